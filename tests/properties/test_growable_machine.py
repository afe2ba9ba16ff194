"""Random programs of growable buffers and blocks on the host, against what was written into them.

Every 2 MiB of a growable buffer and every block is stamped by work on its stream and read back in that
stream's order, behind gates that hold streams up: a page given to two owners, or too early, or contents lost
in a growth, show as a wrong stamp. The oracle is a dictionary of stamps; addresses never change in it.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import vram
from vram import GrowableBuffer, OutOfMemory, Stream

MIB = 1 << 20
STEP = 2 * MIB
LIMIT = 96 * MIB
MOST = 24 * MIB
SLACK = 2 * MOST  # what pages may be made ready meanwhile, and the edges of others
WHICH = st.integers(0, 10**6)
LENGTHS = st.integers(0, MOST // STEP).map(lambda slots: slots * STEP) | st.integers(0, MOST)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "cross_stream": st.sampled_from(["ready", "wait", "never"]),
        "max_page": st.sampled_from(["2MiB", "8MiB"]),
        "release_threshold": st.sampled_from([None, 0, 8 * MIB]),
        "zero_on_free": st.booleans(),
    },
)


class GrowableMachine(RuleBasedStateMachine):
    """What is open, with the stamps each place must have."""

    @initialize(options=OPTIONS)
    def begin(self, options: dict[str, Any]) -> None:
        self.pool = vram.Pool("host", limit=LIMIT, **options)
        self.zeroes = bool(options.get("zero_on_free"))
        self.streams = [Stream("host"), Stream("host")]
        self.gates: list[threading.Event] = []
        self.open: list[GrowableBuffer] = []
        self.places: dict[int, int] = {}  # address of the buffer → that address, for growth that moves
        self.stamps: dict[int, tuple[int, Stream]] = {}  # address of a word → its stamp, on which stream
        self.blocks: dict[int, tuple[Any, Stream]] = {}
        self.wrong: list[str] = []
        self.next_stamp = 0

    def stream_of(self, buffer: GrowableBuffer) -> Stream:
        return next(stream for stream in self.streams if stream.handle == buffer.stream)

    def stamp(self, address: int, stream: Stream) -> None:
        self.next_stamp += 1
        self.stamps[address] = (self.next_stamp, stream)
        stream.launch(lambda value=self.next_stamp: _write(address, value))

    def let_all_run(self) -> None:
        """Nothing stands in the way of the streams any more."""
        while self.gates:
            self.gates.pop().set()

    def may_wait_for(self, size: int) -> None:
        """Near the limit the pool may have to wait for whatever is queued, which must not be held up then."""
        if self.pool.stats().reserved + size + SLACK > LIMIT:
            self.let_all_run()

    def words(self, start: int, buffer: GrowableBuffer, length: int) -> list[int]:
        """One word in each 2 MiB of the first `length` bytes, beginning with that of byte `start`."""
        first = -(-start // STEP) * STEP
        return [buffer.ptr + at for at in range(first, max(0, length - 7), STEP)]

    # ---- rules ----------------------------------------------------------------------------------------

    @rule(which=WHICH)
    def hold_up(self, which: int) -> None:
        if len(self.gates) < 2:
            self.gates.append(threading.Event())
            self.streams[which % 2].launch(self.gates[-1].wait)

    @rule()
    def run(self) -> None:
        self.let_all_run()

    @precondition(lambda self: len(self.open) < 4)
    @rule(which=WHICH, ahead=st.sampled_from([0, 0, "auto"]))
    def open_one(self, which: int, ahead: Any) -> None:
        buffer = GrowableBuffer(MOST, self.pool, stream=self.streams[which % 2], ahead=ahead)
        self.open.append(buffer)
        self.places[id(buffer)] = buffer.ptr

    @precondition(lambda self: self.open)
    @rule(which=WHICH, length=LENGTHS)
    def resize(self, which: int, length: int) -> None:
        buffer = self.open[which % len(self.open)]
        before = buffer.size
        self.may_wait_for(max(0, length - before))
        if self.zeroes and length > before:
            self.let_all_run()  # what a shrink released is zeroed when its work has completed
        try:
            buffer.resize(length)
        except OutOfMemory:
            assert buffer.size == before, "a growth that fails leaves the old length"
            assert self.held() + length - before > LIMIT // 4
            return
        assert buffer.ptr == self.places[id(buffer)], "growth never moves"
        for address in self.words(length, buffer, before):
            self.stamps.pop(address, None)
        last = buffer.ptr + length // STEP * STEP  # the word of a slot that is cut short
        if length < before and last + 8 > buffer.ptr + length:
            self.stamps.pop(last, None)
        for address in self.words(before, buffer, length):
            if address not in self.stamps:
                self.stamp(address, self.stream_of(buffer))

    @precondition(lambda self: self.open)
    @rule(which=WHICH)
    def close_one(self, which: int) -> None:
        buffer = self.open.pop(which % len(self.open))
        for address in self.words(0, buffer, buffer.size):
            self.stamps.pop(address, None)
        buffer.close()

    @rule(size=st.sampled_from([8, 700_000, STEP, 3 * MIB, 9 * MIB]), which=WHICH)
    def allocate(self, size: int, which: int) -> None:
        self.may_wait_for(size)
        stream = self.streams[which % 2]
        try:
            block = self.pool.allocate(size, stream=stream)
        except OutOfMemory:
            return
        self.blocks[block.ptr] = (block, stream)
        for at in range(0, size - 7, STEP):
            self.stamp(block.ptr + at, stream)

    @precondition(lambda self: self.blocks)
    @rule(which=WHICH)
    def free(self, which: int) -> None:
        address = list(self.blocks)[which % len(self.blocks)]
        block, _ = self.blocks.pop(address)
        self.verify(list(range(address, address + block.size - 7, STEP)))
        for at in range(address, address + block.size - 7, STEP):
            del self.stamps[at]
        block.free()

    @rule(wait=st.booleans())
    def trim(self, wait: bool) -> None:
        if wait:
            self.let_all_run()
        self.pool.trim(wait=wait)

    @rule()
    def look(self) -> None:
        self.verify(list(self.stamps))

    # ---- the oracle -----------------------------------------------------------------------------------

    def held(self) -> int:
        return self.pool.stats().allocated

    def verify(self, addresses: list[int]) -> None:
        """Have the streams compare what is there, when they come to it."""
        for address in addresses:
            stamp, stream = self.stamps[address]
            stream.launch(lambda address=address, stamp=stamp: self.compare(address, stamp))

    def compare(self, address: int, stamp: int) -> None:
        found = ctypes.c_uint64.from_address(address).value
        if found != stamp:
            self.wrong.append(f"{found} instead of {stamp} at {address:#x}")

    @invariant()
    def keeps_its_promises(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.check() is None
        assert self.wrong == []
        assert self.pool.stats().reserved <= LIMIT
        capacities = sum(-(-buffer.size // STEP) * STEP for buffer in self.open)
        assert self.held() == capacities + sum(
            -(-block.size // 512) * 512 for block, _ in self.blocks.values()
        )

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.verify(list(self.stamps))
        self.let_all_run()
        for stream in self.streams:
            stream.synchronize()
        assert self.wrong == []
        for buffer in self.open:
            buffer.close()
        self.blocks.clear()
        self.pool.trim(wait=True)
        assert self.pool.stats().reserved == 0
        self.pool.close()
        for stream in self.streams:
            stream.close()


def _write(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


TestGrowable = GrowableMachine.TestCase
TestGrowable.settings = settings(settings.default, max_examples=40, stateful_step_count=40)
