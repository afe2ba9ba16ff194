"""Captured streams: what a graph uses is the graph's alone until the graph and all its launches are gone, and
the pool makes no call that a capture forbids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from stepping import Bench, benches

from vram import Device, DeviceError, Graph, OutOfMemory, Stream

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, MIB, 7 * MIB, 32 * MIB]
every_size = pytest.mark.parametrize("size", SIZES)
every_policy = pytest.mark.parametrize("cross_stream", ["ready", "wait", "never"])


def take_everything(bench: Bench, stream: Stream | None = None, size: int = 2 * MIB) -> list[Any]:
    """Every block that eager code can get."""
    taken = []
    with pytest.raises(OutOfMemory):
        while True:
            taken.append(bench.pool.allocate(size, stream=stream))
    return taken


@pytest.fixture(params=[True, False], ids=["pages", "plain"])
def make_bench(request: pytest.FixtureRequest) -> Iterator[Any]:
    with benches(pages=request.param, limit="128MiB") as make:
        yield make


def pages_of(buffer: Any) -> set[int]:
    """The pages it lies on; where there are none, the units of 512 bytes."""
    grain = 2 * MIB if buffer.device.pages else 512
    return set(range(buffer.ptr // grain, (buffer.ptr + max(1, buffer.size) - 1) // grain + 1))


@every_policy
@every_size
def test_memory_of_a_graph_is_not_handed_out_while_it_lives(
    make_bench: Any, size: int, cross_stream: str
) -> None:
    bench = make_bench(cross_stream=cross_stream)
    with bench.one.capture() as graph:
        buffer = bench.pool.allocate(size, stream=bench.one)
        buffer.fill(1)
        kept = pages_of(buffer)
        buffer.free()
    for stream in (None, bench.one, bench.two):
        for other in take_everything(bench, stream):
            assert not pages_of(other) & kept, "eager code was given memory that the graph writes"
    graph.launch()
    assert bench.backend.run_all()
    graph.close()
    whole = sum(each.size for each in take_everything(bench))
    assert whole >= 100 * MIB, "memory of a graph that is gone was not given back"


@every_size
def test_freed_memory_serves_the_same_capture_again(make_bench: Any, size: int) -> None:
    bench = make_bench()
    with bench.one.capture() as graph:
        addresses = set()
        for _ in range(20):
            buffer = bench.pool.allocate(size, stream=bench.one)
            buffer.fill(2)
            addresses.add(buffer.ptr)
            buffer.free()
    assert len(addresses) == 1
    graph.close()


def test_a_capture_is_not_given_what_the_stream_has_cached(make_bench: Any) -> None:
    bench = make_bench()
    warm = bench.pool.allocate(MIB, stream=bench.one)
    address = warm.ptr
    warm.free()
    with bench.one.capture() as graph:
        captured = bench.pool.allocate(MIB, stream=bench.one)
        assert captured.ptr != address
    again = bench.pool.allocate(MIB, stream=bench.one)
    assert again.ptr == address, "after the capture the stream has its cache back"
    del captured, graph


def test_launches_under_way_keep_the_memory_after_the_graph_is_closed(make_bench: Any) -> None:
    bench = make_bench()
    with bench.one.capture() as graph:
        buffer = bench.pool.allocate(64 * MIB, stream=bench.one)
        buffer.fill(3)
        kept = pages_of(buffer)
        buffer.free()
    graph.launch(bench.two)
    graph.close()
    for other in take_everything(bench):
        assert not pages_of(other) & kept
    assert bench.backend.run_all()
    assert sum(each.size for each in take_everything(bench)) >= 100 * MIB


def test_eager_work_on_a_graph_s_result_is_waited_for(make_bench: Any) -> None:
    bench = make_bench()
    with bench.one.capture() as graph:
        result = bench.pool.allocate(64 * MIB, stream=bench.one)
        result.fill(4)
    graph.launch()
    assert bench.backend.run_all()
    result.fill(5)  # eager, and still queued when both are gone
    result.free()
    graph.close()
    reserved = bench.pool.stats().reserved
    other = bench.pool.allocate(32 * MIB, stream=bench.two)
    assert bench.pool.stats().reserved > reserved, "taken while eager work still writes it"
    assert bench.backend.run_all()
    del other
    assert sum(each.size for each in take_everything(bench, bench.two)) >= 100 * MIB


def test_a_buffer_recorded_on_a_captured_stream_waits_for_the_graph(make_bench: Any) -> None:
    bench = make_bench()
    given = bench.pool.allocate(64 * MIB, stream=bench.two)
    with bench.one.capture() as graph:
        given.fill(6, stream=bench.one)
    kept = pages_of(given)
    given.free()
    for other in take_everything(bench, bench.two):
        assert not pages_of(other) & kept
    assert bench.pool.stats().pending == 64 * MIB
    graph.close()
    assert bench.backend.run_all()
    assert sum(each.size for each in take_everything(bench, bench.two)) >= 100 * MIB


def test_zeroing_does_not_disturb_a_graph(make_bench: Any) -> None:
    bench = make_bench(zero_on_free=True, zero_on_allocate=True)
    with bench.one.capture() as graph:
        buffer = bench.pool.allocate(MIB, stream=bench.one)
    fills = bench.backend.calls("fill")
    buffer.free()
    assert bench.backend.calls("fill") == fills, "eager zeros would race with a launch"
    graph.close()
    bench.pool.trim(wait=True)
    assert bench.backend.calls("fill") > fills
    assert bench.pool.stats().reserved == 0


def test_a_stream_may_be_closed_before_its_graph(make_bench: Any) -> None:
    bench = make_bench()
    with bench.one.capture() as graph:
        bench.pool.allocate(64 * MIB, stream=bench.one).fill(7)
    bench.one.close()
    graph.launch(bench.two)
    assert bench.backend.run_all()
    graph.close()
    assert bench.backend.run_all()
    assert sum(each.size for each in take_everything(bench)) >= 100 * MIB


def test_several_graphs_have_memory_of_their_own(make_bench: Any) -> None:
    bench = make_bench()
    graphs, pages = [], []
    for number in range(4):
        with bench.one.capture() as graph:
            buffer = bench.pool.allocate(8 * MIB, stream=bench.one)
            buffer.fill(number)
            pages.append(pages_of(buffer))
            buffer.free()
        graphs.append(graph)
    assert sum(len(each) for each in pages) == len(set().union(*pages))
    graphs[1].close()
    assert bench.backend.run_all()
    eager = take_everything(bench, size=8 * MIB)
    for number in (0, 2, 3):
        assert all(not pages_of(each) & pages[number] for each in eager)


def test_batches_and_warm_ups_during_a_capture(make_bench: Any) -> None:
    bench = make_bench()
    bench.pool.warmup({"64KiB": 50}, stream=bench.one)
    cached = bench.pool.stats().cached
    with bench.one.capture() as graph:
        buffers = bench.pool.allocate_batch(["64KiB"] * 20, stream=bench.one)
    assert bench.pool.stats().cached == cached, "the batch took what was cached for eager work"
    del buffers, graph


def test_a_capture_that_fails_leaves_nothing_behind(make_bench: Any) -> None:
    bench = make_bench()
    with pytest.raises(ZeroDivisionError), bench.one.capture() as graph:
        bench.pool.allocate(64 * MIB, stream=bench.one).fill(8)
        _ = 1 / 0
    assert not graph.ready
    with pytest.raises(DeviceError, match="not captured yet, or was closed"):
        graph.launch()
    assert sum(each.size for each in take_everything(bench)) >= 100 * MIB


def test_host_work_cannot_be_captured() -> None:
    with pytest.raises(DeviceError, match="cannot be captured"):
        Graph(Stream("host"))


def test_the_default_stream_cannot_be_captured() -> None:
    with pytest.raises(DeviceError, match="default stream cannot be captured"):
        Stream.default(Device.model("1GiB")).capture()
