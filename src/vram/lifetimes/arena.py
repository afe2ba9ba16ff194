"""`Arena`: allocations that share one lifetime. Allocating moves a cursor; everything is released at once.

The cursor, the chunks and stream order are native (`native/arena/arena.hpp`). This module adds arrays,
scopes, statistics and error messages.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vram import _native
from vram.arguments import require, shown
from vram.core.buffer import Buffer
from vram.core.closing import Closing
from vram.core.device import Device
from vram.core.scope import Scope
from vram.errors import ConfigError, DeviceError, InvalidFree, OutOfMemory
from vram.lifetimes.elements import ELEMENTS, element_of, pattern_of, type_of_value
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
    """Statistics of an arena. All values are bytes except the counts.

    `used` is the memory in live arrays and the padding between them. `high_water` is its maximum: an arena
    with that `size` needs only one chunk. `capacity` is held from the pool, in `chunks`. `resting` is the
    part of it that is host memory which queued work still used at a reset. `depth` counts open scopes.
    `allocations` counts the allocations, `allocated` their requested bytes, `requests` the requests to the
    pool. `host_waits` counts how often the host waited for resting memory.
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


class Arena(Closing, _native.ArenaCore):
    """Memory for data with a common lifetime: an iteration, a phase, a request.

    `arena.empty(shape, dtype)` allocates the next bytes. `arena.reset()` releases everything at once, and
    `with arena.scope():` releases what was allocated inside. The arena keeps the memory, so an iteration like
    an earlier one makes no request to the pool. Live arrays never move.

    `device_or_pool` is a pool, or a device (None: the default device). For a device, the memory comes from
    the manager's pool, or with `pinned` from a new `PinnedPool`. `size` bytes are allocated immediately; more
    is allocated as needed, unless `growable` is false. The memory follows the order of `stream`. `align`
    applies to all allocations (64 bytes on the host, 256 elsewhere). With `checked`, an array that is used
    after its scope raises and reports where it was allocated. `name` appears in reports and in the pool's
    statistics.

    An arena belongs to the thread that created it. Another thread must call `adopt()` first, after the
    previous one has stopped using it.
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
        """Create an arena. Without `size` it holds no memory before the first allocation."""
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
        """Allocate an array with undefined contents: NumPy's on the host, elsewhere a Buffer with a shape.

        Other libraries use that Buffer without a copy: `torch.from_dlpack(b)`, `cupy.from_dlpack(b)`, or
        through `__cuda_array_interface__`. It is valid until its scope ends or the arena is reset.
        """
        return self._make(self, shape, dtype)

    def zeros(self, shape: int | tuple[int, ...], dtype: Any = float) -> Any:
        """Allocate an array of zeros. Like `empty`, then filled: on a device in the order of the stream."""
        return self.full(shape, 0, dtype)

    def ones(self, shape: int | tuple[int, ...], dtype: Any = float) -> Any:
        """Allocate an array of ones. Like `empty`, then filled: on a device in the order of the stream."""
        return self.full(shape, 1, dtype)

    def full(self, shape: int | tuple[int, ...], fill_value: Any, dtype: Any = None) -> Any:
        """Allocate an array with `fill_value` in every element. The default of `dtype` is the value's type.

        On the host, `fill_value` may be an array that broadcasts to `shape`, as in `numpy.full`. On a device
        it is one value, and the fill is queued on the arena's stream. A value that the type cannot hold
        raises ConfigError, and nothing is allocated.
        """
        if not self.host_accessible:
            return _full_on_device(self, shape, fill_value, dtype)
        from vram.lifetimes import arrays as arena_arrays

        value = arena_arrays.fill_value_of(fill_value, shape, dtype)
        array = self.empty(shape, value.dtype)
        array[...] = value
        return array

    # ---- lifetimes --------------------------------------------------------------------------------------

    def scope(self) -> ArenaScope:
        """Release what is allocated in this `with` block or decorated function at its end. Scopes nest."""
        return ArenaScope(self)

    def reset(self, *, zero: bool = False) -> None:
        """Release everything at once; the arena keeps the memory.

        The host does not wait for queued work: the arena's stream waits for the streams passed to
        `record_stream`, and host memory that queued work uses rests until that work completes. With `zero`,
        everything allocated until the next reset reads as zero, filled in stream order; ends of scopes do not
        zero. Raises DeviceError while a scope is open.
        """
        if self._unended is not None:  # a scope whose end failed
            if self.is_open(*self._unended):
                self.rewind(*self._unended)
            self._unended = None
        self.reset_memory(zero)

    def on_reset(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Call `callback(*arguments)` once when the current lifetime ends, before its memory is reused.

        That is the next `reset()`, or inside of a scope the end of the scope; at the latest `close()`, or the
        drop of the arena. Use it to release what refers to the memory, for example the handles of
        another library. Callbacks are called in reverse order, on the host, in the thread that ends the
        lifetime, before the arena waits in stream order. They may use the arrays and call `record_stream`;
        calls that change the arena raise DeviceError. If callbacks raise, the others are still called and the
        lifetime ends; then the exception is raised, several as an ExceptionGroup. A callback that refers to
        an array of the arena keeps the arena alive: end its lifetime with `reset()` or `close()`.
        """
        self.call_at_end(functools.partial(callback, *arguments) if arguments else callback)

    def _end(self, mark: tuple[int, int]) -> None:
        try:
            self.rewind(*mark)
        except BaseException:  # also a group, if callbacks have raised
            if not self.closed and self.is_open(*mark):
                self._unended = min(self._unended or mark, mark)
            raise

    # ---- properties and statistics ----------------------------------------------------------------------

    @property
    def device(self) -> Device:
        """The device whose memory, or whose streams, the arena uses."""
        return self.pool.device

    @property
    def growable(self) -> bool:
        """Whether the arena may allocate more than `size` from its pool."""
        return self._growable

    def stats(self) -> ArenaStats:
        """Return what the arena holds and has done."""
        return ArenaStats(**self.raw_stats())

    @property
    def used(self) -> int:
        """Bytes in live arrays and the padding between them."""
        return self.raw_stats()["used"]

    @property
    def high_water(self) -> int:
        """Maximum of `used` since the arena was created or `reset_peak()` was called."""
        return self.raw_stats()["high_water"]

    @property
    def capacity(self) -> int:
        """Bytes held from the pool."""
        return self.raw_stats()["capacity"]

    # ---- end --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Return the memory to the pool and invalidate its arrays. Calling it again has no effect.

        The remaining callbacks of `on_reset` are called first. NumPy arrays and DLPack capsules that still
        exist keep their memory until they are dropped.
        """
        self.end()

    def __del__(self) -> None:
        if "name" in self.__dict__ and self.callbacks:
            self.adopt()  # any thread may drop an arena
            self.close()

    def __repr__(self) -> str:
        if "name" not in self.__dict__:
            return "<vram.Arena, not created>"
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
    """A lifetime nested in that of an arena. Created by `Arena.scope`."""

    __slots__ = ("_arena", "_marks")

    def __init__(self, arena: Arena) -> None:
        """Create a scope. It can be entered repeatedly, also within itself."""
        self._arena = arena
        self._marks: list[tuple[int, int]] = []

    def __enter__(self) -> ArenaScope:
        """Remember the position of the arena."""
        self._marks.append(self._arena.mark())
        return self

    def __exit__(self, *exception: object) -> None:
        """Return to that position. An arena that was closed in between has nothing to release."""
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
    """The high-water marks of several arenas. Printed as a table.

    `apart` is what the arenas need separately. `shared` is what one arena needs that serves them in turn and
    is reset in between: the largest mark. Sharing suits phases whose arrays do not outlive them.
    """

    arenas: tuple[ArenaLine, ...]
    apart: int
    shared: int

    def _repr_html_(self) -> str:
        from vram.core.html import arenas_html

        return arenas_html(self)

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
    """Compare arenas on the same memory: their high-water marks, and what one shared arena would need."""
    if not arenas:
        raise ConfigError("arena_report needs the arenas to compare: arena_report(forward, backward)")
    for arena in arenas:
        require(arena, Arena, "each arena")
    places = {(arena.device.name, arena.host_accessible) for arena in arenas}
    if len(places) > 1:
        named = ", ".join(sorted({arena.device.name for arena in arenas}))
        raise ConfigError(
            f"the arenas use different memory ({named}, or pinned), so one arena cannot serve them all; "
            "compare arenas on the same memory"
        )
    lines = tuple(ArenaLine(arena.name, arena.high_water, arena.capacity) for arena in arenas)
    marks = [line.high_water for line in lines]
    return ArenaReport(lines, sum(marks), max(marks))


# ---- arguments --------------------------------------------------------------------------------------------


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
        raise ConfigError(f"{shown(align)} is not an alignment; use a power of two up to 2 MiB", align=align)
    return number


def _first_array(arena: Arena, shape: Any, dtype: Any) -> Any:
    """Choose how this arena creates arrays when the first is requested: only then is NumPy loaded."""
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


def _full_on_device(arena: Arena, shape: Any, value: Any, dtype: Any) -> Buffer:
    element = element_of(type_of_value(value) if dtype is None else dtype)
    pattern = pattern_of(element, value)
    array = arena.take_array(shape, *element)
    array.fill(pattern)
    return array


# ---- error messages for the native core --------------------------------------------------------------------


def _outlived(arena: Arena, size: int, stack: Stack) -> InvalidFree:
    """An array was used after its lifetime."""
    place = "\n".join(f"    {_place(frame)}" for frame in stack)
    where = f"It was allocated at\n{place}" if stack else "Pass checked=True to the arena to see where."
    return InvalidFree(
        f"an array of {format_size(size)} in {arena.name!r} was used after its lifetime: its scope has "
        "ended, or the arena was reset or closed, and the memory may belong to another array now. Copy "
        f"data that must outlive the scope, or allocate it outside of the scope. {where}",
        arena=arena.name,
        size=size,
        stack=stack,
    )


def _place(frame: Frame) -> str:
    return f"{frame.filename}:{frame.line} in {frame.name}"


_REFUSALS: Final = {
    "arena of another thread": "it belongs to another thread: its creator, or the last to call adopt(). "
    "Call arena.adopt() here after that thread has stopped using it, or create an arena for each thread.",
    "reset while marks are open": "a scope is open. Leave the scope first: reset() releases everything.",
    "rewind to a mark that is over": "it has already ended, because an enclosing scope ended or the arena "
    "was reset. Scopes must end in the reverse order of their beginning.",
    "arena alignment": "an alignment must be a power of two up to 2 MiB.",
    "arena within its callback": "a callback of on_reset() called it while a lifetime of the arena ends. "
    "Callbacks release things; allocate, reset and register callbacks after the reset has returned.",
}


def _refused(arena: Arena, call: str, what: str) -> DeviceError:
    """A call that violates the rules of arenas."""
    name = getattr(arena, "name", "the arena")
    return DeviceError(
        f"vram failed to {what} ({name!r}): {_REFUSALS[call]}", arena=name, call=call, code="invalid"
    )


def _raised(arena: Arena, errors: list[BaseException]) -> BaseException:
    """Callbacks have raised, and possibly the end of the lifetime itself."""
    if len(errors) == 1:
        return errors[0]
    return BaseExceptionGroup(f"{len(errors)} errors when a lifetime of {arena.name!r} ended", errors)


def _full(arena: Arena, size: int) -> OutOfMemory:
    """An arena of fixed size is full."""
    now = arena.stats()
    return OutOfMemory(
        f"out of memory: {format_size(size)} requested from {arena.name!r}, which is "
        f"{format_size(now.capacity)} and cannot grow; {format_size(now.used)} is used. Make it larger, let "
        "it grow (growable=True; high_water then shows the size it needs), or end scopes earlier.",
        requested=size,
        arena=arena.name,
        device=arena.device.name,
        allocated=now.used,
        reserved=now.capacity,
        report={"requested": size, "used": now.used, "capacity": now.capacity, "limit": now.capacity},
    )
