"""`Arena`: allocations with one common lifetime. Taken by moving a cursor, given back all at once.

The cursor, its chunks and stream order are native (`native/arena/arena.hpp`). This module adds arrays,
scopes, statistics, and the messages of errors.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vram import _native
from vram.arguments import require, shown
from vram.core.buffer import Buffer
from vram.core.device import Device
from vram.core.scope import Scope
from vram.errors import ConfigError, DeviceError, InvalidFree, OutOfMemory, VramError
from vram.lifetimes.elements import ELEMENTS, element_of
from vram.sizes import format_count, format_size, parse_size
from vram.trace.model import Frame

if TYPE_CHECKING:
    from vram.core.snapshot import Stack

__all__ = ["Arena", "ArenaLine", "ArenaReport", "ArenaStats", "arena_report"]

MOST_ALIGN: Final = 2 << 20
"""The largest alignment, in bytes."""
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """What an arena holds and has done; all in bytes but for the counts.

    `used` is in live arrays and the padding between them, `high_water` the most of it at any time: an arena
    with that `size` holds all of it in one piece. `capacity` is held from the pool, in `chunks`; of it
    `resting` in host memory that queued work still used at a reset. `depth` counts open scopes.
    `allocations` were served, of `allocated` bytes as asked for, by `requests` to the pool. `host_waits`
    counts the times that resting memory had to be waited for.
    """

    used: int
    high_water: int
    capacity: int
    resting: int
    chunks: int
    depth: int
    allocations: int
    allocated: int
    requests: int
    resets: int
    host_waits: int


class Arena(_native.ArenaCore):
    """Memory for what lives and dies together: an iteration, a phase, a request.

    `arena.empty(shape, dtype)` takes the next bytes; `arena.reset()` gives everything back in one step,
    `with arena.scope():` what was taken inside. The memory stays the arena's: an iteration like one before it
    asks nobody for anything. What is live never moves.

    `device_or_pool` is where the memory comes from: a pool, or a device (None: the default one), which means
    the manager's pool of it, or with `pinned` a new `PinnedPool`. `size` bytes are taken at once; more is
    taken as needed, unless `growable` is false. The memory follows the order of `stream`, and `align` is for
    all allocations (64 bytes on the host, 256 elsewhere). With `checked`, arrays that outlive their scope
    raise when they are used and say where they were made. `name` is what reports and the pool's account
    call it.

    An arena belongs to the thread that made it; another calls `adopt()` first, once the former has stopped.
    """

    _unended: tuple[int, int] | None = None

    def __init__(
        self,
        device_or_pool: str | Device | _native.PoolCore | None = None,
        size: int | str | None = None,
        growable: bool = True,
        pinned: bool = False,
        *,
        stream: Any = None,
        align: int | None = None,
        checked: bool = False,
        name: str | None = None,
    ) -> None:
        """Make an arena; without `size` it takes nothing before the first allocation."""
        if not growable and not size:
            raise ConfigError(
                'an arena that cannot grow needs a size: Arena(…, size="64MiB", growable=False)'
            )
        pool = _pool_for(device_or_pool, pinned)
        alignment = 0 if align is None else _checked_align(align)
        wanted = 0 if size is None else parse_size(size)
        super().__init__(pool, wanted, growable, alignment, stream, name, checked)
        self.name = name or f"arena-{next(_numbers)}"
        self._growable = growable
        self._make: Callable[[Arena, Any, Any], Any] = _first_array
        self.device._core.add_listener(self.stream_listener())

    # ---- allocation -------------------------------------------------------------------------------------

    def empty(self, shape: int | tuple[int, ...], dtype: Any = float) -> Any:
        """Take an array with undefined contents: NumPy's own on the host, elsewhere a Buffer with a shape.

        Other libraries take that Buffer without a copy: `torch.from_dlpack(b)`, `cupy.from_dlpack(b)`, or
        by `__cuda_array_interface__`. It may be used until its scope ends or the arena is reset.
        """
        return self._make(self, shape, dtype)

    # ---- lifetimes --------------------------------------------------------------------------------------

    def scope(self) -> ArenaScope:
        """What is taken in this `with` block, or function, is given back at its end. Scopes nest."""
        return ArenaScope(self)

    def reset(self, *, zero: bool = False) -> None:
        """Give everything back at once; the memory stays the arena's.

        Work that is queued already is not waited for: the arena's stream waits for the streams that
        were told to it by `record_stream`, and host memory which queued work uses rests until that has
        finished. With `zero` all that is taken until the next reset reads as zero, filled in stream
        order; ends of scopes inside do not zero. DeviceError while a scope is open.
        """
        if self._unended is not None:  # a scope whose end failed
            if self.is_open(*self._unended):
                self.rewind(*self._unended)
            self._unended = None
        self.reset_memory(zero)

    def _end(self, mark: tuple[int, int]) -> None:
        try:
            self.rewind(*mark)
        except VramError:
            if not self.closed and self.is_open(*mark):
                self._unended = min(self._unended or mark, mark)
            raise

    # ---- what it says of itself -------------------------------------------------------------------------

    @property
    def device(self) -> Device:
        """The device whose memory, or whose streams, it is about."""
        return self.pool.device

    @property
    def growable(self) -> bool:
        """Whether it takes more than `size` from its pool when it needs to."""
        return self._growable

    def stats(self) -> ArenaStats:
        """What it holds and has done."""
        return ArenaStats(**self.raw_stats())

    @property
    def used(self) -> int:
        """Bytes in live arrays and the padding between them."""
        return self.raw_stats()["used"]

    @property
    def high_water(self) -> int:
        """The most bytes used at any time, since the arena was made or `reset_peak()`."""
        return self.raw_stats()["high_water"]

    @property
    def capacity(self) -> int:
        """Bytes held from the pool."""
        return self.raw_stats()["capacity"]

    # ---- end --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the memory back to the pool; arrays of it are over. Again: nothing.

        NumPy arrays and DLPack capsules that are still held keep the memory they look at until they go.
        """
        self.end()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if "name" not in self.__dict__:
            return "<vram.Arena, not made>"
        head = f"<vram.Arena {self.name!r} on {self.device.name}"
        if self.closed:
            return f"{head}, closed>"
        now = self.stats()
        scopes = f", {format_count(now.depth, 'open scope')}" if now.depth else ""
        return (
            f"{head}: {format_size(now.used)} used of {format_size(now.capacity)} in "
            f"{format_count(now.chunks, 'chunk')}, high water {format_size(now.high_water)}{scopes}>"
        )


