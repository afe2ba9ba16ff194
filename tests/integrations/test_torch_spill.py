"""Spilling under PyTorch: what goes to the host, what stays, and activations that go ahead of time.

On a null GPU nothing is computed: what is checked there is what moves, and that every call works.
"""

from __future__ import annotations

import importlib.util

import pytest
from torch_programs import output, told

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.fork,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
]

MODEL = """
    import json, os
    import vram.torch
    vram.torch.install(limit=os.environ.get("LIMIT"), spill="8GiB")
    import torch
    from torch import nn
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(16)]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    pool = vram.get_memory_manager().pool("cuda:0")

    def step():
        x = torch.randn(8192, 1024, device="cuda")
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def moved():
        return pool.stats()["spill.moved_out_bytes"]
"""
ENOUGH = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
SHORT = {**ENOUGH, "LIMIT": "800MiB"}  # without a limit it takes 1.4 GiB


def test_a_step_has_the_same_result_with_less_memory() -> None:
    program = """
    losses = [step() for _ in range(6)]
    print(json.dumps([losses, moved(), pool.stats().reserved]))
    """
    losses, none, reserved = told(MODEL, program, **ENOUGH)
    same, pages, less = told(MODEL, program, **SHORT)
    assert none == 0 and pages > 0
    assert less <= 800 << 20 < reserved
    assert same == losses


def test_activations_leave_before_pages_must_move() -> None:
    early, late = told(
        MODEL,
        """
        for _ in range(4):
            step()
        early = moved()
        for _ in range(4):
            step()
        print(json.dumps([early, moved() - early]))
        """,
        **SHORT,
    )
    assert early > 0
    assert late < early / 4


def test_nothing_is_kept_after_a_step() -> None:
    kept = told(
        MODEL,
        """
        import gc
        import vram.torch.spill
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        gc.collect()
        found = [each for each in gc.get_objects() if isinstance(each, vram.torch.spill._Activations)]
        kept = pool.stats()["spill.saved_bytes"]
        print(json.dumps([[each.saved, kept, each.ahead] for each in found]))
        """,
        **SHORT,
    )
    assert kept == [[0, 0, 0]]


def test_parameters_stay_and_states_go_first() -> None:
    parameters, states, spilled = told(
        MODEL,
        """
        step()
        parameters = [each.data_ptr() for each in model.parameters() if each.numel() > 1 << 18]
        states = [state["exp_avg"].data_ptr() for state in optimizer.state.values()]
        blocks = [torch.empty(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(10)]
        print(json.dumps([parameters, states, [block.address for block in pool.spilled()]]))
        """,
        **SHORT,
    )
    assert set(states) & set(spilled)
    assert not set(parameters) & set(spilled)


def test_hooks_of_the_program_are_left_alone() -> None:
    assert "done" in output(
        MODEL,
        """
        step()
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            step()
        step()
        with torch.no_grad():
            model(torch.randn(64, 1024, device="cuda"))
        try:
            model(torch.randn(64, 7, device="cuda"))
        except RuntimeError:
            pass
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        step()
        print("done")
        """,
        **SHORT,
    )


def test_a_graph_that_is_used_twice() -> None:
    first, second = told(
        MODEL,
        """
        step()
        step()
        loss = model(torch.ones(8192, 1024, device="cuda")).pow(2).mean()
        given = list(model.parameters())
        first = torch.autograd.grad(loss, given, retain_graph=True)
        second = torch.autograd.grad(loss, given)
        print(json.dumps([[each.double().sum().item() for each in part] for part in (first, second)]))
        """,
        **SHORT,
    )
    assert first == second


def test_as_much_leaves_as_a_step_lacks() -> None:
    program = """
    for _ in range(10):
        step()
    before = pool.stats()["spill.saved_out_bytes"]
    for _ in range(4):
        step()
    print(json.dumps([(pool.stats()["spill.saved_out_bytes"] - before) / 4, pool.stats().peak_allocated]))
    """
    none, peak = told(MODEL, program, **ENOUGH)
    left, _ = told(MODEL, program, **SHORT)
    lacking = peak - (800 << 20)
    assert none == 0
    assert 0.8 * lacking < left < 1.3 * lacking


def test_nothing_leaves_if_it_cannot_lower_the_peak() -> None:
    """The optimizer needs most, when the backward pass has used all that was saved."""
    late, pages = told(
        MODEL.replace("randn(8192,", "randn(512,").replace("AdamW(", "AdamW(foreach=True, params="),
        """
        for _ in range(10):
            step()
        early = pool.stats()["spill.saved_out_bytes"]
        for _ in range(4):
            step()
        late = pool.stats()["spill.saved_out_bytes"] - early
        print(json.dumps([late, moved()]))
        """,
        **ENOUGH,
        LIMIT="300MiB",
    )
    assert pages > 0
    assert late == 0


def test_a_tensor_that_is_saved_again_leaves_once() -> None:
    assert "done" in output(
        MODEL,
        """
        import gc
        import vram.torch.spill
        for _ in range(3):
            step()
        activations, = [each for each in gc.get_objects() if isinstance(each, vram.torch.spill._Activations)]
        activations._slack = 1 << 40  # everything leaves as soon as it is saved
        tensor = torch.ones(8 << 20, device="cuda")
        first = activations.pack(tensor)
        assert first._entry.storage is None
        assert activations.pack(tensor[: 4 << 20])._entry is first._entry
        copied = pool.stats()["spill.saved_out_bytes"]
        again = activations.pack(tensor)
        assert again._entry is first._entry and pool.stats()["spill.saved_out_bytes"] == copied
        tensor.add_(1)
        changed = activations.pack(tensor)
        assert changed._entry is not first._entry
        at = tensor.data_ptr()
        del tensor
        torch.cuda.synchronize()
        other = torch.ones(8 << 20, device="cuda")
        assert activations.pack(other)._entry not in (first._entry, changed._entry)
        print("done", other.data_ptr() == at)
        """,
        **SHORT,
    )
