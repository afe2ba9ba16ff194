"""Bytes survive: whatever is freed, split, merged and mapped around them, live memory keeps its contents."""

from __future__ import annotations

import random
from typing import Any

import pytest
from contents import read, require_contents, write

from effort import sample
from vram import Pool, Stream

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def readable(pool: Pool) -> Pool:
    require_contents(pool)
    return pool


class Marked:
    """A buffer with a pattern of its own in it."""

    def __init__(self, pool: Pool, size: int, number: int, stream: Any = None) -> None:
        self.buffer = pool.allocate(size, stream=stream)
        self.pattern = number.to_bytes(4, "little") * (size // 4)
        write(self.buffer, self.pattern)

    def assert_intact(self) -> None:
        assert read(self.buffer) == self.pattern, f"{self.buffer} changed"


def test_contents_survive_fragmentation_and_remapping(readable: Pool) -> None:
    dice = random.Random(5)
    sizes = [512, 5 * KIB, 300 * KIB, MIB, 2 * MIB, 3 * MIB + 512, 9 * MIB, 30 * MIB]
    held: list[Marked] = []
    for number in sample(range(200)):
        while held and sum(each.buffer.size for each in held) > 120 * MIB:
            gone = held.pop(dice.randrange(len(held)))
            gone.assert_intact()
            gone.buffer.free()
        held.append(Marked(readable, dice.choice(sizes), number))
        if number % 50 > 45:
            readable.trim(wait=True)
            assert readable.check() is None
    for each in held:
        each.assert_intact()


def test_contents_survive_other_streams_memory_moving(readable: Pool) -> None:
    dice = random.Random(6)
    with Stream(readable.device) as one, Stream(readable.device) as two:
        held: list[Marked] = []
        for number in range(200):
            if len(held) > 8:
                gone = held.pop(dice.randrange(len(held)))
                gone.assert_intact()
                gone.buffer.free()
            size = dice.choice([64 * KIB, MIB, 2 * MIB, 6 * MIB])
            held.append(Marked(readable, size, number, dice.choice([None, one, two])))
        for each in held:
            each.assert_intact()
        held.clear()


def test_large_blocks_from_the_pages_of_small_ones(readable: Pool) -> None:
    pieces = [Marked(readable, 2 * MIB, number) for number in range(32)]
    kept = pieces[::4]
    del pieces
    large = [Marked(readable, 16 * MIB, 100 + number) for number in range(3)]
    for each in (*kept, *large):
        each.assert_intact()
    if readable.raw_stats()["paged"]:
        assert readable.stats().reserved <= 66 * MIB, "free pages between live blocks were not used"


class Results:
    """Buffers that queued work fills with a number each; the oldest are read while newer work is queued."""

    def __init__(self) -> None:
        self._held: list[tuple[int, Any]] = []

    def add(self, number: int, buffer: Any) -> None:
        self._held.append((number, buffer))
        if len(self._held) > 20:
            self._assert_oldest()

    def assert_all(self) -> None:
        while self._held:
            self._assert_oldest()

    def _assert_oldest(self) -> None:
        number, buffer = self._held.pop(0)
        assert read(buffer) == bytes([number]) * buffer.size


def test_queued_work_keeps_the_memory_it_was_queued_with(readable: Pool) -> None:
    """Nothing waits: memory is freed and allocated again while fills and copies of it are still queued."""
    dice, results = random.Random(8), Results()
    with Stream(readable.device) as one:
        for number in range(100):
            size = dice.choice([4 * KIB, MIB, 3 * MIB])
            source, result = (readable.allocate(size, stream=one) for _ in range(2))
            source.fill(number)
            result.copy_from(source)
            source.free()
            results.add(number, result)
        results.assert_all()


def test_queued_copies_to_another_stream_keep_their_source(readable: Pool) -> None:
    dice, results = random.Random(9), Results()
    with Stream(readable.device) as one, Stream(readable.device) as two:
        for number in range(100):
            size = dice.choice([4 * KIB, MIB, 3 * MIB])
            source, result = readable.allocate(size, stream=one), readable.allocate(size, stream=two)
            source.fill(number)
            two.wait_stream(one)
            result.copy_from(source, stream=two)  # a use on another stream is recorded by itself
            source.free()
            results.add(number, result)
        results.assert_all()


def test_zeroing_pools_give_zeros(kind: Any) -> None:
    pool = kind.make(zero_on_allocate=True)
    require_contents(pool)
    with pool, Stream(pool.device) as stream:
        for size in (100, 4 * KIB, MIB, 5 * MIB):
            for _ in range(3):
                buffer = pool.allocate(size, stream=stream)
                assert read(buffer).count(0) == size
                buffer.fill(255)
                buffer.free()
            for batched in pool.allocate_batch([size] * 3, stream=stream):
                assert read(batched).count(0) == size
                batched.fill(255)


def test_memory_zeroed_on_free_holds_no_secret(kind: Any) -> None:
    pool = kind.make(zero_on_free=True, zero_on_allocate=False)
    require_contents(pool)
    with pool:
        for size in (4 * KIB, MIB, 5 * MIB):
            buffer = pool.allocate(size)
            buffer.fill(255)
            buffer.free()
            pool.device.synchronize()
            again = pool.allocate(size)
            assert read(again).count(0) == size
