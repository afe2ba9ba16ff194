"""What does an array cost from an arena, from a pool, and from the library's own allocator?

A step takes so many arrays, holds them, and gives all of them back: an arena by one reset, the others one by
one. Nanoseconds of processor time for each array, the best of several steps, and the ratio to the library's
own allocator (NumPy on the host, PyTorch on a GPU). "written" also writes one byte to each page of 4 KiB,
where memory that was given back to the system has to be brought in again.
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
    """By name; the first is what the others are compared with."""
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
    """On a GPU, with the libraries that are there."""
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


def in_place(step: Step, count: int, size: int) -> Callable[[], float]:
    """Nanoseconds of this thread's processor time for one array."""
    return lambda: elapsed_ns(lambda: step(count, size), time.thread_time_ns) / count


def measure(place: Device, repeats: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with Pool(place) as pool, Arena(pool) as arena:
        steps = host_steps(arena, pool) if place.kind == "host" else device_steps(arena, pool)
        for size in SIZES:
            count = max(2, min(MOST_ARRAYS, MOST_LIVE // size))
            found = least({name: in_place(step, count, size) for name, step in steps.items()}, repeats)
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
