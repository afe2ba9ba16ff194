"""Measure the cost of recording a pool, with and without stacks.

Runs loops of allocate+free pairs on a model device, in turns: not recorded, recorded, and recorded with
Python stacks, at several call depths. An event is an allocation or a free. "thread" is the processor time
of the loop itself; "all" includes the thread that writes the file.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import vram
from vram.bench.measure import in_turns, least_of_each
from vram.bench.report import Column, Report, Table
from vram.cli.bench import measuring_command

Result = TypeVar("Result")
Loop: TypeAlias = Callable[[], dict[str, float]]

PAIRS = 500_000
FRESH_PAIRS = 20_000
REPEATS = 3
DEPTHS = (1, 20)


def in_each_way(pool: vram.Pool, path: Path, loop: Loop, repeats: int) -> dict[str, dict[str, float]]:
    """Return nanoseconds per event: not recorded, recorded, and recorded with stacks."""
    ways: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "not recorded": nullcontext,
        "recorded": lambda: vram.record(pool, path, stacks=None),
        "with stacks": lambda: vram.record(pool, path),
    }

    def once(way: str) -> dict[str, float]:
        with ways[way]() as recorder:
            spent = loop()
        if isinstance(recorder, vram.Recorder) and recorder.dropped:
            raise SystemExit(f"{recorder.dropped} events were dropped, so the figures are not valid")
        return spent

    found = in_turns({way: partial(once, way) for way in ways}, repeats, warm=0)
    return {way: least_of_each(results) for way, results in found.items()}


def measured(pool: vram.Pool, path: Path, quick: bool) -> list[dict[str, Any]]:
    """Compare each way of recording with none, in the same loop."""
    pairs, fresh_pairs, repeats = (
        (PAIRS // 50, FRESH_PAIRS // 50, 1) if quick else (PAIRS, FRESH_PAIRS, REPEATS)
    )
    loops: dict[str, Loop] = {
        f"{depth} calls deep": lambda depth=depth: deep(depth - 1, lambda: settled(pool, pairs))  # type: ignore[misc]
        for depth in DEPTHS
    }
    loops["20 calls deep, all entered anew"] = lambda: fresh(pool, 19, fresh_pairs)
    rows = []
    for where, loop in loops.items():
        found = in_each_way(pool, path, loop, repeats)
        plain = found["not recorded"]
        for way, spent in found.items():
            added = {f"added_{key}": ns - plain[key] for key, ns in spent.items()}
            rows.append({"what": f"{way}, {where}", **spent, **added})
    return rows


def timed(work: Callable[[], object], pairs: int) -> dict[str, float]:
    """Return nanoseconds per event: of this thread, and of the whole process."""
    thread, every = time.thread_time_ns(), time.process_time_ns()
    work()
    spent = {"thread": time.thread_time_ns() - thread, "all": time.process_time_ns() - every}
    return {key: ns / (2 * pairs) for key, ns in spent.items()}


def settled(pool: vram.Pool, pairs: int) -> dict[str, float]:
    """Run a loop in one function."""

    def work() -> None:
        malloc, free = pool.malloc, pool.free
        for _ in range(pairs):
            free(malloc(4096))

    return timed(work, pairs)


def fresh(pool: vram.Pool, depth: int, pairs: int) -> dict[str, float]:
    """Enter all calls again for every allocation."""

    def work() -> None:
        malloc, free = pool.malloc, pool.free
        for _ in range(pairs):
            deep(depth, lambda: free(malloc(4096)))

    return timed(work, pairs)


def deep(depth: int, function: Callable[[], Result]) -> Result:
    return function() if depth <= 0 else deep(depth - 1, function)


def run(device: str | None, *, quick: bool) -> Report:
    place = vram.Device(device or "model:8GiB")
    with tempfile.TemporaryDirectory() as folder, vram.Pool(place) as pool:
        rows = measured(pool, Path(folder) / "run.vtrace", quick)
    columns = [
        Column("what", "loop"),
        Column("thread", "thread", "ns"),
        Column("all", "all", "ns"),
        Column("added_thread", "added", "ns"),
        Column("added_all", "in all", "ns"),
    ]
    return Report.of("record", place, [Table("ns per event", columns, rows)], quick=quick)


if __name__ == "__main__":
    measuring_command("record", __doc__, run)()
