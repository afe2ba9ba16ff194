"""`race_check()`: finds memory that streams share without order, by happens-before reasoning, not by timing.

Here is what watches and tells. The rules are in `accesses`, the clocks in `order`, the places in `sites`.
Making order, and keeping memory back with record_stream, is the program's.
"""

from __future__ import annotations

import dis
import functools
import os
import re
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any, Literal, TypeAlias, get_args

from vram import _native, device
from vram.accesses import Allocation, Books, Use
from vram.buffer import Buffer
from vram.device import Device, Event, Reads, Stream, stream_handle
from vram.errors import ConfigError, RaceError, VramError
from vram.order import Clock, StreamKey, Work
from vram.sites import Names, Site, source_line, stack_here
from vram.trace.model import Frame

__all__ = ["Race", "RaceChecker", "RaceWarning", "Site", "race_check", "reads"]

Mode: TypeAlias = Literal["raise", "warn", "collect"]
Kind: TypeAlias = Literal["free", "unordered", "use after free"]

MOST_RACES = 1000
"""Races that one checker keeps; `dropped` counts the others."""


# ---- what is found ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Race:
    """A pair of things done to one piece of memory that nothing orders.

    `kind` says which: "free" (`use` may still run when what `free` gave back is handed out again; `reuse` is
    where that happened, if it did), "unordered" (`earlier` and `use` overlap, one of them writes) or
    "use after free". `stream` is the handle of the stream that should have waited, `used_on` of the other.
    """

    kind: Kind
    device: str
    address: int
    size: int
    stream: int
    used_on: int
    use: Site
    missing: str
    fix: str
    fix_place: str
    alternative: str | None = None
    allocation: Site | None = None
    free: Site | None = None
    earlier: Site | None = None
    reuse: Site | None = None

    def __str__(self) -> str:
        headline = _HEADLINES[self.kind].format(use=self.use)
        lines = [f"{self.size} bytes at {self.address:#x} on {self.device} {headline}"]
        lines.append(str(self.allocation) if self.allocation else "  allocated before the check began")
        sites = {"free": (self.use, self.free, self.reuse), "unordered": (self.earlier, self.use)}
        lines += [str(site) for site in sites.get(self.kind, (self.free, self.reuse, self.use)) if site]
        lines.append(f"  missing: {self.missing}")
        lines.append(f"  fix: {self.fix}  ({self.fix_place})")
        if self.alternative:
            lines.append(f"   or: {self.alternative}")
        return "\n".join(lines)


_HEADLINES: dict[Kind, str] = {
    "free": "are freed while work on {use.stream_name} may still use them",
    "unordered": "are used on {use.stream_name} with nothing to order it after an earlier use",
    "use after free": "are used on {use.stream_name} after they were freed",
}


class RaceWarning(RuntimeWarning):
    """What `race_check("warn")` warns with; `race` holds the evidence."""

    def __init__(self, race: Race) -> None:
        """Warn of one race."""
        super().__init__(str(race))
        self.race = race


def reads(memory: Any) -> Any:
    """Mark an argument of `stream.launch(function, reads(x))` as only read; the function gets `x` itself.

    Without it, work counts as writing to every buffer among its arguments.
    """
    return Reads(memory)


# ---- the checker ------------------------------------------------------------------------------------------


def race_check(mode: Mode = "raise") -> RaceChecker:
    """Watch all pools and streams for races: `with vram.race_check() as checker: ...`.

    "raise" raises RaceError from the call that completes a race; from the next one where a dropped Buffer
    does. "warn" issues a RaceWarning, "collect" only fills `checker.races`. One checker at a time.
    """
    return RaceChecker(mode)


