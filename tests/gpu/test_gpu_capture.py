"""CUDA graphs: inside a capture the pool makes no forbidden call, and what a graph uses stays its own.

Captured by PyTorch in its strictest mode, and by vram itself.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest
from work import Marked, Work

from vram import Device, Pool, Stream

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other libraries' warnings are theirs

MIB = 1 << 20
LONGEST = 10.0  # seconds until a graph that was destroyed must have given its memory back
MakePool = Callable[..., Pool]


class Capture(Protocol):
    """Somebody's graph: captured once in a `with` block of `capturing`, replayed, destroyed."""

    stream: Any
    handle: int

    def capturing(self) -> contextlib.AbstractContextManager[object]: ...
    def replay(self) -> None: ...
    def destroy(self) -> None: ...


class TorchCapture:
    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.stream = torch.cuda.Stream()
        self.handle = self.stream.cuda_stream
        self.graph = torch.cuda.CUDAGraph()

    def capturing(self) -> contextlib.AbstractContextManager[object]:
        # "global": a forbidden call from any thread of the process would end the capture.
        return self._torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="global")

    def replay(self) -> None:
        with self._torch.cuda.stream(self.stream):
            self.graph.replay()

    def destroy(self) -> None:
        self._torch.cuda.synchronize()
        self.graph.reset()


class OwnCapture:
    def __init__(self, device: Device) -> None:
        self.stream = Stream(device)
        self.handle = self.stream.handle
        self.graph: Any = None

    @contextlib.contextmanager
    def capturing(self) -> Iterator[object]:
        with self.stream.capture() as self.graph:
            yield self.graph

    def replay(self) -> None:
        self.graph.launch()

    def destroy(self) -> None:
        self.stream.synchronize()
        self.graph.close()


@pytest.fixture(params=["torch", "vram"])
def make_capture(request: pytest.FixtureRequest, device: Device) -> Callable[[], Capture]:
    if request.param == "vram":
        return lambda: OwnCapture(device)
    torch = request.getfixturevalue("torch")
    return lambda: TorchCapture(torch)


@contextlib.contextmanager
def captured(pool: Pool, capture: Capture) -> Iterator[None]:
    """A capture; the pool finds out by itself."""
    with capture.capturing():
        yield


def overlaps(buffer: Any, ranges: list[tuple[int, int]]) -> bool:
    return any(
        buffer.ptr < start + size and start < buffer.ptr + max(1, buffer.size) for start, size in ranges
    )


def fill_up(pool: Pool, work: Work, size: int, stream: Any = None) -> list[Marked]:
    """Take all that the limit allows, with patterns."""
    held: list[Marked] = []
    with contextlib.suppress(MemoryError):
        while True:
            held.append(Marked(pool, work, size, stream))
    return held


def trimmed_to_nothing(pool: Pool) -> bool:
    """Whether everything goes back; what a graph held comes late, from a thread of the driver's."""
    until = time.monotonic() + LONGEST
    while time.monotonic() < until:
        gc.collect()
        pool.device.synchronize()
        pool.trim(wait=True)
        if pool.stats().reserved == 0:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("pages", [True, False], ids=["pages", "plain"])
@pytest.mark.parametrize("size", [4096, MIB, 5 * MIB, 40 * MIB])
def test_what_is_allocated_in_a_capture_works_at_every_replay(
    make_pool: MakePool, work: Work, make_capture: Callable[[], Capture], pages: bool, size: int
) -> None:
    pool, capture = make_pool(pages=pages), make_capture()
    with captured(pool, capture):
        first = Marked(pool, work, size, capture.stream)
        first.check()
        second = Marked(pool, work, size, capture.stream)
        second.check()
        first.check()
    assert work.take_counts() == (0, 0), "captured work ran"
    for _ in range(3):
        capture.replay()
    assert work.take_counts() == (0, 3 * 3 * size)
    assert first.buffer.ptr != second.buffer.ptr and pool.check() is None
    capture.destroy()


def test_growth_in_a_capture_is_allowed_and_so_is_everything_else(
    make_pool: MakePool, work: Work, device: Device, make_capture: Callable[[], Capture]
) -> None:
    """Every call that a program may make in the middle: none of them ends the capture."""
    pool, capture = make_pool(limit="512MiB"), make_capture()
    with Stream(device) as other:
        before = Marked(pool, work, 7 * MIB, other)
        device.synchronize()
        with captured(pool, capture):
            kept = Marked(pool, work, 70 * MIB, capture.stream)
            eager = Marked(pool, work, 70 * MIB, other)
            eager.check()
            eager.buffer.free()
            before.buffer.free()
            pool.stats(), pool.snapshot(), pool.check()
            pool.trim()
            pool.coalesce()
            batch = pool.allocate_batch([MIB] * 4, stream=capture.stream)
            assert device.free_memory > 0
            del batch
            kept.check()
        capture.replay()
        assert work.take_counts() == (0, 2 * 70 * MIB)
        assert pool.check() is None
        capture.destroy()


