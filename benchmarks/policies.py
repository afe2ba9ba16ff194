"""How fast are replays: each policy over the recorded jobs, a sweep, and a program longer than memory?

Prints a table, or JSON with `--json`. Speeds count recorded events (three for an allocation that is freed) by
the clock of this machine, the best of some runs. `--operations` sets the length of the made-up program.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from vram.replay import POLICY_KINDS, Setting, grid, replay, replay_stream, sweep
from vram.trace import ALLOCATE, FREE, Lifetimes, lifetimes, open_trace

TRACES = Path(__file__).resolve().parent.parent / "traces"
JOBS = ("gpt2_train", "llama_varlen_ckpt", "resnet_multiscale", "llm_serve", "multistream_prefetch")
STEP_ALLOCATIONS = 25_000
SHAPES = 200  # different sizes; recorded jobs have about as many
KEPT = 16
"""Of so many allocations forward, one is an activation that lives until the way back."""
REPEATS = 5
SWEEP_SETTINGS = 64


def speeds() -> list[dict[str, Any]]:
    """Events a second of each policy over each job, the best of some runs."""
    rows = []
    for job in JOBS:
        program = lifetimes(open_trace(TRACES / f"{job}.pickle.xz"))
        for policy in POLICY_KINDS:
            results = [replay(program, policy) for _ in range(REPEATS)]
            best = max(result.events_per_second for result in results)
            rows.append({"job": job, "policy": policy, "events_per_second": best})
    return rows


def sweep_seconds() -> dict[str, Any]:
    """Sixty-four settings over llama_varlen_ckpt, each with its smallest device."""
    program = lifetimes(open_trace(TRACES / "llama_varlen_ckpt.pickle.xz"))
    more = [
        Setting("torch", {"max_split_size_mb": str(size)}) for size in (24, 32, 48, 96, 192, 384, 768, 1024)
    ]
    settings = list(islice((*grid(), *more), SWEEP_SETTINGS))
    start, cpu = time.perf_counter(), time.process_time()
    sweep(program, settings)
    return {
        "settings": len(settings),
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
    }


def made_up(operations: int) -> Iterator[Lifetimes]:
    """A training loop of equal steps, one a piece: activations forward, freed backward, others in passing."""
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
    """What is done, to which allocation, of what size; everything is freed in the end."""
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
    """The made-up program through the two policies that are promised a speed, and what memory that took."""
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
                "more_memory_mib": (after - before) / 1024,
                "ratio": result.ratio,
            }
        )
    return rows


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--operations", type=int, default=20_000_000)
    arguments = parser.parse_args()
    found = {"streamed": streamed(arguments.operations), "speeds": speeds(), "sweep": sweep_seconds()}
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    print("million recorded events a second")
    print(f"{'job':<24}" + "".join(f"{policy:>18}" for policy in POLICY_KINDS))
    for job in JOBS:
        row = [each["events_per_second"] / 1e6 for each in found["speeds"] if each["job"] == job]
        print(f"{job:<24}" + "".join(f"{speed:>18.1f}" for speed in row))
    print()
    for each in found["streamed"]:
        print(
            f"{each['operations']} operations in pieces through {each['policy']}: "
            f"{each['operations_per_second'] / 1e6:.1f} million a second, "
            f"{each['more_memory_mib']:.0f} MiB more memory"
        )
    print(f"sweep of {found['sweep']['settings']} settings: {found['sweep']['seconds']:.1f} s")


if __name__ == "__main__":
    main()
