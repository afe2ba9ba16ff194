"""`vram bench warmup`: the first use of blocks that `Pool.warmup` prepared, compared with the hundredth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from vram.bench.measure import in_turns
from vram.bench.report import Column, Report, Table
from vram.core.device import Device
from vram.core.pool import Pool

__all__ = ["run"]

BLOCKS, BLOCK_BYTES = 1000, 64 << 10
REPEATS, QUICK_REPEATS = 15, 3


def run(device: str | Device | None = None, *, quick: bool = False) -> Report:
    """Measure each of 1000 allocations from a new pool, for each kind of preparation."""
    place = Device(device)
    repeats = QUICK_REPEATS if quick else REPEATS
    runs: dict[str, Callable[[], list[int]]] = {
        name: lambda ready=ready: _uses(place, ready)  # type: ignore[misc]
        for name, ready in READY.items()
    }
    runs["the clock alone"] = _clock_alone
    rows = [{"pool": name, **_summary(results)} for name, results in in_turns(runs, repeats, warm=1).items()]
    return Report.of("warmup", place, [_table(rows)], quick=quick)


def _warmed_up(pool: Pool) -> None:
    pool.warmup([(BLOCK_BYTES, BLOCKS)])


def _in_use_before(pool: Pool) -> None:
    for block in [pool.malloc(BLOCK_BYTES) for _ in range(BLOCKS)]:
        pool.free(block)


def _untouched(pool: Pool) -> None:
    pass


READY: dict[str, Callable[[Pool], None]] = {
    "prepared by warmup()": _warmed_up,
    "used before: 1000 allocated and freed": _in_use_before,
    "not prepared": _untouched,
}
"""What happens to a new pool before it is measured."""


def _uses(place: Device, ready: Callable[[Pool], None]) -> list[int]:
    """Return the nanoseconds of each allocation, including the cost of the clock."""
    with Pool(place) as pool:
        times, blocks = [0] * BLOCKS, [0] * BLOCKS
        clock, malloc = time.perf_counter_ns, pool.malloc
        ready(pool)
        clock()
        for i in range(BLOCKS):
            start = clock()
            blocks[i] = malloc(BLOCK_BYTES)
            times[i] = clock() - start
        for block in blocks:
            pool.free(block)
    return times


def _clock_alone() -> list[int]:
    times, clock = [0] * BLOCKS, time.perf_counter_ns
    clock()
    for i in range(BLOCKS):
        start = clock()
        times[i] = clock() - start
    return times


def _summary(repeats: list[list[int]]) -> dict[str, float]:
    """Use the median over the repeats for each use, so that one disturbed repeat does not count."""
    uses = [statistics.median(times) for times in zip(*repeats, strict=True)]
    return {
        "first": uses[0],
        "first_ten": statistics.median(uses[:10]),
        "hundredth": statistics.median(uses[95:105]),
        "slowest": max(uses),
        "ratio": uses[0] / max(1.0, statistics.median(uses[95:105])),
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    return Table(
        f"Allocations of 64 KiB from Python, {BLOCKS} in sequence from a new pool, ns",
        [
            Column("pool", "pool"),
            Column("first", "1st", "ns"),
            Column("first_ten", "first ten (median)", "ns"),
            Column("hundredth", "100th (median of 10 around it)", "ns"),
            Column("ratio", "1st over 100th", "ratio"),
            Column("slowest", "slowest", "ns"),
        ],
        rows,
        "Each allocation is timed alone, so every figure includes the cost of the clock. The very first "
        "call also meets cold processor caches, regardless of the pool: compare it with the used pool.",
    )
