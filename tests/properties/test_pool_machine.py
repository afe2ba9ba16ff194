"""Random programs against a simple oracle: no overlap, no lost byte, alignment, accounting, stream order.

The oracle is a dictionary of what is live. On the host every buffer is filled and read back in stream order
by real threads, behind gates that hold streams up, so memory reused too early shows as a wrong byte. On the
model the device keeps score: work is executed one step at a time, and reuse must come after the uses before.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from waiting import PATIENCE

import vram
from vram import Device, OutOfMemory, Pool, Stream

KIB, MIB = 1 << 10, 1 << 20
UNIT = 512
LIMIT = 48 * MIB
TIMEOUT = PATIENCE

SIZES = st.sampled_from(
    [
        0,
        513,
        4 * KIB,
        60 * KIB,
        512 * KIB,
        512 * KIB,
        MIB,
        MIB,
        MIB + 1,
        2 * MIB,
        3 * MIB,
        5 * MIB,
        8 * MIB,
        20 * MIB,
    ]
)
ALIGNMENTS = st.sampled_from([None, None, None, 512, 4 * KIB, 2 * MIB, 8 * MIB])
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "cross_stream": st.sampled_from(["ready", "wait", "never"]),
        "stream_cache": st.sampled_from([0, 2, 4096]),
        "best_fit": st.booleans(),
        "max_page": st.sampled_from(["2MiB", "8MiB", "32MiB"]),
        "segment_size": st.sampled_from([0, 4 * MIB, 20 * MIB]),
        "release_threshold": st.sampled_from([None, 0, 8 * MIB]),
        "zero_on_allocate": st.booleans(),
        "zero_on_free": st.booleans(),
    },
)
WHICH = st.integers(0, 10**6)  # picks one of what there is
CHURN = {"sizes": st.lists(SIZES, min_size=1, max_size=4), "which": WHICH, "frees": st.integers(0, 3)}


def rounded(size: int) -> int:
    return max(UNIT, -(-size // UNIT) * UNIT)


class PoolMachine(RuleBasedStateMachine):
    """The rules that need no device of a kind, and the oracle."""

    device: Device
    pool: Pool
    streams: list[Stream]
    keep: str  # what suspend() does with contents

    def begin(self, device: Device, options: dict[str, Any]) -> None:
        self.device = device
        self.pool = vram.Pool(device, limit=LIMIT, **options)
        self.streams = [Stream(device), Stream(device)]
        self.live: dict[int, Any] = {}
        self.peak = 0
        self.failed = 0

    # What a device of a kind adds.
    def allocated(self, buffer: Any) -> None: ...

    def freeing(self, buffer: Any) -> None: ...

    def stream(self, which: int) -> Stream:
        return self.streams[which % len(self.streams)]

    def buffer(self, which: int) -> Any:
        return list(self.live.values())[which % len(self.live)]

    def note(self, buffer: Any) -> None:
        assert buffer.ptr not in self.live
        self.live[buffer.ptr] = buffer
        self.peak = max(self.peak, self.live_bytes())
        self.allocated(buffer)

    def shares_pages(self) -> bool:
        """Any free page may serve any request."""
        return self.pool.raw_stats()["paged"] and self.pool.config()["cross_stream"] != "never"

    def note_passing(self, most: int) -> None:
        """Up to that many bytes were live for a moment."""
        assert self.peak <= self.pool.stats().peak_allocated <= max(self.peak, self.live_bytes() + most)
        self.peak = self.pool.stats().peak_allocated

    def live_bytes(self) -> int:
        return sum(rounded(buffer.size) for buffer in self.live.values())

    # ---- rules ----------------------------------------------------------------------------------------

    @rule(size=SIZES, align=ALIGNMENTS, which=WHICH)
    def allocate(self, size: int, align: int | None, which: int) -> None:
        self.may_wait_for(2 * max(size, align or 0))
        try:
            buffer = self.pool.allocate(size, stream=self.stream(which), align=align)
        except OutOfMemory:
            self.failed += 1
            assert self.live, "nothing was live and yet it did not fit"
            if self.shares_pages():
                assert self.live_bytes() + size > LIMIT // 4
            return
        assert buffer.size == size and buffer.ptr % max(UNIT, align or 0) == 0
        assert buffer.stream == self.stream(which).handle
        self.note(buffer)

    @rule(sizes=st.lists(SIZES, max_size=5), which=WHICH)
    def allocate_batch(self, sizes: list[int], which: int) -> None:
        self.may_wait_for(sum(sizes))
        try:
            buffers = self.pool.allocate_batch(sizes, stream=self.stream(which))
        except OutOfMemory:
            self.failed += 1
            self.note_passing(sum(map(rounded, sizes)))
            return
        assert [buffer.size for buffer in buffers] == sizes
        for buffer in buffers:
            self.note(buffer)

    @rule(**CHURN)
    def churn(self, sizes: list[int], which: int, frees: int) -> None:
        """Free some, then allocate some on alternating streams, in the midst of unfinished work."""
        for number in range(min(frees, len(self.live))):
            self.free(which // 7 + number, drop=bool(which & 1))
        for number, size in enumerate(sizes):
            self.allocate(size, None, which + number)
            self.go_on(which + number)

    def go_on(self, which: int) -> None: ...

    # The heart of every program, three times: Hypothesis leaves single rules out of many runs.
    @rule(**CHURN)
    def churn_more(self, **program: Any) -> None:
        self.churn(**program)

    @rule(**CHURN)
    def churn_still(self, **program: Any) -> None:
        self.churn(**program)

    @precondition(lambda self: self.live)
    @rule(which=WHICH, drop=st.booleans())
    def free(self, which: int, drop: bool) -> None:
        buffer = self.buffer(which)
        self.freeing(buffer)
        del self.live[buffer.ptr]
        if not drop:
            buffer.free()

    @rule(size=st.sampled_from([4 * KIB, MIB]), count=st.integers(0, 4), which=WHICH)
    def warm(self, size: int, count: int, which: int) -> None:
        self.may_wait_for(size * count)
        try:
            self.pool.warmup({size: count}, stream=self.stream(which))
        except OutOfMemory:
            self.failed += 1
        self.note_passing(count * rounded(size))

    @rule(to=st.sampled_from([0, 8 * MIB, 64 * MIB]), wait=st.booleans())
    def trim(self, to: int, wait: bool) -> None:
        if wait:
            self.may_wait_for(LIMIT)
        self.pool.trim(to, wait=wait)

    @precondition(lambda self: self.pool.raw_stats()["paged"])
    @rule(which=WHICH, frees=st.integers(0, 2))
    def suspend_and_resume(self, which: int, frees: int) -> None:
        """Memory goes and comes back under the same addresses; some of it is freed meanwhile."""
        freed = [self.buffer(which + number) for number in range(min(frees, len(self.live)))]
        for buffer in dict.fromkeys(freed):
            self.freeing(buffer)
            del self.live[buffer.ptr]
        self.may_wait_for(LIMIT)
        self.pool.suspend(keep=self.keep)
        assert self.pool.check() is None
        for buffer in dict.fromkeys(freed):
            buffer.free()
        self.pool.resume()
        assert not any(buffer.suspended for buffer in self.live.values())

    @rule()
    def coalesce(self) -> None:
        self.pool.coalesce()
        assert self.pool.stats().cached == 0

    @rule()
    def reset_peak(self) -> None:
        self.pool.reset_peak()
        self.peak = self.live_bytes()

    @rule(which=WHICH)
    def replace_stream(self, which: int) -> None:
        self.stream_ending(self.stream(which))
        self.stream(which).close()
        self.streams[which % len(self.streams)] = Stream(self.device)

    def stream_ending(self, stream: Stream) -> None: ...

    def may_wait_for(self, size: int) -> None:
        """A request of that size comes, which may have to wait for work."""

    # ---- the oracle -----------------------------------------------------------------------------------

    @invariant()
    def the_pool_is_intact(self) -> None:
        assert self.pool.check() is None

    @invariant()
    def live_blocks_never_overlap(self) -> None:
        end = 0
        for address, buffer in sorted(self.live.items()):
            assert address >= end
            end = address + rounded(buffer.size)

    @invariant()
    def accounts_are_exact(self) -> None:
        stats, live = self.pool.stats(), self.live_bytes()
        assert (stats.allocated, stats.live) == (live, len(self.live))
        assert stats.requested == sum(buffer.size for buffer in self.live.values())
        assert stats.allocated + stats.cached + stats.pending + stats.free == stats.reserved <= LIMIT
        assert stats.peak_allocated == self.peak
        assert stats.out_of_memory == self.failed

    @invariant()
    def the_snapshot_is_what_is_live(self) -> None:
        blocks = {block.address: block for block in self.pool.snapshot().blocks("live")}
        assert set(blocks) == set(self.live)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.end()

    def end(self) -> None:
        for buffer in self.live.values():
            self.freeing(buffer)
        self.live.clear()
        self.pool.close()


# ---- the host: contents ---------------------------------------------------------------------------------


class HostMachine(PoolMachine):
    """Streams are threads; a gate may hold one up. Every use is checked where the stream comes to it."""

    keep = "host"

    @initialize(options=OPTIONS, pages=st.booleans())
    def open(self, options: dict[str, Any], pages: bool) -> None:
        self.begin(Device("host"), {**options, "pages": pages})
        self.values: dict[int, int] = {}
        self.next_value = 0
        self.wrong: list[str] = []
        self.gates: list[threading.Event] = []

    def may_wait_for(self, size: int) -> None:
        if self.pool.stats().reserved + size > LIMIT // 2:
            self.open_gates()

    def owner(self, buffer: Any) -> Stream:
        return next((each for each in self.streams if each.handle == buffer.stream), self.streams[0])

    def allocated(self, buffer: Any) -> None:
        if self.pool.config()["zero_on_allocate"]:
            self.look(buffer.ptr, buffer.size, 0)
        self.next_value = self.next_value % 255 + 1
        self.values[buffer.ptr] = self.next_value
        buffer.fill(self.next_value)

    def freeing(self, buffer: Any) -> None:
        """Read everything once more in the order of the stream, just before the free."""
        if any(each.handle == buffer.stream for each in self.streams):
            self.expect(self.owner(buffer), buffer)
        else:  # its stream has ended, and with it its work
            self.open_gates()
            self.device.synchronize()
            self.look(buffer.ptr, buffer.size, self.values[buffer.ptr])

    def expect(self, stream: Stream, buffer: Any) -> None:
        stream.launch(self.look, buffer.ptr, buffer.size, self.values[buffer.ptr])

    def look(self, address: int, size: int, value: int) -> None:
        memory = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
        for sample in (memory[:: max(1, size // 997)], memory[-1:]):
            if set(sample) - {value}:
                self.wrong.append(f"{size} bytes at {address:#x} are no longer {value}")

    @rule(which=WHICH)
    def hold_up(self, which: int) -> None:
        self.gates.append(threading.Event())
        self.stream(which).launch(self.gates[-1].wait, TIMEOUT)

    @rule()
    def open_gates(self) -> None:
        for gate in self.gates:
            gate.set()
        self.gates.clear()

    @precondition(lambda self: self.live)
    @rule(buffer=WHICH, which=WHICH)
    def read_elsewhere(self, buffer: int, which: int) -> None:
        """Another stream reads after the writes so far, and says so."""
        found, reader = self.buffer(buffer), self.stream(which)
        if any(each.handle == found.stream for each in self.streams):
            reader.wait_stream(self.owner(found))
        else:
            self.open_gates()
            self.device.synchronize()
        self.expect(reader, found)
        found.record_stream(reader)

    def stream_ending(self, stream: Stream) -> None:
        self.open_gates()

    @invariant()
    def every_byte_is_where_it_was_put(self) -> None:
        assert self.wrong == []

    def end(self) -> None:
        self.open_gates()
        super().end()
        self.device.synchronize()
        assert self.wrong == []
        for stream in self.streams:
            stream.close()


# ---- the model: order -----------------------------------------------------------------------------------


class ModelMachine(PoolMachine):
    """Nothing happens until it is stepped. Work that reuses an address must follow the work that used it."""

    keep = "discard"

    @initialize(options=OPTIONS, pages=st.booleans())
    def open(self, options: dict[str, Any], pages: bool) -> None:
        self.begin(Device.model("1GiB", pages=pages, manual=True), options)
        self.backend: Any = self.device.backend
        self.next_work = 0
        self.uses: dict[int, set[int]] = {}  # live: the work on each buffer
        self.gone: list[tuple[int, int, set[int]]] = []  # freed: address, bytes and the work on it
        self.after: dict[int, set[int]] = {}  # work: what must have run before it

    def use(self, buffer: Any, stream: Stream, after: set[int]) -> None:
        self.next_work += 1
        self.backend.work(stream.handle, self.next_work, buffer.ptr, buffer.size)
        self.uses[buffer.ptr].add(self.next_work)
        self.after[self.next_work] = after

    def allocated(self, buffer: Any) -> None:
        start, end = buffer.ptr, buffer.ptr + rounded(buffer.size)
        before: set[int] = set()
        for address, size, works in self.gone:
            if address < end and start < address + size:
                before |= works
        self.uses[buffer.ptr] = set()
        stream = next(each for each in self.streams if each.handle == buffer.stream)
        self.use(buffer, stream, before)

    def freeing(self, buffer: Any) -> None:
        self.gone.append((buffer.ptr, rounded(buffer.size), self.uses.pop(buffer.ptr)))

    @precondition(lambda self: self.live)
    @rule(buffer=WHICH, which=WHICH)
    def use_elsewhere(self, buffer: int, which: int) -> None:
        found, stream = self.buffer(buffer), self.stream(which)
        found.record_stream(stream)
        self.use(found, stream, set())

    def go_on(self, which: int) -> None:
        self.step(which // 3, which % 4)

    @rule(which=WHICH, count=st.integers(1, 8))
    def step(self, which: int, count: int) -> None:
        for _ in range(count):
            self.backend.step(self.stream(which).handle)

    @rule()
    def run_all(self) -> None:
        assert self.backend.run_all()

    @invariant()
    def reuse_comes_after_use(self) -> None:
        done: set[int] = set()
        for work in self.backend.executed():
            after = self.after.get(work, set())  # zeros are the pool's own work
            assert after <= done, f"work {work} ran before work it must follow"
            done.add(work)

    @invariant()
    def the_device_agrees(self) -> None:
        counts, stats = self.backend.counts(), self.pool.stats()
        assert stats.reserved == counts["page_bytes"] + counts["plain_bytes"]
        assert self.backend.check() is None

    def end(self) -> None:
        super().end()
        self.backend.run_all()
        self.reuse_comes_after_use()
        for stream in self.streams:
            stream.close()
        left = self.backend.counts()
        assert [left[name] for name in ("page_bytes", "plain_bytes", "mappings", "spaces", "events")] == [
            0
        ] * 5


TestHost = HostMachine.TestCase
TestHost.settings = settings(max_examples=settings.default.max_examples)
TestModel = ModelMachine.TestCase
TestModel.settings = settings(max_examples=2 * settings.default.max_examples)
