"""Planned steps on a real device: contents with real kernels on several streams, captures, and PyTorch.

Programs that need PyTorch on vram run in processes of their own, as it must be installed first.
"""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from work import Marked, Work

import vram
from vram import Device, Graph, Pool, Stream

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other libraries' warnings are theirs

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 60 * KIB, MIB, 2 * MIB, 7 * MIB, 32 * MIB]
JOBS = Path(__file__).resolve().parents[2] / "benchmarks" / "jobs"
TIMEOUT = 240.0  # seconds
MakePool = Callable[..., Pool]
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


class Steps:
    """A step of a hundred buffers on two streams, some used on the other one, too."""

    def __init__(self, pool: Pool, work: Work, streams: list[Stream], seed: int = 1) -> None:
        self.pool, self.work, self.streams = pool, work, streams
        dice = random.Random(seed)
        self.script = [
            (dice.choice(SIZES), dice.randrange(2), dice.randrange(1, 12), dice.random() < 0.2)
            for _ in range(100)
        ]

    def run(self, dice: random.Random | None = None) -> None:
        held: list[tuple[int, Marked]] = []
        for moment, (size, which, lifetime, shared) in enumerate(self.script):
            if dice is not None and dice.random() < 0.05:
                size, lifetime = dice.choice(SIZES), lifetime + dice.randrange(8)
            for _end, buffer in [each for each in held if each[0] <= moment]:
                buffer.check()
                buffer.buffer.free()
            held = [each for each in held if each[0] > moment]
            own, other = self.streams[which], self.streams[1 - which]
            buffer = Marked(self.pool, self.work, size, own)
            if shared:
                other.wait_stream(own)
                self.work.spin(0.2, other.handle)
                buffer.check_on(other)
            held.append((moment + lifetime, buffer))
        for _end, buffer in held:
            buffer.check()
            buffer.buffer.free()


@pytest.mark.parametrize("pages", [True, False], ids=["pages", "plain"])
def test_contents_stay_on_two_streams(make_pool: MakePool, work: Work, device: Device, pages: bool) -> None:
    pool = make_pool(pages=pages)
    with Stream(device) as one, Stream(device) as two:
        steps = Steps(pool, work, [one, two])
        for _ in range(10):
            with vram.planned(pool) as planned:
                steps.run()
            assert pool.check() is None
        report = planned.report()
        assert (report.fallbacks, report.hits) == (0, 9 * len(steps.script))
        dice = random.Random(2)
        for number in range(20):
            with planned:
                steps.run(dice if number % 2 else None)
            assert pool.check() is None
        assert planned.report().fallbacks > 0
        wrong, checked = work.take_counts()
        assert (wrong, checked > 0) == (0, True)
        planned.close()
        assert pool.stats().live == 0


def test_a_captured_step_keeps_its_memory_to_itself(make_pool: MakePool, work: Work, device: Device) -> None:
    pool = make_pool()
    with Stream(device) as stream:

        def step() -> None:
            for size in (MIB, 4 * MIB, MIB):
                buffer = Marked(pool, work, size, stream)
                buffer.check()
                buffer.buffer.free()

        for _ in range(3):
            with vram.planned(pool) as planned:
                step()
        hits = planned.report().hits
        with planned, Graph(stream) as graph:
            step()
        assert planned.report().hits == hits
        for _ in range(5):
            graph.launch()
            with planned:
                step()
        wrong, checked = work.take_counts()
        assert (wrong, checked > 0) == (0, True)
        assert planned.report().hits == hits + 5 * 3
        graph.close()


# ---- PyTorch ----------------------------------------------------------------------------------------------

INSTALL = f"""
    import json, sys
    sys.path.insert(0, {str(JOBS)!r})
    import vram.torch
    vram.torch.install(max_page="2MiB")  # made once, then planned: driver time is no matter
    import torch
    pool = vram.get_memory_manager().pool("cuda:0")
"""


def told(*parts: str) -> Any:
    """What a program printed as JSON in its last line."""
    program = "\n".join(textwrap.dedent(part) for part in parts)
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


GPT2 = """
    from workloads import gpt2
    STEPS, SETTLED = 10, 6
    torch.manual_seed(0)
    job, losses = gpt2(STEPS), []
    for number in range(STEPS):
        if number == SETTLED:
            torch.cuda.synchronize()
            pool.trim(wait=True)
            pool.reset_peak()
            before = planned and planned.report()
        with planned or torch.enable_grad():
            losses.append(next(job))
    torch.cuda.synchronize()
    losses = [float(loss) for loss in losses]
    stats = pool.stats()
    assert pool.check() is None
"""


@needs_torch
def test_a_planned_gpt2_step_needs_what_is_live_at_once() -> None:
    free = told(
        INSTALL,
        "planned = None",
        GPT2,
        'print(json.dumps({"bound": stats.peak_allocated, "losses": losses}))',
    )
    planned = told(
        INSTALL,
        "planned = vram.planned(pool)",
        GPT2,
        """
        after = planned.report()
        print(json.dumps({
            "reserved": stats.peak_reserved,
            "losses": losses,
            "hits": after.hits - before.hits,
            "left": after.left - before.left,
            "fallbacks": after.fallbacks - before.fallbacks,
            "refused": after.refused,
            "plans": after.plans,
            "ratio": after.ratio,
        }))
        """,
    )
    assert planned["losses"] == pytest.approx(free["losses"], rel=1e-2)
    assert planned["refused"] == 0
    assert planned["fallbacks"] == 0, planned
    assert planned["hits"] > 20 * planned["left"], planned
    assert planned["reserved"] / free["bound"] <= 1.01, (planned, free["bound"])


@needs_torch
def test_steps_of_varying_shape_give_the_numbers_of_the_default_allocator() -> None:
    training = """
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.LayerNorm(1024), torch.nn.Linear(1024, 10)
        ).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for step in range(40):
            with planned or torch.enable_grad():
                x = torch.randn(64 + (step // 10) * (step % 3), 256, device="cuda")
                loss = torch.nn.functional.cross_entropy(model(x), torch.arange(len(x), device="cuda") % 10)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                losses.append(loss.item().hex())
    """
    free = told("import json, torch", "planned = None", training, "print(json.dumps(losses))")
    planned = told(
        INSTALL,
        "planned = vram.planned(pool)",
        training,
        "assert planned.report().hits > 500, planned.report()",
        "assert pool.check() is None",
        "print(json.dumps(losses))",
    )
    assert planned == free


@needs_torch
def test_tensors_used_on_a_side_stream() -> None:
    wrong = told(
        INSTALL,
        """
        side = torch.cuda.Stream()
        results = []
        for number in range(60):
            with vram.planned(pool) as planned:
                x = torch.full((1 << 20,), float(number), device="cuda")
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    torch.cuda._sleep(300_000)
                    results.append(torch.stack([x.amin(), x.amax()]))
                x.record_stream(side)
                del x
                torch.full((1 << 20,), -1.0, device="cuda")
        torch.cuda.synchronize()
        assert planned.report().hits > 60, planned.report()
        print(json.dumps(sum(pair.tolist() != [n, n] for n, pair in enumerate(results))))
        """,
    )
    assert wrong == 0
