"""Stream order: when memory freed on one stream may serve again, there and elsewhere.

On model devices nothing happens until the test steps it, so "still running" and "finished" are exact; on the
host and on CUDA devices the same is shown with work that really runs beside the program, and real bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from contents import read
from stepping import Bench, benches
from waiting import PATIENCE

import vram
from vram import OutOfMemory, Pool, Stream

KIB, MIB = 1 << 10, 1 << 20
TIMEOUT = PATIENCE
SIZES = [4 * KIB, MIB, 2 * MIB, 7 * MIB, 32 * MIB]


def take_all(bench: Bench, size: int, stream: Stream) -> tuple[Any, list[Any]]:
    """A buffer of `size`, and the rest of the pages it is on."""
    first, *rest = (bench.pool.allocate(size, stream=stream) for _ in range(max(1, 2 * MIB // size)))
    return first, rest


@pytest.fixture(params=[True, False], ids=["pages", "plain"])
def make_bench(request: pytest.FixtureRequest) -> Iterator[Any]:
    with benches(pages=request.param) as make:
        yield make


every_policy = pytest.mark.parametrize("cross_stream", ["ready", "wait", "never"])
every_size = pytest.mark.parametrize("size", SIZES)


# ---- the own stream -----------------------------------------------------------------------------------


@every_policy
@every_size
@pytest.mark.parametrize("stream_cache", [0, 4096])
def test_the_own_stream_reuses_at_once(
    make_bench: Any, cross_stream: str, size: int, stream_cache: int
) -> None:
    bench = make_bench(cross_stream=cross_stream, stream_cache=stream_cache)
    first = bench.pool.allocate(size, stream=bench.one)
    reserved = bench.reserved
    for number in range(5):
        bench.work(number, first, bench.one)
        address = first.ptr
        first.free()
        first = bench.pool.allocate(size, stream=bench.one)
        assert first.ptr == address
    assert bench.reserved == reserved and bench.backend.counts()["queued"] >= 5
    assert bench.backend.host_waits() == 0


# ---- another stream -----------------------------------------------------------------------------------


@every_size
def test_ready_takes_from_another_stream_only_what_has_finished(make_bench: Any, size: int) -> None:
    bench = make_bench(cross_stream="ready", stream_cache=0)
    busy, _rest = take_all(bench, size, bench.one)
    bench.work(1, busy, bench.one)
    busy.free()
    reserved = bench.reserved
    held = bench.pool.allocate(size, stream=bench.two)
    assert bench.reserved > reserved, "memory was taken from a stream that still uses it"
    bench.finish()
    reserved = bench.reserved
    other = bench.pool.allocate(size, stream=bench.three)
    assert bench.reserved == reserved, "memory whose use has finished was not taken"
    assert {held.size, other.size} == {size} and bench.backend.host_waits() == 0


@every_size
def test_wait_takes_at_once_and_the_stream_waits(make_bench: Any, size: int) -> None:
    bench = make_bench(cross_stream="wait", stream_cache=0)
    busy, rest = take_all(bench, size, bench.one)
    bench.work(1, busy, bench.one)
    busy.free()
    reserved = bench.reserved
    taken = bench.pool.allocate(size, stream=bench.two)
    assert bench.reserved == reserved and bench.rung("stream_wait") == 1
    bench.work(2, taken, bench.two)
    bench.run_first(bench.two)
    assert bench.backend.executed() == []
    bench.finish()
    assert bench.backend.executed() == [1, 2] and bench.pool.stats().live == len(rest) + 1
    assert bench.backend.host_waits() == 0


@every_size
def test_never_leaves_other_streams_alone(make_bench: Any, size: int) -> None:
    bench = make_bench(cross_stream="never")
    bench.pool.allocate(size, stream=bench.one).free()
    bench.finish()
    reserved = bench.reserved
    held = bench.pool.allocate(size, stream=bench.two)
    assert bench.reserved > reserved and held.size == size
    assert bench.rung("finished_elsewhere") == bench.rung("stream_wait") == 0


@every_size
def test_ready_makes_the_stream_wait_rather_than_fail(make_bench: Any, size: int) -> None:
    limit = size + -size % (2 * MIB)
    bench = make_bench(cross_stream="ready", limit=limit)
    busy, rest = take_all(bench, size, bench.one)
    bench.work(1, busy, bench.one)
    busy.free()
    taken = bench.pool.allocate(size, stream=bench.two)
    bench.work(2, taken, bench.two)
    bench.run_first(bench.two)
    bench.finish()
    assert bench.backend.executed() == [1, 2] and bench.pool.stats().live == len(rest) + 1
    assert bench.backend.host_waits() == 0, "the host waited where a stream could"


def test_never_gives_other_streams_memory_back_before_it_fails(make_bench: Any) -> None:
    bench = make_bench(cross_stream="never", limit="32MiB")
    busy = bench.pool.allocate("32MiB", stream=bench.one)
    bench.work(1, busy, bench.one)
    busy.free()
    taken = bench.pool.allocate("32MiB", stream=bench.two)
    assert taken.size == 32 * MIB and bench.reserved == 32 * MIB
    assert bench.backend.executed() == [1], "memory went back to the device while work used it"


# ---- record_stream ------------------------------------------------------------------------------------


@every_policy
@every_size
def test_a_recorded_use_keeps_memory_pending_until_it_has_finished(
    make_bench: Any, cross_stream: str, size: int
) -> None:
    bench = make_bench(cross_stream=cross_stream)
    buffer = bench.pool.allocate(size, stream=bench.one)
    bench.work(1, buffer, bench.two)
    buffer.record_stream(bench.two)
    address = buffer.ptr
    buffer.free()
    assert bench.pool.stats().pending == max(512, size) and bench.pool.stats().allocated == 0
    held = [bench.pool.allocate(size, stream=bench.one) for _ in range(3)]
    assert address not in {each.ptr for each in held}
    assert bench.pool.stats().pending == max(512, size)
    bench.finish()
    held.append(bench.pool.allocate(size, stream=bench.one))
    bench.pool.coalesce()
    assert bench.pool.stats().pending == 0
    assert bench.backend.host_waits() == 0


def test_uses_on_several_streams_must_all_finish(make_bench: Any) -> None:
    bench = make_bench()
    buffer = bench.pool.allocate(2 * MIB, stream=bench.one)
    for number, stream in enumerate((bench.two, bench.three)):
        bench.work(number, buffer, stream)
        buffer.record_stream(stream)
        buffer.record_stream(stream)
    buffer.free()
    for stream in (bench.three, bench.two):
        bench.pool.coalesce()
        assert bench.pool.stats().pending == 2 * MIB
        bench.run_first(stream)
    bench.pool.coalesce()
    assert bench.pool.stats().pending == 0


def test_a_use_recorded_through_an_address_inside_counts(make_bench: Any) -> None:
    bench = make_bench()
    address = bench.pool.malloc(5 * MIB, bench.one)
    bench.pool.record_stream(address + 3 * MIB + 17, bench.two)
    bench.backend.work(bench.two.handle, 1, address, 5 * MIB)
    bench.pool.free(address)
    assert bench.pool.stats().pending == 5 * MIB
    bench.finish()
    bench.pool.coalesce()
    assert bench.pool.stats().pending == 0


def test_recording_the_own_stream_changes_nothing(make_bench: Any) -> None:
    bench = make_bench()
    buffer = bench.pool.allocate(2 * MIB, stream=bench.one)
    buffer.record_stream(bench.one)
    bench.work(1, buffer, bench.one)
    buffer.free()
    assert bench.pool.stats().pending == 0


def test_a_use_is_forgotten_with_the_allocation_it_was_of(make_bench: Any) -> None:
    bench = make_bench()
    buffer = bench.pool.allocate(4 * KIB, stream=bench.one)
    buffer.record_stream(bench.two)
    buffer.free()
    bench.finish()
    bench.pool.coalesce()
    again = bench.pool.allocate(4 * KIB, stream=bench.one)
    bench.backend.work(bench.two.handle, 1)
    again.free()
    assert bench.pool.stats().pending == 0


def test_out_of_memory_waits_for_pending_memory_first(make_bench: Any) -> None:
    bench = make_bench(limit="32MiB")
    buffer = bench.pool.allocate("32MiB", stream=bench.one)
    bench.work(1, buffer, bench.two)
    buffer.record_stream(bench.two)
    buffer.free()
    again = bench.pool.allocate("32MiB", stream=bench.one)
    assert again.size == 32 * MIB and bench.backend.executed() == [1]


def test_the_host_waits_for_just_enough(make_bench: Any) -> None:
    bench = make_bench(limit="64MiB")
    early, late = (bench.pool.allocate("32MiB", stream=bench.one) for _ in range(2))
    bench.work(1, early, bench.two)
    early.record_stream(bench.two)
    early.free()
    bench.work(2, late, bench.two)
    late.record_stream(bench.two)
    late.free()
    bench.backend.work(bench.three.handle, 3)
    again = bench.pool.allocate("32MiB", stream=bench.one)
    assert again.size == 32 * MIB
    assert 2 not in bench.backend.executed(), "waited for more than the request needed"


def test_a_report_says_what_is_pending_where(make_bench: Any) -> None:
    bench = make_bench(limit="32MiB")
    buffer = bench.pool.allocate("16MiB", stream=bench.one)
    held = bench.pool.allocate("16MiB", stream=bench.one)
    buffer.record_stream(bench.two)
    buffer.free()
    with pytest.raises(OutOfMemory) as caught:
        bench.pool.allocate("32MiB", stream=bench.one)
    assert caught.value.allocated == held.size


# ---- streams that end ---------------------------------------------------------------------------------


@every_policy
@every_size
def test_a_stream_that_ends_gives_its_memory_back(make_bench: Any, cross_stream: str, size: int) -> None:
    bench = make_bench(cross_stream=cross_stream)
    stream = Stream(bench.device)
    kept, gone = (bench.pool.allocate(size, stream=stream) for _ in range(2))
    gone.free()
    reserved = bench.reserved
    stream.close()
    assert bench.pool.check() is None
    bench.finish()
    default = bench.pool.allocate(size)
    assert bench.reserved == reserved, "the memory of a closed stream was not reused"
    kept.free()
    again = bench.pool.allocate(size)
    assert bench.reserved == reserved and {default.size, again.size} == {size}


def test_a_stream_that_ends_releases_what_was_pending_on_it(make_bench: Any) -> None:
    bench = make_bench()
    stream = Stream(bench.device)
    buffer = bench.pool.allocate(2 * MIB, stream=bench.one)
    buffer.record_stream(stream)
    bench.work(1, buffer, stream)
    buffer.free()
    assert bench.pool.stats().pending == 2 * MIB
    stream.close()
    bench.finish()
    bench.pool.coalesce()
    assert bench.pool.stats().pending == 0


def test_a_recorded_stream_may_end_before_the_free(make_bench: Any) -> None:
    bench = make_bench()
    stream = Stream(bench.device)
    buffer = bench.pool.allocate(2 * MIB, stream=bench.one)
    buffer.record_stream(stream)
    stream.close()
    buffer.free()
    bench.finish()
    bench.pool.coalesce()
    assert (bench.pool.stats().pending, bench.pool.stats().allocated) == (0, 0)


def test_many_streams_come_and_go(make_bench: Any) -> None:
    bench = make_bench()
    for _ in range(300):
        with Stream(bench.device) as stream:
            bench.work(1, bench.pool.allocate(MIB, stream=stream), stream)
        bench.finish()
    assert bench.reserved <= 40 * MIB
    assert len(bench.pool.stats().streams) < 10


def test_a_pool_of_a_dropped_stream_still_closes(make_bench: Any) -> None:
    bench = make_bench()
    buffer = bench.pool.allocate(MIB, stream=(stream := Stream(bench.device)))
    del stream
    buffer.free()


# ---- the same with real work and real bytes -----------------------------------------------------------
#
# A function that waits for the gate holds its stream, so "still running" is exact here too. One function at a
# time is held: a driver may run the functions of all streams on one thread.


@dataclass(frozen=True)
class Place:
    device: str
    pages: bool

    def pool(self, **options: Any) -> Pool:
        return vram.Pool(self.device, pages=self.pages, **options)

    def stream(self) -> Stream:
        return Stream(self.device)


@pytest.fixture(
    params=[
        pytest.param(Place("host", True), id="host-pages"),
        pytest.param(Place("host", False), id="host-plain"),
        pytest.param(Place("cuda:0", True), id="cuda-pages", marks=pytest.mark.gpu),
        pytest.param(Place("cuda:0", False), id="cuda-plain", marks=pytest.mark.gpu),
    ]
)
def place(request: pytest.FixtureRequest) -> Place:
    return request.param


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opened after the test at the latest: a stream that is held forever would hold everything."""
    event = threading.Event()
    yield event
    event.set()


