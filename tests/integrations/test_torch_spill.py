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
