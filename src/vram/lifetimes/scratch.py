"""`Scratch`: variable-length workspace for the work of one stream, over one GrowableBuffer.

It decides how long the buffer is; where its memory comes from is the pool's business.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

from vram.core.buffer import Buffer
from vram.core.locks import new_lock
from vram.core.stream import Stream
from vram.errors import ConfigError
from vram.lifetimes.growable import STEP, GrowableBuffer, pool_of
from vram.sizes import format_size, parse_size

if TYPE_CHECKING:
    from vram.core.pool import Pool

__all__ = ["Scratch"]

WINDOW: Final = 64
"""Requests after which the length is looked at."""
UNIT: Final = 512
"""Workspaces begin at multiples of this."""


class Scratch:
    """Workspace for the work of one stream: `with scratch.get(size) as workspace: ...`.

    A workspace is a Buffer, the caller's until it is freed or dropped; then its bytes serve the next one, in
    stream order, while the work that used them may still run. Workspaces taken while others are held
    lie behind them. It grows at once when more is asked for, where it stands: no pointer changes. It shrinks
    by this rule: after every 64 requests, if the most that was held at a time was no more than half of what
    it has, to that. Neither waits for the device.

    `stream` is as everywhere; `pool` (by default the memory manager's of the stream's device) needs pages.
    `max_size` bounds it, and takes only addresses: by default a quarter of the device's memory. Any thread
    may use it, though the work must be queued on its stream, or be ordered before what follows there.
    """

    def __init__(
        self, stream: Any = None, *, pool: Pool | None = None, max_size: int | str | None = None
    ) -> None:
        """Make an empty one; it takes addresses and no memory."""
        source = pool_of(pool or (stream.device if isinstance(stream, Stream) else None))
        most = source.device.total_memory // 4 if max_size is None else parse_size(max_size)
        self._buffer = GrowableBuffer(most, source, stream=stream, ahead=0)
        self._lock = new_lock()  # dropping what was garbage may come in between
        self._held: list[tuple[weakref.ref[Buffer], int]] = []  # by address: a workspace and its end
        self._most = 0  # bytes held at a time since the window began
        self._count = 0

    def get(self, size: int | str, *, align: int = UNIT) -> Buffer:
        """A workspace of `size` bytes. OutOfMemory without room for it, ConfigError beyond `max_size`."""
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
        """Where the workspaces end that are still held."""
        while self._held:
            last, end = self._held[-1]
            workspace = last()
            if workspace is not None and not workspace.freed:
                return end
            self._held.pop()
        return 0

    def _follow(self, end: int) -> None:
        """The rule by which it shrinks. The workspace just handed out counts, so nothing held is cut off."""
        self._most = max(self._most, end)
        self._count += 1
        if self._count < WINDOW:
            return
        if 2 * self._most <= self._buffer.capacity:
            self._buffer.resize(self._most)
        self._count, self._most = 0, end

    @property
    def size(self) -> int:
        """Bytes that have memory now."""
        return self._buffer.capacity

    @property
    def max_size(self) -> int:
        """The most bytes it may have."""
        return self._buffer.max_size

    @property
    def pool(self) -> Pool:
        """The pool its memory comes from."""
        return self._buffer.pool

    @property
    def closed(self) -> bool:
        """Whether it was closed, or its pool was."""
        return self._buffer.closed

    def trim(self) -> int:
        """Give up all but what is held; returns the bytes that remain."""
        with self._lock:
            self._buffer.resize(min(self._top(), self._buffer.size))
            self._count = self._most = 0
            return self.size

    def close(self) -> None:
        """Give everything back, in stream order; workspaces still held are freed. Again: nothing."""
        with self._lock:
            self._buffer.close()
            self._held.clear()

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return "<vram.Scratch, closed>"
        return f"<vram.Scratch of {format_size(self.size)} on {self._buffer.device.name}>"
