"""Garbage collection anywhere: finalizers that use the pool at work, and nothing left behind."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from waiting import PATIENCE

import vram
from vram import OutOfMemory, Pool, Stream

KIB, MIB = 1 << 10, 1 << 20
TIMEOUT = PATIENCE


@pytest.fixture
def eager_collector() -> Iterator[None]:
    """Collect at nearly every allocation of an object."""
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)


class Cyclic:
    """Garbage that only the collector finds, and whose end uses the pool."""

    def __init__(self, pool: Pool, size: int, stream: Any = None) -> None:
        self.me = self
        self.pool, self.size = pool, size
        self.buffer = pool.allocate(size, stream=stream)

    def __del__(self) -> None:
        self.buffer.free()
        self.pool.allocate(self.size)
        self.pool.stats()


@pytest.mark.usefixtures("eager_collector")
@pytest.mark.parametrize("options", [{}, {"stream_cache": 0}, {"pages": False}, {"stacks": "python"}])
def test_finalizers_may_free_and_allocate_in_the_pool_at_work(options: dict[str, Any]) -> None:
    with vram.Pool("host", **options) as pool, Stream("host") as stream:
        for number in range(300):
            Cyclic(pool, (number % 7) * 300 * KIB, stream if number % 3 else None)
            pool.allocate_batch([100, 4 * KIB])
            pool.snapshot()
        gc.collect()
        assert pool.stats().live == 0 and pool.check() is None


@pytest.mark.usefixtures("eager_collector")
def test_finalizers_on_every_thread_at_once() -> None:
    errors: list[BaseException] = []
    with vram.Pool("host") as pool:

        def churn() -> None:
            try:
                for number in range(150):
                    Cyclic(pool, number * 100)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=churn) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        gc.collect()
        assert not errors and pool.stats().live == 0 and pool.check() is None


def test_a_callback_may_collect_garbage_that_frees() -> None:
    with vram.Pool("host", limit="32MiB") as pool:
        gc.disable()
        try:
            for _ in range(2):
                Cyclic(pool, 8 * MIB)
            pool.on_oom(lambda: gc.collect() > 0)
            assert pool.allocate(24 * MIB).size == 24 * MIB
        finally:
            gc.enable()
        gc.collect()
        assert pool.check() is None


def test_a_callback_may_drop_itself_and_its_pool() -> None:
    pool = vram.Pool("host", limit="4MiB")
    gone = weakref.ref(pool)

    handles: list[Any] = []

    def callback(size: int) -> bool:
        handles.pop().remove()
        gc.collect()
        return False

    handles.append(pool.on_oom(callback))
    with pytest.raises(OutOfMemory):
        pool.allocate("8MiB")
    del pool, callback
    gc.collect()
    assert gone() is None


def test_a_callback_whose_end_uses_the_pool() -> None:
    """The callback is released while no lock of the pool is held."""

    class Callback:
        def __init__(self, pool: Pool) -> None:
            self.pool, self.buffer = weakref.ref(pool), pool.allocate(4 * KIB)

        def __call__(self, size: int, stream: int) -> bool:
            return False

        def __del__(self) -> None:
            pool = self.pool()
            if pool is not None:
                pool.raw_stats()
            ended.append(1)

    ended: list[int] = []
    pool = vram.Pool("host")
    pool.set_oom_callback(Callback(pool))
    pool.set_oom_callback(Callback(pool))
    assert ended == [1]
    pool.set_oom_callback(None)
    assert ended == [1, 1]
    pool.set_oom_callback(Callback(pool))
    pool.close()
    del pool
    gc.collect()
    assert ended == [1, 1, 1]


def test_closing_while_another_thread_asks() -> None:
    """Closing releases the callback, never with a lock that a thread holding the GIL may want."""
    for _ in range(30):
        pool = vram.Pool("host")
        pool.allocate(4 * KIB).free()
        pool.on_oom(lambda: False)
        stop = threading.Event()

        def ask(pool: Pool = pool, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                pool.stats()

        thread = threading.Thread(target=ask)
        thread.start()
        pool.close()
        stop.set()
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def test_a_pool_in_a_cycle_is_collected() -> None:
    class Owner:
        def __init__(self) -> None:
            self.pool = vram.Pool("host")
            self.pool.on_oom(self.release)
            self.buffer = self.pool.allocate(MIB)

        def release(self) -> bool:
            return bool(self.buffer)

    owner = Owner()
    gone = weakref.ref(owner.pool)
    del owner
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_a_million_cycles_leave_nothing_behind() -> None:
    pool = vram.Pool("host")
    allocate, malloc, free = pool.allocate, pool.malloc, pool.free

    def cycle(count: int) -> None:
        for _ in range(count):
            allocate(4 * KIB)
            free(malloc(64 * KIB))

    cycle(10_000)
    gc.collect()
    blocks, resident, reserved = sys.getallocatedblocks(), resident_bytes(), pool.stats().reserved
    cycle(500_000)
    gc.collect()
    assert sys.getallocatedblocks() - blocks < 200
    assert resident_bytes() - resident < 2 * MIB
    assert pool.stats().reserved == reserved and pool.stats().live == 0
    assert pool.check() is None
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"stream_cache": 0}, {"journal": 1000}, {"stacks": "python"}])
def test_slow_paths_leave_nothing_behind(options: dict[str, Any]) -> None:
    with vram.Pool("host", limit="64MiB", **options) as pool, Stream("host") as stream:

        def cycle(count: int) -> None:
            for number in range(count):
                buffer = pool.allocate(3 * MIB + number % 5 * 64 * KIB, tag="tag", stream=stream)
                buffer.record_stream(None)
                with memoryview(buffer):
                    pass
                pool.allocate_batch([100, 200 * KIB])
                pool.stats()
                if number % 10 == 0:
                    with pytest.raises(OutOfMemory):
                        pool.allocate("1GiB")
                    pool.snapshot()
                    pool.trim()
                    Stream("host").close()

        cycle(200)
        gc.collect()
        blocks, resident = sys.getallocatedblocks(), resident_bytes()
        cycle(1000)
        gc.collect()
        assert sys.getallocatedblocks() - blocks < 500
        assert resident_bytes() - resident < 4 * MIB
        assert pool.check() is None


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
