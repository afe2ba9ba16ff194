"""What went wrong in other allocators, each as a promise of this one, with the number of the public issue."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from programs import FORK, assert_quiet, run_program
from stepping import Bench
from waiting import PATIENCE

import vram
from vram import Device, DeviceError, Event, InvalidFree, OutOfMemory, Pool, Stream

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
TIMEOUT = PATIENCE


@pytest.fixture
def host() -> Iterator[Pool]:
    with vram.Pool("host") as pool:
        yield pool
        assert pool.check() is None


# ---- order --------------------------------------------------------------------------------------------


def test_record_stream_on_an_interior_pointer() -> None:
    """A view's address, inside an allocation, records the use of the whole (pytorch#27366)."""
    bench = Bench()
    address = bench.pool.malloc(8 * MIB, bench.one)
    bench.backend.work(bench.two.handle, 1, address, 8 * MIB)
    bench.pool.record_stream(address + 5 * MIB + 3, bench.two)
    bench.pool.free(address)
    assert bench.pool.stats().pending == 8 * MIB
    with pytest.raises((DeviceError, InvalidFree)):
        bench.pool.record_stream(address + 5 * MIB, bench.two)
    with pytest.raises((DeviceError, InvalidFree)):
        bench.pool.record_stream(512, bench.two)
    assert bench.pool.check() is None


def test_an_out_of_memory_retry_counts_blocks_pending_on_events() -> None:
    """Memory that only waits for an event serves before a request fails (pytorch#19219, #189504)."""
    bench = Bench(limit="64MiB")
    for number, stream in enumerate((bench.two, bench.three)):
        buffer = bench.pool.allocate("32MiB", stream=bench.one)
        bench.work(number, buffer, stream)
        buffer.record_stream(stream)
        buffer.free()
    assert bench.pool.stats().pending == 64 * MIB
    again = bench.pool.allocate("64MiB", stream=bench.one)
    assert again.size == 64 * MIB and set(bench.backend.executed()) == {0, 1}


def test_waiting_for_one_event_where_one_will_do() -> None:
    """A request waits for what it needs, not for every event there is (pytorch#171771)."""
    bench = Bench(limit="64MiB")
    for number in range(4):
        buffer = bench.pool.allocate("16MiB", stream=bench.one)
        bench.work(number, buffer, bench.two)
        buffer.record_stream(bench.two)
        buffer.free()
    bench.backend.work(bench.three.handle, 99)
    assert bench.pool.allocate("16MiB", stream=bench.one).size == 16 * MIB
    assert bench.backend.host_waits() == 1
    assert not {2, 3} & set(bench.backend.executed())


def test_a_merged_block_keeps_the_order_of_all_its_parts() -> None:
    """Neighbours freed at different times merge; the whole is as young as its youngest part (rmm#2489)."""
    for options in ({"cross_stream": "wait"}, {"cross_stream": "ready", "limit": "2MiB"}):
        bench = Bench(stream_cache=0, **options)
        quarters = bench.pool.allocate_batch([64 * KIB] * 4, stream=bench.one)
        bench.work(1, quarters[0], bench.one)
        quarters[0].free()
        bench.backend.step(bench.one.handle)
        bench.pool.coalesce()
        for number, quarter in enumerate(quarters[1:], 2):
            bench.work(number, quarter, bench.one)
            quarter.free()
        bench.pool.coalesce()
        taken = bench.pool.allocate(128 * KIB, stream=bench.two)
        assert taken.ptr in {quarter.ptr for quarter in quarters}, "the merged block did not serve"
        bench.work(9, taken, bench.two)
        while bench.backend.step(bench.two.handle):
            pass
        assert 9 not in bench.backend.executed(), "it ran before the work on its memory"
        assert bench.backend.run_all() and bench.pool.check() is None


def test_memory_that_came_by_waiting_and_goes_on_is_still_ordered() -> None:
    """Handed from stream to stream to stream, memory is used in that order (rmm#2489)."""
    bench = Bench(cross_stream="wait", limit="32MiB")
    for number, stream in enumerate((bench.one, bench.two, bench.three, bench.one)):
        buffer = bench.pool.allocate("32MiB", stream=stream)
        bench.work(number, buffer, stream)
        buffer.free()
    for stream in (bench.three, bench.two, bench.one) * 10:
        bench.backend.step(stream.handle)
    assert bench.backend.run_all() and bench.backend.executed() == [0, 1, 2, 3]


