"""`race_check()`: finds memory that streams share without ordering, by happens-before analysis.

This module observes and reports. `reach` finds the memory that a launch can reach, `regions` compares bytes,
`history` has the rules, `clocks` the vector clocks and `call_sites` the source locations. Ordering streams
and calling record_stream are up to the program.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from vram.arguments import require
from vram.core import observer
from vram.core.device import Device
from vram.core.pool import PinnedPool, Pool
from vram.core.stream import Event, Reads, Stream, stream_handle
from vram.errors import ConfigError, RaceError, VramError
from vram.race import pytorch
from vram.race.call_sites import Names, Site, source_line, stack_here
from vram.race.clocks import Clock, StreamKey, Work, join
from vram.race.finding import Kind, Race
from vram.race.history import Allocation, Group, History, Use
from vram.race.reach import Found, Owner, memory_in, memory_of
from vram.race.regions import Region
from vram.trace.model import Frame

if TYPE_CHECKING:
    from vram.core.stream import Graph

__all__ = ["Race", "RaceChecker", "RaceWarning", "Site", "race_check", "reads"]

Mode: TypeAlias = Literal["raise", "warn", "collect"]

MOST_SUSPECTS = 4096
"""Maximum number of freed tensors of one stream that are kept until the stream allocates again."""
MOST_RACES = 1000
"""Maximum number of races that one checker keeps; `dropped` counts the others."""


_log = logging.getLogger("vram")


# ---- results ----------------------------------------------------------------------------------------------


class RaceWarning(RuntimeWarning):
    """The warning of `race_check("warn")`; `race` has the evidence."""

    def __init__(self, race: Race) -> None:
        """Create a warning for one race."""
        super().__init__(str(require(race, Race, "race")))
        self.race = race


def reads(memory: Any) -> Any:
    """Mark an argument of `stream.launch(function, reads(x))` as only read; the function gets `x` itself.

    Without the mark, work counts as writing to every buffer among its arguments.
    """
    return Reads(memory)


# ---- the checker ------------------------------------------------------------------------------------------


def race_check(mode: Mode = "raise") -> RaceChecker:
    """Check all pools and streams for races: `with vram.race_check() as checker: ...`.

    "raise" raises RaceError from the call that completes a race, or from the next call if the race is
    completed by dropping a Buffer. "warn" issues a RaceWarning. "collect" only fills `checker.races`. Only
    one checker can be active.
    """
    return RaceChecker(mode)


class RaceChecker:
    """Created by `race_check`. Use it as a context manager, or call `start()` and `stop()`."""

    def __init__(self, mode: Mode = "raise") -> None:
        """Create a checker that is not active yet."""
        if mode not in get_args(Mode):
            raise ConfigError(
                f"mode must be one of {', '.join(map(repr, get_args(Mode)))}, not {mode!r}", mode=mode
            )
        self.mode = mode
        self.races: list[Race] = []
        self.possible: list[Race] = []
        self.dropped = 0
        self._reported = 0
        self._watch = Watch(self)
        self._torch: pytorch.Follower | None = None

    @property
    def active(self) -> bool:
        """Whether the checker is active."""
        return _active is self

    def start(self) -> RaceChecker:
        """Start checking. Earlier allocations and ordering are taken as they are."""
        global _active
        with _install_lock:
            _require_nobody_watches()
            self._watch = Watch(self)
            _active = self
            observer.install(self._watch)
            try:
                self._torch = pytorch.follow(self._watch)
            except BaseException:
                _active = None
                observer.install(None)
                raise
        return self

    def stop(self) -> None:
        """Stop checking; raise what a dropped Buffer could not. Calling it again has no effect."""
        self._uninstall()
        self._report_possible()
        self._watch.raise_remembered()

    def use(self, memory: Any, stream: Any, *, writes: bool = True) -> None:
        """Declare that work just queued on `stream` uses a Buffer, an array, an address, or a list of these.

        Use it for work that the checker cannot see, such as kernels launched by another library.
        """
        if self.active:
            self._watch.declare(memory, stream, writes)

    def _uninstall(self) -> None:
        global _active
        with _install_lock:
            if _active is self:
                _active = None
                observer.install(None)
                if self._torch is not None:
                    self._torch.stop()

    def _keep(self, races: list[Race]) -> None:
        room = MOST_RACES - len(self.races)
        self.races += races[:room]
        self.dropped += max(0, len(races) - room)

    def _report_possible(self) -> None:
        unreported, self._reported = self.possible[self._reported :], len(self.possible)
        if unreported:
            _log.warning(
                "race_check: %d possible race(s), if functions whose code is not known write to what they "
                "are given; see `possible` of the checker. The first: %s",
                len(unreported),
                unreported[0],
            )

    def _bound(self) -> None:
        del self.possible[MOST_RACES:]

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
        state = "active" if self.active else "not active"
        return f"<vram.race_check {self.mode!r}, {state}, {len(self.races)} race(s)>"


_active: RaceChecker | None = None
_install_lock = threading.Lock()


def _require_nobody_watches() -> None:
    if _active is not None:
        raise VramError(
            f"a race_check({_active.mode!r}) is already active in this process; only one can be active, for "
            "all pools and threads. Stop it first, or use its `races`."
        )
    if observer.active is not None:
        raise VramError("vram.core.observer.active has another observer; remove it to use race_check")


def _after_fork_in_child() -> None:
    """The child has its own devices; what the parent checks does not apply to it."""
    global _active, _install_lock
    _install_lock = threading.Lock()
    if _active is not None:
        follower, _active = _active._torch, None
        observer.install(None)
        if follower is not None:
            follower.stop()


os.register_at_fork(after_in_child=_after_fork_in_child)


# ---- observing --------------------------------------------------------------------------------------------


class _Touch(NamedTuple):
    """Bytes of one allocation that are used."""

    memory: Allocation
    region: Region
    writes: bool
    holds: bool = False
    unsure: bool = False


class _Suspect(NamedTuple):
    """A tensor that was freed while another stream may still use it."""

    memory: Allocation
    use: Use
    race: Race


class Watch:
    """What is installed: the observer of `vram.core.observer` and the watcher of the native pools.

    One lock guards it. A garbage collection inside the lock may drop buffers and close streams on the same
    thread; such calls are deferred until the state is consistent again.
    """

    def __init__(self, checker: RaceChecker) -> None:
        self._checker = checker
        self.history = History()
        self.names = Names()
        self._lock = threading.RLock()
        self._busy = False
        self._late: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._remembered: list[Race] = []
        self._quiet = False
        self._arenas: dict[int, Group] = {}
        self._known: weakref.WeakKeyDictionary[Any, set[StreamKey]] = weakref.WeakKeyDictionary()  # to pools
        self._capturing: dict[StreamKey, list[_Touch]] = {}
        self._graphs: weakref.WeakKeyDictionary[Any, list[_Touch]] = weakref.WeakKeyDictionary()
        self._suspects: defaultdict[StreamKey, list[_Suspect]] = defaultdict(list)

    # -- ordering, reported by vram.core.observer

    def on_record(self, event: Event, stream: Stream) -> None:
        self.after(self.history.clocks.record, event, self._key(stream))

    def on_wait(self, stream: Stream, event: Event) -> None:
        self.after(self.history.clocks.wait, self._key(stream), event)

    def on_sync(self, what: Stream | Event | Device) -> Callable[[], None]:
        marked: Clock = {}
        self.quietly(lambda: marked.update(self.history.clocks.marked(what)))
        return lambda: self.after(self.history.clocks.learn, marked)

    def on_launch(self, stream: Stream, work: Any, arguments: tuple[Any, ...]) -> Any:
        if not callable(work):
            return work  # the backend rejects it
        key = self._key(stream)
        found = memory_in(work, arguments, functools.partial(self._is_ours, key.core))
        clock: Clock = {}
        self.before(self._launch, key, found, f"launch of {_name_of(work)}", clock)
        if key in self._capturing:
            return work  # it runs on every launch of the graph
        return Work(work, self.history.clocks.thread, clock)

    def on_close(self, stream: Stream) -> None:
        self.quietly(self.history.clocks.close, self.history.clocks.key(stream._core, stream._handle))

    def on_capture(self, graph: Graph, stream: Stream) -> None:
        self.after(self._capturing.__setitem__, self._key(stream), [])

    def on_captured(self, graph: Graph, stream: Stream) -> None:
        self.after(lambda: self._graphs.update({graph: self._capturing.pop(self._key(stream), [])}))

    def on_graph(self, graph: Graph, handle: int) -> None:
        self.before(self._launch_graph, self.history.clocks.key(graph.device._core, handle), graph)

    def on_suspend(self, pool: Any, tag: str | None) -> Callable[[], None]:
        waited: Clock = {}
        site = Site("suspended", 0, "", stack_here())
        self.before(self._suspend, pool, tag, site, waited)
        return lambda: self.after(self._suspended, pool, _suspended_blocks(pool), site, waited)

    def on_resume(self, pool: Any) -> None:
        self.after(self._suspended, pool, _suspended_blocks(pool), None, {})

    def on_pool_close(self, pool: Any) -> Callable[[], None]:
        known, site = self.on_sync(pool.device), Site("freed with their pool", 0, "", stack_here())

        def done() -> None:
            self.after(self._pool_closed, pool, site)
            known()

        return done

    # -- memory, reported by the native pools

    def on_allocate(self, pool: Any, address: int, size: int, handle: int) -> None:
        key = self._pool_key(pool, handle)
        self.after(self._allocate, key, address, size, self._site("allocated", key), pool, _group_of(pool))

    def on_grow(self, pool: Any, block: int, size: int, handle: int) -> None:
        key = self._pool_key(pool, handle)
        self.after(self._grow, key, block, size, self._site("allocated", key), pool)

    def on_shrink(self, pool: Any, block: int, size: int) -> None:
        self.before(self._shrink, _core_of(pool), block, size, stack_here())

    def on_free(self, pool: Any, address: int) -> None:
        if not pool.closed:
            self.before(self._free, _core_of(pool), address, stack_here())

    def on_drop(self, pool: Any, address: int) -> None:
        # Otherwise the address may belong to another pool now, or the collector is destroying the device as
        # well.
        if not pool.closed and hasattr(_core_of(pool), "kind"):
            self.quietly(self._free, _core_of(pool), address, stack_here(), True)

    def on_record_stream(self, pool: Any, address: int, handle: int) -> None:
        self.before(self._record_stream, pool, address, self._pool_key(pool, handle))

    def on_use(
        self, pool: Any, block: int, address: int, size: int, owner: int, handle: int, writes: bool, what: str
    ) -> None:
        found = Found(Region(address, address + max(1, size)), writes, named=True)
        found.owner = Owner(pool, block, address + size - block, owner, gone=False)
        self.before(self._pool_use, self._pool_key(pool, handle), found, what)

    def on_touch(self, pool: Any, address: int, size: int, handle: int, writes: bool, what: str) -> None:
        found = Found(Region(address, address + max(1, size)), writes, named=False)
        self.before(self._launch, self._pool_key(pool, handle), [found], what, {})

    def on_host_wait(self, pool: Any, handle: int) -> None:
        clocks = self.history.clocks
        self.after(lambda: clocks.learn(clocks.view(clocks.key(_core_of(pool), handle))))

    def on_stream_wait(self, pool: Any, handle: int, other: int) -> None:
        core, clocks = _core_of(pool), self.history.clocks
        self.after(clocks.follow, clocks.key(core, handle), [clocks.key(core, other)])

    def on_copy_between(self, pool: Any, handle: int, other_pool: Any, other: int) -> None:
        clocks = self.history.clocks
        one, two = clocks.key(_core_of(pool), handle), clocks.key(_core_of(other_pool), other)
        self.after(clocks.follow, one, [two])
        self.after(clocks.follow, two, [one])

    # -- tensors, reported by `pytorch`

    def on_plug_record_stream(self, pool: Any, address: int, handle: int) -> None:
        self.quietly(self._record_stream, pool, address, self._pool_key(pool, handle))

    def on_operator(self, key: StreamKey, found: list[Found], what: str) -> None:
        """An operator is about to be queued."""
        self.before(self._launch, key, found, what, {})

    def on_result(self, key: StreamKey, found: list[Found], what: str) -> None:
        """The operator was queued, with these results."""
        self.after(self._launch, key, found, what, {})

    def on_replay(self, key: StreamKey, graph: Any) -> None:
        self.before(self._launch_graph, key, graph)

    def on_tensor(self, key: StreamKey, address: int, size: int, site: Site | None, pool: Any) -> None:
        """Memory of PyTorch was seen for the first time. Must not raise."""
        self.quietly(self._take_tensor, key, address, size, site, pool)

    def on_tensor_allocated(self, key: StreamKey, address: int, site: Site) -> None:
        """PyTorch has allocated memory. Must not raise."""
        self.quietly(self._confirm, key, address, site)

    def on_tensor_freed(self, core: Any, address: int) -> None:
        self.quietly(self._free, core, address, stack_here(), True)

    # -- arenas: each is identified by a number

    def on_piece(self, pool: Any, address: int, size: int, handle: int, arena: int, waits: bool) -> None:
        key = self._pool_key(pool, handle)
        site = self._site("allocated", key)
        self.after(self._allocate, key, address, size, site, pool, self._arena(arena, waits))

    def on_arena_stream(self, pool: Any, arena: int, handle: int, waits: bool) -> None:
        self.after(self._arena(arena, waits).recorded.add, self._pool_key(pool, handle))

    def on_settled(self, pool: Any, arena: int, handle: int, over: bool) -> None:
        self.quietly(self._settled, arena, self.history.clocks.key(_core_of(pool), handle), over)

    def _arena(self, arena: int, waits: bool) -> Group:
        return self._arenas.setdefault(arena, Group(waits=waits, own=not waits))

    # -- reported by the program

    def declare(self, memory: Any, stream: Any, writes: bool) -> None:
        core = stream._core if isinstance(stream, Stream) else Device()._core
        for found in memory_of(memory, writes, functools.partial(self._is_ours, core)):
            if found.owner is not None and not isinstance(stream, Stream):
                core = _core_of(found.owner.pool)
            found.holds = False
            key = self.history.clocks.key(core, stream_handle(stream, Device._of(core)))
            self.before(self._launch, key, [found], "declared use", {})

    # -- consequences: allocations

    def _allocate(
        self,
        key: StreamKey,
        address: int,
        size: int,
        site: Site | None,
        pool: Any,
        group: Group,
        **more: Any,
    ) -> Allocation:
        made = self.history.allocate(key, address, size, site, weakref.ref(pool), group=group, **more)
        made.captured = key in self._capturing
        if site is not None:
            for race in made.took_over:
                race.reuse = self._named(replace(site, what="allocated again"), key.core)
        return made

    def _take_tensor(self, key: StreamKey, address: int, size: int, site: Site | None, pool: Any) -> None:
        """A pool may give memory to another stream, which waits only for the stream it was freed on."""
        made = self._allocate(key, address, size, site, pool, Group())
        made.noun = "tensor"
        races = [race for race in made.took_over if self._acquit(race)]
        self._tell(races if isinstance(pool, Pool) else [])

    def _acquit(self, race: Race) -> bool:
        """Return whether the race was only suspected; it is not any more."""
        for suspects in self._suspects.values():
            for suspect in suspects:
                if suspect.race is race:
                    suspects.remove(suspect)
                    return True
        return False

    def _suspect(self, memory: Allocation, found: list[tuple[Race, Use]]) -> None:
        """A freed tensor is safe if its stream waits for the uses before it allocates again."""
        suspects = self._suspects[memory.key]
        suspects += [_Suspect(memory, use, race) for race, use in found]
        if len(suspects) > MOST_SUSPECTS:
            suspects[:] = self._still_free(suspects)[-MOST_SUSPECTS // 2 :]

    def _still_free(self, suspects: list[_Suspect]) -> list[_Suspect]:
        return [each for each in suspects if self._is_at_its_address(each.memory)]

    def _is_at_its_address(self, memory: Allocation) -> bool:
        return self.history.find(memory.key.core, memory.address) is memory

    def _confirm(self, key: StreamKey, address: int, site: Site) -> None:
        """A stream allocates. Tensors of it that other streams may still use are not safe from now on."""
        if key not in self._suspects:
            return
        clock = self.history.clocks.view(key)
        unsafe = [
            each
            for each in self._still_free(self._suspects.pop(key))
            if clock.get(each.use.key, 0) < each.use.tick
        ]
        for memory, _, race in unsafe:
            if memory.address <= address < memory.end:
                race.reuse = self._named(replace(site, what="allocated again"), key.core)
        self._tell([each.race for each in unsafe])

    def _adopt(self, owner: Owner) -> None:
        """Register memory that was allocated before the check started."""
        core, block, size, stream = _core_of(owner.pool), owner.block, owner.size, owner.stream
        with suppress(Exception):  # memory of an arena is not an allocation of the pool
            facts = owner.pool.info(block)
            size, stream = facts["bytes"], facts["stream"]
        key = self.history.clocks.key(core, stream)
        self.history.allocate(key, block, size, None, weakref.ref(owner.pool), group=_group_of(owner.pool))

    def _grow(self, key: StreamKey, block: int, size: int, site: Site, pool: Any) -> None:
        pieces = self.history.pieces(key.core, block)
        there = sum(piece.size for piece in pieces)
        group = pieces[0].group if pieces else _group_of(pool)
        if size > there:
            made = self._allocate(key, block + there, size - there, site, pool, group, block=block)
            made.growable, made.reported = True, pieces[0].reported if pieces else made.reported

    def _shrink(self, core: Any, block: int, size: int, stack: tuple[Frame, ...]) -> None:
        pieces = self.history.pieces(core, block)
        for piece in pieces:
            if piece.address < block + size < piece.address + piece.size:
                pieces.append(self.history.split(piece, block + size - piece.address))
        self._free_pieces([piece for piece in pieces if piece.address >= block + size], stack, False)

    def _free(self, core: Any, address: int, stack: tuple[Frame, ...], dropped: bool = False) -> None:
        # None: allocated before the check, or an error that the pool itself will raise.
        self._free_pieces(self.history.pieces(core, address), stack, dropped)

    def _free_pieces(self, pieces: list[Allocation], stack: tuple[Frame, ...], dropped: bool) -> None:
        races: list[Race] = []
        for memory in pieces:
            site = Site("freed", memory.key.handle, "", stack)
            unordered = self.history.unordered_at_free(memory, dropped)
            found = [(self._freed_early(memory, use, site), use) for use in unordered]
            memory.races += found
            if memory.noun == "tensor" and found:
                self._suspect(memory, found)
            else:
                races += [race for race, _ in found]
        self._tell(races)
        for memory in pieces:
            self.history.free(memory, Site("freed", memory.key.handle, "", stack), dropped=dropped)

    def _record_stream(self, pool: Any, address: int, key: StreamKey) -> None:
        memory = self.history.find(key.core, address)
        if memory is None or memory.freed:
            with suppress(Exception):  # the pool rejects unknown addresses
                self._adopt(Owner(pool, address, pool.info(address)["bytes"], 0, gone=False))
            memory = self.history.find(key.core, address)
        if memory is not None and not memory.freed:
            memory.group.recorded.add(key)

    def _settled(self, arena: int, key: StreamKey, over: bool) -> None:
        group = self._arenas.get(arena)
        if group is None:
            return
        if group.waits:
            self.history.clocks.follow(key, group.recorded)
        if over:
            del self._arenas[arena]

    def _suspend(self, pool: Any, tag: str | None, site: Site, waited: Clock) -> None:
        """The pool waits for the streams it knows, or for those of blocks with the tag."""
        found = [each for each in self.history.of_pool(pool) if not each.growable]
        if tag is not None:
            found = [each for each in found if _tag_of(pool, each) == tag]
        keys = self._known.get(pool, ()) if tag is None else ()
        for key in keys:
            join(waited, self.history.clocks.view(key))
        races: list[Race] = []
        for memory in found:
            before = join(self.history.waited_for(memory), waited if tag is None else {})
            join(waited, before)
            races += [
                self._freed_early(memory, use, replace(site, stream=memory.key.handle))
                for use in memory.uses
                if before.get(use.key, 0) < use.tick and memory.first_time("free", use.key, use.tick)
            ]
        self._tell(races)

    def _suspended(self, pool: Any, blocks: list[tuple[int, int]], site: Site | None, waited: Clock) -> None:
        """These blocks of the pool have no memory now; all others have."""
        self.history.clocks.learn(waited)
        regions = [Region(block, block + size) for block, size in blocks]
        gone = {id(memory) for region in regions for memory in self.history.over(_core_of(pool), region)}
        for memory in self.history.of_pool(pool):
            memory.suspended = (memory.suspended or site) if id(memory) in gone else None

    def _pool_closed(self, pool: Any, site: Site) -> None:
        for memory in self.history.of_pool(pool):
            self.history.free(memory, replace(site, stream=memory.key.handle))
        self._known.pop(pool, None)

    # -- consequences: uses

    def _launch(self, key: StreamKey, found: list[Found], what: str, clock: Clock) -> None:
        captured = self._capturing.get(key)
        if captured is not None:
            captured += self._touches(key, found, what)
            return
        now = self.history.clocks.advance(key)
        clock.update(now)
        self._use(list(self._touches(key, found, what)), key, now, what)

    def _launch_graph(self, key: StreamKey, graph: Graph) -> None:
        """Memory allocated during the capture belongs to the graph, even after its free."""
        captured = self._graphs.get(graph, [])
        touches = [
            touch._replace(holds=False)
            for touch in captured
            if not (touch.memory.captured and touch.memory.freed)
        ]
        self._use(touches, key, self.history.clocks.advance(key), "launch of a graph")

    def _pool_use(self, key: StreamKey, found: Found, what: str) -> None:
        self._launch(key, [found], what, {})
        for memory in self.history.over(key.core, found.region):
            if key != memory.key or memory.group.own:
                memory.group.recorded.add(key)  # the pool does this for its own copies and fills

    def _touches(self, key: StreamKey, found: list[Found], what: str) -> Iterator[_Touch]:
        """Yield the affected allocations. Numbers that are not addresses are ignored."""
        for each in found:
            region = each.region
            if each.owner is not None and not each.owner.gone:
                memories = self._owned(each.owner, region)
            elif each.owner is not None:
                memories = self._gone(each, key, what)
            else:
                memories = [
                    memory for core in self._cores(key.core) for memory in self.history.over(core, region)
                ]
                if region.open and memories:
                    region = Region(region.start, self._end_of(memories[0]), open=True)
                    memories = self.history.over(memories[0].key.core, region)
            for memory in memories:
                if each.named or not memory.gone:
                    yield _Touch(memory, region, each.writes, each.holds, each.unsure)

    def _owned(self, owner: Owner, region: Region) -> list[Allocation]:
        core = _core_of(owner.pool)
        live = [memory for memory in self.history.over(core, region) if not memory.freed]
        if not live:
            self._adopt(owner)
            live = self.history.over(core, region)
        return live

    def _gone(self, found: Found, key: StreamKey, what: str) -> list[Allocation]:
        """Handle a freed Buffer whose addresses may belong to another allocation."""
        assert found.owner is not None
        if not found.named:
            return []
        known = self.history.find(_core_of(found.owner.pool), found.region.start)
        if known is not None and known.freed:
            return [known]
        self._tell([self._used_after_reuse(found.owner, key, what)])
        return []

    def _cores(self, core: Any) -> list[Any]:
        """Return the devices an address may belong to: that of the stream, or the host."""
        return [core, *(each for each in self.history.cores() if each is not core and each.kind == "host")]

    def _end_of(self, memory: Allocation) -> int:
        pieces = [] if memory.freed else self.history.pieces(memory.key.core, memory.block)
        return pieces[-1].end if pieces else memory.end

    def _is_ours(self, core: Any, address: int) -> bool:
        with self._lock:
            return any(self.history.find(each, address) is not None for each in self._cores(core))

    def _use(self, touches: list[_Touch], key: StreamKey, clock: Clock, what: str) -> None:
        if not touches:
            return
        read = self._site(f"read by {what}", key)
        sites = {False: read, True: replace(read, what=f"written by {what}")}
        perhaps = replace(read, what=f"perhaps written by {what}")
        races: list[Race] = []
        for memory, region, writes, _, unsure in touches:
            site = perhaps if unsure else sites[writes]
            if memory.gone is not None:
                if memory.first_time("after", key):
                    races.append(self._used_after_free(memory, key, site))
                continue
            found = self.history.unordered_before(memory, region, key, clock, writes or unsure)
            for use, inherited in found:
                sure = writes or use.writes
                told = races if sure else self._checker.possible
                told.append(self._unordered(memory, use, inherited, key, site))
        self._checker._bound()
        self._tell(races)
        for memory, region, writes, holds, unsure in touches:
            if memory.gone is None:
                site = perhaps if unsure else sites[writes]
                memory.uses.add(Use(key, clock[key], writes, region, site, holds, unsure))

    # -- descriptions of races

    def _freed_early(self, memory: Allocation, use: Use, free: Site) -> Race:
        owner, user = self._code(memory.key), self._code(use.key)
        return self._race(
            "free",
            memory,
            use.site,
            streams=(memory.key, use.key),
            free=free,
            missing=f"{user} → {owner}: neither {owner} nor the host waits for this use on {user} before the "
            "free, and record_stream was not called",
            fix=_record_call(memory, user),
            fix_place=f"before the free at {free.place}",
            alternative=f"{owner}.wait_stream({user})  (after the use, before the free)",
        )

    def _unordered(
        self, memory: Allocation, earlier: Use, inherited: bool, key: StreamKey, site: Site
    ) -> Race:
        what = f"earlier, {earlier.site.what}" if inherited else earlier.site.what
        waited_for = memory.key if inherited else earlier.key
        first, second = self._code(waited_for), self._code(key)
        return self._race(
            "unordered",
            memory,
            site,
            streams=(key, waited_for),
            earlier=replace(earlier.site, what=what),
            missing=f"{first} → {second}: {second} does not wait for the work queued on {first}",
            fix=f"{second}.wait_stream({first})",
            fix_place=f"before {site.place}",
        )

    def _used_after_free(self, memory: Allocation, key: StreamKey, site: Site) -> Race:
        gone = memory.gone
        done = "suspend" if gone is not None and memory.freed is None else "free"
        return self._race(
            "use after free",
            memory,
            site,
            streams=(memory.key, key),
            free=gone,
            missing=f"use → {done}: the {done} comes before the use, regardless of stream order",
            fix=f"{_buffer_name(memory)}.free()" if done == "free" else _resume_call(memory),
            fix_place=f"move it from {gone.place if gone else 'there'} to after {site.place}"
            if done == "free"
            else f"before {site.place}",
        )

    def _used_after_reuse(self, owner: Owner, key: StreamKey, what: str) -> Race:
        """Describe a use of a freed Buffer whose addresses now belong to another allocation."""
        core = _core_of(owner.pool)
        other = self.history.find(core, owner.block)
        stream = self.history.clocks.key(core, owner.stream)
        none = weakref.ref(owner.pool)
        gone = Allocation(stream, owner.block, owner.size, 0, None, owner.block, Group(), none)
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
        return replace(site, stream_name=self.names.words(core, site.stream))

    # -- reporting

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
        except RaceWarning:  # a filter turns warnings into errors
            if not self._quiet:
                raise
            self._remembered.append(race)

    def take_remembered(self) -> list[Race]:
        """Return the races that could not be raised where they were found."""
        with self._lock:
            races, self._remembered = self._remembered, []
        return races

    def raise_remembered(self) -> None:
        """Raise the first of them; all are in the checker's `races`."""
        races = self.take_remembered()
        if races:
            self._raise_or_warn(races[0])

    # -- one call at a time

    def before(self, action: Callable[..., None], *arguments: Any) -> None:
        """Process an operation before it is performed; if this raises, the operation is not performed."""
        with self._lock:
            if self._busy:
                self._late.append((action, arguments))
                return
            self._catch_up()
            self.raise_remembered()
            self._run(action, arguments)

    def after(self, action: Callable[..., object], *arguments: Any) -> None:
        """Process an operation after it was performed."""
        with self._lock:
            self.quietly(action, *arguments)
            if not self._busy:
                self.raise_remembered()

    def quietly(self, action: Callable[..., object], *arguments: Any) -> None:
        """Process an operation without raising; the next call that can raise reports the races."""
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
        return self.names.code(key.core, key.handle)

    def _pool_key(self, pool: Any, handle: int) -> StreamKey:
        """Return the stream of a call to a pool, which knows the stream from now on."""
        key = self.history.clocks.key(_core_of(pool), handle)
        self._known.setdefault(pool, set()).add(key)
        return key

    def _key(self, stream: Stream) -> StreamKey:
        return self.history.clocks.key(stream._core, stream._handle)

    def _site(self, what: str, key: StreamKey) -> Site:
        stack = stack_here()
        self.names.notice(key.core, key.handle, stack)
        return Site(what, key.handle, "", stack)