class ArenaScope(Scope):
    """A lifetime inside an arena's. Made by `Arena.scope`."""

    __slots__ = ("_arena", "_marks")

    def __init__(self, arena: Arena) -> None:
        """May be entered again, also within itself."""
        self._arena = arena
        self._marks: list[tuple[int, int]] = []

    def __enter__(self) -> ArenaScope:
        """Remember where the arena stands."""
        self._marks.append(self._arena.mark())
        return self

    def __exit__(self, *exception: object) -> None:
        """Go back there; an arena that was closed meanwhile has nothing to give back."""
        mark = self._marks.pop()
        if not self._arena.closed:
            self._arena._end(mark)


# ---- several arenas ---------------------------------------------------------------------------------------


class ArenaLine(NamedTuple):
    """One arena in a report."""

    name: str
    high_water: int
    capacity: int


@dataclass(frozen=True, slots=True)
class ArenaReport:
    """The high-water marks of several arenas. Printed, it is a table.

    `apart` is what they need as they are, `shared` what one arena needs that serves them in turn and is reset
    in between: the largest mark. That is for phases whose arrays do not outlive them.
    """

    arenas: tuple[ArenaLine, ...]
    apart: int
    shared: int

    def __str__(self) -> str:
        rows = [("arena", "high water", "held")]
        rows += [
            (line.name, format_size(line.high_water), format_size(line.capacity)) for line in self.arenas
        ]
        rows.append(("apart", format_size(self.apart), ""))
        rows.append(("one shared", format_size(self.shared), ""))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}".rstrip() for row in rows
        )


def arena_report(*arenas: Arena) -> ArenaReport:
    """Compare arenas of one memory: the high-water mark of each, and what one shared by all would need."""
    if not arenas:
        raise ConfigError("arena_report takes the arenas to compare: arena_report(forward, backward)")
    for arena in arenas:
        require(arena, Arena, "each of the arenas")
    places = {(arena.device.name, arena.host_accessible) for arena in arenas}
    if len(places) > 1:
        named = ", ".join(sorted({arena.device.name for arena in arenas}))
        raise ConfigError(
            f"the arenas have different memory ({named}, or pinned), so no arena can serve them all; report "
            "those of one memory together"
        )
    lines = tuple(ArenaLine(arena.name, arena.high_water, arena.capacity) for arena in arenas)
    marks = [line.high_water for line in lines]
    return ArenaReport(lines, sum(marks), max(marks))


