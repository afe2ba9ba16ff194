"""race_check: against an oracle that tries every execution of small programs, and its rules one by one."""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import os
import pickle
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vram
from vram.core import observer
from vram.race.checker import Race, RaceChecker, RaceWarning, reads

UNIT = 512
TIMEOUT = 30.0  # seconds until a test gives a missing wake-up up


def work(*_: Any, **__: Any) -> None:
    """Stands for a kernel."""


# ---- the oracle ---------------------------------------------------------------------------------------
#
# A program is a list of operations of the host. Streams run what is queued on them in order and at any time;
# a wait holds a stream until the record it names has run, a synchronize holds the host. A free lets the
# memory go once the work before it on its own stream, and on recorded streams, has run. The oracle walks
# through every reachable state and asks of each pair: can the later one be done while the earlier is not?


@dataclass(frozen=True)
class Op:
    """`what` on a stream (a number), with a buffer (a number) or an event (a number)."""

    what: str
    stream: int = 0
    item: int = 0


@dataclass
class Node:
    """One piece of device work; `needs` are nodes that must have run before, besides the stream's order."""

    needs: frozenset[int] = frozenset()
    use: tuple[int, int, bool] | None = None  # buffer, stream, writes


@dataclass
class Oracle:
    """Queues the operations of a program, then finds what can overtake what."""

    owners: Sequence[int]  # the stream of each buffer
    nodes: list[Node] = field(default_factory=list)
    queues: dict[int, list[int]] = field(default_factory=dict)
    host: list[tuple[list[int], frozenset[int]]] = field(
        default_factory=list
    )  # (queues these, once these ran)
    events: dict[int, int] = field(default_factory=dict)
    recorded: dict[int, set[int]] = field(default_factory=dict)
    frees: dict[int, int] = field(default_factory=dict)

    def queue(self, stream: int, node: Node) -> int:
        number = len(self.nodes)
        previous = self.queues.setdefault(stream, [])
        if previous:
            node.needs |= {previous[-1]}
        self.nodes.append(node)
        previous.append(number)
        self.host.append(([number], frozenset()))
        return number

    def tail(self, *streams: int) -> frozenset[int]:
        return frozenset(self.queues[each][-1] for each in streams if self.queues.get(each))

    def wait_on_host(self, nodes: frozenset[int]) -> None:
        self.host.append(([], nodes))

    def add(self, op: Op) -> None:
        getattr(self, f"add_{op.what}")(op)

    def add_read(self, op: Op) -> None:
        self.queue(op.stream, Node(use=(op.item, op.stream, False)))

    def add_write(self, op: Op) -> None:
        self.queue(op.stream, Node(use=(op.item, op.stream, True)))

    def add_fill(self, op: Op) -> None:
        self.add_write(op)
        self.add_keep(op)

    def add_keep(self, op: Op) -> None:
        self.recorded.setdefault(op.item, set()).add(op.stream)

    def add_record(self, op: Op) -> None:
        self.events[op.item] = self.queue(op.stream, Node())

    def add_wait(self, op: Op) -> None:
        if op.item in self.events:
            self.queue(op.stream, Node(needs=frozenset({self.events[op.item]})))

    def add_sync(self, op: Op) -> None:
        self.wait_on_host(self.tail(op.stream))

    def add_sync_event(self, op: Op) -> None:
        self.wait_on_host(frozenset({self.events[op.item]} if op.item in self.events else ()))

    def add_sync_all(self, op: Op) -> None:
        self.wait_on_host(self.tail(*self.queues))

    def add_free(self, op: Op) -> None:
        before = self.tail(self.owners[op.item], *self.recorded.get(op.item, ()))
        self.frees[op.item] = len(self.nodes)
        self.nodes.append(Node(needs=before))
        self.host.append(([self.frees[op.item]], frozenset()))

    def overtakings(self) -> set[tuple[int, int]]:
        """(late, early): nodes that can have run while others, queued before, have not."""
        found: set[tuple[int, int]] = set()
        start = (0, frozenset[int]())
        seen, open_states = {start}, [start]
        while open_states:
            position, done = open_states.pop()
            queued = [node for nodes, _ in self.host[:position] for node in nodes]
            found.update((late, early) for late in done for early in range(late) if early not in done)
            steps = [(position, done | {n}) for n in queued if n not in done and self.nodes[n].needs <= done]
            if position < len(self.host) and self.host[position][1] <= done:
                steps.append((position + 1, done))
            for state in steps:
                if state not in seen:
                    seen.add(state)
                    open_states.append(state)
        return found

    def races(self) -> set[tuple[str, int, int, int]]:
        """(kind, buffer, the stream that should have waited, the other stream)."""
        overtaking = self.overtakings()
        found = set()
        uses = [(number, node.use) for number, node in enumerate(self.nodes) if node.use is not None]
        for early, (buffer, stream, writes) in uses:
            if (self.frees.get(buffer, -1), early) in overtaking:
                found.add(("free", buffer, self.owners[buffer], stream))
            for late, (other, later_stream, writes_too) in uses:
                conflict = buffer == other and stream != later_stream and (writes or writes_too)
                if conflict and (late, early) in overtaking:
                    found.add(("unordered", buffer, later_stream, stream))
        return found


