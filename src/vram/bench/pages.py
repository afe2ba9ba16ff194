"""`vram bench pages`: growth, reuse of free memory for another size, and a first training step.

Compares pages of each size and the pool's own choice with plain segments and plain driver calls.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from vram._native import Backend
from vram.bench import peers
from vram.bench.measure import reason, undisturbed
from vram.bench.report import Column, Left, Report, Table
from vram.bench.workloads import Way, training_step
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

POOLS: dict[str, dict[str, Any]] = {
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
    left_out = [Left(name, place.backend.no_pages) for name in POOLS if name not in pools]
    with undisturbed():
        tables = [
            _growth(place, pools, growth, repeats),
            _remap(place, pools, remap, repeats),
            _steps(place, pools, activations, repeats, left_out),
        ]
    return Report.of("pages", place, tables, left_out, quick=quick)


def _ms(work: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e6


# ---- growth -----------------------------------------------------------------------------------------------


def _growth(place: Device, pools: Mapping[str, dict[str, Any]], total: int, repeats: int) -> Table:
    ways: dict[str, Callable[[int], float | None]] = {
        name: lambda size, options=options: _grow(place, options, size, total)  # type: ignore[misc]
        for name, options in pools.items()
    }
    if place.pages:
        ways |= {
            f"pages of {format_size(page)}, driver calls alone": (
                lambda size, page=page: _map(place.backend, page, size, total)  # type: ignore[misc]
            )
            for page in PAGE_SIZES
        }
    alone = "cuMemAlloc alone" if place.kind == "cuda" else "plain memory of the device alone"
    ways[alone] = lambda size: _reserve(place.backend, size, total)
    sizes = {f"in blocks of {format_size(size)}": size for size in (*GROWTH_BLOCKS, total // 2)}
    rows = [
        {"memory": name, **{title: _per_gib(way, size, total, repeats) for title, size in sizes.items()}}
        for name, way in ways.items()
    ]
    columns = [Column("memory", "memory"), *(Column(title, title, "ms") for title in sizes)]
    return Table(f"Growth: {format_size(total)} from an empty pool, ms per GiB", columns, rows)


def _per_gib(way: Callable[[int], float | None], size: int, total: int, repeats: int) -> float | None:
    """Return the minimum of several times, per GiB; None if a way cannot allocate blocks of that size."""
    times = [spent for spent in (way(size) for _ in range(repeats)) if spent is not None]
    return min(times) * GIB / total if times else None


def _grow(place: Device, options: dict[str, Any], size: int, total: int) -> float:
    with Pool(place, **options) as pool:
        return _ms(lambda: [pool.malloc(size) for _ in range(total // size)])


def _reserve(backend: Backend, size: int, total: int) -> float:
    addresses: list[int] = []
    spent = _ms(lambda: addresses.extend(backend.reserve(size) for _ in range(total // size)))
    for address in addresses:
        backend.release(address, size)
    return spent


def _map(backend: Backend, page: int, size: int, total: int) -> float | None:
    """Create pages and map them at new addresses, with access granted once for each block."""
    if size % page:
        return None
    space, pages = backend.space_reserve(total), []

    def grow() -> None:
        for block in range(space, space + total, size):
            for address in range(block, block + size, page):
                pages.append(backend.page_create(page))
                backend.map(address, page, pages[-1])
            backend.set_access(block, size)

    spent = _ms(grow)
    for number, handle in enumerate(pages):
        backend.unmap(space + number * page, page)
        backend.page_release(handle, page)
    backend.space_release(space, total)
    return spent


# ---- remapping --------------------------------------------------------------------------------------------


def _remap(place: Device, pools: Mapping[str, dict[str, Any]], total: int, repeats: int) -> Table:
    """Fill a limit with blocks, free every other one, and request blocks of twice the size."""
    rows: list[dict[str, Any]] = []
    for name, options in pools.items():
        best = min(
            (_twice_the_size(place, options, total) for _ in range(repeats)), key=lambda row: row["us"]
        )
        rows.append({"memory": name, **best})
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
        for _ in range(count):
            held.append(pool.malloc(size))

    start = time.perf_counter_ns()
    with contextlib.suppress(MemoryError):
        ask()
    spent = (time.perf_counter_ns() - start) / 1e3
    for block in held:
        pool.free(block)
    return spent, len(held)


# ---- a first training step --------------------------------------------------------------------------------


def _steps(
    place: Device, pools: Mapping[str, dict[str, Any]], total: int, repeats: int, left_out: list[Left]
) -> Table:
    step = training_step(total)
    rows: list[dict[str, Any]] = []
    for name, options in pools.items():
        rows.append({"memory": name, **_least([_pool_steps(place, options, total) for _ in range(repeats)])})
    others, missing = peers.find(place, peers.TORCH[:1])
    left_out += missing
    for way in others:
        try:
            rows.append({"memory": way.name, **_least([_way_steps(way, total) for _ in range(repeats)])})
        except Exception as error:
            left_out.append(Left(f"{way.name}, training step", reason(error)))
    return Table(
        f"A training step: {step.pairs} blocks, {format_size(total)} of activations, forward and back, ms",
        [
            Column("memory", "memory"),
            Column("step1", "first step", "ms"),
            Column("step2", "second", "ms"),
            Column("step3", "third", "ms"),
            Column("reserved", "reserved over live at peak", "ratio"),
        ],
        rows,
    )


def _pool_steps(place: Device, options: dict[str, Any], total: int) -> dict[str, float]:
    with Pool(place, **options) as pool:
        found = _way_steps(peers.raw_way(pool), total)
        return {**found, "reserved": pool.stats().waste_ratio}


def _way_steps(way: Way, total: int) -> dict[str, float]:
    way.trim()
    loop = training_step(total).compile(way)
    found = {f"step{number}": loop() / 1e6 for number in range(1, STEPS + 1)}
    way.trim()
    return found


def _least(repeats: list[dict[str, float]]) -> dict[str, float]:
    return {key: min(found[key] for found in repeats) for key in repeats[0]}