def test_an_event_of_another_device_is_refused() -> None:
    """An event is recorded on its own device only (rmm#1306)."""
    here, there = Device.model("1GiB"), Device.model("1GiB")
    with Stream(here) as ours, Stream(there) as theirs:
        with pytest.raises(DeviceError):
            Event(here).record(theirs)
        with pytest.raises(DeviceError):
            ours.wait_event(theirs.record_event())
        with vram.Pool(here) as pool:
            buffer = pool.allocate(MIB, stream=ours)
            with pytest.raises(DeviceError):
                buffer.record_stream(theirs)
            buffer.free()
            assert pool.stats().pending == 0


def test_threads_without_a_stream_of_their_own_share_the_default_one() -> None:
    """The handle 0 is one stream for all threads: nobody's private order hides behind it (cccl#878)."""
    with vram.Pool("host", limit="16MiB") as pool:
        gate, seen = threading.Event(), []
        default = Stream.default("host")
        first = pool.allocate("16MiB")
        default.launch(gate.wait, TIMEOUT)
        first.fill(1)
        first.free()

        def other_thread() -> None:
            second = pool.allocate("16MiB")
            second.fill(2)
            seen.append(default.query())
            gate.set()
            default.synchronize()
            seen.append(bytes(second) == b"\2" * (16 * MIB))

        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join(TIMEOUT)
        assert seen == [False, True]


# ---- threads, collector, exit -------------------------------------------------------------------------


def test_no_lock_is_held_while_the_interpreter_is_wanted() -> None:
    """A callback runs Python while other threads, holding the interpreter, use the pool (pytorch#97833)."""
    with vram.Pool("host", limit="16MiB") as pool:
        held, calls = [pool.allocate("16MiB")], []
        done = threading.Event()

        def others() -> None:
            while not done.is_set():
                pool.stats()
                pool.snapshot()
                pool.record_stream(held[0].ptr, 0) if held else None
                pool.set_limit(16 * MIB)

        def callback(size: int) -> bool:
            calls.append(size)
            return len(calls) > 20

        threads = [threading.Thread(target=others) for _ in range(2)]
        for thread in threads:
            thread.start()
        pool.on_oom(callback)
        try:
            for _ in range(20):
                with pytest.raises(OutOfMemory):
                    pool.allocate("1MiB")
        finally:
            done.set()
            for thread in threads:
                thread.join(TIMEOUT)
        assert len(calls) == 20 and not any(thread.is_alive() for thread in threads)


@pytest.mark.fork
def test_no_thread_outlives_the_allocator() -> None:
    """Threads of streams and of asynchronous requests end before what they use (pytorch#152008)."""
    assert_quiet(
        run_program(
            """
            import time, vram
            pool, stream = vram.Pool("host"), vram.Stream("host")
            buffers = [pool.allocate("1MiB", stream=stream) for _ in range(8)]
            futures = [pool.allocate_async("64KiB") for _ in range(100)]
            stream.launch(time.sleep, 0.1)
            for buffer in buffers:
                buffer.fill(1)
            """
        )
    )


@pytest.mark.fork
def test_no_device_call_after_the_interpreter_has_gone() -> None:
    """What is still held at exit is left to the system, not freed by destructors too late (rmm#2366)."""
    assert_quiet(
        run_program(
            """
            import builtins, vram
            class Late:
                def __init__(self):
                    self.pool = vram.Pool("host")
                    self.buffer = self.pool.allocate("1MiB")
                    self.event = vram.Stream("host").record_event()
                    self.me = self
            builtins.late = Late()
            kept = vram.Pool(vram.Device.model("1GiB")).allocate("1MiB")
            """
        )
    )


def test_a_free_racing_a_trim() -> None:
    """Blocks freed while others trim are neither lost nor given back twice (cupy#105)."""
    with vram.Pool("host") as pool:
        done = threading.Event()

        def trim() -> None:
            while not done.is_set():
                pool.trim()
                pool.coalesce()

        thread = threading.Thread(target=trim)
        thread.start()
        for number in range(600):
            with pool.allocate((number % 5 + 1) * 700 * KIB) as buffer, memoryview(buffer) as view:
                view[0] = view[-1] = 1
            pool.allocate(100)
        done.set()
        thread.join(TIMEOUT)
        assert pool.check() is None and pool.stats().live == 0
        pool.trim(wait=True)
        assert pool.stats().reserved == 0


