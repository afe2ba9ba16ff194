"""Page-locked memory on a GPU: really locked, really asynchronous, never reused too early, fast to get."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import vram
from vram import Device, DeviceError, PinnedPool, Pool, Stream

pytestmark = pytest.mark.gpu

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MEMORY_TYPE, HOST, DEVICE_POINTER = 2, 1, 3  # of cuPointerGetAttribute


@pytest.fixture
def pinned() -> Iterator[PinnedPool]:
    with PinnedPool("cuda:0") as pool:
        yield pool
        assert pool.check() is None


@pytest.fixture
def gpu() -> Iterator[Pool]:
    with Pool("cuda:0") as pool:
        yield pool


class Driver:
    """The driver's own words, beside vram."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        assert self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert self.library.cuCtxSetCurrent(context) == 0

    def attribute(self, number: int, ptr: int) -> int | None:
        """An attribute of a pointer; None for memory that the driver does not know."""
        value = ctypes.c_uint64()
        result = self.library.cuPointerGetAttribute(ctypes.byref(value), number, ctypes.c_uint64(ptr))
        return value.value if result == 0 else None

    def allocate_host(self, size: int) -> Callable[[], None]:
        """Get page-locked memory from the driver; returns what frees it."""
        memory = ctypes.c_void_p()
        assert self.library.cuMemHostAlloc(ctypes.byref(memory), ctypes.c_size_t(size), 1) == 0
        return lambda: self.library.cuMemFreeHost(memory)


@pytest.fixture(scope="module")
def driver() -> Driver:
    Device("cuda:0").synchronize()
    return Driver()


def busy(pool: Pool, stream: Stream, seconds: float = 0.2) -> None:
    """Keep a stream busy for about that long: fills of 2 GiB take about 0.6 ms on an H200, more elsewhere."""
    buffer = pool.allocate(2 * GIB, stream=stream)
    buffer.fill(0, stream=stream)
    stream.synchronize()
    begun = time.perf_counter()
    buffer.fill(0, stream=stream)
    stream.synchronize()
    for _ in range(min(2000, int(seconds / (time.perf_counter() - begun)) + 1)):
        buffer.fill(0, stream=stream)


