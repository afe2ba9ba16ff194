"""Measure the speed of replays: every policy on the recorded jobs, a sweep, and a program larger than memory.

Speeds count recorded events (three for an allocation that is freed) per second of wall time, the best of
several runs. `--operations` sets the length of the generated program.
"""

from __future__ import annotations

import random
import resource
import time
from array import array
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import rich_click as click

from vram.bench.measure import in_turns
from vram.bench.report import Column, Report, Table
from vram.cli.bench import measuring_command
from vram.core.device import Device
from vram.replay import POLICY_KINDS, Setting, grid, replay, replay_stream, sweep
from vram.trace import ALLOCATE, FREE, Lifetimes, lifetimes, open_trace

TRACES = Path(__file__).resolve().parent.parent / "traces"
JOBS = ("gpt2_train", "llama_varlen_ckpt", "resnet_multiscale", "llm_serve", "multistream_prefetch")
STEP_ALLOCATIONS = 25_000
SHAPES = 200  # different sizes; recorded jobs have about as many
KEPT = 16
"""One of so many allocations of the forward pass lives until the backward pass."""
REPEATS = 5
SWEEP_SETTINGS = 64


def speeds(job: str, repeats: int) -> dict[str, Any]:
    """Return the events per second of each policy on a job, the best of several runs."""
    program = lifetimes(open_trace(TRACES / f"{job}.pickle.xz"))
    runs = {policy: partial(replay, program, policy) for policy in POLICY_KINDS}
    found = in_turns(runs, repeats, warm=0)
    best = {policy: max(each.events_per_second for each in results) for policy, results in found.items()}
    return {"job": job, **best}


def sweep_seconds(count: int) -> dict[str, Any]:
    """Time a sweep over llama_varlen_ckpt that finds the smallest device for each setting."""
    program = lifetimes(open_trace(TRACES / "llama_varlen_ckpt.pickle.xz"))
    more = [
        Setting("torch", {"max_split_size_mb": str(size)}) for size in (24, 32, 48, 96, 192, 384, 768, 1024)
    ]
    settings = list(islice((*grid(), *more), count))
    start, cpu = time.perf_counter(), time.process_time()
    sweep(program, settings)
    return {
        "settings": len(settings),
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
    }


def made_up(operations: int) -> Iterator[Lifetimes]:
    """Generate a training loop of equal steps, one per piece: activations live until the backward pass."""
    op, number, size = _step(random.Random(1))
    count = len(op)
    zeros = array("q", bytes(8 * count))
    for start in range(0, operations, count):
        yield Lifetimes(
            allocations=count,
            carried=0,
            streams=1,
            op=op,
            id=number,
            size=size,
            stream=array("I", bytes(4 * count)),
            time_us=zeros,
            completed_us=zeros,
            completed_event=array("q", [-1]) * count,
            event=array("q", range(start, start + count)),
        )


def _step(chance: random.Random) -> tuple[array[int], array[int], array[int]]:
    """Return operations, allocations and sizes of one step, which frees everything."""
    rows: list[tuple[int, int, int]] = []
    shapes = [int(2 ** chance.uniform(9, 24)) for _ in range(SHAPES)]
    sizes = chance.choices(shapes, k=STEP_ALLOCATIONS)
    kept = list(range(0, len(sizes), KEPT))

    def passing(number: int) -> None:
        rows.extend([(ALLOCATE, number, sizes[number]), (FREE, number, sizes[number])])

    for number, size in enumerate(sizes):
        if number % KEPT:
            passing(number)
        else:
            rows.append((ALLOCATE, number, size))
    for number in reversed(kept):
        for other in range(number + 1, min(number + KEPT, len(sizes))):
            passing(other)
        rows.append((FREE, number, sizes[number]))
    op, number, size = zip(*rows, strict=True)
    return array("B", op), array("I", number), array("Q", size)


def streamed(operations: int) -> list[dict[str, Any]]:
    """Replay the generated program through two policies; return their speed and memory use."""
    rows = []
    for policy in ("torch", "vram"):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = replay_stream(made_up(operations), policy)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rows.append(
            {
                "policy": policy,
                "operations": operations,
                "operations_per_second": result.events_per_second,
                "more_memory": (after - before) * 1024,
                "ratio": result.ratio,
            }
        )
    return rows


def run(device: str | None, *, quick: bool, operations: int) -> Report:
    piecewise = Table(
        "A program longer than memory, replayed in pieces",
        [
            Column("policy", "policy"),
            Column("operations", "operations", "count"),
            Column("operations_per_second", "operations per second", "count"),
            Column("more_memory", "more memory", "bytes"),
            Column("ratio", "reserved over allocated", "exact ratio"),
        ],
        streamed(operations // 100 if quick else operations),
    )
    policies = Table(
        "Recorded events per second",
        [Column("job", "job"), *(Column(policy, policy, "count") for policy in POLICY_KINDS)],
        [speeds(job, 1 if quick else REPEATS) for job in (JOBS[-1:] if quick else JOBS)],
    )
    sweeps = Table(
        "A sweep over llama_varlen_ckpt",
        [
            Column("settings", "settings", "count"),
            Column("seconds", "seconds", "s"),
            Column("cpu_seconds", "processor, s", "s"),
        ],
        [sweep_seconds(4 if quick else SWEEP_SETTINGS)],
    )
    return Report.of("policies", Device(device), [piecewise, policies, sweeps], quick=quick)


if __name__ == "__main__":
    operations = click.option("--operations", default=20_000_000, help="Length of the generated program.")
    measuring_command("policies", __doc__, run, operations)()
