"""Random programs that suspend and resume, against an oracle of contents.

On the host every byte is real: buffers are filled on real streams, suspended and resumed by tag while others
are allocated, freed and written, and read back. The oracle knows what each buffer must hold, which are
suspended, and what may fail.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import vram
from vram import OutOfMemory, Pool, Stream, Suspended

KIB, MIB = 1 << 10, 1 << 20
LIMIT = 48 * MIB
STORE = 40 * MIB

SIZES = st.sampled_from(
    [0, 513, 4 * KIB, 60 * KIB, 512 * KIB, MIB, MIB + 1, 2 * MIB, 3 * MIB, 5 * MIB, 8 * MIB, 20 * MIB]
)
TAGS = st.sampled_from([None, "a", "b"])
KEEPS = st.sampled_from(["host", "host", "discard"])
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "cross_stream": st.sampled_from(["ready", "wait", "never"]),
        "stream_cache": st.sampled_from([0, 2, 4096]),
        "max_page": st.sampled_from(["2MiB", "8MiB", "32MiB"]),
        "segment_size": st.sampled_from([0, 4 * MIB, 20 * MIB]),
        "zero_on_free": st.booleans(),
    },
)
WHICH = st.integers(0, 10**6)


class SuspendMachine(RuleBasedStateMachine):
    """`contents` has for each buffer the byte that fills it; None where that is undefined."""

    pool: Pool
    store: Pool
    streams: list[Stream]

    @initialize(options=OPTIONS)
    def begin(self, options: dict[str, Any]) -> None:
        self.pool = vram.Pool("host", limit=LIMIT, **options)
        self.store = vram.PinnedPool("host", limit=STORE, segment_size="2MiB")
        self.streams = [Stream("host"), Stream("host")]
        self.contents: dict[Any, int | None] = {}
        self.suspended: set[Any] = set()
        self.count = 0

    def pick(self, which: int, among: Any = None) -> Any:
        found = list(self.contents if among is None else among)
        return found[which % len(found)] if found else None

    def usable(self) -> list[Any]:
        return [buffer for buffer in self.contents if buffer not in self.suspended]

    def of_tag(self, tag: str | None) -> set[Any]:
        return {buffer for buffer in self.contents if tag is None or buffer.tag == tag}

    @rule(size=SIZES, tag=TAGS, stream=st.integers(0, 2))
    def allocate(self, size: int, tag: str | None, stream: int) -> None:
        try:
            buffer = self.pool.allocate(size, tag=tag, stream=[None, *self.streams][stream])
        except OutOfMemory:
            return
        self.count += 1
        buffer.fill(self.count % 256)
        self.contents[buffer] = self.count % 256

    @precondition(lambda self: self.usable())
    @rule(which=WHICH, stream=st.integers(0, 1))
    def write(self, which: int, stream: int) -> None:
        """In order: after the buffer's own stream, which then waits for it."""
        buffer = self.pick(which, self.usable())
        self.pool.device.synchronize()
        self.count += 1
        buffer.fill(self.count % 256, stream=self.streams[stream])
        self.contents[buffer] = self.count % 256
        self.streams[stream].synchronize()

    @precondition(lambda self: self.usable())
    @rule(which=WHICH)
    def read(self, which: int) -> None:
        self.verify(self.pick(which, self.usable()))

    def verify(self, buffer: Any) -> None:
        expected = self.contents[buffer]
        found = bytearray(buffer.size)
        self.pool.device.synchronize()
        buffer.copy_to(found, stream=self.streams[0])  # its own stream may be closed
        assert expected is None or found == bytes([expected]) * buffer.size

    @precondition(lambda self: self.contents)
    @rule(which=WHICH)
    def free(self, which: int) -> None:
        buffer = self.pick(which)
        del self.contents[buffer]
        self.suspended.discard(buffer)
        buffer.free()

    @rule(tag=TAGS, keep=KEEPS)
    def suspend(self, tag: str | None, keep: str) -> None:
        new = self.of_tag(tag) - self.suspended
        addresses = {buffer: buffer.ptr for buffer in self.contents}
        try:
            self.pool.suspend(tag, keep, store=self.store)
        except OutOfMemory as error:
            assert keep == "host"
            assert error.limit == STORE
            return
        self.suspended |= new
        if keep == "discard":
            self.contents.update(dict.fromkeys(new))
        assert {buffer: buffer.ptr for buffer in self.contents} == addresses
        if tag is None and not self.usable():  # with a tag, other streams are not waited for
            assert self.pool.stats().reserved == 0

    @rule(tag=TAGS)
    def resume(self, tag: str | None) -> None:
        before = self.pool.stats()
        try:
            taken = self.pool.resume(tag)
        except OutOfMemory as error:
            assert error.requested + self.pool.stats().reserved > LIMIT or error.requested <= before.suspended
            assert self.pool.stats().suspended == before.suspended
            return
        assert self.pool.stats().suspended == before.suspended - taken
        self.suspended -= self.of_tag(tag)
        for buffer in self.usable():
            self.verify(buffer)

    @rule()
    def trim(self) -> None:
        self.pool.trim(wait=True)
        self.store.trim(wait=True)

    @precondition(lambda self: len(self.streams) == 2)
    @rule()
    def renew_a_stream(self) -> None:
        self.streams.pop(0).close()
        self.streams.append(Stream("host"))

    @precondition(lambda self: self.suspended)
    @rule(which=WHICH)
    def touch_a_suspended_one(self, which: int) -> None:
        buffer = self.pick(which, sorted(self.suspended, key=lambda each: each.ptr))
        with pytest.raises(Suspended):
            buffer.fill(0)
        assert buffer.suspended

    @invariant()
    def all_is_well(self) -> None:
        if not hasattr(self, "contents"):
            return
        assert self.pool.check() is None
        assert self.store.check() is None
        stats = self.pool.stats()
        assert stats.reserved <= LIMIT
        assert stats.live == len(self.contents)
        assert stats["suspended.blocks"] == len(self.suspended)
        assert self.store.stats().allocated >= self.pool.raw_stats()["kept"]
        ranges = sorted((buffer.ptr, buffer.ptr + max(buffer.size, 1)) for buffer in self.contents)
        assert all(one[1] <= two[0] for one, two in pairwise(ranges))

    def teardown(self) -> None:
        if not hasattr(self, "contents"):
            return
        for buffer in self.usable():
            self.verify(buffer)
        for buffer in self.contents:
            buffer.free()
        assert self.pool.stats().allocated == 0
        self.pool.trim(wait=True)  # a freed block that is still zeroed holds its suspended pages
        assert self.pool.stats().suspended == self.pool.stats().pending == 0
        assert self.store.stats().allocated == 0
        self.pool.close()
        self.store.close()


TestSuspend = SuspendMachine.TestCase
TestSuspend.settings = settings(max_examples=60, stateful_step_count=40)
