"""Calls made by work of a stream: none hangs, none crashes, and memory is not released under queued work."""

from __future__ import annotations

import gc
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import vram
from vram import _native

MiB = 1 << 20
SOON = 60.0


@pytest.fixture
def stream() -> Iterator[vram.Stream]:
    with vram.Stream("host") as made:
        yield made


def memory_of(backend: Any) -> int:
    return int(backend.total_bytes - backend.memory_info()[0])


def until(condition: Callable[[], bool]) -> None:
    """What another thread does has no moment; it must come, though."""
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


def own_host() -> vram.Device:
    """A host device that nobody else uses, so that its memory can be counted."""
    from vram.core.device import _Core

    return vram.Device._of(_Core("host", 0, "host", _native.HostBackend()))


class Gate:
    """Holds a stream's work until it is opened."""

    def __init__(self, stream: vram.Stream) -> None:
        self._event = threading.Event()
        stream.launch(self._event.wait)

    def open(self) -> None:
        self._event.set()


def drop(*_: object) -> None:
    pass


# ---- pools, arenas and growable buffers ------------------------------------------------------------------


def test_a_pool_dropped_by_work_goes_when_the_work_behind_it_is_done() -> None:
    device = own_host()
    stream = vram.Stream(device)
    pool = vram.Pool(device)
    x = pool.allocate("8MiB", stream=stream)
    first, last = Gate(stream), None
    stream.launch(drop, x)
    x.fill(2)
    seen = bytearray(1)
    stream.launch(_read_byte, x.ptr, seen)
    last = Gate(stream)
    del pool, x
    gc.collect()
    first.open()
    until(lambda: seen[0] == 2)
    assert memory_of(device.backend) > 0, "work is queued behind it"
    last.open()
    stream.synchronize()
    until(lambda: memory_of(device.backend) == 0)


def _read_byte(address: int, into: bytearray) -> None:
    import ctypes

    into[0] = ctypes.c_uint8.from_address(address).value


def _closed_by_work(thing: Any, stream: vram.Stream, queue: Callable[[], None]) -> None:
    gate = Gate(stream)
    stream.launch(thing.close)
    queue()
    gate.open()
    with pytest.raises(vram.DeviceError, match="from another thread") as refused:
        stream.synchronize()
    assert refused.value.code == "deadlock"


def test_a_pool_cannot_be_closed_by_work_that_other_work_stands_behind(stream: vram.Stream) -> None:
    pool = vram.Pool("host")
    x = pool.allocate("8MiB", stream=stream)
    _closed_by_work(pool, stream, lambda: x.fill(1))
    assert not pool.closed
    target = bytearray(8 * MiB)
    x.copy_to(target)
    assert set(target) == {1}
    pool.close()


def test_a_pool_can_be_closed_by_work_of_a_stream_it_does_not_know(stream: vram.Stream) -> None:
    pool = vram.Pool("host")
    x = pool.allocate("8MiB")
    x.fill(1)
    stream.launch(pool.close)
    stream.synchronize()
    assert pool.closed


def test_an_arena_is_not_closed_under_queued_work(stream: vram.Stream) -> None:
    pool = vram.Pool("host")
    made: list[vram.Arena] = []

    def work() -> None:
        arena = vram.Arena(pool, "4MiB", stream=stream)
        piece = arena.allocate(MiB)
        piece.fill(3)
        made.append(arena)
        del piece
        arena.close()

    stream.launch(work)
    with pytest.raises(vram.DeviceError) as refused:
        stream.synchronize()
    assert refused.value.code == "deadlock"
    del refused  # its traceback leads to the arena
    made.clear()
    gc.collect()
    assert pool.check() is None
    until(lambda: pool.stats().allocated == 0)
    pool.close()


def test_a_growable_buffer_is_closed_by_work_in_stream_order(stream: vram.Stream) -> None:
    pool = vram.Pool("host")
    buffer = vram.GrowableBuffer("64MiB", pool, size="8MiB", stream=stream)
    gate = Gate(stream)
    stream.launch(buffer.close)
    buffer.view().fill(4)
    gate.open()
    stream.synchronize()
    assert buffer.closed
    assert pool.check() is None
    pool.close()


def test_work_that_waits_for_a_stream_that_waits_for_it_is_refused() -> None:
    a, b = vram.Stream("host"), vram.Stream("host")
    gate = Gate(b)
    b.launch(a.synchronize)
    a.wait_stream(b)
    a.launch(drop, None)
    gate.open()
    with pytest.raises(vram.DeviceError) as refused:
        b.synchronize()
    assert refused.value.code == "deadlock"
    a.synchronize()


