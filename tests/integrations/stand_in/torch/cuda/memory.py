"""torch.cuda.memory: the plug."""

from __future__ import annotations

import ctypes
from typing import Any

current: Any = None


class _Allocator:
    """Remembers the functions it is given, as torch._C's allocator object does."""

    def __init__(self, library: ctypes.CDLL, allocate: str, free: str) -> None:
        self.hooks: dict[str, int] = {}
        self.alloc = library[allocate]
        self.alloc.restype = ctypes.c_void_p
        self.alloc.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        self.free = library[free]
        self.free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

    def _take(self, name: str, function: int) -> None:
        self.hooks[name] = function

    def set_record_stream_fn(self, function: int) -> None:
        self._take("record_stream", function)

    def set_reset_fn(self, function: int) -> None:
        self._take("reset", function)

    def set_memory_fraction_fn(self, function: int) -> None:
        self._take("memory_fraction", function)

    def set_base_alloc_fn(self, function: int) -> None:
        self._take("base", function)

    def set_begin_allocate_to_pool(self, function: int) -> None:
        self._take("begin", function)

    def set_end_allocate_to_pool_fn(self, function: int) -> None:
        self._take("end", function)


class CUDAPluggableAllocator:
    def __init__(self, path: str, allocate: str, free: str) -> None:
        self._allocator = _Allocator(ctypes.CDLL(path), allocate, free)

    def allocator(self) -> _Allocator:
        return self._allocator


class MemPool:
    def __init__(self, allocator: _Allocator) -> None:
        self.allocator = allocator


def change_current_allocator(allocator: CUDAPluggableAllocator) -> None:
    global current
    current = allocator._allocator