def test_memory_freed_in_a_capture_serves_again_inside_it(
    make_pool: MakePool, work: Work, make_capture: Callable[[], Capture]
) -> None:
    pool, capture = make_pool(), make_capture()
    addresses = []
    with captured(pool, capture):
        for _ in range(5):
            each = Marked(pool, work, 5 * MIB, capture.stream)
            each.check()
            addresses.append(each.buffer.ptr)
            each.buffer.free()
    assert len(set(addresses)) == 1
    for _ in range(3):
        capture.replay()
    assert work.take_counts() == (0, 3 * 5 * 5 * MIB)
    capture.destroy()


@pytest.mark.parametrize("freed", ["inside", "after", "kept"])
@pytest.mark.parametrize("size", [MIB, 6 * MIB])
def test_memory_of_a_graph_is_nobody_elses_while_it_lives(
    make_pool: MakePool, work: Work, make_capture: Callable[[], Capture], freed: str, size: int
) -> None:
    pool, capture = make_pool(limit="128MiB"), make_capture()
    with captured(pool, capture):
        buffers = [Marked(pool, work, size, capture.stream) for _ in range(6)]
        for each in buffers:
            each.check()
        ranges = [(each.buffer.ptr, size) for each in buffers]
        if freed == "inside":
            buffers.clear()
    if freed == "after":
        buffers.clear()

    for stream in (None, capture.stream):
        held = fill_up(pool, work, size, stream)
        assert len(held) > 6 and not any(overlaps(each.buffer, ranges) for each in held)
        capture.replay()
        capture.replay()
        pool.device.synchronize()
        for each in held:
            each.check()
        assert work.take_counts() == (0, 2 * 6 * size + len(held) * size)
        held.clear()
        pool.trim(wait=True)
        assert pool.stats().reserved >= 6 * size, "memory of a living graph went back to the device"
    capture.destroy()


def test_memory_used_by_a_graph_and_recorded_stays_until_the_graph_is_gone(
    make_pool: MakePool, work: Work, device: Device, make_capture: Callable[[], Capture]
) -> None:
    pool, capture = make_pool(limit="64MiB"), make_capture()
    with Stream(device) as other:
        eager = Marked(pool, work, 6 * MIB, other)
        device.synchronize()
        with captured(pool, capture):
            work.check(eager.buffer.ptr, eager.size, eager.seed, capture.handle)
            eager.buffer.record_stream(capture.stream)
        ranges = [(eager.buffer.ptr, eager.size)]
        eager.buffer.free()
        for stream in (None, other):
            held = fill_up(pool, work, 6 * MIB, stream)
            assert held and not any(overlaps(each.buffer, ranges) for each in held)
            capture.replay()
            assert work.take_counts() == (0, 6 * MIB)
            held.clear()
        capture.destroy()
        assert trimmed_to_nothing(pool)


@pytest.mark.parametrize("freed", ["inside", "after"])
def test_memory_of_a_graph_returns_when_the_graph_is_gone(
    make_pool: MakePool, work: Work, make_capture: Callable[[], Capture], freed: str
) -> None:
    pool, capture = make_pool(), make_capture()
    with captured(pool, capture):
        buffers = [Marked(pool, work, 5 * MIB, capture.stream) for _ in range(4)]
        if freed == "inside":
            buffers.clear()
    capture.replay()
    buffers.clear()
    pool.device.synchronize()
    pool.trim(wait=True)
    assert pool.stats().reserved >= 20 * MIB and pool.stats().allocated == 0
    capture.destroy()
    assert trimmed_to_nothing(pool), f"{pool.stats()} after the graph was destroyed"


def test_many_graphs_come_and_go(
    make_pool: MakePool, work: Work, make_capture: Callable[[], Capture]
) -> None:
    pool = make_pool(limit="256MiB")
    for _ in range(20):
        capture = make_capture()
        with captured(pool, capture):
            buffers = [Marked(pool, work, 5 * MIB, capture.stream) for _ in range(8)]
            for each in buffers:
                each.check()
            del buffers, each
        capture.replay()
        capture.destroy()
        assert work.take_counts() == (0, 8 * 5 * MIB)
    assert trimmed_to_nothing(pool) and pool.check() is None


def test_eager_work_on_the_stream_goes_on_after_a_capture(
    make_pool: MakePool, work: Work, make_capture: Callable[[], Capture]
) -> None:
    pool, capture = make_pool(), make_capture()
    before = Marked(pool, work, 3 * MIB, capture.stream)
    with captured(pool, capture):
        inside = Marked(pool, work, 3 * MIB, capture.stream)
        inside.check()
    after = Marked(pool, work, 3 * MIB, capture.stream)
    capture.replay()
    before.check()
    after.check()
    assert work.take_counts() == (0, 3 * 3 * MIB)
    assert len({before.buffer.ptr, inside.buffer.ptr, after.buffer.ptr}) == 3
    capture.destroy()