def test_the_collector_re_entering_free() -> None:
    """A finalizer that frees in the pool runs in the middle of the pool's own calls (cupy#2074)."""
    import gc

    with vram.Pool("host") as pool:

        class Node:
            def __init__(self) -> None:
                self.me, self.buffer = self, pool.allocate(300 * KIB)

            def __del__(self) -> None:
                self.buffer.free()
                pool.allocate(64 * KIB)

        before = gc.get_threshold()
        gc.set_threshold(1, 1, 1)
        try:
            for _ in range(300):
                Node()
                pool.allocate_batch([100, 2 * MIB])
                pool.stats()
        finally:
            gc.set_threshold(*before)
        gc.collect()
        assert pool.stats().live == 0 and pool.check() is None


@pytest.mark.fork
def test_the_child_of_a_fork_frees_nothing_of_its_parent() -> None:
    """Inherited buffers are dropped in silence and the parent's memory is as it was."""
    assert_quiet(
        run_program(
            FORK,
            """
            import vram
            pool = vram.Pool("host")
            buffers = [pool.allocate("1MiB") for _ in range(4)]
            for buffer in buffers:
                buffer.copy_from(bytes([7]) * (1 << 20))
            del buffer

            def body():
                buffers.clear()
                pool.close()

            child(body)
            assert all(bytes(buffer) == bytes([7]) * (1 << 20) for buffer in buffers)
            assert pool.stats().live == 4 and pool.check() is None
            """,
        )
    )


# ---- sizes and owners ---------------------------------------------------------------------------------


def test_memory_is_freed_by_the_pool_that_gave_it(host: Pool) -> None:
    """A pointer of another pool is refused by name, and stays the other's (pytorch#146431)."""
    with vram.Pool("host") as other:
        theirs = other.malloc(MIB)
        with pytest.raises(InvalidFree):
            host.free(theirs)
        assert other.info(theirs)["requested"] == MIB
        other.free(theirs)


def test_the_size_given_to_free_must_be_that_of_the_allocation() -> None:
    """Where a size comes with a free, one that is not the allocation's is an error (pytorch#153109)."""
    manager = vram.get_memory_manager()
    address = manager.allocate_memory(MIB)
    with pytest.raises((InvalidFree, ValueError)):
        manager.free_memory(address, 2 * MIB)
    manager.free_memory(address, MIB)


def test_size_0_is_an_allocation_like_others(host: Pool) -> None:
    """It has an address, is counted, is freed once, and shares it with nobody (pytorch#159892, rmm#2312)."""
    addresses = [host.malloc(0) for _ in range(100)]
    assert len(set(addresses)) == 100 and all(addresses)
    assert host.stats().live == 100 and host.stats().requested == 0
    for address in addresses:
        host.free(address)
        with pytest.raises(InvalidFree):
            host.free(address)
    assert host.stats().live == 0


@pytest.mark.parametrize("below", [0, 1, 255, 511, 512, 2 * MIB - 1, 2 * MIB])
def test_rounding_a_size_up_does_not_wrap(host: Pool, below: int) -> None:
    """The largest sizes are out of memory, not tiny blocks (rmm#2451)."""
    for top in (2**64, 2**63, 2**41, 2**40):
        for align in (None, 2 * MIB):
            with pytest.raises(OutOfMemory):
                host.allocate(top - below, align=align)
        with pytest.raises(OutOfMemory):
            host.allocate_batch([top - below, top - below])
    assert host.stats().allocated == 0


@pytest.mark.parametrize("pages", [True, False])
def test_large_sizes_are_not_rounded_to_powers_of_two(pages: bool) -> None:
    """One byte above a power of two costs at most a page more, not twice the memory (pytorch#150517)."""
    with vram.Pool(Device.model("64GiB"), pages=pages) as pool:
        for size in (64 * MIB, GIB, 5 * GIB):
            buffer = pool.allocate(size + 1)
            assert pool.stats().allocated <= size + 512
            assert pool.stats().reserved <= size + 32 * MIB
            buffer.free()
            pool.trim(wait=True)