class Machine:
    """Runs programs on a model device. Buffers have different sizes, so that a race names its buffer."""

    def __init__(self, streams: int) -> None:
        self.device = vram.Device.model("1GiB", lag_us=10.0)
        self.pool = vram.Pool(self.device)
        self.streams = [vram.Stream(self.device) for _ in range(streams)]

    def run(self, owners: Sequence[int], program: Sequence[Op]) -> set[tuple[str, int, int, int]]:
        with vram.race_check("collect") as checker:
            self.buffers = [
                self.pool.allocate(UNIT * (i + 1), stream=self.streams[owner])
                for i, owner in enumerate(owners)
            ]
            self.events: dict[int, vram.Event] = {}
            for op in program:
                self.do(op)
        self.device.synchronize()
        handles = {stream.handle: number for number, stream in enumerate(self.streams)}
        return {
            (race.kind, race.size // UNIT - 1, handles[race.stream], handles[race.used_on])
            for race in checker.races
        }

    def event(self, number: int) -> vram.Event:
        if number not in self.events:
            self.events[number] = vram.Event(self.device)
        return self.events[number]

    def do(self, op: Op) -> None:
        stream = self.streams[op.stream]
        match op.what:
            case "read":
                stream.launch(work, reads(self.buffers[op.item]))
            case "write":
                stream.launch(work, self.buffers[op.item])
            case "fill":
                self.buffers[op.item].fill(1, stream=stream)
            case "keep":
                self.buffers[op.item].record_stream(stream)
            case "record":
                self.event(op.item).record(stream)
            case "wait":
                stream.wait_event(self.event(op.item))
            case "sync":
                stream.synchronize()
            case "sync_event":
                self.event(op.item).synchronize()
            case "sync_all":
                self.device.synchronize()
            case "free":
                self.buffers[op.item].free()


def expected(owners: Sequence[int], program: Sequence[Op]) -> set[tuple[str, int, int, int]]:
    oracle = Oracle(owners)
    for op in program:
        oracle.add(op)
    return oracle.races()


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine(streams=3)


TWO_STREAMS = [
    Op("write", 0),
    Op("read", 1),
    Op("write", 1),
    Op("keep", 1),
    Op("record", 0),
    Op("record", 1),
    Op("wait", 0),
    Op("wait", 1),
    Op("sync", 0),
    Op("sync", 1),
    Op("sync_event"),
]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_every_program_of_two_streams(machine: Machine, length: int) -> None:
    racy = 0
    for middle in itertools.product(TWO_STREAMS, repeat=length):
        program = [*middle, Op("free")]
        found = machine.run([0], program)
        assert found == expected([0], program), program
        racy += bool(found)
    assert 0 < racy < len(TWO_STREAMS) ** length


@pytest.mark.slow
def test_every_way_to_hand_a_buffer_on_and_back(machine: Machine) -> None:
    """Write on 0, read on 1, write on 2, free; any order, record, wait or record_stream in each gap."""
    edges = [
        (),
        *[(Op("record", s, 7), Op("wait", t, 7)) for s, t in itertools.permutations(range(3), 2)],
        (Op("sync", 1),),
        (Op("keep", 2),),
        (Op("sync_all"),),
    ]
    verdicts = set()
    for first, second, third in itertools.product(edges, repeat=3):
        program = [Op("write", 0), *first, Op("read", 1), *second, Op("write", 2), *third, Op("free")]
        found = machine.run([0], program)
        assert found == expected([0], program), program
        verdicts.add(frozenset(found))
    assert len(verdicts) > 8 and frozenset() in verdicts


OPS = [
    *["read", "write", "fill"] * 2,
    *["record", "wait"] * 3,
    *["keep", "sync", "sync_event", "sync_all", "free"],
]


def random_program(choose: Callable[[Sequence[Any]], Any], length: int, buffers: int) -> list[Op]:
    """A valid program: nothing is used after its free, and everything is freed in the end."""
    live = list(range(buffers))
    program = []
    for _ in range(length):
        what = choose(OPS)
        if what in ("record", "wait", "sync_event"):
            program.append(Op(what, choose(range(3)), choose(range(2))))
        elif what in ("sync", "sync_all"):
            program.append(Op(what, choose(range(3))))
        elif live:
            item = choose(live)
            program.append(Op(what, choose(range(3)), item))
            if what == "free":
                live.remove(item)
    return program + [Op("free", item=item) for item in live]


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[int], list[Op]]:
    owners = draw(st.lists(st.integers(0, 2), min_size=1, max_size=2))
    length = draw(st.integers(1, 9))
    return owners, random_program(lambda options: draw(st.sampled_from(options)), length, len(owners))


MACHINE = functools.cache(lambda: Machine(streams=3))


