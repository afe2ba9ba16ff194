"""What a pool says of itself is exact: sums, peaks, snapshots, and what the device itself counted."""

from __future__ import annotations

import random
from typing import Any

import pytest

from vram import DriverPool, OutOfMemory, PinnedPool, Pool, Stream

KIB, MIB = 1 << 10, 1 << 20
UNIT = 512


def rounded(size: int) -> int:
    return max(UNIT, -(-size // UNIT) * UNIT)


def assert_accounts_agree(pool: Pool) -> None:
    stats, snapshot = pool.stats(), pool.snapshot()
    known = stats.allocated + stats.cached + stats.pending + stats.free
    shared = isinstance(pool, DriverPool) and pool.is_default  # of which others hold the rest
    assert known <= stats.reserved if shared else known == stats.reserved
    by_state = {
        state: sum(block.size for block in snapshot.blocks(state)) for state in ("live", "cached", "pending")
    }
    assert by_state == {"live": stats.allocated, "cached": stats.cached, "pending": stats.pending}
    assert sum(1 for _ in snapshot.blocks("live")) == stats.live
    assert (snapshot.allocated, snapshot.reserved) == (stats.allocated, stats.reserved)
    assert stats.reserved <= stats.peak_reserved and stats.allocated <= stats.peak_allocated
    if pool.device.kind == "model" and not isinstance(pool, PinnedPool):
        backend: Any = pool.device.backend
        counts = backend.counts()
        assert stats.reserved == counts["page_bytes"] + counts["plain_bytes"]
    # What is free in a driver pool has no address that anybody else knows.
    if all(segment.plain for segment in snapshot.segments) and not isinstance(pool, DriverPool):
        assert sum(block.size for block in snapshot.blocks("free")) == stats.free


def assert_snapshot_tiles(pool: Pool) -> None:
    end = 0
    for segment in sorted(pool.snapshot().segments, key=lambda segment: segment.address):
        assert segment.address >= end, "segments overlap"
        place = segment.address
        for block in segment.blocks:
            assert block.address == place and block.size > 0
            assert block.state in ("live", "cached", "pending", "free")
            place += block.size
        assert place == segment.address + segment.size
        end = place


def churn(pool: Pool, steps: int, streams: list[Any], seed: int = 7) -> int:
    """Random allocations and frees; returns the exact peak of live bytes."""
    dice = random.Random(seed)
    held: list[Any] = []
    live = peak = 0
    for _ in range(steps):
        if held and dice.random() < 0.45:
            buffer = held.pop(dice.randrange(len(held)))
            live -= rounded(buffer.size)
            if dice.random() < 0.2:
                buffer.record_stream(dice.choice(streams))
            buffer.free()
        else:
            size = dice.choice([0, 1, 700, 4 * KIB, 60 * KIB, MIB, 3 * MIB])
            held.append(pool.allocate(size, stream=dice.choice(streams)))
            live += rounded(size)
            peak = max(peak, live)
        assert pool.stats().allocated == live
    return peak


def test_accounts_agree_at_every_step_of_a_random_program(pool: Pool) -> None:
    with Stream(pool.device) as one, Stream(pool.device) as two:
        for seed in range(3):
            churn(pool, 60, [None, one, two], seed)
            assert_accounts_agree(pool)
            assert_snapshot_tiles(pool)
            assert pool.check() is None
    assert_accounts_agree(pool)


def test_the_peak_is_exact_on_one_stream_and_on_several(pool: Pool) -> None:
    assert churn(pool, 150, [None]) == pool.stats().peak_allocated
    with Stream(pool.device) as one, Stream(pool.device) as two:
        pool.reset_peak()
        assert pool.stats().peak_allocated == 0
        assert churn(pool, 150, [None, one, two]) == pool.stats().peak_allocated


def test_the_peak_counts_hits_too(pool: Pool) -> None:
    pool.warmup({64 * KIB: 8})
    pool.reset_peak()
    held = [pool.allocate(64 * KIB) for _ in range(8)]
    del held
    again = [pool.allocate(64 * KIB) for _ in range(5)]
    assert pool.stats().peak_allocated == 8 * 64 * KIB and len(again) == 5
    pool.reset_peak()
    assert pool.stats().peak_allocated == 5 * 64 * KIB
    again.append(pool.allocate(64 * KIB))
    assert pool.stats().peak_allocated == 6 * 64 * KIB


def test_a_failed_request_leaves_the_accounts_alone(limited: Pool) -> None:
    held = limited.allocate(10 * MIB)
    before = limited.stats()
    for _ in range(3):
        with pytest.raises(OutOfMemory):
            limited.allocate(60 * MIB)
    after = limited.stats()
    assert (after.allocated, after.peak_allocated, after.live) == (held.size, before.peak_allocated, 1)
    assert after.out_of_memory == before.out_of_memory + 3
    assert after.peak_reserved <= 64 * MIB
    assert_accounts_agree(limited)


def test_a_snapshot_shows_every_allocation_with_its_facts(pool: Pool) -> None:
    with Stream(pool.device) as stream:
        small = pool.allocate(100, tag="small")
        large = pool.allocate(5 * MIB, stream=stream, tag="large")
        plain = pool.allocate(0)
        shown = {block.address: block for block in pool.snapshot().blocks("live")}
        assert set(shown) == {small.ptr, large.ptr, plain.ptr}
        assert (shown[small.ptr].requested, shown[small.ptr].size, shown[small.ptr].tag) == (
            100,
            512,
            "small",
        )
        assert (shown[large.ptr].stream, shown[large.ptr].tag) == (stream.handle, "large")
        assert (shown[plain.ptr].requested, shown[plain.ptr].tag) == (0, None)
        assert pool.snapshot().by_tag() == {"large": 5 * MIB, "small": 512, None: 512}


def test_every_allocation_is_served_by_one_rung(pool: Pool) -> None:
    with Stream(pool.device) as one:
        churn(pool, 200, [None, one])
    stats = pool.stats()
    assert sum(stats.rungs.values()) == stats.allocations
    assert stats.rungs["stream_cache"] == stats.stream_cache_hits


def test_memory_is_taken_only_when_needed(pool: Pool) -> None:
    assert pool.stats().reserved == 0
    pool.allocate(1)
    assert 0 < pool.stats().reserved <= 64 * MIB
