"""Bytes survive: whatever is freed, split, merged and mapped around them, live memory keeps its contents."""

from __future__ import annotations

import random
from typing import Any

import pytest

from vram import Pool, Stream

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def readable(pool: Pool) -> Pool:
    if pool.device.kind != "host":
        pytest.skip("a model has addresses only")
    return pool


class Marked:
    """A buffer with a pattern of its own in it."""

    def __init__(self, pool: Pool, size: int, number: int, stream: Any = None) -> None:
        self.buffer = pool.allocate(size, stream=stream)
        self.pattern = number.to_bytes(4, "little") * 128
        pool.device.synchronize()  # zeros come in stream order, writes of the host do not
        with memoryview(self.buffer) as view:
            for place in self.places():
                view[place : place + 512] = self.pattern[: len(view[place : place + 512])]

    def places(self) -> list[int]:
        size = self.buffer.size
        return sorted({*range(0, size, max(512, size // 64 // 512 * 512)), max(0, size - 512) // 512 * 512})

    def assert_intact(self) -> None:
        with memoryview(self.buffer) as view:
            for place in self.places():
                part = bytes(view[place : place + 512])
                assert part == self.pattern[: len(part)], f"byte {place} of {self.buffer} changed"


def test_contents_survive_fragmentation_and_remapping(readable: Pool) -> None:
    dice = random.Random(5)
    sizes = [512, 5 * KIB, 300 * KIB, MIB, 2 * MIB, 3 * MIB + 512, 9 * MIB, 30 * MIB]
    held: list[Marked] = []
    for number in range(300):
        while held and sum(each.buffer.size for each in held) > 120 * MIB:
            gone = held.pop(dice.randrange(len(held)))
            gone.assert_intact()
            gone.buffer.free()
        held.append(Marked(readable, dice.choice(sizes), number))
        if number % 50 == 49:
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


def test_zeroing_pools_give_zeros(kind: Any) -> None:
    pool = kind.make(zero_on_allocate=True)
    if pool.device.kind != "host":
        pytest.skip("a model has addresses only")
    with pool, Stream(pool.device) as stream:
        for size in (100, 4 * KIB, MIB, 5 * MIB):
            for _ in range(3):
                buffer = pool.allocate(size, stream=stream)
                stream.synchronize()
                assert bytes(buffer).count(0) == size
                buffer.fill(255)
                buffer.free()
            for batched in pool.allocate_batch([size] * 3, stream=stream):
                stream.synchronize()
                assert bytes(batched).count(0) == size
                batched.fill(255)


def test_memory_zeroed_on_free_holds_no_secret(kind: Any) -> None:
    pool = kind.make(zero_on_free=True, zero_on_allocate=False)
    if pool.device.kind != "host":
        pytest.skip("a model has addresses only")
    with pool:
        for size in (4 * KIB, MIB, 5 * MIB):
            buffer = pool.allocate(size)
            buffer.fill(255)
            buffer.free()
            pool.device.synchronize()
            again = pool.allocate(size)
            assert bytes(again).count(0) == size
