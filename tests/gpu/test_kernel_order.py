"""Stream order with real kernels: each writes a pattern and a later one counts what differs.

A pool that hands memory out too early makes a check find another buffer's pattern. The last tests show that
it would be found: with a use that the pool is not told of, stale data is read, and race_check says so.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from work import Hold, Marked, Work

import vram
from vram import Device, OutOfMemory, Pool, Stream

pytestmark = pytest.mark.gpu

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 60 * KIB, MIB, 2 * MIB, 7 * MIB, 32 * MIB]
POLICIES = ["ready", "wait", "never"]

every_size = pytest.mark.parametrize("size", SIZES)
with_and_without_pages = pytest.mark.parametrize("pages", [True, False], ids=["pages", "plain"])
MakePool = Callable[..., Pool]


# ---- the own stream -----------------------------------------------------------------------------------


@with_and_without_pages
@pytest.mark.parametrize("stream_cache", [0, 4096])
def test_the_own_stream_reuses_without_synchronising(
    make_pool: MakePool, work: Work, device: Device, pages: bool, stream_cache: int
) -> None:
    pool = make_pool(pages=pages, stream_cache=stream_cache)
    dice, held, addresses = random.Random(1), deque[Marked](), []
    with Stream(device) as stream:
        for _ in range(400):
            if len(held) == 4:
                gone = held.popleft()
                gone.check()
                gone.buffer.free()
            held.append(Marked(pool, work, dice.choice(SIZES), stream))
            addresses.append(held[-1].buffer.ptr)
        for each in held:
            each.check()
        wrong, checked = work.take_counts()
        assert (wrong, checked > 0) == (0, True)
        assert len(set(addresses)) < 100, "memory was not reused, so nothing was shown"
        held.clear()


@every_size
def test_the_own_stream_reuses_while_the_work_still_runs(
    make_pool: MakePool, work: Work, device: Device, size: int
) -> None:
    pool = make_pool()
    with Stream(device) as stream:
        with Hold(stream):
            first = Marked(pool, work, size, stream)
            first.check()
            address = first.buffer.ptr
            first.buffer.free()
            second = Marked(pool, work, size, stream)
            second.check()
            assert second.buffer.ptr == address and not stream.query()
        assert work.take_counts() == (0, 2 * size)
        second.buffer.free()


# ---- several streams ----------------------------------------------------------------------------------


def run_on_streams(pool: Pool, work: Work, streams: list[Stream], steps: int, seed: int) -> None:
    """Buffers of random sizes, each used for a while on its stream and freed before the work has run."""
    dice, held = random.Random(seed), deque[Marked]()

    def let_oldest_go() -> None:
        gone = held.popleft()
        work.spin(0.05, gone.buffer.stream)
        gone.check()
        gone.buffer.free()

    for _ in range(steps):
        while sum(each.size for each in held) > 120 * MIB:
            let_oldest_go()
        try:
            held.append(Marked(pool, work, dice.choice(SIZES), dice.choice(streams)))
        except OutOfMemory:  # fragments that no other stream may have
            let_oldest_go()
    while held:
        let_oldest_go()


@with_and_without_pages
@pytest.mark.parametrize("cross_stream", POLICIES)
def test_streams_under_pressure_never_see_each_others_patterns(
    make_pool: MakePool, work: Work, device: Device, cross_stream: str, pages: bool
) -> None:
    pool = make_pool(cross_stream=cross_stream, pages=pages, limit="256MiB")
    streams = [Stream(device) for _ in range(4)]
    run_on_streams(pool, work, streams, 600, seed=2)
    wrong, checked = work.take_counts()
    assert wrong == 0 and checked > 1 << 30
    rungs = pool.stats().rungs
    crossed = rungs["finished_elsewhere"] + rungs["stream_wait"] + rungs["free_pages"]
    if cross_stream == "never":
        assert rungs["finished_elsewhere"] == rungs["stream_wait"] == 0
    else:
        assert crossed > 0, f"no memory went from stream to stream, so nothing was shown: {rungs}"
    for stream in streams:
        stream.close()


@every_size
@with_and_without_pages
def test_a_taker_waits_for_the_owners_kernels(
    make_pool: MakePool, work: Work, device: Device, size: int, pages: bool
) -> None:
    pool = make_pool(cross_stream="wait", stream_cache=0, pages=pages)
    with Stream(device) as one, Stream(device) as two:
        rest = [pool.allocate(size, stream=one) for _ in range(max(0, 2 * MIB // size - 1))]
        first = Marked(pool, work, size, one)
        with Hold(one):
            first.check()
            first.buffer.free()
            second = Marked(pool, work, size, two)
            second.check()
            assert pool.stats().rungs["stream_wait"] == 1 and not two.query()
        assert work.take_counts() == (0, 2 * size)
        second.buffer.free()
        rest.clear()


# ---- record_stream ------------------------------------------------------------------------------------


@every_size
@pytest.mark.parametrize("cross_stream", POLICIES)
def test_a_recorded_use_delays_reuse_until_its_kernels_have_finished(
    make_pool: MakePool, work: Work, device: Device, size: int, cross_stream: str
) -> None:
    pool = make_pool(cross_stream=cross_stream)
    with Stream(device) as one, Stream(device) as two:
        buffer = Marked(pool, work, size, one)
        address = buffer.buffer.ptr
        two.wait_stream(one)
        with Hold(two):
            buffer.check_on(two)
            buffer.buffer.free()
            assert pool.stats().pending == size
            others = [Marked(pool, work, size, one) for _ in range(3)]
            one.synchronize()
            assert address not in {each.buffer.ptr for each in others}
            assert pool.stats().pending == size
        assert work.take_counts() == (0, size)
        pool.coalesce()
        assert pool.stats().pending == 0
        others.clear()


# ---- programs that are wrong --------------------------------------------------------------------------


def read_late_without_telling(pool: Pool, work: Work, size: int, one: Stream, two: Stream, told: Any) -> bool:
    """Free memory while a kernel on another stream is still to read it; returns whether it was reused."""
    seed = work.new_seed()
    address = pool.malloc(size, one)
    work.fill(address, size, seed, one.handle)
    two.wait_stream(one)
    with Hold(two):
        work.check(address, size, seed, two.handle)
        told(address, two)
        pool.free(address)
        again = pool.malloc(size, one)
        work.fill(again, size, work.new_seed(), one.handle)
        one.synchronize()
    two.synchronize()
    pool.free(again)
    return again == address


def test_a_use_that_is_not_recorded_reads_stale_data(make_pool: MakePool, work: Work, device: Device) -> None:
    pool = make_pool()
    with Stream(device) as one, Stream(device) as two:
        for size in (4 * KIB, MIB, 7 * MIB):
            assert read_late_without_telling(pool, work, size, one, two, lambda address, stream: None)
            wrong, checked = work.take_counts()
            assert checked == size and wrong > size // 2, "the checks here cannot see stale data"


def test_the_same_program_is_right_once_the_use_is_recorded(
    make_pool: MakePool, work: Work, device: Device
) -> None:
    pool = make_pool()
    with Stream(device) as one, Stream(device) as two:
        for size in (4 * KIB, MIB, 7 * MIB):
            reused = read_late_without_telling(pool, work, size, one, two, pool.record_stream)
            assert work.take_counts() == (0, size) and not reused


def test_race_check_reports_the_use_that_is_not_recorded(
    make_pool: MakePool, work: Work, device: Device
) -> None:
    pool = make_pool()
    with Stream(device) as one, Stream(device) as two:
        with vram.race_check("collect") as checker:

            def told(address: int, stream: Stream) -> None:
                checker.use(address, stream, writes=False)

            read_late_without_telling(pool, work, MIB, one, two, told)
        assert work.take_counts()[0] > 0
        assert [race.kind for race in checker.races] == ["free"]
        assert (checker.races[0].size, checker.races[0].used_on) == (MIB, two.handle)