@given(programs())
def test_random_programs(case: tuple[list[int], list[Op]]) -> None:
    owners, program = case
    assert MACHINE().run(owners, program) == expected(owners, program)


@pytest.mark.slow
def test_many_random_programs(machine: Machine) -> None:
    generator = random.Random(1)
    clean = 0
    for _ in range(1500):
        owners = [generator.randrange(3) for _ in range(generator.randint(1, 2))]
        program = random_program(generator.choice, generator.randint(2, 10), len(owners))
        found = machine.run(owners, program)
        assert found == expected(owners, program), (owners, program)
        clean += not found
    assert 100 < clean < 1400


def test_long_programs_that_order_everything_are_clean(machine: Machine) -> None:
    """Far too long for the oracle: every hand-over is ordered by one of the ways there are."""
    generator = random.Random(2)
    with vram.race_check():
        for _ in range(200):
            owner = generator.randrange(3)
            buffer = machine.pool.allocate(UNIT * generator.randint(1, 8), stream=machine.streams[owner])
            at = owner
            for _ in range(generator.randint(0, 5)):
                to = generator.randrange(3)
                hand_over(machine, generator.randrange(4), at, to)
                machine.streams[to].launch(work, buffer)
                at = to
            if generator.random() < 0.5:
                buffer.record_stream(machine.streams[at])
            else:
                hand_over(machine, generator.randrange(4), at, owner)
            buffer.free()


def hand_over(machine: Machine, way: int, source: int, target: int) -> None:
    first, second = machine.streams[source], machine.streams[target]
    match way:
        case 0:
            second.wait_stream(first)
        case 1:
            first.synchronize()
        case 2:
            first.record_event().synchronize()
        case _:
            middle = machine.streams[3 - source - target] if source != target else first
            middle.wait_stream(first)
            second.wait_stream(middle)


# ---- reuse --------------------------------------------------------------------------------------------


@pytest.fixture
def host() -> Iterator[tuple[vram.Pool, vram.Stream, vram.Stream]]:
    with vram.Pool("host") as pool, vram.Stream("host") as s1, vram.Stream("host") as s2:
        yield pool, s1, s2


Host = tuple[vram.Pool, vram.Stream, vram.Stream]


def misuse(pool: vram.Pool, s1: vram.Stream, s2: vram.Stream) -> int:
    """Free a buffer that s2 may still use; returns its address."""
    x = pool.allocate(UNIT, stream=s1)
    s2.wait_stream(s1)
    s2.launch(work, reads(x.ptr))
    address = x.ptr
    x.free()
    return address


@pytest.mark.parametrize("wait", [False, True])
def test_the_reuse_is_named_where_it_happened(host: Host, wait: bool) -> None:
    pool, s1, s2 = host
    with vram.race_check("collect") as checker:
        address = misuse(pool, s1, s2)
        if wait:  # too late for the free, in time for this reuse
            s1.wait_stream(s2)
        again = pool.allocate(UNIT, stream=s1)
        assert again.ptr == address
    [race] = checker.races
    assert race.kind == "free"
    assert (race.reuse is None) == wait
    assert ("allocated again" in str(race)) != wait


@pytest.mark.parametrize("wait", [False, True])
def test_new_memory_is_used_elsewhere_only_behind_its_allocation(host: Host, wait: bool) -> None:
    """Its stream may still be at work on whatever was there before."""
    pool, s1, s2 = host
    with vram.race_check("collect") as checker:
        old = pool.allocate(UNIT, stream=s1)
        s1.launch(work, old)
        old.free()
        new = pool.allocate(UNIT, stream=s1)
        assert new.ptr == old.ptr
        if wait:
            s2.wait_stream(s1)
        s2.launch(work, reads(new.ptr))
        new.record_stream(s2)
        new.free()
    assert [race.kind for race in checker.races] == ([] if wait else ["unordered"])
    if not wait:
        [race] = checker.races
        assert (race.fix, race.used_on) == ("s2.wait_stream(s1)", s1.handle)
        assert race.earlier is not None and race.earlier.what.startswith("earlier, ")


def test_what_has_finished_does_not_bind_the_next_owner(host: Host) -> None:
    pool, s1, s2 = host
    with vram.race_check():
        old = pool.allocate(UNIT, stream=s1)
        s1.launch(work, old)
        s1.synchronize()
        old.free()
        new = pool.allocate(UNIT, stream=s1)
        s2.launch(work, new)
        new.record_stream(s2)
        new.free()


def test_memory_that_the_pool_moves_to_another_stream_is_ordered_by_the_pool() -> None:
    device = vram.Device.model("1GiB")
    pool = vram.Pool(device, cross_stream="wait")
    s1, s2, s3 = (vram.Stream(device) for _ in range(3))
    with vram.race_check():
        old, neighbour = pool.allocate(UNIT, stream=s1), pool.allocate(UNIT, stream=s1)
        s1.launch(work, old.ptr)
        address = old.ptr
        old.free()
        pool.coalesce()
        new = pool.allocate(UNIT, stream=s3)
        assert new.ptr == address
        s3.launch(work, new)
        s2.wait_stream(s3)
        s2.launch(work, new)
        s3.wait_stream(s2)
        new.free()
        neighbour.free()  # it kept the page where it was


