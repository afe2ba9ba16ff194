"""The allocators that experiments compare, with one small interface: vram's pool, the driver's, PyTorch's,
and one that is wrong on purpose.
"""

from __future__ import annotations

import contextlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from vram.core.driver_pool import DriverPool
from vram.core.pool import Pool
from vram.core.stream import Stream
from vram.errors import OutOfMemory

from .experiment import MIB, Bench

__all__ = [
    "Allocator",
    "OpenPool",
    "driver_pool",
    "naive_pool",
    "served",
    "stream_ordered_pools",
    "torch_installed",
    "torch_pool",
    "vram_pool",
]

SLOT = 2 * MIB
"""A backend allocates plain memory in multiples of this size."""


class Allocator(ABC):
    """Allocates addresses in the order of a stream. `malloc` raises OutOfMemory if there is no memory."""

    @abstractmethod
    def malloc(self, size: int, stream: Stream) -> int:
        """Allocate for work on `stream`."""

    @abstractmethod
    def free(self, address: int, stream: Stream) -> None:
        """Free in the order of `stream`, for which it was allocated."""

    @abstractmethod
    def reserved(self) -> int:
        """Return the bytes held from the device."""

    def record_stream(self, address: int, stream: Stream) -> None:
        """Record a use on another stream."""
        raise NotImplementedError(f"{type(self).__name__} has no record_stream")

    def trim(self) -> None:
        """Release unused memory."""
        raise NotImplementedError(f"{type(self).__name__} has no trim")


OpenPool: TypeAlias = Callable[[], contextlib.AbstractContextManager[Allocator]]
"""Opens a pool for the time of a `with` block."""


# ---- vram's and the driver's ------------------------------------------------------------------------------


class _PoolAllocator(Allocator):
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def malloc(self, size: int, stream: Stream) -> int:
        return self._pool.malloc(size, stream)

    def free(self, address: int, stream: Stream) -> None:
        self._pool.free(address)

    def reserved(self) -> int:
        return self._pool.stats().reserved

    def record_stream(self, address: int, stream: Stream) -> None:
        self._pool.record_stream(address, stream)

    def trim(self) -> None:
        self._pool.trim(wait=True)


@contextlib.contextmanager
def vram_pool(bench: Bench, **options: Any) -> Iterator[Allocator]:
    """Open vram's pool with these options."""
    with Pool(bench.device, **options) as pool:
        yield _PoolAllocator(pool)


@contextlib.contextmanager
def driver_pool(bench: Bench, limit: int = 0) -> Iterator[Allocator]:
    """A new pool of the driver, of at most `limit` bytes, that gives nothing back by itself."""
    with DriverPool(bench.device, max_size=limit, release_threshold=None) as pool:
        yield _PoolAllocator(pool)
        bench.device.synchronize()


def stream_ordered_pools(bench: Bench) -> dict[str, OpenPool]:
    """What can be compared on the device: vram's pool, and the driver's on a GPU."""
    pools: dict[str, OpenPool] = {"vram": lambda: vram_pool(bench)}
    if bench.on_gpu:
        pools["cudaMallocAsync"] = lambda: driver_pool(bench)
    return pools


# ---- wrong on purpose -------------------------------------------------------------------------------------


class _Naive(Allocator):
    """Returns the most recently freed block to any stream immediately, like a pool that ignores streams."""

    def __init__(self, addresses: list[int], size: int) -> None:
        self._free = addresses
        self._reserved = size * len(addresses)

    def malloc(self, size: int, stream: Stream) -> int:
        return self._free.pop()

    def free(self, address: int, stream: Stream) -> None:
        self._free.append(address)

    def reserved(self) -> int:
        return self._reserved


@contextlib.contextmanager
def naive_pool(bench: Bench, size: int, blocks: int = 2) -> Iterator[Allocator]:
    """Open a pool of a few blocks of one size that ignores streams."""
    whole = -(-size * blocks // SLOT) * SLOT
    with bench.reserved(whole) as (base,):
        yield _Naive([base + size * index for index in range(blocks)], size)


# ---- PyTorch's --------------------------------------------------------------------------------------------


class _Torch(Allocator):
    def __init__(self, torch: Any, index: int) -> None:
        self._torch, self._index = torch, index

    def malloc(self, size: int, stream: Stream) -> int:
        try:
            return int(self._torch.cuda.caching_allocator_alloc(size, self._index, stream.handle))
        except self._torch.cuda.OutOfMemoryError as error:
            raise OutOfMemory(str(error), size=size) from error

    def free(self, address: int, stream: Stream) -> None:
        self._torch.cuda.caching_allocator_delete(address)

    def reserved(self) -> int:
        return int(self._torch.cuda.memory_reserved(self._index))

    def trim(self) -> None:
        self._torch.cuda.empty_cache()


@contextlib.contextmanager
def torch_pool(bench: Bench, limit: int) -> Iterator[Allocator]:
    """Open PyTorch's caching allocator, limited to `limit` bytes more than it has already reserved."""
    torch: Any = importlib.import_module("torch")
    index = bench.device.index
    torch.cuda.init()
    torch.cuda.empty_cache()
    share = (torch.cuda.memory_reserved(index) + limit) / bench.device.total_memory
    torch.cuda.set_per_process_memory_fraction(share, index)
    try:
        yield _Torch(torch, index)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, index)
        torch.cuda.empty_cache()


def torch_installed() -> bool:
    """Return whether PyTorch with CUDA is available for comparison."""
    if importlib.util.find_spec("torch") is None:
        return False
    return bool(importlib.import_module("torch").cuda.is_available())


def served(call: Callable[[], object]) -> bool:
    """Return whether an allocation succeeds; errors other than OutOfMemory are raised."""
    try:
        call()
    except OutOfMemory:
        return False
    return True
