"""Threads: any thread may allocate, free what another allocated, and ask; nothing is lost or given twice."""

from __future__ import annotations

import pickle
import queue
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from waiting import PATIENCE, wait_until

import vram
from vram import DeviceError, InvalidFree, OutOfMemory, Pool, Stream

KIB, MIB = 1 << 10, 1 << 20
THREADS = 4
TIMEOUT = PATIENCE


def at_once(*works: Callable[[], None]) -> None:
    """Run all of them from one moment on; what one raises is raised here."""
    start = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        start.wait(TIMEOUT)
        work()

    with ThreadPoolExecutor(len(works)) as executor:
        for future in [executor.submit(run, work) for work in works]:
            future.result(TIMEOUT)


KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "plain": {"pages": False},
    "uncached": {"stream_cache": 0},
    "wait": {"cross_stream": "wait"},
    "journal": {"journal": 256},
}


@pytest.fixture(params=KINDS)
def pool(request: pytest.FixtureRequest) -> Any:
    with vram.Pool("host", limit="512MiB", **KINDS[request.param]) as made:
        yield made
        assert made.check() is None


@pytest.mark.parametrize("own_streams", [False, True])
def test_threads_free_what_others_allocated(pool: Pool, own_streams: bool) -> None:
    """Each block carries its owner's number; whoever frees it finds that number still there."""
    passed: queue.SimpleQueue[tuple[Any, bytes]] = queue.SimpleQueue()
    streams = [Stream("host") if own_streams else None for _ in range(THREADS)]

    def work(number: int) -> Callable[[], None]:
        def run() -> None:
            dice = random.Random(number)
            held: list[tuple[Any, bytes]] = []
            for step in range(400):
                size = dice.choice([64, 4 * KIB, 70 * KIB, MIB, 3 * MIB])
                mark = bytes([number, step % 256, dice.randrange(256), 7])
                buffer = pool.allocate(size, stream=streams[number])
                with memoryview(buffer) as view:
                    view[:4] = view[-4:] = mark
                held.append((buffer, mark))
                if dice.random() < 0.5:
                    passed.put(held.pop(dice.randrange(len(held))))
                while len(held) > 6 or (held and dice.random() < 0.3):
                    finish(*held.pop(dice.randrange(len(held))))
                if dice.random() < 0.5 and not passed.empty():
                    finish(*passed.get(timeout=TIMEOUT))
                if step % 100 == 50:
                    pool.stats()
                    pool.trim()

        return run

    def finish(buffer: Any, mark: bytes) -> None:
        with memoryview(buffer) as view:
            assert bytes(view[:4]) == bytes(view[-4:]) == mark, "memory was allocated twice"
        buffer.free()

    at_once(*(work(number) for number in range(THREADS)))
    while not passed.empty():
        finish(*passed.get())
    assert pool.stats().live == 0 and pool.stats().frees == THREADS * 400
    for stream in streams:
        if stream is not None:
            stream.close()


def test_one_block_is_freed_by_one_thread_only(pool: Pool) -> None:
    for size in (4 * KIB, 3 * MIB):
        for _ in range(50):
            address, outcomes = pool.malloc(size), []

            def free(address: int = address, outcomes: list[str] = outcomes) -> None:
                try:
                    pool.free(address)
                    outcomes.append("freed")
                except InvalidFree:
                    outcomes.append("refused")

            at_once(free, free, free)
            assert sorted(outcomes) == ["freed", "refused", "refused"]
    assert pool.stats().live == 0


def test_the_peak_is_exact_under_threads(pool: Pool) -> None:
    def work() -> None:
        for _ in range(300):
            pool.allocate(64 * KIB)

    at_once(*[work] * THREADS)
    assert 64 * KIB <= pool.stats().peak_allocated <= THREADS * 64 * KIB
    assert pool.stats().allocations == THREADS * 300 and pool.stats().allocated == 0


def test_limits_hold_under_threads() -> None:
    with vram.Pool("host", limit="32MiB") as pool:
        refused = []

        def work() -> None:
            held = []
            for _ in range(60):
                try:
                    held.append(pool.allocate(3 * MIB))
                except OutOfMemory:
                    refused.append(1)
                    held.clear()

        at_once(*[work] * THREADS)
        assert pool.stats().peak_reserved <= 32 * MIB and refused
        assert pool.stats().out_of_memory == len(refused) and pool.check() is None
        assert pool.allocate(30 * MIB).size == 30 * MIB


def test_settings_may_change_while_in_use(pool: Pool) -> None:
    done = threading.Event()

    def work() -> None:
        with Stream("host") as stream:
            for size in (100, 4 * KIB, 3 * MIB) * 100:
                pool.allocate(size, stream=stream).record_stream(None)
        done.set()

    def change() -> None:
        while not done.is_set():
            pool.limit = "400MiB"
            pool.reconfigure({"stream_cache": 8, "cross_stream": "wait", "release_threshold": 16 * MIB})
            pool.coalesce()
            pool.reconfigure({"stream_cache": 4096, "cross_stream": "ready", "zero_on_free": True})
            pool.trim()
            pool.reset_peak()
            pool.snapshot()
            pool.reconfigure({"zero_on_free": False})

    at_once(work, change)