@every_size
def test_a_taker_waits_for_the_owner(place: Place, gate: threading.Event, size: int) -> None:
    with (
        place.pool(cross_stream="wait", stream_cache=0) as pool,
        place.stream() as one,
        place.stream() as two,
    ):
        first, *rest = (pool.allocate(size, stream=one) for _ in range(max(1, 2 * MIB // size)))
        one.launch(gate.wait, TIMEOUT)
        first.fill(1)
        first.free()
        second = pool.allocate(size, stream=two)
        waits, busy = pool.stats().rungs["stream_wait"], second.fill(2) or not two.query()
        gate.set()
        assert waits == 1 and busy
        one.synchronize()
        assert read(second) == b"\2" * size and not any(each.freed for each in rest)


@every_size
def test_a_recorded_reader_sees_what_was_written(place: Place, gate: threading.Event, size: int) -> None:
    with place.pool() as pool, place.stream() as one, place.stream() as two:
        buffer = pool.allocate(size, stream=one)
        copy = pool.allocate(size, stream=two)
        buffer.fill(7)
        two.wait_stream(one)
        two.launch(gate.wait, TIMEOUT)
        copy.copy_from(buffer, stream=two)  # a use on another stream is recorded by itself
        buffer.free()
        held = [pool.allocate(size, stream=one) for _ in range(3)]
        for each in held:
            each.fill(9)
        one.synchronize()
        gate.set()
        assert read(copy) == b"\7" * size
        assert pool.check() is None


def test_closing_a_pool_waits_for_its_streams(place: Place, gate: threading.Event) -> None:
    done: list[int] = []
    pool = place.pool()
    with place.stream() as stream:
        buffer = pool.allocate(MIB, stream=stream)
        stream.launch(gate.wait, TIMEOUT)
        buffer.fill(1)
        stream.launch(done.append, 1)
        threading.Timer(0.05, gate.set).start()
        pool.close()
        assert done == [1]
