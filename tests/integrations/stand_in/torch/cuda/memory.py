"""torch.cuda.memory: the plug, and the history that PyTorch's own allocator keeps."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from typing import Any

current: Any = None
history: deque[dict[str, Any]] | None = None
live: dict[int, dict[str, Any]] = {}
marks: list[dict[str, Any]] = []


def _record_memory_history(
    enabled: str | None = "all", context: str | None = "all", stacks: str = "all", max_entries: int = 1 << 62
) -> None:
    global history
    assert context in ("alloc", "all") and stacks in ("python", "all")
    history = None if enabled is None else deque(maxlen=max_entries)


def happens(action: str, address: int, size: int, *names: str) -> None:
    """Something that PyTorch's allocator does."""
    if history is not None:
        frames = [{"filename": "train.py", "line": 1, "name": name} for name in names]
        place = "device_free" if action == "oom" else "addr"
        event = {"action": action, place: address, "size": size, "stream": 0, "frames": frames}
        history.append({**event, "time_us": time.time_ns() // 1000})
    if action == "alloc":
        block = {"address": address, "size": size, "requested_size": size, "state": "active_allocated"}
        live[address] = {**block, "frames": []}
    elif action == "free_completed":
        live.pop(address, None)


def _snapshot() -> dict[str, Any]:
    blocks = [live[address] for address in sorted(live)]
    segment = {
        "device": 0,
        "address": 0,
        "total_size": 1 << 40,
        "stream": 0,
        "segment_type": "large",
        "blocks": blocks,
    }
    return {
        "segments": [segment] if blocks else [],
        "device_traces": [list(history or ())],
        "allocator_settings": {"expandable_segments": False},
        "external_annotations": list(marks),
    }


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
