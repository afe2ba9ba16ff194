"""What does an allocate+free pair cost from Python, against two calls of a builtin that does nothing?

Six scenarios, raw pointers and Buffer handles, on the host device, all in one run. `--json` for machines.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import vram

KIB, MIB = 1024, 1024 * 1024
TRANSFORMER_STEP = [size * KIB for size in (96, 24 * 1024, 6 * 1024, 384, 12 * 1024, 96 * 1024, 1536, 48)]
REPEATS = 7


def best(measure: Callable[[], float]) -> float:
    """The least of several measurements, in nanoseconds a pair; the others were disturbed."""
    return min(measure() for _ in range(REPEATS))


def pair_loop(make: Callable[[int], object], drop: Callable[[object], object] | None, size: int) -> float:
    """One live at a time."""
    count = 20_000
    if drop is None:
        start = time.perf_counter_ns()
        for _ in range(count):
            make(size)
        return (time.perf_counter_ns() - start) / count
    start = time.perf_counter_ns()
    for _ in range(count):
        drop(make(size))
    return (time.perf_counter_ns() - start) / count


def many_then_free(
    make: Callable[[int], object], drop: Callable[[object], object] | None, size: int
) -> float:
    """A thousand live, then all freed."""
    count = 1000
    live: list[object] = []
    start = time.perf_counter_ns()
    for _ in range(count):
        live.append(make(size))
    if drop is not None:
        for item in live:
            drop(item)
    live.clear()
    return (time.perf_counter_ns() - start) / count


def step(make: Callable[[int], object], drop: Callable[[object], object] | None, layers: int = 12) -> float:
    """The shape of a transformer step: every layer keeps what it makes until the way back."""
    live: list[object] = []
    start = time.perf_counter_ns()
    for _ in range(layers):
        for size in TRANSFORMER_STEP:
            live.append(make(size))
    while live:
        item = live.pop()
        if drop is not None:
            drop(item)
        del item
    return (time.perf_counter_ns() - start) / (layers * len(TRANSFORMER_STEP))


def variable(make: Callable[[int], object], drop: Callable[[object], object] | None) -> float:
    """Sizes that vary, 64 live."""
    sizes = [512 * (1 + (i * 7919) % 4096) for i in range(64)]
    live: list[object] = [make(size) for size in sizes]
    count = 6400
    start = time.perf_counter_ns()
    for i in range(count):
        slot = i % 64
        if drop is not None:
            drop(live[slot])
        live[slot] = None
        live[slot] = make(sizes[slot])
    elapsed = (time.perf_counter_ns() - start) / count
    if drop is not None:
        for item in live:
            drop(item)
    return elapsed


Scenario = Callable[[Callable[[int], object], "Callable[[object], object] | None"], float]
SCENARIOS: dict[str, Scenario] = {
    "512 B": lambda make, drop: pair_loop(make, drop, 512),
    "256 KiB": lambda make, drop: pair_loop(make, drop, 256 * KIB),
    "64 MiB": lambda make, drop: pair_loop(make, drop, 64 * MIB),
    "1000 x 64 KiB": lambda make, drop: many_then_free(make, drop, 64 * KIB),
    "transformer step": step,
    "variable, 64 live": variable,
}


def run() -> list[dict[str, float | str]]:
    """One row a scenario: nanoseconds a pair of the floor, of raw pointers and of Buffers."""
    rows: list[dict[str, float | str]] = []
    with vram.Pool("host") as pool:
        for name, scenario in SCENARIOS.items():
            scenario(pool.malloc, pool.free)  # fills the cache
            scenario(pool.allocate, None)
            floor = best(lambda s=scenario: s(abs, abs))
            raw = best(lambda s=scenario: s(pool.malloc, pool.free))
            buffer = best(lambda s=scenario: s(pool.allocate, None))
            rows.append({"scenario": name, "floor_ns": floor, "raw_ns": raw, "buffer_ns": buffer})
    return rows


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = run()
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'scenario':<20}{'two builtins':>14}{'malloc+free':>14}{'ratio':>8}{'Buffer':>12}{'ratio':>8}")
    for row in rows:
        floor, raw, buffer = (float(row[key]) for key in ("floor_ns", "raw_ns", "buffer_ns"))
        print(
            f"{row['scenario']:<20}{floor:>11.0f} ns{raw:>11.0f} ns{raw / floor:>7.1f}x"
            f"{buffer:>9.0f} ns{buffer / floor:>7.1f}x"
        )


if __name__ == "__main__":
    main()
