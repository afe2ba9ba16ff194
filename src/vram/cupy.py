"""vram for CuPy: `vram.cupy.install()` makes CuPy allocate device and pinned memory from the manager's pools.

Memory is ordered by CuPy's current stream. Failures raise CuPy's own OutOfMemoryError. The pool handles
placement, reuse and graph captures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vram.core.buffer import Buffer
from vram.core.device import adopt_cupy_stream
from vram.errors import OutOfMemory
from vram.integrations.adaptors import DevicePools, pinned_pool, prepare, require_library

__all__ = ["install", "uninstall"]

_cupy: Any = require_library("cupy", "CuPy")
_memory: Any = _cupy.cuda.memory
_pinned_memory: Any = _cupy.cuda.pinned_memory

_before: Callable[[int], Any] | None = None  # CuPy's allocator while ours is installed


def install(**config: Any) -> None:
    """Make CuPy allocate from vram on every device. Calling it again only applies `config`.

    `config` is passed to `vram.configure`. Existing arrays keep their memory.
    """
    global _before
    prepare(config)
    if _before is not None:
        return
    before = _memory.get_allocator()
    _cupy.cuda.set_allocator(make_allocator(DevicePools("cupy").allocate, _place))
    _cupy.cuda.set_pinned_memory_allocator(make_pinned_allocator(_allocate_pinned))
    _before = before


def uninstall() -> None:
    """Restore CuPy's own allocators. Memory allocated from vram stays valid until it is dropped."""
    global _before
    if _before is None:
        return
    _cupy.cuda.set_allocator(_before)
    _cupy.cuda.set_pinned_memory_allocator(_cupy.get_default_pinned_memory_pool().malloc)
    _before = None


def make_allocator(
    allocate: Callable[[int, int, int], Buffer], place: Callable[[], tuple[int, int]]
) -> Callable[[int], Any]:
    """Return CuPy's `fn(size) -> MemoryPointer`. `place` returns the device and stream to pass to `allocate`.

    CuPy's UnownedMemory holds the Buffer and drops it with the last array, so a free runs no Python code.
    """
    pointer, unowned = _memory.MemoryPointer, _memory.UnownedMemory

    def vram_allocator(size: int) -> Any:
        device, stream = place()
        if size == 0:
            return pointer(unowned(0, 0, None, device), 0)
        try:
            buffer = allocate(size, device, stream)
        except OutOfMemory as error:
            raise _out_of_memory(size, error) from error
        return pointer(unowned(buffer.ptr, size, buffer, device), 0)

    return vram_allocator


def make_pinned_allocator(allocate: Callable[[int], Buffer]) -> Callable[[int], Any]:
    """Return CuPy's `fn(size) -> PinnedMemoryPointer`. A Buffer has the `ptr` and `size` that CuPy needs."""
    pointer = _pinned_memory.PinnedMemoryPointer

    def vram_pinned_allocator(size: int) -> Any:
        try:
            return pointer(allocate(size), 0)
        except OutOfMemory as error:
            raise _out_of_memory(size, error) from error

    return vram_pinned_allocator


def _place() -> tuple[int, int]:
    """Return CuPy's current device and the handle of its current stream."""
    device, stream = _get_device(), _get_stream()
    handle: int = stream.ptr
    if handle:
        adopt_cupy_stream(device, stream)
    return device, handle


_get_device: Callable[[], int] = _cupy.cuda.device.get_device_id
_get_stream: Callable[[], Any] = _cupy.cuda.get_current_stream


def _allocate_pinned(size: int) -> Buffer:
    return pinned_pool().allocate(size, tag="cupy")


def _out_of_memory(size: int, error: OutOfMemory) -> Exception:
    """Return CuPy's error with its numbers and our report."""
    facts = error.facts
    made: Exception = _memory.OutOfMemoryError(size, facts.get("allocated", -1), facts.get("limit") or 0)
    made.args = (f"{made} {error}",)
    return made
