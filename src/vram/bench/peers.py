"""The ways to allocate that `hotpath` and `scenarios` compare: vram, the floor, and every installed peer.

Each peer is called in its cheapest configuration that is available to a Python program. If one cannot be
used, the report gives the reason. `workloads` and `measure` time the calls.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from vram.bench.measure import reason
from vram.bench.report import LeftOut
from vram.bench.workloads import Way
from vram.core.device import Device
from vram.core.driver_pool import DriverPool
from vram.core.pool import Pool

__all__ = ["FLOOR", "PEERS", "TORCH", "buffer_way", "find", "raw_way"]

FLOOR = Way("two calls of a no-op builtin", "abs(size)", "abs(0)", {"abs": abs})
"""The cost of the loop and two calls if nothing is allocated."""

RELEASE_THRESHOLD, NEVER = 4, 2**64 - 1
"""The number of that attribute of a driver pool, and its value that keeps free memory in the pool."""
RMM_POOL_BYTES = 8 << 30
"""Initial size of RMM's pool and arena, so that they never grow during a measurement."""
DRIVER_POOL = "cudaMallocAsync (vram.DriverPool)"


def raw_way(pool: Pool, name: str = "vram malloc, free") -> Way:
    """Allocate plain addresses from one of our pools."""
    return Way(name, "malloc(size)", "free(block)", {"malloc": pool.malloc, "free": pool.free})


def buffer_way(pool: Pool) -> Way:
    """Allocate Buffers from our pool, freed when dropped."""
    return Way("vram Buffer", "allocate(size)", names={"allocate": pool.allocate})


# ---- peers: each returns its way on a CUDA device, or raises -----------------------------------------------


def _torch(device: Device) -> tuple[Any, dict[str, Any]]:
    """PyTorch on a device, and how each way to call its allocator runs out of memory and gives it back."""
    torch = importlib.import_module("torch")
    torch.cuda.init()
    torch.cuda.set_device(device.index)
    return torch, {"out_of_memory": torch.OutOfMemoryError, "trim": torch.cuda.empty_cache}


def _torch_raw(device: Device) -> Way:
    torch, endings = _torch(device)
    names = {
        "alloc": torch._C._cuda_cudaCachingAllocator_raw_alloc,
        "delete": torch._C._cuda_cudaCachingAllocator_raw_delete,
        "stream": torch.cuda.current_stream(device.index).cuda_stream,
    }
    return Way("torch raw C calls", "alloc(size, stream)", "delete(block)", names, **endings)


def _torch_public(device: Device) -> Way:
    torch, endings = _torch(device)
    names = {"alloc": torch.cuda.caching_allocator_alloc, "delete": torch.cuda.caching_allocator_delete}
    return Way("torch caching_allocator_alloc", "alloc(size)", "delete(block)", names, **endings)


def _torch_empty(device: Device) -> Way:
    torch, endings = _torch(device)
    names = {"empty": torch.empty, "uint8": torch.uint8, "place": torch.device("cuda", device.index)}
    return Way("torch.empty", "empty(size, dtype=uint8, device=place)", names=names, **endings)


def _cupy_pool(device: Device) -> Way:
    cupy = importlib.import_module("cupy")
    cupy.cuda.Device(device.index).use()
    pool = cupy.cuda.MemoryPool()
    return Way("CuPy pool", "malloc(size)", names={"malloc": pool.malloc}, trim=pool.free_all_blocks)


def _cupy_async(device: Device) -> Way:
    cupy = importlib.import_module("cupy")
    cupy.cuda.Device(device.index).use()
    runtime = cupy.cuda.runtime
    # The device's default pool, which cuda.core shares and configures in the same way.
    runtime.memPoolSetAttribute(runtime.deviceGetDefaultMemPool(device.index), RELEASE_THRESHOLD, NEVER)
    pool = cupy.cuda.MemoryAsyncPool("default")
    return Way("CuPy async pool", "malloc(size)", names={"malloc": pool.malloc})


def _rmm(name: str, make: Callable[[Any], Any]) -> Callable[[Device], Way]:
    def find(device: Device) -> Way:
        rmm = importlib.import_module("rmm")
        resource = make(rmm.mr)
        names = {"allocate": resource.allocate, "deallocate": resource.deallocate}
        return Way(f"RMM {name}", "allocate(size)", "deallocate(block, {size})", names)

    return find


def _cuda_core(device: Device) -> Way:
    core = importlib.import_module("cuda.core")
    place = core.Device(device.index)
    place.set_current()
    resource = core.DeviceMemoryResource(place)
    names = {"allocate": resource.allocate, "stream": place.default_stream}
    return Way("cuda.core", "allocate(size, stream=stream)", "block.close(stream)", names)


PEERS: dict[str, Callable[[Device], Way]] = {
    "torch raw C calls": _torch_raw,
    "torch caching_allocator_alloc": _torch_public,
    "torch.empty": _torch_empty,
    "CuPy pool": _cupy_pool,
    "CuPy async pool": _cupy_async,
    "RMM arena": _rmm(
        "arena", lambda mr: mr.ArenaMemoryResource(mr.CudaMemoryResource(), arena_size=RMM_POOL_BYTES)
    ),
    "RMM pool": _rmm("pool", lambda mr: mr.PoolMemoryResource(mr.CudaMemoryResource(), RMM_POOL_BYTES)),
    "RMM async": _rmm("async", lambda mr: mr.CudaAsyncMemoryResource(initial_pool_size=RMM_POOL_BYTES)),
    "cuda.core": _cuda_core,
    DRIVER_POOL: lambda device: raw_way(DriverPool(device), DRIVER_POOL),
}
"""All peers by name."""
TORCH = ("torch raw C calls", "torch.empty")
"""PyTorch's allocator: called as cheaply as possible, and as most programs call it."""


def find(device: Device, names: Iterable[str] = PEERS) -> tuple[list[Way], list[LeftOut]]:
    """Return the peers that can be used on a device, and the others with the reason."""
    if device.kind != "cuda":
        return [], [LeftOut(name, f"needs a CUDA device; this is {device.name}") for name in names]
    ways, left_out = [], []
    for name in names:
        try:
            ways.append(PEERS[name](device))
        except Exception as error:
            left_out.append(LeftOut(name, reason(error)))
    return ways, left_out