def test_a_part_of_freed_memory_that_is_reused_leaves_the_rest_freed(host: Host) -> None:
    pool, s1, _ = host
    with vram.race_check("collect") as checker:
        large = pool.allocate(8 * UNIT, stream=s1)
        address = large.ptr
        large.free()
        pool.coalesce()
        small = pool.allocate(UNIT, stream=s1)
        assert small.ptr == address
        s1.launch(work, small.ptr)
        assert checker.races == []
        s1.launch(work, address + 2 * UNIT)
    assert [race.kind for race in checker.races] == ["use after free"]


# ---- uses ---------------------------------------------------------------------------------------------


def test_use_after_free(host: Host) -> None:
    pool, s1, _ = host
    with vram.race_check("collect") as checker:
        x = pool.allocate(UNIT, stream=s1)
        address = x.ptr
        x.free()
        s1.launch(work, address)
        s1.launch(work, x)
    [race] = checker.races
    assert race.kind == "use after free"
    assert race.free is not None and race.free.what == "freed"


def test_a_freed_buffer_whose_place_is_taken_is_still_known(host: Host) -> None:
    pool, s1, _ = host
    with vram.race_check("collect") as checker:
        x = pool.allocate(UNIT, stream=s1)
        x.free()
        y = pool.allocate(UNIT, stream=s1)
        assert y.ptr == x.ptr
        s1.launch(work, y)
        assert checker.races == []
        s1.launch(work, x)
    [race] = checker.races
    assert race.kind == "use after free" and race.reuse is not None


def test_a_buffer_of_a_closed_pool_is_not_taken_for_one_that_has_its_address(host: Host) -> None:
    pool, s1, s2 = host
    with vram.Pool("host") as closed:
        old = closed.allocate(UNIT, stream=s1)
    with vram.race_check("collect") as checker:
        new = pool.allocate(UNIT, stream=s1)
        if new.ptr != old.ptr:
            pytest.skip("the operating system gave other addresses")
        s2.launch(work, reads(new.ptr))
        s1.launch(work, reads(old))
        s1.synchronize()
        del old
        new.record_stream(s2)
        new.free()
    assert [race.kind for race in checker.races] == ["use after free"]