class RaceChecker:
    """Made by `race_check`. A context manager; or call `start()` and `stop()`."""

    def __init__(self, mode: Mode = "raise") -> None:
        """Make a checker; it watches nothing yet."""
        if mode not in get_args(Mode):
            raise ConfigError(
                f"race_check knows {', '.join(map(repr, get_args(Mode)))}, not {mode!r}", mode=mode
            )
        self.mode = mode
        self.races: list[Race] = []
        self.dropped = 0
        self._watch = _Watch(self)

    @property
    def active(self) -> bool:
        """Whether it watches now."""
        return _active is self

    def start(self) -> RaceChecker:
        """Begin to watch. Memory and order from before are taken as they are."""
        global _active
        with _install_lock:
            _require_nobody_watches()
            self._watch = _Watch(self)
            _active, device.observer = self, self._watch
            _native.set_watcher(self._watch)
        return self

    def stop(self) -> None:
        """Stop watching; raises what a dropped Buffer could not. Stopping again does nothing."""
        self._uninstall()
        self._watch.raise_remembered()

    def use(self, memory: Any, stream: Any, *, writes: bool = True) -> None:
        """Declare that work just queued on `stream` uses a Buffer, a view of one, or a raw address.

        For work that the checker cannot see, such as kernels launched by another library.
        """
        if self.active:
            self._watch.declare(memory, stream, writes)

    def _uninstall(self) -> None:
        global _active
        with _install_lock:
            if _active is self:
                _native.set_watcher(None)
                _active = device.observer = None

    def _keep(self, races: list[Race]) -> None:
        room = MOST_RACES - len(self.races)
        self.races += races[:room]
        self.dropped += max(0, len(races) - room)

    def __enter__(self) -> RaceChecker:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return self.stop()
        self._uninstall()
        for race in self._watch.take_remembered():
            error.add_note(f"race_check also found: {race}")
        return None

    def __repr__(self) -> str:
        state = "watching" if self.active else "not watching"
        return f"<vram.race_check {self.mode!r}, {state}, {len(self.races)} race(s)>"


_active: RaceChecker | None = None
_install_lock = threading.Lock()


def _require_nobody_watches() -> None:
    if _active is not None:
        raise VramError(
            f"a race_check({_active.mode!r}) is already watching this process; there is one at a time, for "
            "all pools and threads. Stop it first, or use its `races`."
        )
    if device.observer is not None:
        raise VramError("vram.device.observer is taken by another watcher; race_check needs its place")


def _after_fork_in_child() -> None:
    """The child's devices are its own; what the parent watches does not concern it."""
    global _active, _install_lock
    _install_lock = threading.Lock()
    if _active is not None:
        _native.set_watcher(None)
        _active = device.observer = None


os.register_at_fork(after_in_child=_after_fork_in_child)


# ---- watching ---------------------------------------------------------------------------------------------