def test_streams_end_while_others_allocate(pool: Pool) -> None:
    def work() -> None:
        for size in (4 * KIB, 2 * MIB, 300 * KIB) * 20:
            with Stream("host") as stream:
                buffer = pool.allocate(size, stream=stream)
                buffer.fill(1)
                buffer.record_stream(None)

    at_once(*[work] * THREADS)
    pool.device.synchronize()
    assert pool.stats().live == 0
    assert len(pool.stats().streams) < THREADS * 60


def test_closing_while_others_allocate() -> None:
    for _ in range(20):
        pool = vram.Pool("host")
        held = pool.allocate(MIB)

        def work(pool: Pool = pool) -> None:
            with pytest.raises(DeviceError) as caught:
                while True:
                    pool.allocate(3 * MIB)
                    pool.allocate(4 * KIB)
            assert caught.value.code == "closed"

        at_once(work, work, pool.close)
        assert pool.closed and not held.freed


def test_a_callback_frees_on_the_thread_that_asks() -> None:
    with vram.Pool("host", limit="16MiB") as pool:
        lock, hoard, callers = threading.Lock(), [pool.allocate(16 * MIB)], set()

        def release() -> bool:
            callers.add(threading.get_ident())
            with lock:
                return bool(hoard and hoard.pop())

        pool.on_oom(release)
        allocators: set[int] = set()

        def work() -> None:
            for _ in range(20):
                allocators.add(threading.get_ident())
                try:
                    buffer = pool.allocate(4 * MIB)
                except OutOfMemory:
                    continue  # another thread was quicker to take what was freed
                with lock:
                    hoard.append(buffer)

        at_once(*[work] * THREADS)
        assert callers and callers <= allocators


# ---- asynchronous allocation --------------------------------------------------------------------------


def test_asynchronous_allocations_under_load(pool: Pool) -> None:
    futures: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        for step in range(100):
            futures.put(pool.allocate_async(4 * KIB + step * 512, tag="async"))
            pool.allocate(4 * KIB)

    at_once(*[work] * THREADS)
    buffers = [futures.get().result(TIMEOUT) for _ in range(THREADS * 100)]
    assert len({buffer.ptr for buffer in buffers}) == THREADS * 100
    assert {buffer.tag for buffer in buffers} == {"async"}
    del buffers
    wait_until(lambda: pool.stats().live == 0)  # threads that served them may hold the last a moment longer


def test_asynchronous_failures_come_with_the_future(pool: Pool) -> None:
    assert isinstance(pool.allocate_async("1GiB").exception(TIMEOUT), OutOfMemory)
    assert isinstance(pool.allocate_async(-1).exception(TIMEOUT), vram.ConfigError)
    assert pool.allocate_async("1MiB").result(TIMEOUT).size == MIB


def test_a_future_that_nobody_keeps_frees_its_buffer(pool: Pool) -> None:
    for _ in range(50):
        pool.allocate_async(MIB).result(TIMEOUT)
    wait_until(lambda: pool.stats().live == 0)


# ---- errors travel between processes ------------------------------------------------------------------


def test_errors_survive_pickling() -> None:
    with vram.Pool("host", limit="4MiB") as pool:
        failures = [
            lambda: pool.allocate("8MiB", tag="big"),
            lambda: pool.free(512),
            lambda: pool.allocate(1, stream=0x7777),
            lambda: pool.allocate(-1),
            lambda: vram.Pool("host", limits=1),
        ]
        for fail in failures:
            with pytest.raises(vram.VramError) as caught:
                fail()
            for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
                copy = pickle.loads(pickle.dumps(caught.value, protocol))
                assert type(copy) is type(caught.value)
                assert str(copy) == str(caught.value) and copy.facts == caught.value.facts


@pytest.mark.parametrize("options", [{}, {"zero_on_allocate": True}, {"pages": False}])
def test_memory_may_be_used_while_another_thread_closes_the_pool(options: dict[str, Any]) -> None:
    """Each use either happens before the memory goes or is refused; no memory that is gone is touched."""
    for _ in range(20):
        use_until_closed(vram.Pool("host", **options), Stream("host"))


def use_until_closed(pool: Pool, stream: Stream) -> None:
    buffers = [pool.allocate(64 * KIB, stream=where) for where in (None, stream)]
    target = bytearray(64 * KIB)

    def keep(use: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            with pytest.raises(DeviceError) as refused:
                while True:
                    use()
            assert refused.value.code == "closed"

        return run

    at_once(
        keep(lambda: buffers[0].fill(1)),
        keep(lambda: buffers[1].copy_from(buffers[0])),
        keep(lambda: buffers[0].copy_to(target)),
        keep(lambda: pool.allocate(16 * KIB, stream=stream)),
        pool.close,
    )
    assert pool.raw_stats()["live"] == 0


def test_no_view_is_made_of_memory_that_is_about_to_go() -> None:
    """A pool that waits for its streams to close lends no views meanwhile."""
    pool, stream = vram.Pool("host"), Stream("host")
    buffer = pool.allocate(64 * KIB)
    pool.allocate(KIB, stream=stream)
    release = threading.Event()
    stream.launch(release.wait, TIMEOUT)
    closing = threading.Thread(target=pool.close)
    closing.start()
    with pytest.raises(DeviceError):
        while not pool.closed:
            memoryview(buffer).release()
    assert not pool.closed
    release.set()
    closing.join(TIMEOUT)
    assert pool.closed
