"""What does an array cost from an arena, from a pool, and from the library's own allocator?

A step takes so many arrays, holds them, and gives all of them back: an arena by one reset, the others one by
one. Nanoseconds of processor time for each array, the best of several steps, and the ratio to the library's
own allocator (NumPy on the host, PyTorch on a GPU). "written" also writes one byte to each page of 4 KiB,
where memory that was given back to the system has to be brought in again. `--json FILE` for machines.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from typing import Any

import vram
from vram.sizes import format_size
from vram.system.machine import describe_machine

SIZES = (512, 64 << 10, 1 << 20, 16 << 20)
MOST_LIVE, MOST_ARRAYS, PAGE = 64 << 20, 200, 4096
Step = Callable[[int, int], None]  # step(arrays, size)


def host_steps(arena: vram.Arena, pool: vram.Pool) -> dict[str, Step]:
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


def common_steps(arena: vram.Arena, pool: vram.Pool) -> dict[str, Step]:
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


def device_steps(arena: vram.Arena, pool: vram.Pool) -> dict[str, Step]:
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


def nanoseconds(step: Step, count: int, size: int, seconds: float) -> float:
    """Of this thread's processor time for one array, in the best of the steps that fit into the time."""
    step(count, size)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.thread_time_ns()
        step(count, size)
        best = min(best, (time.thread_time_ns() - began) / count)
    return best


def measure(device: vram.Device, seconds: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with vram.Pool(device) as pool, vram.Arena(pool) as arena:
        steps = host_steps(arena, pool) if device.kind == "host" else device_steps(arena, pool)
        for size in SIZES:
            count = max(2, min(MOST_ARRAYS, MOST_LIVE // size))
            found = {name: nanoseconds(step, count, size, seconds) for name, step in steps.items()}
            for name, taken in found.items():
                own = "np.empty, written" if "written" in name else next(iter(steps))
                rows.append(
                    {"size": size, "arrays": count, "way": name, "ns": taken, "ratio": taken / found[own]}
                )
    return rows


def main() -> None:
    """Print a table; `--json FILE` writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="host")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each figure")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    device = vram.Device(arguments.device)
    gc.disable()  # a collection in the middle of a step is nobody's cost
    rows = measure(device, arguments.seconds)
    print(f"{'size':>8} {'arrays':>6}  {'way':<34}{'ns each':>10}{'ratio':>8}")
    for row in rows:
        head = f"{format_size(row['size']):>8} {row['arrays']:>6}  {row['way']:<34}"
        print(f"{head}{row['ns']:>10.0f}{row['ratio']:>8.2f}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"machine": describe_machine(device), "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
