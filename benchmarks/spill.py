"""Measure the speed of spilling: moving memory to the host and back, and using it there.

The reference is one copy between the device and pinned memory, in the same run. Then a buffer is spilled and
prefetched, the first time (which creates host pages) and afterwards, and filled on both sides. What the
option costs while nothing spills is measured in turns: a pool with it, and one without it.

    python benchmarks/spill.py --device cuda:0 --size 1GiB
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import rich_click as click

import vram
from vram.bench.measure import elapsed_ns
from vram.bench.report import Column, Report, Table
from vram.cli.bench import measuring_command
from vram.cli.console import read_size
from vram.sizes import format_size

ROUNDS = 5
PAIR_ROUNDS = 51
PAIRS = 10_000
PAIR_BYTES = 256 << 10


def median_ns(work: Callable[[], object], between: Callable[[], object] = lambda: None) -> float:
    """Return the median time of `work` over ROUNDS; `between` follows each one and is not measured."""
    times = []
    for _ in range(ROUNDS):
        times.append(elapsed_ns(work))
        between()
    return statistics.median(times)


def copy_ns(device: vram.Device, size: int) -> float:
    """Return the time of a plain copy to pinned memory."""
    with vram.Pool(device) as pool, vram.PinnedPool(device) as pinned:
        there, here = pool.allocate(size), pinned.allocate(size)

        def work() -> None:
            there.copy_to(here)
            device.synchronize()

        work()
        return median_ns(work)


def rows_of(device: vram.Device, size: int) -> list[dict[str, object]]:
    """Return all rows: what was done, its time and its speed."""
    with vram.Pool(device, spill=2 * size) as pool:
        buffer = pool.allocate(size)

        def fill() -> None:
            buffer.fill(1)
            device.synchronize()

        fill()
        times = {"copy to pinned memory": copy_ns(device, size)}
        times["fill on the device"] = median_ns(fill)
        times["spill, first time"] = elapsed_ns(buffer.spill)
        times["fill on the host"] = median_ns(fill)
        times["prefetch, first time"] = elapsed_ns(buffer.prefetch)
        times["spill"] = median_ns(buffer.spill, buffer.prefetch)
        buffer.spill()
        times["prefetch"] = median_ns(buffer.prefetch, buffer.spill)
    return [
        {"what": what, "ms": took / 1e6, "speed": f"{size / took:.1f} GB/s"} for what, took in times.items()
    ]


def pair_rows(device: vram.Device, size: int) -> list[dict[str, object]]:
    """Return the time of an allocate and a free that the cache serves, without spill and with it."""
    times: dict[str, list[float]] = {"without spill": [], "with spill": []}
    with vram.Pool(device) as plain, vram.Pool(device, spill=2 * size) as spilling:
        for _ in range(PAIR_ROUNDS):
            for found, pool in zip(times.values(), (plain, spilling), strict=True):
                found.append(elapsed_ns(lambda pool=pool: _make_pairs(pool)) / PAIRS)
    ratios = [ours / theirs for theirs, ours in zip(*times.values(), strict=True)]
    return [
        {"what": what, "ns": statistics.median(found), "ratio": ratio}
        for (what, found), ratio in zip(times.items(), (1.0, statistics.median(ratios)), strict=True)
    ]


def _make_pairs(pool: vram.Pool) -> None:
    malloc, free = pool.malloc, pool.free
    for _ in range(PAIRS):
        free(malloc(PAIR_BYTES))


def run(device: str | None, *, quick: bool, size: int | None) -> Report:
    place = vram.Device(device)
    total = size or (64 << 20 if quick else 1 << 30)
    columns = [
        Column("what", "what"),
        Column("ms", "time, ms", "ms"),
        Column("speed", "speed"),
    ]
    pair_columns = [
        Column("what", "pool"),
        Column("ns", "pair, ns", "ns"),
        Column("ratio", "ratio", "exact ratio"),
    ]
    tables = [
        Table(format_size(total), columns, rows_of(place, total)),
        Table(f"Allocate and free {format_size(PAIR_BYTES)}", pair_columns, pair_rows(place, total)),
    ]
    return Report.of("spill", place, tables, quick=quick)


if __name__ == "__main__":
    help_text = "Bytes to move; 1GiB, and 64MiB with --quick."
    measuring_command("spill", __doc__, run, click.option("--size", callback=read_size, help=help_text))()