VIEWS: dict[str, Callable[[vram.Buffer], tuple[Any, ...]]] = {
    "buffer": lambda x: (work, x),
    "address": lambda x: (work, x.ptr),
    "address inside": lambda x: (work, x.ptr + 100),
    "list": lambda x: (work, [1, x]),
    "view": lambda x: (work, memoryview(x)),
    "read": lambda x: (work, reads(x)),
    "closure": lambda x: (lambda: work(x),),
    "default": lambda x: (lambda value=x: work(value),),
    "partial": lambda x: (functools.partial(work, x),),
    "partial with arguments": lambda x: (functools.partial(work, x), 1),
    "keyword": lambda x: (functools.partial(work, value=x),),
    "method": lambda x: (x.__enter__,),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_launch_uses_what_it_can_reach(host: Host, name: str) -> None:
    pool, s1, s2 = host
    x = pool.allocate(UNIT, stream=s1)
    with vram.race_check("collect") as checker:
        s1.launch(work, x)
        s2.launch(*VIEWS[name](x))
        vram.Device("host").synchronize()
    assert [(race.kind, race.address) for race in checker.races] == [("unordered", x.ptr)]


def test_arrays_over_the_memory_count(host: Host) -> None:
    numpy = pytest.importorskip("numpy")
    pool, s1, s2 = host
    with vram.race_check("collect") as checker:
        x = pool.allocate(UNIT, stream=s1)
        array = numpy.from_dlpack(x)
        s1.launch(work, array)
        s2.launch(work, array)
        vram.Device("host").synchronize()
    assert [race.kind for race in checker.races] == ["unordered"]


GLOBAL: Any = None


def test_globals_of_a_launched_function_count(host: Host) -> None:
    global GLOBAL
    pool, s1, s2 = host
    try:
        with vram.race_check("collect") as checker:
            GLOBAL = pool.allocate(UNIT, stream=s1)
            s2.launch(lambda: work(GLOBAL))
            GLOBAL.free()
        assert [race.kind for race in checker.races] == ["free"]
    finally:
        s2.synchronize()
        GLOBAL = None


def test_numbers_that_are_no_addresses_do_not_count(host: Host) -> None:
    pool, s1, s2 = host
    with vram.race_check():
        x = pool.allocate(UNIT, stream=s1)
        s2.launch(work, 0, -1, True, 2**200, x.ptr - 1, x.ptr + UNIT, "text", None, 1.5)
        x.free()


def test_two_readers_do_not_conflict(host: Host) -> None:
    pool, s1, s2 = host
    with vram.race_check():
        x = pool.allocate(UNIT, stream=s1)
        s2.launch(work, reads(x))
        s1.launch(work, reads(x))
        s2.launch(lambda: work(x))
        x.record_stream(s2)
        s2.synchronize()
        x.free()


def test_uses_can_be_declared(host: Host) -> None:
    pool, s1, s2 = host
    with vram.race_check("collect") as checker:
        x = pool.allocate(UNIT, stream=s1)
        p = pool.malloc(UNIT, s1)
        checker.use(x, s2, writes=False)
        checker.use(p, s2)
        x.free()
        pool.free(p)
    assert [race.use.what for race in checker.races] == ["read by declared use", "written by declared use"]
    assert [race.fix for race in checker.races] == ["x.record_stream(s2)", "pool.record_stream(p, s2)"]
    checker.use(12, s1)  # off: nothing


def test_a_declared_use_takes_any_stream(host: Host) -> None:
    pool, s1, s2 = host
    with vram.race_check("collect") as checker:
        x = pool.allocate(UNIT, stream=s1)
        checker.use(x, s2.handle)
        x.free()
    assert [race.used_on for race in checker.races] == [s2.handle]


def test_memory_from_before_the_check_is_known_by_its_use(host: Host) -> None:
    pool, s1, s2 = host
    x, y = pool.allocate(UNIT, stream=s1), pool.allocate(UNIT, stream=s1)
    with vram.race_check("collect") as checker:
        s2.launch(work, x)
        y.fill(1, stream=s2)
        y.free()
        x.free()
    [race] = checker.races
    assert race.allocation is None and race.stream == s1.handle
    assert "allocated before the check started" in str(race)


# ---- order --------------------------------------------------------------------------------------------


def test_copies_to_and_from_host_memory_order(host: Host) -> None:
    pool, s1, s2 = host
    with vram.race_check():
        x = pool.allocate(UNIT, stream=s1)
        s1.launch(work, x)
        x.copy_from(bytes(UNIT))
        s2.launch(work, x)
        x.copy_to(bytearray(UNIT), stream=s2)
        x.free()


def test_copies_between_buffers_use_both(host: Host) -> None:
    pool, s1, s2 = host
    with vram.race_check("collect") as checker:
        x, y = pool.allocate(UNIT, stream=s1), pool.allocate(UNIT, stream=s1)
        x.fill(1)
        x.copy_to(y, stream=s2)
        y.fill(2)
    assert [(race.used_on, race.stream) for race in checker.races] == [
        (s1.handle, s2.handle),
        (s2.handle, s1.handle),
    ]


def test_asking_and_hearing_yes_orders(host: Host) -> None:
    pool, s1, s2 = host
    gate = threading.Event()
    with vram.race_check("collect") as checker:
        x = pool.allocate(UNIT, stream=s1)
        s2.launch(lambda *_: gate.wait(TIMEOUT), x.ptr)
        event = s2.record_event()
        assert not event.query() and not s2.query()
        gate.set()
        while not event.query():
            pass
        x.free()
        y = pool.allocate(UNIT, stream=s1)
        s2.launch(work, y.ptr)
        while not s2.query():
            pass
        y.free()
    assert checker.races == []


def test_asking_and_hearing_no_does_not(host: Host) -> None:
    pool, s1, s2 = host
    gate = threading.Event()
    with vram.race_check("collect") as checker:
        x = pool.allocate(UNIT, stream=s1)
        s2.launch(lambda *_: gate.wait(TIMEOUT), x.ptr)
        assert not s2.query() and not s2.record_event().query()
        x.free()
        gate.set()
    assert len(checker.races) == 1


def test_what_is_queued_while_the_host_waits_is_not_known(host: Host) -> None:
    pool, s1, s2 = host
    gate, waiting = threading.Event(), threading.Event()
    x = pool.allocate(UNIT, stream=s1)

    def wait() -> None:
        waiting.set()
        s2.synchronize()

    with vram.race_check("collect") as checker:
        s2.launch(gate.wait, TIMEOUT)
        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait(TIMEOUT)
        while not blocked(thread, "synchronize"):
            pass
        s2.launch(work, x)
        gate.set()
        thread.join()
        x.free()
    assert len(checker.races) == 1


def blocked(thread: threading.Thread, function: str) -> bool:
    assert thread.ident is not None
    frame = sys._current_frames().get(thread.ident)
    return frame is not None and frame.f_code.co_name == function


def test_a_synchronize_that_raises_has_waited(host: Host) -> None:
    pool, s1, s2 = host

    def fail(*_: Any) -> None:
        raise ValueError("as meant")

    with vram.race_check():
        x = pool.allocate(UNIT, stream=s1)
        s2.launch(fail, x.ptr)
        with pytest.raises(ValueError, match="as meant"):
            s2.synchronize()
        x.free()


def test_a_buffer_that_its_last_work_drops_is_not_freed_early(host: Host) -> None:
    pool, s1, s2 = host
    with vram.race_check():
        x = pool.allocate(UNIT, stream=s1)
        s2.launch(work, x)
        del x
        s2.synchronize()


def test_a_launched_function_knows_only_what_came_before_it(host: Host) -> None:
    pool, s1, s2 = host
    s3 = vram.Stream("host")
    with vram.race_check("collect") as checker:
        x = pool.allocate(UNIT, stream=s1)
        s3.launch(work, reads(x.ptr))
        s2.launch(work, reads(x.ptr))
        s2.launch(x.free)
        s2.synchronize()
    assert [race.used_on for race in checker.races] == [s3.handle]


def test_what_a_launched_function_waits_for_the_program_does_not_know(host: Host) -> None:
    pool, s1, s2 = host
    s3 = vram.Stream("host")
    done = threading.Event()

    def wait_and_free(buffer: vram.Buffer) -> None:
        s3.synchronize()
        buffer.free()
        done.set()

    with vram.race_check("collect") as checker:
        x, y = pool.allocate(UNIT, stream=s1), pool.allocate(UNIT, stream=s1)
        s3.launch(work, reads(x.ptr), reads(y.ptr))
        s2.launch(wait_and_free, reads(x))
        assert done.wait(TIMEOUT)
        y.free()
    assert [race.address for race in checker.races] == [y.ptr]


def test_a_device_that_is_done_says_nothing_of_another() -> None:
    with vram.race_check("collect") as checker:
        device, other = vram.Device.model("1GiB"), vram.Device.model("1GiB")
        pool, s1, s2 = vram.Pool(device), vram.Stream(device), vram.Stream(device)
        x = pool.allocate(UNIT, stream=s1)
        s2.launch(work, reads(x))
        other.synchronize()
        x.free()
    assert len(checker.races) == 1


def test_a_handle_that_comes_again_is_another_stream() -> None:
    core = vram.Device.model("1GiB")._core
    checker = vram.race_check("collect")
    clocks = checker._watch.history.clocks
    old = clocks.key(core, 7)
    clocks.close(old)
    assert clocks.key(core, 7) != old


def test_a_closed_stream_orders_nothing(host: Host) -> None:
    pool, s1, _ = host
    with vram.race_check("collect") as checker:
        x = pool.allocate(UNIT, stream=s1)
        with vram.Stream("host") as s3:
            s3.launch(work, x.ptr)
        x.free()
    assert len(checker.races) == 1


def test_streams_of_one_number_on_two_devices_are_two() -> None:
    with vram.race_check("collect") as checker:
        for device in (vram.Device.model("1GiB"), vram.Device.model("1GiB")):
            pool, s1, s2 = vram.Pool(device), vram.Stream(device), vram.Stream(device)
            x = pool.allocate(UNIT, stream=s1)
            s2.launch(work, reads(x))
            if checker.races:
                s2.synchronize()
            x.free()
    assert len(checker.races) == 1


# ---- telling ------------------------------------------------------------------------------------------


def test_raise_stops_the_free_and_tells_once(host: Host) -> None:
    pool, s1, s2 = host
    with vram.race_check() as checker:
        x = pool.allocate(UNIT, stream=s1)
        s2.launch(work, reads(x.ptr))
        with pytest.raises(vram.RaceError) as caught:
            x.free()
        assert not x.freed and caught.value.race is checker.races[0]
        x.record_stream(s2)
        x.free()
    assert len(checker.races) == 1


def test_raise_stops_the_launch(host: Host) -> None:
    pool, s1, s2 = host
    ran: list[int] = []
    with vram.race_check():
        x = pool.allocate(UNIT, stream=s1)
        s1.launch(work, x)
        with pytest.raises(vram.RaceError):
            s2.launch(ran.append, x.ptr)
        s2.synchronize()
    assert ran == []


def dropped(pool: vram.Pool, s1: vram.Stream, s2: vram.Stream) -> None:
    x = pool.allocate(UNIT, stream=s1)
    s2.launch(work, reads(x.ptr))
    del x


NEXT: dict[str, Callable[[vram.Pool, vram.Stream], object]] = {
    "allocate": lambda pool, stream: pool.allocate(UNIT, stream=stream),
    "malloc": lambda pool, stream: pool.malloc(UNIT, stream),
    "launch": lambda pool, stream: stream.launch(work),
    "record": lambda pool, stream: stream.record_event(),
    "synchronize": lambda pool, stream: stream.synchronize(),
}


@pytest.mark.parametrize("name", NEXT)
def test_a_dropped_buffer_raises_from_the_next_call(host: Host, name: str) -> None:
    pool, s1, s2 = host
    with vram.race_check() as checker:
        dropped(pool, s1, s2)
        with pytest.raises(vram.RaceError):
            NEXT[name](pool, s1)
        NEXT[name](pool, s1)  # once
    assert len(checker.races) == 1
    assert pool.check() is None


def test_a_dropped_buffer_raises_at_the_end(host: Host) -> None:
    with pytest.raises(vram.RaceError), vram.race_check():
        dropped(*host)


def test_a_dropped_buffer_raises_from_stop(host: Host) -> None:
    checker = vram.race_check().start()
    dropped(*host)
    with pytest.raises(vram.RaceError):
        checker.stop()
    checker.stop()


def test_another_error_goes_first_and_carries_a_note(host: Host) -> None:
    with pytest.raises(KeyError) as caught, vram.race_check():
        dropped(*host)
        raise KeyError("mine")
    assert "race_check also found" in caught.value.__notes__[0]


def test_a_reuse_before_the_remembered_race_is_raised_is_in_it(host: Host) -> None:
    pool, s1, s2 = host
    with vram.race_check():
        dropped(pool, s1, s2)
        with pytest.raises(vram.RaceError) as caught:
            pool.allocate(UNIT, stream=s1)
    assert caught.value.race.reuse is not None


def test_warn(host: Host) -> None:
    with vram.race_check("warn") as checker, pytest.warns(RaceWarning, match="freed while") as caught:
        misuse(*host)
        dropped(*host)
    assert [warning.message.race for warning in caught] == checker.races  # type: ignore[union-attr]
    assert {warning.filename for warning in caught} == {__file__}


def test_warnings_that_are_errors(host: Host) -> None:
    pool, s1, s2 = host
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with vram.race_check("warn"):
            with pytest.raises(RaceWarning):
                misuse(pool, s1, s2)
            dropped(pool, s1, s2)
            with pytest.raises(RaceWarning):
                s1.synchronize()


def test_collect_keeps_so_many_and_counts_the_others(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vram.race.checker.MOST_RACES", 3)
    with vram.race_check("collect") as checker:
        for _ in range(5):
            misuse(*host)
    assert (len(checker.races), checker.dropped) == (3, 2)


def test_the_report(host: Host) -> None:
    pool, s1, s2 = host
    with vram.race_check("collect") as checker:
        misuse(pool, s1, s2)
    [race] = checker.races
    assert (race.device, race.size, race.stream, race.used_on) == ("host", UNIT, s1.handle, s2.handle)
    text = str(race)
    for part in (
        f"{UNIT} bytes at {race.address:#x} on host",
        f"allocated on s1 (stream {s1.handle})",
        f"read by launch of work on s2 (stream {s2.handle})",
        f"freed on s1 (stream {s1.handle})",
        "in misuse: x = pool.allocate(UNIT, stream=s1)",
        "in misuse: s2.launch(work, reads(x.ptr))",
        "in misuse: x.free()",
        "missing: s2 → s1",
        "fix: x.record_stream(s2)",
        "or: s1.wait_stream(s2)",
    ):
        assert part in text, f"{part!r} is not in\n{text}"
    assert "vram/race.py" not in text


def test_streams_without_a_name_are_called_by_number(host: Host) -> None:
    pool, _, _ = host
    streams = {"made": vram.Stream("host")}
    with vram.race_check("collect") as checker:
        x = pool.allocate(UNIT)
        streams["made"].launch(work, reads(x.ptr))
        x.free()
    [race] = checker.races
    assert race.fix == f"x.record_stream(stream_{streams['made'].handle})"
    assert race.alternative is not None and race.alternative.startswith("vram.Stream.default().wait_stream(")


def test_errors_survive_pickling(host: Host) -> None:
    with pytest.raises(vram.RaceError) as caught, vram.race_check():
        misuse(*host)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, vram.RaceError) and isinstance(copy.race, Race)
    assert str(copy) == str(caught.value) and copy.address == caught.value.address
    assert copy.race == caught.value.race


# ---- on and off ---------------------------------------------------------------------------------------


def test_one_checker_at_a_time() -> None:
    with vram.race_check() as checker:
        assert checker.active and "'raise', active" in repr(checker)
        with pytest.raises(vram.VramError, match="already active"):
            vram.race_check("collect").start()
        with pytest.raises(vram.VramError, match="already active"):
            checker.start()
        assert checker.active
    assert not checker.active


def test_another_observer_is_not_pushed_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "active", object())
    with pytest.raises(vram.VramError, match="another observer"):
        vram.race_check().start()


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(vram.ConfigError, match="collect"):
        vram.race_check("loud")  # type: ignore[arg-type]


