"""Streams that other libraries make and destroy by the thousand, with handles that come back.

What is on the memory is checked by kernels: memory that is reused too early has another's pattern on it.
"""

from __future__ import annotations

import ctypes
import gc
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from programs import assert_ended_well, run_program
from work import Work

import vram
import vram.core.manager
from vram import Device, Pool
from vram.core.stream import stream_handle

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other libraries' warnings are theirs

MIB = 1 << 20
MANY = 2000
NON_BLOCKING = 1
MakePool = Callable[..., Pool]


class Driver:
    """Streams straight from the driver, which no library owns."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        assert self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert self._driver.cuCtxSetCurrent(context) == 0

    def create(self, flags: int = NON_BLOCKING) -> int:
        stream = ctypes.c_void_p()
        assert self._driver.cuStreamCreate(ctypes.byref(stream), flags) == 0
        assert stream.value is not None
        return stream.value

    def destroy(self, stream: int) -> None:
        assert self._driver.cuStreamDestroy_v2(ctypes.c_void_p(stream)) == 0


@pytest.fixture(scope="module")
def driver(device: Device) -> Driver:
    device.synchronize()
    return Driver()


def churn(work: Work, pool: Pool, create: Callable[[], Any], destroy: Callable[[Any], None]) -> set[int]:
    """Allocate on streams that are destroyed at once, write, check, free late; returns the handles seen."""
    handles: set[int] = set()
    live: deque[Any] = deque()
    for i in range(MANY):
        stream = create()
        handle = stream_handle(stream, work.device)
        handles.add(handle)
        size = (64 << 10) if i % 3 else 2 * MIB
        buffer = pool.allocate(size, stream=handle)
        seed = work.new_seed()
        if i % 5 == 0:
            work.spin(0.3, handle)  # so that the stream is destroyed, and the memory freed, before it is done
        work.fill(buffer.ptr, size, seed, handle)
        work.check(buffer.ptr, size, seed, handle)
        live.append(buffer)
        destroy(stream)
        del stream, buffer
        if len(live) > 7:
            live.popleft().free()
    for each in live:
        each.free()
    assert work.take_counts()[0] == 0, "memory was reused while another stream was at work on it"
    assert pool.check() is None and pool.stats().live == 0
    assert len(pool.stats().streams) < 600
    return handles


def test_streams_of_the_driver(make_pool: MakePool, work: Work, driver: Driver) -> None:
    handles = churn(work, make_pool(), driver.create, driver.destroy)
    assert len(handles) < MANY / 2, "the driver did not use handles again, so that nothing was tested"


def test_uses_on_streams_that_are_gone(make_pool: MakePool, work: Work, driver: Driver) -> None:
    pool = make_pool()
    for _ in range(MANY // 2):
        stream = driver.create()
        buffer = pool.allocate(MIB)
        seed = work.new_seed()
        work.fill(buffer.ptr, MIB, seed, 0)
        work.device.synchronize()
        buffer.record_stream(stream)
        work.spin(0.05, stream)
        work.check(buffer.ptr, MIB, seed, stream)
        driver.destroy(stream)
        buffer.free()
        work.fill(pool.allocate(MIB).ptr, MIB, work.new_seed(), 0)  # must not be the same memory yet
    assert work.take_counts()[0] == 0
    pool.trim(0, wait=True)  # only the device tells that streams which are gone have done their work
    assert pool.check() is None and pool.stats().reserved == 0


def test_a_live_stream_reuses_its_memory_in_order(make_pool: MakePool, work: Work, driver: Driver) -> None:
    pool, stream = make_pool(), driver.create()
    addresses = set()
    for _ in range(200):
        buffer = pool.allocate(MIB, stream=stream)
        seed = work.new_seed()
        work.fill(buffer.ptr, MIB, seed, stream)
        work.check(buffer.ptr, MIB, seed, stream)
        addresses.add(buffer.ptr)
        buffer.free()
    assert len(addresses) == 1 and work.take_counts() == (0, 200 * MIB)
    driver.destroy(stream)


# ---- CuPy -------------------------------------------------------------------------------------------------


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch, device: Device) -> Iterator[vram.MemoryManager]:
    made = vram.MemoryManager()
    monkeypatch.setattr(vram.core.manager, "_manager", made)
    yield made
    gc.collect()
    device.synchronize()
    for pool in made.pools:
        assert pool.check() is None


@pytest.fixture
def over_cupy(cupy: Any, manager: vram.MemoryManager) -> Iterator[Pool]:
    vram.cupy.install()
    yield manager.pool("cuda:0")
    vram.cupy.uninstall()
    gc.collect()


@pytest.mark.parametrize("non_blocking", [False, True])
def test_cupys_streams(cupy: Any, over_cupy: Pool, non_blocking: bool) -> None:
    kept: deque[Any] = deque(maxlen=8)
    sums = []
    for i in range(MANY):
        stream = cupy.cuda.Stream(non_blocking=non_blocking)
        with stream:
            array = cupy.full(100_000 if i % 3 else 600_000, i, dtype=cupy.int64)
            total = (array + 1).sum()
        kept.append(array)
        sums.append((i, len(array), total, stream.record()))
        del stream, array
        if len(sums) >= 100:
            for number, length, found, done in sums:
                done.synchronize()
                assert int(found.get()) == (number + 1) * length
            sums.clear()
    assert over_cupy.check() is None and len(over_cupy.stats().streams) < 300


def test_external_streams_of_cupy(cupy: Any, over_cupy: Pool, driver: Driver, work: Work) -> None:
    kept: deque[Any] = deque(maxlen=8)
    for i in range(MANY):
        handle = driver.create()
        with cupy.cuda.ExternalStream(handle):
            array = cupy.empty(100_000 if i % 3 else 600_000, dtype=cupy.uint32)
            seed = work.new_seed()
            work.fill(array.data.ptr, array.nbytes, seed, handle)
            work.check(array.data.ptr, array.nbytes, seed, handle)
        driver.destroy(handle)
        kept.append(array)
        del array
    kept.clear()
    assert work.take_counts()[0] == 0 and over_cupy.check() is None
    assert len(over_cupy.stats().streams) < 600


# ---- Numba ------------------------------------------------------------------------------------------------


def test_numbas_streams(make_pool: MakePool, work: Work, numba_cuda: Any) -> None:
    def destroy(stream: Any) -> None:
        numba_cuda.current_context().deallocations.clear()

    churn(work, make_pool(), numba_cuda.stream, destroy)


# ---- PyTorch ----------------------------------------------------------------------------------------------


def test_pytorchs_external_and_own_streams() -> None:
    program = """
        import warnings
        warnings.simplefilter("ignore")
        import ctypes, collections, vram, vram.torch
        vram.torch.install()
        import torch
        driver = ctypes.CDLL("libcuda.so.1")
        torch.zeros(1, device="cuda")
        pool = vram.get_memory_manager().pool("cuda:0")
        own, kept, checks = torch.cuda.Stream(), collections.deque(maxlen=8), []
        for i in range(MANY):
            handle = ctypes.c_void_p()
            assert driver.cuStreamCreate(ctypes.byref(handle), 1) == 0
            external = torch.cuda.ExternalStream(handle.value)
            with torch.cuda.stream(external):
                x = torch.full((100_000 if i % 3 else 600_000,), i, dtype=torch.int64, device="cuda")
                done = external.record_event()
            with torch.cuda.stream(own):
                own.wait_event(done)
                x.record_stream(own)
                checks.append((x != i).any())
                y = torch.full((50_000,), i, dtype=torch.int64, device="cuda")
                marked = own.record_event()
            external.wait_event(marked)
            y.record_stream(external)
            with torch.cuda.stream(external):
                z = y + 1  # its memory is freed while the stream is gone
            assert driver.cuStreamDestroy_v2(handle) == 0
            kept.append((x, y, z))
            del x, y, z, external
            if len(checks) >= 200:
                own.synchronize()
                assert not torch.stack(checks).any().item(), "memory was reused too early"
                checks.clear()
        torch.cuda.synchronize()
        kept.clear()
        assert pool.check() is None and len(pool.stats().streams) < 700
        torch.cuda.empty_cache()
        print("fine")
    """.replace("MANY", str(MANY))
    ended = run_program(program)
    assert_ended_well(ended)
    assert ended.stdout.endswith("fine\n")
