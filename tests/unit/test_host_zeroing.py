"""Zeroing on the host device: zeros come before what the host writes, whatever its streams are doing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import vram

MiB = 1 << 20


@pytest.fixture
def held() -> Iterator[tuple[vram.Stream, threading.Event]]:
    """A stream whose work has not begun, and what begins it."""
    gate = threading.Event()
    with vram.Stream("host") as stream:
        stream.launch(gate.wait)
        yield stream, gate
        gate.set()
        stream.synchronize()


def bytes_of(buffer: vram.Buffer) -> np.ndarray:
    return np.asarray(memoryview(buffer))


@pytest.mark.parametrize("option", ["zero_on_allocate", "zero_on_free"])
def test_what_the_host_writes_stays(held: tuple[vram.Stream, threading.Event], option: str) -> None:
    stream, gate = held
    pool = vram.Pool("host", **{option: True})
    first = pool.allocate(8 * MiB, stream=stream)
    bytes_of(first)[:] = 5
    first.free()
    second = pool.allocate(8 * MiB, stream=stream)
    assert not bytes_of(second).any(), "zero when the call returns"
    bytes_of(second)[:] = 7
    gate.set()
    stream.synchronize()
    pool.coalesce()
    assert (bytes_of(second) == 7).all()


@pytest.mark.parametrize("option", ["zero_on_allocate", "zero_on_free"])
def test_memory_with_work_queued_is_not_allocated(
    held: tuple[vram.Stream, threading.Event], option: str
) -> None:
    stream, gate = held
    pool = vram.Pool("host", **{option: True})
    first = pool.allocate(8 * MiB, stream=stream)
    first.fill(9)
    first.free()
    second = pool.allocate(8 * MiB, stream=stream)
    gate.set()
    stream.synchronize()
    assert not bytes_of(second).any()
    pool.coalesce()
    third = pool.allocate(8 * MiB, stream=stream)
    assert not bytes_of(third).any()
    assert pool.check() is None


def test_zeroing_turned_on_holds_for_memory_freed_before() -> None:
    pool = vram.Pool("host")
    stream = vram.Stream("host")
    blocks = [pool.allocate(size, stream=stream) for size in (4096, MiB, 8 * MiB)]
    for block in blocks:
        block.fill(3)
        block.free()
    pool.reconfigure({"zero_on_allocate": True})
    for size in (4096, MiB, 8 * MiB):
        block = pool.allocate(size, stream=stream)
        assert not bytes_of(block).any()
        block.free()
    pool.close()


def test_a_growable_buffer_grows_over_zeros(held: tuple[vram.Stream, threading.Event]) -> None:
    stream, gate = held
    pool = vram.Pool("host", zero_on_allocate=True)
    buffer = vram.GrowableBuffer("64MiB", pool, size="8MiB", stream=stream)
    view = buffer.view()
    view.fill(6)
    del view
    buffer.resize("2MiB")
    threading.Timer(0.05, gate.set).start()  # growing back needs the same addresses, and so waits
    buffer.resize("8MiB")
    array = buffer.array(6 * MiB, "uint8", 2 * MiB)
    assert not array.any()
    array[:] = 8
    stream.synchronize()
    assert (array == 8).all()