def timed(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


# ---- locked -----------------------------------------------------------------------------------------------


def test_the_driver_knows_the_memory(pinned: PinnedPool, driver: Driver) -> None:
    assert pinned.pinned
    buffer = pinned.allocate(5 * MIB)
    for ptr in (buffer.ptr, buffer.ptr + buffer.size - 1):
        assert driver.attribute(MEMORY_TYPE, ptr) == HOST
        assert driver.attribute(DEVICE_POINTER, ptr) == ptr
    plain = bytearray(5 * MIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(plain))
    assert driver.attribute(MEMORY_TYPE, address) is None


def test_what_is_given_back_is_unknown_to_the_driver(pinned: PinnedPool, driver: Driver) -> None:
    buffer = pinned.allocate(5 * MIB)
    ptr = buffer.ptr
    buffer.free()
    pinned.trim()  # asks when its last use has finished
    pinned.device.synchronize()  # it has
    assert pinned.trim() == 0, "unlocking waits for running work, so it must be asked for"
    assert pinned.trim(wait=True) > 0
    assert driver.attribute(MEMORY_TYPE, ptr) is None


def test_torch_takes_it_for_pinned(pinned: PinnedPool) -> None:
    torch = pytest.importorskip("torch")
    torch.cuda.init()  # before that, no memory is pinned to PyTorch
    buffer = pinned.allocate(4 * KIB)
    tensor = torch.from_dlpack(buffer)
    assert tensor.is_pinned() and tensor.data_ptr() == buffer.ptr
    there = tensor.to("cuda:0", non_blocking=True)
    torch.cuda.synchronize()
    assert there.shape == (4 * KIB,)


def test_fill_works_on_locked_memory(pinned: PinnedPool) -> None:
    buffer = pinned.allocate(3 * MIB + 17)
    buffer.fill(9)
    pinned.device.synchronize()
    assert (np.asarray(buffer) == 9).all()


# ---- copies -----------------------------------------------------------------------------------------------


def test_bytes_go_there_and_back(pinned: PinnedPool, gpu: Pool) -> None:
    dice = np.random.default_rng(1)
    with Stream("cuda:0") as stream:
        for size in (1, 4097, MIB, 33 * MIB + 3):
            source, target = pinned.allocate(size), pinned.allocate(size)
            np.asarray(source)[:] = dice.integers(0, 256, size, dtype=np.uint8)
            there = gpu.allocate(size, stream=stream)
            there.copy_from(source, stream=stream)
            there.copy_to(target, stream=stream)
            stream.synchronize()
            assert (np.asarray(source) == np.asarray(target)).all()


def test_copies_return_while_the_stream_is_busy(pinned: PinnedPool, gpu: Pool) -> None:
    with Stream("cuda:0") as stream:
        source, target = pinned.allocate(64 * MIB), pinned.allocate(64 * MIB)
        there = gpu.allocate(64 * MIB, stream=stream)
        busy(gpu, stream)
        assert timed(lambda: there.copy_from(source, stream=stream)) < 0.05
        assert timed(lambda: there.copy_to(target, stream=stream)) < 0.05
        assert not stream.query(), "the stream was not busy; nothing was shown"
        stream.synchronize()


@pytest.mark.parametrize("own", [True, False], ids=["own stream", "another stream"])
def test_nothing_is_reused_before_its_copy_has_finished(pinned: PinnedPool, gpu: Pool, own: bool) -> None:
    with Stream("cuda:0") as stream:
        owner = stream if own else None
        there = gpu.allocate(16 * MIB, stream=stream)
        result = bytearray(16 * MIB)
        source = pinned.allocate(16 * MIB, stream=owner)
        np.asarray(source)[:] = 1
        busy(gpu, stream)
        there.copy_from(source, stream=stream)
        address = source.ptr
        del source
        again = pinned.allocate(16 * MIB, stream=owner)
        np.asarray(again)[:] = 2
        assert not stream.query() and again.ptr != address
        stream.synchronize()
        there.copy_to(result, stream=stream)
        assert result == b"\1" * (16 * MIB)
        pinned.coalesce()
        assert pinned.stats().pending == 0


def test_trim_does_not_wait_for_running_work(pinned: PinnedPool, gpu: Pool) -> None:
    with Stream("cuda:0") as stream:
        pinned.allocate(100 * MIB).free()
        pinned.trim()  # asks when its last use has finished
        pinned.device.synchronize()  # it has
        busy(gpu, stream)
        assert timed(pinned.trim) < 0.05
        assert not stream.query(), "the stream was not busy; nothing was shown"
        stream.synchronize()


def test_locked_memory_is_copied_three_times_as_fast(pinned: PinnedPool, gpu: Pool) -> None:
    size = 256 * MIB
    there = gpu.allocate(size)
    locked = pinned.allocate(size)
    pageable = np.ones(size, dtype=np.uint8)

    def copy_locked() -> None:
        there.copy_from(locked)
        gpu.device.synchronize()

    fast = min(timed(copy_locked) for _ in range(5))
    slow = min(timed(lambda: there.copy_from(pageable)) for _ in range(5))
    print(f"locked {size / fast / 1e9:.1f} GB/s, pageable {size / slow / 1e9:.1f} GB/s")
    assert slow >= 3 * fast


# ---- growth -----------------------------------------------------------------------------------------------


def test_growth_is_faster_than_the_drivers_own(driver: Driver) -> None:
    def ours() -> float:
        with PinnedPool("cuda:0") as pool:
            return timed(lambda: pool.allocate(GIB))

    def theirs() -> float:
        frees: list[Callable[[], None]] = []
        seconds = timed(lambda: frees.append(driver.allocate_host(GIB)))
        frees[0]()
        return seconds

    ours()  # threads and page tables
    mine, other = min(ours() for _ in range(3)), min(theirs() for _ in range(3))
    print(f"1 GiB of locked memory: {mine * 1e3:.0f} ms, cuMemHostAlloc {other * 1e3:.0f} ms")
    assert mine < other


def test_sizes_are_not_rounded_to_powers_of_two(pinned: PinnedPool) -> None:
    held = [pinned.allocate(33 * MIB) for _ in range(8)]
    stats = pinned.stats()
    assert stats.reserved <= 1.1 * stats.allocated and len(held) == 8


# ---- pin --------------------------------------------------------------------------------------------------


def test_an_array_is_locked_for_the_scope(gpu: Pool, driver: Driver) -> None:
    array = np.arange(16 * MIB, dtype=np.uint8)
    back = np.zeros_like(array)
    there = gpu.allocate(array.nbytes)
    with vram.pin(array, "cuda:0") as pin, vram.pin(back, "cuda:0") as target, Stream("cuda:0") as stream:
        assert pin.pinned and driver.attribute(MEMORY_TYPE, array.ctypes.data) == HOST
        busy(gpu, stream)
        assert timed(lambda: there.copy_from(pin, stream=stream)) < 0.05
        assert timed(lambda: there.copy_to(target, stream=stream)) < 0.05
        assert not stream.query(), "the stream was not busy; nothing was shown"
    assert (back == array).all(), "the end of the scope did not wait"
    assert driver.attribute(MEMORY_TYPE, array.ctypes.data) is None
    with vram.pin(array, "cuda:0") as pin:
        assert pin.pinned


def test_read_only_memory_can_be_locked(gpu: Pool) -> None:
    text = bytes(range(256)) * (4 * KIB)
    there, back = gpu.allocate(len(text)), bytearray(len(text))
    with vram.pin(text, "cuda:0") as pin:
        assert pin.pinned and not pin.writable
        there.copy_from(pin)
    there.copy_to(back)
    assert back == text


def test_memory_that_is_locked_already_is_refused(pinned: PinnedPool) -> None:
    with pytest.raises(DeviceError, match="pinned already"):
        vram.pin(pinned.allocate(5 * MIB), "cuda:0")
    array = np.zeros(4 * MIB, dtype=np.uint8)
    with vram.pin(array, "cuda:0"), pytest.raises(DeviceError, match="pinned already"):
        vram.pin(array[KIB:], "cuda:0")