def test_off_means_nothing_is_watched(host: Host) -> None:
    with vram.race_check("collect") as checker:
        pass
    assert observer.active is None
    misuse(*host)
    assert checker.races == []


def test_a_checker_starts_anew(host: Host) -> None:
    pool, s1, s2 = host
    checker = RaceChecker("collect")
    checker.start()
    x = pool.allocate(UNIT, stream=s1)
    s2.launch(work, reads(x.ptr))
    checker.stop()
    s2.synchronize()  # not seen
    with checker:
        x.free()
        misuse(pool, s1, s2)
    assert len(checker.races) == 1


def test_something_that_cannot_be_called_is_still_refused(host: Host) -> None:
    _, s1, _ = host
    with vram.race_check(), pytest.raises(TypeError):
        s1.launch(None)  # type: ignore[arg-type]


@pytest.mark.fork
def test_a_forks_child_is_not_watched(host: Host) -> None:
    with vram.race_check("collect"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
        if child == 0:
            os._exit(0 if observer.active is None else 1)
        assert os.waitpid(child, 0)[1] == 0


# ---- threads and the garbage collector ------------------------------------------------------------------


def test_many_threads_at_once() -> None:
    def play(pool: vram.Pool, errors: list[BaseException]) -> None:
        try:
            with vram.Stream("host") as s1, vram.Stream("host") as s2:
                for _ in range(100):
                    x = pool.allocate(UNIT, stream=s1)
                    s2.wait_stream(s1)
                    s2.launch(work, x)
                    x.record_stream(s2)
                    del x
        except BaseException as error:
            errors.append(error)

    errors: list[BaseException] = []
    with vram.Pool("host") as pool, vram.race_check("collect") as checker:
        threads = [threading.Thread(target=play, args=(pool, errors)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == [] and checker.races == []


def test_a_collection_inside_the_checker_is_put_off(host: Host) -> None:
    """Buffers and streams in cycles die wherever the collector happens to run, the checker included."""
    pool, s1, s2 = host

    class Cycle:
        def __init__(self, *what: Any) -> None:
            self.me, self.what = self, what

    threshold = gc.get_threshold()
    gc.collect()
    try:
        gc.set_threshold(1)
        with vram.race_check("collect") as checker:
            for _ in range(100):
                x = pool.allocate(UNIT, stream=s1)
                s2.wait_stream(s1)
                s2.launch(work, reads(x.ptr))
                x.record_stream(s2)
                Cycle(x, vram.Stream("host"), vram.Event("host"))
                del x
            gc.collect()
    finally:
        gc.set_threshold(*threshold)
    assert checker.races == []


def test_a_drop_inside_the_checker_is_still_judged(host: Host) -> None:
    pool, s1, s2 = host
    with vram.race_check("collect") as checker:
        x = pool.allocate(UNIT, stream=s1)
        s2.launch(work, reads(x.ptr))
        held = [x]
        del x
        checker._watch._run(held.clear, ())
        assert checker.races == []
        s1.record_event()
    assert len(checker.races) == 1


# ---- functions of which nothing is known ---------------------------------------------------------------


class _Kernels:
    """Calls a function that Python does not show, as an extension module has them."""

    def __init__(self, buffer: vram.Buffer) -> None:
        self.buffer = buffer
        self.foreign = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work)

    def run(self) -> None:
        self.foreign(self.buffer.ptr)


@pytest.mark.parametrize("bound", [True, False])
def test_what_an_unknown_function_is_given_is_perhaps_written(
    bound: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with vram.Pool("host") as pool, vram.Stream("host") as s1, vram.Stream("host") as s2:
        with vram.race_check() as checker:
            x = pool.allocate(UNIT, stream=s1)
            kernels = _Kernels(x)
            task = kernels.run if bound else lambda: kernels.foreign(x.ptr)
            s1.launch(task)
            s2.launch(task)  # raises nothing: both may only read
            s1.wait_stream(s2)
        (race,) = checker.possible
        assert checker.races == [] and race.kind == "unordered" and race.fix == "s2.wait_stream(s1)"
        assert race.use.what.startswith("perhaps written by")
        assert "1 possible race" in caplog.text
        x.free()


def test_a_write_conflicts_with_what_is_perhaps_written_in_any_case() -> None:
    with vram.Pool("host") as pool, vram.Stream("host") as s1, vram.Stream("host") as s2:
        with vram.race_check("collect") as checker:
            x = pool.allocate(UNIT, stream=s1)
            s1.launch(_Kernels(x).run)
            s2.launch(work, x.ptr)
            s1.synchronize()
            s2.synchronize()
        assert [race.kind for race in checker.races] == ["unordered"] and checker.possible == []
        x.free()


def test_functions_that_are_known_to_read_are_not_doubted() -> None:
    with vram.Pool("host") as pool, vram.Stream("host") as s1, vram.Stream("host") as s2:
        with vram.race_check() as checker:
            x = pool.allocate(UNIT, stream=s1)

            def look(y: Any) -> None:
                for stream in (s1, s2):
                    stream.launch(lambda: (np.sum(y), y.max(), len(y), bytes(y[:4]), hash(y.tobytes())))

            look(np.frombuffer(x, np.uint8))
            s1.wait_stream(s2)
            s1.synchronize()
        assert checker.possible == []


def test_a_race_in_every_step_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vram.race.history.MOST_REPORTED", 8)
    with vram.Pool("host") as pool, vram.Stream("host") as s1, vram.Stream("host") as s2:
        with vram.race_check("collect") as checker:
            x = pool.allocate(UNIT, stream=s1)
            for _ in range(50):
                s1.launch(work, x.ptr)
                s2.launch(work, x.ptr)
            memory = checker._watch.history.find(pool.device._core, x.ptr)
            assert memory is not None and len(memory.reported) <= 8
            assert len(checker.races) == 99
            s1.synchronize()
            s2.synchronize()
        x.free()