class _Watch:
    """What is installed: the observer of `vram.device` and the watcher of the native pools.

    One lock guards it. A garbage collection inside may drop buffers and close streams of this very thread;
    that is put off until the books are at rest.
    """

    def __init__(self, checker: RaceChecker) -> None:
        self._checker = checker
        self._books = Books()
        self._names = Names()
        self._lock = threading.RLock()
        self._busy = False
        self._late: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._remembered: list[Race] = []
        self._quiet = False

    # -- order, told by vram.device

    def on_record(self, event: Event, stream: Stream) -> None:
        self._after(self._books.clocks.record, event, self._key(stream))

    def on_wait(self, stream: Stream, event: Event) -> None:
        self._after(self._books.clocks.wait, self._key(stream), event)

    def on_sync(self, what: Stream | Event | Device) -> Callable[[], None]:
        marked: Clock = {}
        self._quietly(lambda: marked.update(self._books.clocks.marked(what)))
        return lambda: self._after(self._books.clocks.learn, marked)

    def on_launch(self, stream: Stream, work: Any, arguments: tuple[Any, ...]) -> Any:
        if not callable(work):
            return work  # for the backend to refuse
        key = self._key(stream)
        found = list(_memory_in(work, arguments))
        clock: Clock = {}
        self._before(self._launch, key, found, f"launch of {_name_of(work)}", clock)
        return Work(work, self._books.clocks.thread, clock)

    def on_close(self, stream: Stream) -> None:
        self._quietly(self._books.clocks.close, self._books.clocks.key(stream._core, stream._handle))

    # -- memory, told by the native pools

    def on_allocate(self, pool: Any, address: int, size: int, handle: int) -> None:
        key = self._books.clocks.key(_core_of(pool), handle)
        self._after(self._allocate, key, address, size, self._site("allocated", key))

    def on_free(self, pool: Any, address: int) -> None:
        if not pool.closed:
            self._before(self._free, _core_of(pool), address, stack_here())

    def on_drop(self, pool: Any, address: int) -> None:
        if not pool.closed:  # else the address may be another pool's by now
            self._quietly(self._free, _core_of(pool), address, stack_here())

    def on_record_stream(self, pool: Any, address: int, handle: int) -> None:
        core = _core_of(pool)
        self._before(self._record_stream, core, address, self._books.clocks.key(core, handle))

    def on_use(self, pool: Any, address: int, size: int, handle: int, writes: bool, what: str) -> None:
        key = self._books.clocks.key(_core_of(pool), handle)
        self._before(self._pool_use, pool, key, address, size, writes, what)

    def on_host_wait(self, pool: Any, handle: int) -> None:
        clocks = self._books.clocks
        self._after(lambda: clocks.learn(clocks.view(clocks.key(_core_of(pool), handle))))

    # -- told by the program

    def declare(self, memory: Any, stream: Any, writes: bool) -> None:
        for value, written in _pointers(memory, writes):
            core = self._core_for(value, stream)
            key = self._books.clocks.key(core, stream_handle(stream, Device._of(core)))
            self._before(self._launch, key, [(value, written)], "declared use", {})

    def _core_for(self, value: Buffer | int, stream: Any) -> Any:
        if isinstance(stream, Stream):
            return stream._core
        return Device()._core if isinstance(value, int) else _core_of(value.pool)

    # -- what follows from it

    def _allocate(self, key: StreamKey, address: int, size: int, site: Site) -> None:
        for race in self._books.allocate(key, address, size, site).took_over:
            race.reuse = self._named(replace(site, what="handed out again"), key.core)

    def _launch(self, key: StreamKey, found: list[tuple[Any, bool]], what: str, clock: Clock) -> None:
        now = self._books.clocks.advance(key)
        clock.update(now)
        uses: list[tuple[Allocation, bool]] = []
        for value, writes in found:
            memory = self._memory(key, value)
            if memory is not None:
                uses.append((memory, writes))
            elif not isinstance(value, int) and _is_gone(value):
                self._tell([self._used_after_reuse(value, key, what)])
        self._use(uses, key, now, what)

    def _memory(self, key: StreamKey, value: Buffer | int) -> Allocation | None:
        """The allocation meant; None for a number that is no address, or a Buffer whose place is taken."""
        if isinstance(value, int):
            return self._books.find(key.core, value)
        core = _core_of(value.pool)
        known = self._books.find(core, value.ptr)
        if _is_gone(value):
            return known if known is not None and known.freed else None
        if known is not None and not known.freed:
            return known
        return self._adopt(core, value.ptr, value.size, value.stream)

    def _adopt(self, core: Any, address: int, size: int, handle: int) -> Allocation:
        """Memory allocated before the check began."""
        return self._books.allocate(self._books.clocks.key(core, handle), address, size, None)

    def _pool_use(self, pool: Any, key: StreamKey, address: int, size: int, writes: bool, what: str) -> None:
        memory = self._books.find(key.core, address)
        if memory is None or memory.freed:
            memory = self._adopt(key.core, address, size, pool.info(address)["stream"])
        self._use([(memory, writes)], key, self._books.clocks.advance(key), what)
        memory.recorded.add(key)  # the pool does so for its own copies and fills

    def _use(self, uses: list[tuple[Allocation, bool]], key: StreamKey, clock: Clock, what: str) -> None:
        sites = [self._site(f"{'written' if writes else 'read'} by {what}", key) for _, writes in uses]
        races: list[Race] = []
        for (memory, writes), site in zip(uses, sites, strict=True):
            if memory.freed and memory.first_time("after", key):
                races.append(self._used_after_free(memory, key, site))
            elif not memory.freed:
                found = self._books.unordered_before(memory, key, clock, writes)
                races += [self._unordered(memory, use, key, site) for use in found]
        self._tell(races)
        for (memory, writes), site in zip(uses, sites, strict=True):
            self._books.use(memory, key, clock, writes, site)

    def _free(self, core: Any, address: int, stack: tuple[Frame, ...]) -> None:
        memory = self._books.find(core, address)
        if memory is None or memory.freed or memory.address != address:
            return  # from before the check, or an error that the pool itself will raise
        site = Site("freed", memory.key.handle, "", stack)
        found = [(self._freed_early(memory, use, site), use) for use in self._books.unordered_at_free(memory)]
        memory.races += found
        self._tell([race for race, _ in found])
        self._books.free(memory, site)

    def _record_stream(self, core: Any, address: int, key: StreamKey) -> None:
        memory = self._books.find(core, address)
        if memory is not None and not memory.freed:
            memory.recorded.add(key)

    # -- the races in words

    def _freed_early(self, memory: Allocation, use: Use, free: Site) -> Race:
        owner, user = self._code(memory.key), self._code(use.key)
        return self._race(
            "free",
            memory,
            use.site,
            streams=(memory.key, use.key),
            free=free,
            missing=f"{user} → {owner}: neither {owner} nor the host waits for this use on {user} before the "
            "free, and the pool is not told of it",
            fix=_record_call(memory, user),
            fix_place=f"before the free at {free.place}",
            alternative=f"{owner}.wait_stream({user})  (after the use, before the free)",
        )

    def _unordered(self, memory: Allocation, earlier: Use, key: StreamKey, site: Site) -> Race:
        inherited = earlier in memory.left.values()
        what = f"before that, {earlier.site.what}" if inherited else earlier.site.what
        waited_for = memory.key if inherited else earlier.key
        first, second = self._code(waited_for), self._code(key)
        return self._race(
            "unordered",
            memory,
            site,
            streams=(key, waited_for),
            earlier=replace(earlier.site, what=what),
            missing=f"{first} → {second}: nothing makes {second} wait for what was queued on {first}",
            fix=f"{second}.wait_stream({first})",
            fix_place=f"before {site.place}",
        )

    def _used_after_free(self, memory: Allocation, key: StreamKey, site: Site) -> Race:
        return self._race(
            "use after free",
            memory,
            site,
            streams=(memory.key, key),
            free=memory.freed,
            missing="use → free: the free comes first, whatever the streams do",
            fix=f"{_buffer_name(memory)}.free()",
            fix_place=f"not at {memory.freed.place if memory.freed else 'once'} but after {site.place}",
        )

    def _used_after_reuse(self, buffer: Buffer, key: StreamKey, what: str) -> Race:
        """A freed Buffer whose addresses another allocation has by now."""
        core = _core_of(buffer.pool)
        other = self._books.find(core, buffer.ptr)
        owner = self._books.clocks.key(core, buffer.stream)
        gone = Allocation(owner, buffer.ptr, buffer.size, 0, None)
        race = self._used_after_free(gone, key, self._site(f"used by {what}", key))
        race.reuse = other.site if other is not None else None
        return race

    def _race(
        self, kind: Kind, memory: Allocation, use: Site, streams: tuple[StreamKey, StreamKey], **facts: Any
    ) -> Race:
        (core, waiting, _), (_, used_on, _) = streams
        facts.update(use=use, allocation=memory.site)
        for name, fact in facts.items():
            if isinstance(fact, Site):
                facts[name] = self._named(fact, core)
        return Race(kind, core.name, memory.address, memory.size, waiting, used_on, **facts)

    def _named(self, site: Site, core: Any) -> Site:
        return replace(site, stream_name=self._names.words(core, site.stream))

    # -- telling

    def _tell(self, races: list[Race]) -> None:
        if not races:
            return
        self._checker._keep(races)
        if self._checker.mode == "collect":
            return
        if self._quiet and self._checker.mode == "raise":
            self._remembered += races
            return
        for race in races:
            self._raise_or_warn(race)

    def _raise_or_warn(self, race: Race) -> None:
        if self._checker.mode == "raise":
            raise RaceError(
                str(race),
                race=race,
                address=race.address,
                size=race.size,
                stream=race.stream,
                used_on=race.used_on,
            )
        frame = race.use.stack[0] if race.use.stack else Frame("<unknown>", 0, "")
        try:
            warnings.warn_explicit(RaceWarning(race), None, frame.filename, frame.line)
        except RaceWarning:  # a filter makes errors of warnings
            if not self._quiet:
                raise
            self._remembered.append(race)

    def take_remembered(self) -> list[Race]:
        """The races that could not be raised where they were found."""
        with self._lock:
            races, self._remembered = self._remembered, []
        return races

    def raise_remembered(self) -> None:
        """Raise the first of them; all are in the checker's `races`."""
        races = self.take_remembered()
        if races:
            self._raise_or_warn(races[0])

    # -- one at a time

    def _before(self, action: Callable[..., None], *arguments: Any) -> None:
        """Tell of something that is about to be done, and is not done if this raises."""
        with self._lock:
            if self._busy:
                self._late.append((action, arguments))
                return
            self._catch_up()
            self.raise_remembered()
            self._run(action, arguments)

    def _after(self, action: Callable[..., object], *arguments: Any) -> None:
        """Tell of something that has been done."""
        with self._lock:
            self._quietly(action, *arguments)
            if not self._busy:
                self.raise_remembered()

    def _quietly(self, action: Callable[..., object], *arguments: Any) -> None:
        """Tell of something without raising; what is found is raised by the next call that can."""
        with self._lock:
            self._late.append((action, arguments))
            if not self._busy:
                self._catch_up()

    def _catch_up(self) -> None:
        self._quiet = True
        try:
            while self._late:
                action, arguments = self._late.popleft()
                self._run(action, arguments)
        finally:
            self._quiet = False

    def _run(self, action: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._busy = True
        try:
            action(*arguments)
        finally:
            self._busy = False

    # -- streams and sites

    def _code(self, key: StreamKey) -> str:
        return self._names.code(key.core, key.handle)

    def _key(self, stream: Stream) -> StreamKey:
        return self._books.clocks.key(stream._core, stream._handle)

    def _site(self, what: str, key: StreamKey) -> Site:
        stack = stack_here()
        self._names.notice(key.core, key.handle, stack)
        return Site(what, key.handle, "", stack)


def _is_gone(buffer: Buffer) -> bool:
    return bool(buffer.freed or buffer.pool.closed)


def _core_of(pool: Any) -> Any:
    return getattr(pool.device, "_core", pool.device)


# ---- the memory that a launch uses ------------------------------------------------------------------------


def _memory_in(work: Any, arguments: tuple[Any, ...]) -> Iterator[tuple[Any, bool]]:
    """Yield (Buffer or address, whether it may be written) of what a launched function can reach.

    Arguments count as written unless they are marked. Of what a function carries in its closure, in a
    partial call or finds in its module, it is only known that it is looked at.
    """
    for value in arguments:
        yield from _pointers(value, True)
    for value in _carried(work, len(arguments)):
        yield from _pointers(value, False, deep=False)


def _pointers(value: Any, writes: bool, deep: bool = True) -> Iterator[tuple[Any, bool]]:
    if type(value) is Reads:
        yield from _pointers(value.value, False, deep)
    elif type(value) is int or isinstance(value, Buffer):
        yield value, writes
    elif type(value) is memoryview:
        with suppress(ValueError):  # a released view
            yield from _pointers(value.obj, writes and not value.readonly, deep)
    elif type(value) in (list, tuple) and deep:
        for each in value:
            yield from _pointers(each, writes, deep=False)
    else:
        yield from _array_pointers(value, writes)


def _array_pointers(value: Any, writes: bool) -> Iterator[tuple[int, bool]]:
    """Arrays of other libraries over our memory say where they lie."""
    for protocol in ("__array_interface__", "__cuda_array_interface__"):
        if hasattr(type(value), protocol):
            with suppress(Exception):  # such properties refuse in many ways
                address, read_only = getattr(value, protocol)["data"]
                yield int(address), writes and not read_only


def _carried(function: Any, arguments: int) -> Iterator[Any]:
    """What a function brings along, besides its last so many arguments."""
    if isinstance(function, functools.partial):
        yield from (*function.args[: len(function.args) - arguments], *function.keywords.values())
        function = function.func
    if (owner := getattr(function, "__self__", None)) is not None:
        yield owner
        function = getattr(function, "__func__", None)
    if isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # not bound yet
                yield cell.cell_contents
        yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        for name in _globals_of(function.__code__):
            yield function.__globals__.get(name)


@functools.lru_cache(maxsize=4096)
def _globals_of(code: CodeType) -> frozenset[str]:
    return frozenset(step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


# ---- names of memory --------------------------------------------------------------------------------------

_ASSIGNED = re.compile(r"(?:^|\bas )([A-Za-z_][\w.]*)\s*(?::[^=]+)?(?:=(?!=)|:$)")
_MALLOC = re.compile(r"([\w.]+)\.malloc\(")


def _buffer_name(memory: Allocation) -> str:
    """What the program calls the memory, by the line that allocated it."""
    found = _ASSIGNED.search(source_line(memory.site.stack) if memory.site else "")
    return found[1] if found else "buffer"


def _record_call(memory: Allocation, stream: str) -> str:
    raw = _MALLOC.search(source_line(memory.site.stack) if memory.site else "")
    if raw:
        return f"{raw[1]}.record_stream({_buffer_name(memory)}, {stream})"
    return f"{_buffer_name(memory)}.record_stream({stream})"