def _core_of(pool: Any) -> Any:
    return getattr(pool.device, "_core", pool.device)


def _group_of(pool: Any) -> Group:
    return Group(own=isinstance(pool, PinnedPool))


def _tag_of(pool: Any, memory: Allocation) -> str | None:
    with suppress(Exception):  # memory of an arena is not an allocation of the pool
        tag: str | None = pool.info(memory.block)["tag"]
        return tag
    return None


def _suspended_blocks(pool: Any) -> list[tuple[int, int]]:
    """Return address and size of each suspended block."""
    return [
        (block[0], block[1])
        for segment in pool.raw_snapshot()
        for block in segment["blocks"]
        if block[3] == "suspended"
    ]


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


# ---- names of variables -----------------------------------------------------------------------------------

_ASSIGNED = re.compile(r"(?:^|\bas )([A-Za-z_][\w.]*)\s*(?::[^=]+)?(?:=(?!=)|:$)")
_MALLOC = re.compile(r"([\w.]+)\.malloc\(")


def _buffer_name(memory: Allocation) -> str:
    """Return the program's name for the memory, from the line that allocated it."""
    found = _ASSIGNED.search(source_line(memory.site.stack) if memory.site else "")
    return found[1] if found else memory.noun


def _resume_call(memory: Allocation) -> str:
    return "vram.torch.resume()" if memory.noun == "tensor" else "pool.resume()"


def _record_call(memory: Allocation, stream: str) -> str:
    raw = _MALLOC.search(source_line(memory.site.stack) if memory.site else "")
    if raw:
        return f"{raw[1]}.record_stream({_buffer_name(memory)}, {stream})"
    return f"{_buffer_name(memory)}.record_stream({stream})"
