"""`Scratch`: workspace of variable size for the work of one stream, in one GrowableBuffer.

This module decides the length of the buffer; the pool provides its memory.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

from vram.core.buffer import Buffer
from vram.core.closing import Closing
from vram.core.locks import new_lock
from vram.core.stream import Stream
from vram.errors import ConfigError
from vram.lifetimes.growable import STEP, GrowableBuffer, pool_of
from vram.sizes import format_size, parse_size

if TYPE_CHECKING:
    from vram.core.pool import Pool

__all__ = ["Scratch"]

WINDOW: Final = 64
"""The length is reconsidered after this many requests."""
UNIT: Final = 512
"""Workspaces begin at multiples of this."""


class Scratch(Closing):
    """Workspace for the work of one stream: `with scratch.get(size) as workspace: ...`.

    A workspace is a Buffer that the caller owns until it is freed or dropped. The next workspace then reuses
    its bytes in stream order, while earlier work may still run. Workspaces requested while others are held
    are placed behind them. The scratch memory grows immediately and in place when more is requested: no
    pointer changes. It shrinks by this rule: after every 64 requests, if the maximum held at one time was at
    most half of the memory, it shrinks to that maximum. Neither waits for the device.

    `stream` is a stream as in every other call. `pool` needs pages (default: the memory manager's pool of the
    stream's device). `max_size` is the maximum and reserves only addresses (default: a quarter of the
    device's memory). Any thread may use it, but the work must be queued on its stream or be ordered before
    later work there.
    """

    def __init__(
        self, stream: Any = None, *, pool: Pool | None = None, max_size: int | str | None = None
    ) -> None:
        """Create empty scratch memory; it reserves addresses and no memory."""
        source = pool_of(pool or (stream.device if isinstance(stream, Stream) else None))
        most = source.device.total_memory // 4 if max_size is None else parse_size(max_size)
        self._buffer = GrowableBuffer(most, source, stream=stream, ahead=0)
        self._lock = new_lock()  # garbage collection may drop buffers in between
        self._held: list[tuple[weakref.ref[Buffer], int]] = []  # by address: a workspace and its end
        self._most = 0  # maximum bytes held at one time in this window
        self._count = 0

    def get(self, size: int | str, *, align: int = UNIT) -> Buffer:
        """Return a workspace of `size` bytes. Raises OutOfMemory, or ConfigError beyond `max_size`."""
        wanted = parse_size(size)
        if align < 1 or align & (align - 1) or align > STEP:
            raise ConfigError(
                f"align must be a power of two up to {format_size(STEP)}, not {align}", value=align
            )
        with self._lock:
            start = -(-self._top() // max(align, UNIT)) * max(align, UNIT)
            end = start + wanted
            if end > self._buffer.size:
                self._buffer.resize(end)
            workspace = self._buffer.view(start, wanted)
            self._held.append((weakref.ref(workspace), max(end, start + 1)))
            self._follow(end)
            return workspace

    def _top(self) -> int:
        """Return the end of the last workspace that is still held."""
        while self._held:
            last, end = self._held[-1]
            workspace = last()
            if workspace is not None and not workspace.freed:
                return end
            self._held.pop()
        return 0

    def _follow(self, end: int) -> None:
        """Apply the shrink rule. The new workspace counts, so nothing held is cut off."""
        self._most = max(self._most, end)
        self._count += 1
        if self._count < WINDOW:
            return
        if 2 * self._most <= self._buffer.capacity:
            self._buffer.resize(self._most)
        self._count, self._most = 0, end

    @property
    def size(self) -> int:
        """Bytes that are backed by memory."""
        return self._buffer.capacity

    @property
    def max_size(self) -> int:
        """Maximum size in bytes."""
        return self._buffer.max_size

    @property
    def pool(self) -> Pool:
        """The pool that provides the memory."""
        return self._buffer.pool

    @property
    def closed(self) -> bool:
        """Whether it or its pool was closed."""
        return self._buffer.closed

    def trim(self) -> int:
        """Release all memory that is not held; return the remaining bytes."""
        with self._lock:
            self._buffer.resize(min(self._top(), self._buffer.size))
            self._count = self._most = 0
            return self.size

    def close(self) -> None:
        """Release everything in stream order, also held workspaces. Calling it again has no effect."""
        with self._lock:
            self._buffer.close()
            self._held.clear()

    def __repr__(self) -> str:
        if self.closed:
            return "<vram.Scratch, closed>"
        return f"<vram.Scratch of {format_size(self.size)} on {self._buffer.device.name}>"
