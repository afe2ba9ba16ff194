"""`vram bench pages`: growth, reuse of free memory for another size, and a first training step.

Compares pages of each size and the pool's own choice with plain segments and plain driver calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from vram._native import Backend
from vram.bench import peers
from vram.bench.measure import elapsed_ns, in_turns, least_of_each
from vram.bench.report import Column, LeftOut, Report, Table
from vram.bench.workloads import Scenario, Way, training_step
from vram.config import PAGE_SIZES
from vram.core.device import Device
from vram.core.pool import Pool
from vram.sizes import format_size

__all__ = ["run"]

MIB, GIB = 1 << 20, 1 << 30
REPEATS, QUICK_REPEATS = 5, 1
GROWTH_BLOCKS = (2 * MIB, 64 * MIB)
REMAP_BLOCK = 32 * MIB
STEPS = 3

Pools: TypeAlias = Mapping[str, dict[str, Any]]

POOLS: Pools = {
    "pool, pages of its choice": {},
    "pool, pages of 2 MiB": {"max_page": 2 * MIB},
    "pool, pages up to 8 MiB": {"max_page": 8 * MIB},
    "pool, plain segments": {"pages": False},
}
"""Configurations of the pool, by their names in the table."""


def run(device: str | Device | None = None, *, quick: bool = False) -> Report:
    """Measure growth, remapping and a first step on a device."""
    place = Device(device)
    repeats = QUICK_REPEATS if quick else REPEATS
    large = place.kind == "cuda" and not quick
    growth, remap, activations = (4 * GIB, 4 * GIB, 8 * GIB) if large else (256 * MIB, 512 * MIB, 256 * MIB)
    pools = {
        name: options for name, options in POOLS.items() if place.pages or not options.get("pages", True)
    }
    left_out = [LeftOut(name, place.backend.no_pages) for name in POOLS if name not in pools]
    tables = [
        _growth(place, pools, growth, repeats),
        _remap(place, pools, remap, repeats),
        _steps(place, pools, activations, repeats, left_out),
    ]
    return Report.of("pages", place, tables, left_out, quick=quick)


# ---- growth -----------------------------------------------------------------------------------------------


def _growth(place: Device, pools: Pools, total: int, repeats: int) -> Table:
    columns = [Column("memory", "memory")]
    every = _growths(place, pools, total // 2, total)
    rows: dict[str, dict[str, Any]] = {name: {"memory": name} for name in every}
    for size in (*GROWTH_BLOCKS, total // 2):
        columns.append(Column(title := f"in blocks of {format_size(size)}", title, "ms"))
        for name, spent in in_turns(_growths(place, pools, size, total), repeats, warm=0).items():
            rows[name][title] = min(spent) / 1e6 * GIB / total
    title = f"Growth: {format_size(total)} from an empty pool, ms per GiB"
    return Table(title, columns, list(rows.values()))


def _growths(place: Device, pools: Pools, size: int, total: int) -> dict[str, Callable[[], int]]:
    """Every way to take `total` bytes in blocks of a size; each returns nanoseconds."""
    runs: dict[str, Callable[[], int]] = {
        name: lambda options=options: _grow(place, options, size, total)  # type: ignore[misc]
        for name, options in pools.items()
    }
    for page in PAGE_SIZES if place.pages else ():
        if size % page == 0:
            name = f"pages of {format_size(page)}, driver calls alone"
            runs[name] = lambda page=page: _map(place.backend, page, size, total)  # type: ignore[misc]
    alone = "cuMemAlloc alone" if place.kind == "cuda" else "plain memory of the device alone"
    return runs | {alone: lambda: _reserve(place.backend, size, total)}


def _grow(place: Device, options: dict[str, Any], size: int, total: int) -> int:
    with Pool(place, **options) as pool:
        return elapsed_ns(lambda: [pool.malloc(size) for _ in range(total // size)])


def _reserve(backend: Backend, size: int, total: int) -> int:
    addresses: list[int] = []
    spent = elapsed_ns(lambda: addresses.extend(backend.reserve(size) for _ in range(total // size)))
    for address in addresses:
        backend.release(address, size)
    return spent


def _map(backend: Backend, page: int, size: int, total: int) -> int:
    """Create pages and map them at new addresses, with access granted once for each block."""
    space, pages = backend.space_reserve(total), []

    def grow() -> None:
        for block in range(space, space + total, size):
            for address in range(block, block + size, page):
                pages.append(backend.page_create(page))
                backend.map(address, page, pages[-1])
            backend.set_access(block, size)

    spent = elapsed_ns(grow)
    for number, handle in enumerate(pages):
        backend.unmap(space + number * page, page)
        backend.page_release(handle, page)
    backend.space_release(space, total)
    return spent


# ---- remapping --------------------------------------------------------------------------------------------


def _remap(place: Device, pools: Pools, total: int, repeats: int) -> Table:
    """Fill a limit with blocks, free every other one, and request blocks of twice the size."""
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        name: lambda options=options: _twice_the_size(place, options, total)  # type: ignore[misc]
        for name, options in pools.items()
    }
    found = in_turns(runs, repeats, warm=0)
    rows = [{"memory": name, **min(results, key=lambda row: row["us"])} for name, results in found.items()]
    return Table(
        f"Fragmented memory: {format_size(total)} full of blocks of {format_size(REMAP_BLOCK)}, "
        "every other one freed, the same bytes requested in blocks of twice the size",
        [
            Column("memory", "memory"),
            Column("us", "µs per MiB, first time", "us"),
            Column("again_us", "µs per MiB, repeated", "us"),
            Column("mappings", "mappings made", "count"),
            Column("served", "requests served", "share"),
        ],
        rows,
        "Repeated: the same blocks are freed and requested again, when every address already has its pages.",
    )


def _twice_the_size(place: Device, options: dict[str, Any], total: int) -> dict[str, Any]:
    blocks = total // REMAP_BLOCK
    with Pool(place, limit=total, **options) as pool:
        held = [pool.malloc(REMAP_BLOCK) for _ in range(blocks)]
        for block in held[::2]:
            pool.free(block)
        before = pool.stats()["pages.mappings"]
        first, served = _ask(pool, 2 * REMAP_BLOCK, blocks // 4)
        mapped = pool.stats()["pages.mappings"] - before
        again, _ = _ask(pool, 2 * REMAP_BLOCK, blocks // 4)
    mib = max(1, served) * 2 * REMAP_BLOCK / MIB
    return {
        "us": first / mib,
        "again_us": again / mib,
        "mappings": int(mapped),
        "served": served / (blocks // 4),
    }


def _ask(pool: Pool, size: int, count: int) -> tuple[float, int]:
    """Return the microseconds of `count` requests and how many succeeded; free them again."""
    held: list[int] = []

    def ask() -> None:
        with contextlib.suppress(MemoryError):
            for _ in range(count):
                held.append(pool.malloc(size))

    spent = elapsed_ns(ask) / 1e3
    for block in held:
        pool.free(block)
    return spent, len(held)


# ---- a first training step --------------------------------------------------------------------------------


def _steps(place: Device, pools: Pools, total: int, repeats: int, left_out: list[LeftOut]) -> Table:
    step = training_step(total)
    others, missing = peers.find(place, peers.TORCH[:1])
    runs: dict[str, Callable[[], dict[str, float]]] = {
        name: lambda options=options: _pool_steps(place, options, step)  # type: ignore[misc]
        for name, options in pools.items()
    }
    runs |= {way.name: lambda way=way: _way_steps(way, step) for way in others}  # type: ignore[misc]
    left_out += missing
    found = in_turns(runs, repeats, left_out, where="training step", warm=0)
    return Table(
        f"A training step: {step.pairs} blocks, {format_size(total)} of activations, forward and back, ms",
        [
            Column("memory", "memory"),
            Column("step1", "first step", "ms"),
            Column("step2", "second", "ms"),
            Column("step3", "third", "ms"),
            Column("reserved", "reserved over live at peak", "ratio"),
        ],
        [{"memory": name, **least_of_each(results)} for name, results in found.items()],
    )


def _pool_steps(place: Device, options: dict[str, Any], step: Scenario) -> dict[str, float]:
    with Pool(place, **options) as pool:
        found = _way_steps(peers.raw_way(pool), step)
        return {**found, "reserved": pool.stats().waste_ratio}


def _way_steps(way: Way, step: Scenario) -> dict[str, float]:
    way.trim()
    loop = step.compile(way)
    found = {f"step{number}": loop() / 1e6 for number in range(1, STEPS + 1)}
    way.trim()
    return found