# ---- what is asked for ------------------------------------------------------------------------------------


def _pool_for(what: str | Device | _native.PoolCore | None, pinned: bool) -> _native.PoolCore:
    if isinstance(what, _native.PoolCore):
        from vram.core.pool import PinnedPool

        if pinned and not isinstance(what, PinnedPool):
            raise ConfigError(
                "pinned memory comes from a vram.PinnedPool; pass one, or a device instead of a pool"
            )
        return what
    if pinned:
        from vram.core.pool import PinnedPool

        return PinnedPool(what)
    from vram.core.manager import get_memory_manager

    return get_memory_manager().pool(what)


def _checked_align(align: Any) -> int:
    whole = hasattr(align, "__index__") and not isinstance(align, bool)
    number = operator.index(align) if whole else 0
    if not 1 <= number <= MOST_ALIGN or number & (number - 1):
        raise ConfigError(f"{shown(align)} is not an alignment: a power of two up to 2 MiB is", align=align)
    return number


def _first_array(arena: Arena, shape: Any, dtype: Any) -> Any:
    """How this arena makes arrays is found out with the first of them: only then NumPy is loaded."""
    arena._make = _array_maker(arena)
    return arena._make(arena, shape, dtype)


def _array_maker(arena: Arena) -> Callable[[Arena, Any, Any], Any]:
    if not arena.host_accessible:
        return _device_array
    from vram.lifetimes import arrays as arena_arrays

    return arena_arrays.checked_array if arena.checked else arena_arrays.plain_array


def _device_array(arena: Arena, shape: Any, dtype: Any) -> Buffer:
    try:
        element = ELEMENTS[dtype]
    except (KeyError, TypeError):
        element = element_of(dtype)
    return arena.take_array(shape, *element)


# ---- errors, worded for the native core -------------------------------------------------------------------


def _outlived(arena: Arena, size: int, stack: Stack) -> InvalidFree:
    """A piece was used after its lifetime."""
    place = "\n".join(f"    {_place(frame)}" for frame in stack)
    where = f"It was allocated at\n{place}" if stack else "checked=True on the arena says where it was made."
    return InvalidFree(
        f"{format_size(size)} of {arena.name!r} are used after their lifetime: their scope has ended, or "
        f"the arena was reset or closed, and the memory may be another array's by now. Copy what is to "
        f"last, or allocate it outside of the scope. {where}",
        arena=arena.name,
        size=size,
        stack=stack,
    )


def _place(frame: Frame) -> str:
    return f"{frame.filename}:{frame.line} in {frame.name}"


_REFUSALS: Final = {
    "arena of another thread": "it belongs to another thread: the one that made it, or called adopt() last. "
    "Call arena.adopt() here once that thread has stopped using it, or make an arena for each thread.",
    "reset while marks are open": "a scope is open. End it first: reset() ends everything.",
    "rewind to a mark that is over": "it is over already, because a scope around it has ended or the arena "
    "was reset. Scopes end in the order opposite to that in which they began.",
    "arena alignment": "an alignment is a power of two up to 2 MiB.",
}


def _refused(arena: Arena, call: str, what: str) -> DeviceError:
    """A call that the rules of arenas do not allow."""
    name = getattr(arena, "name", "the arena")
    return DeviceError(
        f"vram could not {what} of {name!r}: {_REFUSALS[call]}", arena=name, call=call, code="invalid"
    )


def _full(arena: Arena, size: int) -> OutOfMemory:
    """An arena of a fixed size has no room."""
    now = arena.stats()
    return OutOfMemory(
        f"out of memory: {format_size(size)} asked of {arena.name!r}, which is {format_size(now.capacity)} "
        f"and cannot grow; {format_size(now.used)} are used. Make it larger, let it grow "
        "(growable=True; its high_water then says what is needed), or end scopes earlier.",
        requested=size,
        arena=arena.name,
        device=arena.device.name,
        allocated=now.used,
        reserved=now.capacity,
        report={"requested": size, "used": now.used, "capacity": now.capacity, "limit": now.capacity},
    )
