"""`vram bench threads`: how much threads slow each other down, in C++, with one stream each."""

from __future__ import annotations

import contextlib
from typing import Any

from vram import _native
from vram.bench.measure import factor, in_turns
from vram.bench.report import Column, Report, Table
from vram.core.device import Device
from vram.core.pool import Pool
from vram.core.stream import Stream

__all__ = ["run"]

THREADS, QUICK_THREADS = (1, 2, 4, 8, 16), (1, 2)
REPEATS, QUICK_REPEATS = 7, 1
BATCHES, QUICK_BATCHES = 4000, 50
"""Batches of 64 pairs per thread and run."""


def run(device: str | Device | None = None, *, quick: bool = False) -> Report:
    """Measure one to sixteen threads on a device."""
    place = Device(device)
    counts = QUICK_THREADS if quick else THREADS
    with contextlib.ExitStack() as opened:
        streams = [opened.enter_context(Stream(place)).handle for _ in range(max(counts))]
        pools = [opened.enter_context(Pool(place)) for _ in range(max(counts))]
        tables = [
            _table(title, [_measure(shared or pools[:n], streams[:n], hand_over, quick) for n in counts])
            for title, shared, hand_over in (
                ("One pool, own frees", pools[:1], False),
                ("One pool, half freed by another thread", pools[:1], True),
                ("One pool per thread, nothing shared: the cost of the machine itself", [], False),
            )
        ]
    return Report.of("threads", place, tables, quick=quick)


def _measure(pools: list[Pool], streams: list[int], hand_over: bool, quick: bool) -> dict[str, Any]:
    repeats, batches = (QUICK_REPEATS, QUICK_BATCHES) if quick else (REPEATS, BATCHES)
    results = in_turns(
        {"threads": lambda: _native.bench_threads(pools, streams, hand_over, batches)}, repeats, warm=1
    )["threads"]
    wall, _, handed_over = min(results)
    return {
        "threads": len(streams),
        "wall": wall,
        "cpu": min(cpu for _, cpu, _ in results),
        "handed_over": handed_over,
    }


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    one = rows[0]
    for row in rows:
        row["wall_ratio"] = factor(row["wall"], one["wall"])
        row["cpu_ratio"] = factor(row["cpu"], one["cpu"])
    return Table(
        f"{title}: one pair as its thread sees it, C++",
        [
            Column("threads", "threads", "count"),
            Column("wall", "wall, ns", "ns"),
            Column("wall_ratio", "of one thread", "ratio"),
            Column("cpu", "processor time, ns", "ns"),
            Column("cpu_ratio", "of one thread", "ratio"),
            Column("handed_over", "freed by another", "share"),
        ],
        rows,
        "More threads than processors make wall time longer, but not processor time.",
    )
