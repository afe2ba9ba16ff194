"""Measure the cost of an array from an arena, from a pool, and from the library's own allocator.

A step allocates arrays, holds them, and releases all of them: an arena by one reset, the others one by one.
The figures are nanoseconds of processor time per array, the minimum of several steps, and the ratio to the
library's own allocator (NumPy on the host, PyTorch on a GPU). The "written" rows also write one byte to each
4 KiB page, which faults in memory that was returned to the system.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vram.bench.measure import elapsed_ns, factor, least
from vram.bench.report import Column, Report, Table
from vram.cli.bench import measuring_command
from vram.core.device import Device
from vram.core.pool import Pool
from vram.lifetimes.arena import Arena

SIZES = (512, 64 << 10, 1 << 20, 16 << 20)
MOST_LIVE, MOST_ARRAYS, PAGE = 64 << 20, 200, 4096
REPEATS, QUICK_REPEATS = 100, 3
Step = Callable[[int, int], None]  # step(arrays, size)


def host_steps(arena: Arena, pool: Pool) -> dict[str, Step]:
    """Return the steps by name; the first is the reference of the others."""
    import numpy as np

    def numpy_step(count: int, size: int) -> None:
        [np.empty(size, np.uint8) for _ in range(count)]

    def arena_step(count: int, size: int) -> None:
        [arena.empty(size, np.uint8) for _ in range(count)]
        arena.reset()

    def numpy_written(count: int, size: int) -> None:
        for array in [np.empty(size, np.uint8) for _ in range(count)]:
            array[::PAGE] = 1

    def arena_written(count: int, size: int) -> None:
        for array in [arena.empty(size, np.uint8) for _ in range(count)]:
            array[::PAGE] = 1
        arena.reset()

    return {
        "np.empty": numpy_step,
        "arena.empty": arena_step,
        **common_steps(arena, pool),
        "np.empty, written": numpy_written,
        "arena.empty, written": arena_written,
    }


def common_steps(arena: Arena, pool: Pool) -> dict[str, Step]:
    def allocate_step(count: int, size: int) -> None:
        [arena.allocate(size) for _ in range(count)]
        arena.reset()

    def scope_step(count: int, size: int) -> None:
        for _ in range(count):
            with arena.scope():
                arena.allocate(size)

    def pool_step(count: int, size: int) -> None:
        for address in [pool.malloc(size) for _ in range(count)]:
            pool.free(address)

    def buffer_step(count: int, size: int) -> None:
        [pool.allocate(size) for _ in range(count)]

    return {
        "arena.allocate": allocate_step,
        "arena.allocate, each in a scope": scope_step,
        "pool.malloc and free": pool_step,
        "pool.allocate, dropped": buffer_step,
    }


def device_steps(arena: Arena, pool: Pool) -> dict[str, Step]:
    """Return the steps for a GPU, with the installed libraries."""
    steps: dict[str, Step] = {}
    try:
        import torch
    except ImportError:
        pass
    else:

        def torch_step(count: int, size: int) -> None:
            [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(count)]

        def torch_arena_step(count: int, size: int) -> None:
            [torch.from_dlpack(arena.empty(size, "uint8")) for _ in range(count)]
            arena.reset()

        steps |= {"torch.empty": torch_step, "torch.from_dlpack(arena.empty)": torch_arena_step}
    try:
        import cupy
    except ImportError:
        pass
    else:

        def cupy_step(count: int, size: int) -> None:
            [cupy.empty(size, cupy.uint8) for _ in range(count)]

        def cupy_arena_step(count: int, size: int) -> None:
            [cupy.from_dlpack(arena.empty(size, "uint8")) for _ in range(count)]
            arena.reset()

        steps |= {"cupy.empty": cupy_step, "cupy.from_dlpack(arena.empty)": cupy_arena_step}

    def arena_step(count: int, size: int) -> None:
        [arena.empty(size, "uint8") for _ in range(count)]
        arena.reset()

    return {**steps, "arena.empty": arena_step, **common_steps(arena, pool)}


def per_array(step: Step, count: int, size: int) -> Callable[[], float]:
    """Return a run that gives the processor time per array, in nanoseconds."""
    return lambda: elapsed_ns(lambda: step(count, size), time.thread_time_ns) / count


def measure(place: Device, repeats: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with Pool(place) as pool, Arena(pool) as arena:
        steps = host_steps(arena, pool) if place.kind == "host" else device_steps(arena, pool)
        for size in SIZES:
            count = max(2, min(MOST_ARRAYS, MOST_LIVE // size))
            found = least({name: per_array(step, count, size) for name, step in steps.items()}, repeats)
            for name, taken in found.items():
                own = "np.empty, written" if "written" in name else next(iter(steps))
                row = {"size": size, "arrays": count, "way": name, "ns": taken}
                rows.append({**row, "ratio": factor(taken, found[own])})
    return rows


def run(device: str | None, *, quick: bool) -> Report:
    place = Device(device or "host")
    table = Table(
        "One array of a step, in processor time",
        [
            Column("size", "size", "bytes"),
            Column("arrays", "arrays", "count"),
            Column("way", "way"),
            Column("ns", "ns each", "ns"),
            Column("ratio", "of the library's own", "ratio"),
        ],
        measure(place, QUICK_REPEATS if quick else REPEATS),
    )
    return Report.of("arena", place, [table], quick=quick)


if __name__ == "__main__":
    measuring_command("arena", __doc__, run)()