def test_of_two_works_that_wait_for_each_other_one_is_refused() -> None:
    a, b = vram.Stream("host"), vram.Stream("host")
    both = threading.Barrier(2)

    def wait_for(other: vram.Stream) -> None:
        both.wait()
        other.synchronize()

    a.launch(wait_for, b)
    b.launch(wait_for, a)
    refused = []
    for each in (a, b):
        try:
            each.synchronize()
        except vram.DeviceError as error:
            refused.append(error.code)
    assert refused == ["deadlock"]


def test_closing_a_pool_of_a_stream_that_waits_for_the_closing_work_is_refused() -> None:
    a, b = vram.Stream("host"), vram.Stream("host")
    pool = vram.Pool("host")
    x = pool.allocate("8MiB", stream=a)
    gate = Gate(b)
    b.launch(pool.close)
    a.wait_stream(b)
    x.fill(3)
    gate.open()
    with pytest.raises(vram.DeviceError) as refused:
        b.synchronize()
    assert refused.value.code == "deadlock"
    a.synchronize()
    pool.close()


def test_an_allocation_by_work_that_cannot_wait_runs_out_of_memory(stream: vram.Stream) -> None:
    pool = vram.Pool("host", limit="8MiB")
    x = pool.allocate("8MiB")
    x.record_stream(stream)
    gate = Gate(stream)
    stream.launch(pool.allocate, "8MiB")
    x.free()
    gate.open()
    with pytest.raises(vram.OutOfMemory):
        stream.synchronize()
    pool.allocate("8MiB")


# ---- copies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["copy_to", "copy_from"])
def test_a_host_copy_that_is_refused_is_not_done_later(stream: vram.Stream, method: str) -> None:
    pool = vram.Pool("host")
    x = pool.allocate(MiB, stream=stream)
    x.fill(1)
    memory = bytearray(b"\2" * MiB)
    gate = Gate(stream)
    stream.launch(getattr(x, method), memory)
    gate.open()
    with pytest.raises(vram.DeviceError) as refused:
        stream.synchronize()
    assert refused.value.code == "deadlock"
    stream.synchronize()
    assert set(memory) == {2}
    x.copy_to(memory)
    assert set(memory) == {1}


# ---- every call ------------------------------------------------------------------------------------------


def _things(stream: vram.Stream) -> dict[str, Any]:
    pool = vram.Pool("host")
    event = vram.Event("host")
    event.record(stream)
    return {
        "Device": vram.Device("host"),
        "Stream": stream,
        "Event": event,
        "Pool": pool,
        "Buffer": pool.allocate(MiB, stream=stream),
        "GrowableBuffer": vram.GrowableBuffer("8MiB", pool, size="2MiB", stream=stream),
        "Arena": vram.Arena(pool, "2MiB", stream=stream),
    }


def _argument(name: str, things: dict[str, Any]) -> Any:
    """Something that fits a parameter of this name."""
    fitting = {
        "stream": things["Stream"],
        "event": things["Event"],
        "since": things["Event"],
        "size": MiB,
        "sizes": [MiB, MiB],
        "by": MiB,
        "value": 1,
        "ptr": things["Buffer"].ptr,
        "shape": 16,
        "tag": "work",
        "function": drop,
        "callback": drop,
        "source": bytearray(MiB),
        "target": bytearray(MiB),
    }
    return fitting.get(name)


def _calls() -> list[tuple[str, str]]:
    types = (vram.Device, vram.Stream, vram.Event, vram.Pool, vram.Buffer, vram.GrowableBuffer, vram.Arena)
    found = []
    for kind in types:
        for name in dir(kind):
            value = inspect.getattr_static(kind, name)
            if name.startswith("_") or isinstance(value, (property, classmethod, staticmethod)):
                continue
            if callable(getattr(kind, name)):
                found.append((kind.__name__, name))
    return found


def test_calls_are_found() -> None:
    calls = _calls()
    assert len(calls) > 60
    assert {("Pool", "close"), ("Stream", "synchronize"), ("Buffer", "copy_to")} <= set(calls)


@pytest.mark.parametrize(("kind", "name"), _calls())
def test_any_call_by_work_returns_or_raises(kind: str, name: str) -> None:
    stream = vram.Stream("host")
    things = _things(stream)
    method = getattr(things[kind], name)
    try:
        parameters = inspect.signature(method).parameters.values()
    except ValueError:
        parameters = ()
    required = [
        _argument(each.name, things)
        for each in parameters
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    done = threading.Event()

    def work() -> None:
        try:
            method(*required)
        except Exception:
            pass
        finally:
            done.set()

    gate = Gate(stream)
    stream.launch(work)
    stream.launch(drop, None)
    if not things["Buffer"].freed:
        things["Buffer"].fill(1)
    gate.open()
    assert done.wait(SOON), f"{kind}.{name} hangs"
    if not stream.closed:
        stream.synchronize()
