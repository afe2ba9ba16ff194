"""Growable buffers and scratch on a GPU: what kernels and other libraries wrote stays, nothing moves, pages
that a shrink gave up wait for the kernels, and growing neither copies nor waits."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from work import Hold, Marked, Work, undisturbed

from vram import Device, DeviceError, GrowableBuffer, OutOfMemory, Pool, Scratch, Stream

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other libraries' warnings are theirs

MIB = 1 << 20
STEP = 2 * MIB
MakePool = Callable[..., Pool]


@pytest.fixture
def stream(device: Device) -> Any:
    with Stream(device) as made:
        yield made


# ---- kernels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, "auto"])
def test_kernels_write_before_and_after_growth(
    make_pool: MakePool, work: Work, stream: Stream, ahead: Any
) -> None:
    pool = make_pool()
    buffer = GrowableBuffer("4GiB", pool, stream=stream, ahead=ahead)
    address, written = buffer.ptr, []
    for step in (STEP, STEP, 10 * MIB, 100 * MIB, 512, 1000 * MIB):
        at = buffer.grow(step)
        seed = work.new_seed()
        work.fill(address + at, step, seed, stream.handle)
        written.append((at, step, seed))
        for start, size, known in written:
            work.check(address + start, size, known, stream.handle)
    assert buffer.ptr == address
    wrong, checked = work.take_counts()
    assert wrong == 0 and checked > buffer.size
    buffer.close()


def test_contents_stay_through_shrinks_and_growths(make_pool: MakePool, work: Work, stream: Stream) -> None:
    pool, chance = make_pool(), random.Random(2)
    buffer = GrowableBuffer("256MiB", pool, stream=stream, size=STEP)
    seed = work.new_seed()
    work.fill(buffer.ptr, STEP, seed, stream.handle)
    others: list[Marked] = []
    for _ in range(200):
        buffer.resize(STEP + chance.randrange(100) * MIB)
        if buffer.size > STEP:  # the rest is overwritten each time
            work.fill(buffer.ptr + STEP, buffer.size - STEP, work.new_seed(), stream.handle)
        others.append(Marked(pool, work, chance.randrange(1, 12) * MIB, stream))
        if len(others) > 6:
            others.pop(0).check()
        work.check(buffer.ptr, STEP, seed, stream.handle)
    for other in others:
        other.check()
    wrong, checked = work.take_counts()
    assert wrong == 0 and checked > 200 * STEP


def test_pages_given_up_wait_for_the_kernels(make_pool: MakePool, work: Work, device: Device) -> None:
    """A held stream still has to write into what the buffer releases; no other memory may get those pages."""
    pool, held, other = make_pool(), Stream(device), Stream(device)
    buffer = GrowableBuffer("64MiB", pool, stream=held, size="32MiB", ahead=0)
    with Hold(held):
        work.fill(buffer.ptr, 32 * MIB, work.new_seed(), held.handle)
        began = time.perf_counter()
        buffer.resize(STEP)
        taken = time.perf_counter() - began
        assert taken < 5, "a shrink does not wait"
        assert buffer.stats()["pending"] == 30 * MIB
        marked = [Marked(pool, work, 10 * MIB, stream) for stream in (held, other) for _ in range(3)]
        for each in marked:
            each.check()
    device.synchronize()
    for each in marked:
        each.check()
    wrong, checked = work.take_counts()
    assert wrong == 0 and checked >= 100 * MIB
    pool.coalesce()
    assert buffer.stats()["pending"] == 0


def test_growing_back_while_the_stream_is_held_takes_the_same_pages(
    make_pool: MakePool, device: Device
) -> None:
    pool, held = make_pool(), Stream(device)
    buffer = GrowableBuffer("64MiB", pool, stream=held, size="32MiB", ahead=0)
    created = pool.raw_stats()["segments"]["total"]
    with Hold(held):
        for size in (STEP, "20MiB", 0, "32MiB"):
            buffer.resize(size)
    assert pool.raw_stats()["segments"]["total"] == created
    held.synchronize()


def test_growing_does_not_wait_for_a_running_kernel(make_pool: MakePool, work: Work, stream: Stream) -> None:
    buffer = GrowableBuffer("1GiB", make_pool(), stream=stream, size=STEP)
    work.spin(300, stream.handle)
    began = time.perf_counter()
    for _ in range(20):
        buffer.grow(STEP)
    buffer.resize("10MiB")
    took = time.perf_counter() - began
    assert not stream.query(), "the kernel is over; the test says nothing"
    assert took < 0.2
    stream.synchronize()


# ---- copies, views, other libraries ----------------------------------------------------------------------


def test_copies_go_through_views_before_and_after(make_pool: MakePool, stream: Stream) -> None:
    buffer = GrowableBuffer("64MiB", make_pool(), stream=stream, size=1000)
    view = buffer.view()
    view.copy_from(bytes(range(250)) * 4)
    buffer.resize("40MiB")
    tail = buffer.view("39MiB", 1000)
    tail.copy_from(view)
    for each in (view, tail):
        data = bytearray(1000)
        each.copy_to(data)
        assert bytes(data) == bytes(range(250)) * 4
    buffer.resize(1000)
    assert tail.freed and not view.freed


def test_torch_tensors_over_it(make_pool: MakePool, torch: Any) -> None:
    pool = make_pool()
    buffer = GrowableBuffer("256MiB", pool, size="4MiB")
    first = buffer.array((1024, 1024), "float32")
    low = torch.as_tensor(first, device="cuda")
    assert (low.data_ptr(), tuple(low.shape), low.dtype) == (buffer.ptr, (1024, 1024), torch.float32)
    low.copy_(torch.arange(1 << 20, device="cuda").view(1024, 1024))
    before = low.sum(dtype=torch.float64).item()
    buffer.resize("200MiB")
    high = torch.from_dlpack(buffer).view(torch.float32)
    assert high.data_ptr() == buffer.ptr
    high[1 << 20 :] = 1.0
    assert low.sum(dtype=torch.float64).item() == before
    assert high[: 1 << 20].sum(dtype=torch.float64).item() == before
    assert high[1 << 20 :].sum(dtype=torch.float64).item() == 49 << 20
    for size in ("4MiB", 0):
        with pytest.raises(BufferError):
            buffer.resize(size)
    del high
    gc.collect()
    buffer.resize("4MiB")
    with pytest.raises(BufferError):
        buffer.close()
    assert low.sum(dtype=torch.float64).item() == before
    del low, first
    gc.collect()
    buffer.close()


def test_cupy_arrays_over_it(make_pool: MakePool, cupy: Any) -> None:
    buffer = GrowableBuffer("64MiB", make_pool(), size="2MiB")
    array = cupy.asarray(buffer.array((512, 1024), "int32"))
    assert array.data.ptr == buffer.ptr
    array[:] = 3
    buffer.resize("20MiB")
    assert int(array.sum()) == 3 << 19
    with pytest.raises(BufferError):
        buffer.resize("1MiB")
    del array
    gc.collect()
    buffer.close()


# ---- promises about calls ---------------------------------------------------------------------------------


def test_a_thousand_requests_of_random_length_create_no_page(
    make_pool: MakePool, work: Work, stream: Stream
) -> None:
    pool, chance = make_pool(), random.Random(9)
    warm = [GrowableBuffer("64MiB", pool, stream=stream, size="64MiB", ahead=0) for _ in range(5)]
    for buffer in warm:
        buffer.close()
    stream.synchronize()
    created = pool.raw_stats()["segments"]["total"]
    live: list[tuple[GrowableBuffer, int]] = []
    for _ in range(1000):
        buffer = GrowableBuffer("64MiB", pool, stream=stream)
        length = chance.randrange(1, 33) * STEP
        while buffer.size < length:
            buffer.grow(STEP)
        seed = work.new_seed()
        work.fill(buffer.ptr, length, seed, stream.handle)
        live.append((buffer, seed))
        if len(live) == 4:
            gone, known = live.pop(chance.randrange(4))
            work.check(gone.ptr, gone.size, known, stream.handle)
            gone.close()
    assert pool.raw_stats()["segments"]["total"] == created
    wrong, checked = work.take_counts()
    assert wrong == 0 and checked > 0
    for buffer, _ in live:
        buffer.close()


def test_out_of_memory_in_the_middle_leaves_the_old_length(
    make_pool: MakePool, work: Work, stream: Stream
) -> None:
    pool = make_pool(limit="256MiB")
    buffer = GrowableBuffer("1GiB", pool, stream=stream, size="100MiB")
    seed = work.new_seed()
    work.fill(buffer.ptr, 100 * MIB, seed, stream.handle)
    with pytest.raises(OutOfMemory):
        buffer.resize("400MiB")
    assert buffer.size == 100 * MIB
    work.check(buffer.ptr, 100 * MIB, seed, stream.handle)
    assert work.take_counts()[0] == 0
    assert pool.stats().reserved <= 256 * MIB


@undisturbed
def test_the_device_has_its_memory_back(make_pool: MakePool, device: Device) -> None:
    pool = make_pool()
    free = device.free_memory
    buffer = GrowableBuffer("8GiB", pool, size="4GiB", ahead=0)
    assert device.free_memory <= free - (4 << 30)
    buffer.resize("1GiB")
    pool.trim(wait=True)
    assert free - device.free_memory < (1 << 30) + 64 * MIB
    buffer.close()
    pool.trim(wait=True)
    assert free - device.free_memory < 64 * MIB


def test_a_captured_stream_keeps_its_length(make_pool: MakePool, work: Work, stream: Stream) -> None:
    buffer = GrowableBuffer("64MiB", make_pool(), stream=stream, size="4MiB", ahead=0)
    with stream.capture() as graph:
        with pytest.raises(DeviceError) as caught:
            buffer.resize("8MiB")
        assert caught.value.code == "capturing"
        work.fill(buffer.ptr, 4 * MIB, 77, stream.handle)
    buffer.resize("32MiB")
    graph.launch(stream)
    work.check(buffer.ptr, 4 * MIB, 77, stream.handle)
    wrong, checked = work.take_counts()
    assert (wrong, checked) == (0, 4 * MIB)
    del graph
    buffer.close()


# ---- scratch ----------------------------------------------------------------------------------------------


def test_scratch_serves_kernels_in_stream_order(make_pool: MakePool, work: Work, stream: Stream) -> None:
    scratch, chance = Scratch(stream, pool=make_pool()), random.Random(4)
    sizes = [chance.choice([1, 3, 20, 150]) * MIB for _ in range(300)]
    work.spin(100, stream.handle)
    began = time.perf_counter()
    for size in sizes:
        with scratch.get(size) as outer, scratch.get(MIB) as inner:
            seeds = work.new_seed(), work.new_seed()
            for part, seed in zip((outer, inner), seeds, strict=True):
                work.fill(part.ptr, part.size, seed, stream.handle)
            for part, seed in zip((outer, inner), seeds, strict=True):
                work.check(part.ptr, part.size, seed, stream.handle)
    queued = time.perf_counter() - began
    wrong, checked = work.take_counts()
    assert wrong == 0
    assert checked == sum(sizes) + len(sizes) * MIB
    assert queued < 30
    scratch.close()


def test_scratch_follows_the_demand(make_pool: MakePool, stream: Stream) -> None:
    scratch = Scratch(stream, pool=make_pool())
    scratch.get("512MiB").free()
    assert scratch.size == 512 * MIB
    for _ in range(200):
        scratch.get("10MiB").free()
    assert scratch.size == 10 * MIB
    scratch.close()
