"""vram under CuPy, Numba and cuda.core on a GPU: their operations, streams, errors, graphs, and the end."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from programs import assert_quiet, run_program
from work import Work

import vram
import vram.core.manager
from vram import Device, Pool

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other libraries' warnings are theirs

MIB = 1 << 20


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch, device: Device) -> Iterator[vram.MemoryManager]:
    """The process-wide manager of one test. Its pools go with the last of what libraries keep of them."""
    made = vram.MemoryManager()
    monkeypatch.setattr(vram.core.manager, "_manager", made)
    if adaptor := sys.modules.get("vram.cuda_core"):  # it keeps the pools of the manager before
        monkeypatch.setattr(adaptor._pools, "_pools", {})
    yield made
    gc.collect()
    device.synchronize()
    for pool in made.pools:
        assert pool.check() is None


# ---- CuPy -------------------------------------------------------------------------------------------------


@pytest.fixture
def over_cupy(cupy: Any, manager: vram.MemoryManager) -> Iterator[Pool]:
    """The pool that CuPy allocates from."""
    vram.cupy.install()
    vram.cupy.install()
    yield manager.pool("cuda:0")
    vram.cupy.uninstall()
    gc.collect()


def test_cupys_arrays_live_in_our_pool(cupy: Any, over_cupy: Pool) -> None:
    matrix = cupy.arange(1 << 20, dtype=cupy.float32).reshape(1024, 1024)
    assert over_cupy.info(matrix.data.ptr)["tag"] == "cupy"
    assert over_cupy.snapshot().by_tag()["cupy"] >= 4 * MIB
    with vram.tag("mine"):
        tagged = cupy.ones(1000)
    assert over_cupy.info(tagged.data.ptr)["tag"] == "mine"
    del matrix, tagged
    assert over_cupy.stats().live == 0


def test_cupys_operations_work(cupy: Any, over_cupy: Pool) -> None:
    numpy = pytest.importorskip("numpy")
    a = numpy.random.default_rng(1).random((300, 200))
    on_gpu = cupy.asarray(a)
    for found, expected in (
        (on_gpu @ on_gpu.T, a @ a.T),
        (cupy.sort(on_gpu, axis=0), numpy.sort(a, axis=0)),
        (cupy.concatenate([on_gpu, on_gpu]), numpy.concatenate([a, a])),
        (cupy.fft.fft(on_gpu), numpy.fft.fft(a)),
        (cupy.cumsum(on_gpu), numpy.cumsum(a)),
        (cupy.linalg.svd(on_gpu)[1], numpy.linalg.svd(a)[1]),
        (cupy.unique(cupy.asarray([3, 1, 3])), numpy.unique([3, 1, 3])),
        (cupy.zeros((0, 5)), numpy.zeros((0, 5))),
        (cupy.where(on_gpu > 0.5, on_gpu, 0).sum(axis=1), numpy.where(a > 0.5, a, 0).sum(axis=1)),
    ):
        assert numpy.allclose(cupy.asnumpy(found), expected)


def test_cupys_current_stream_orders_its_arrays(cupy: Any, over_cupy: Pool, work: Work) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        array = cupy.empty(4 * MIB, cupy.uint8)
    assert over_cupy.info(array.data.ptr)["stream"] == stream.ptr
    seed = work.new_seed()
    work.fill(array.data.ptr, 4 * MIB, seed, stream.ptr)
    work.spin(30.0, stream.ptr)
    work.check(array.data.ptr, 4 * MIB, seed, stream.ptr)
    del array
    for _ in range(3):
        cupy.zeros(4 * MIB, cupy.uint8)  # on the default stream, which must not get that memory yet
    assert work.take_counts() == (0, 4 * MIB)


def test_cupys_streams_may_go_before_their_arrays(cupy: Any, over_cupy: Pool) -> None:
    over_cupy.limit = "64MiB"
    for _ in range(20):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            array = cupy.full(16 * MIB, 5, dtype=cupy.uint8)
        stream.synchronize()
        del stream
        gc.collect()
        assert int(array[5]) == 5
        del array
    whole = cupy.ones(48 * MIB, dtype=cupy.uint8)  # needs what those streams had
    assert int(whole.sum(dtype=cupy.int64)) == 48 * MIB and over_cupy.check() is None


def test_out_of_memory_is_cupys_own_error(cupy: Any, over_cupy: Pool) -> None:
    over_cupy.limit = "64MiB"
    kept = cupy.empty(16 * MIB, cupy.uint8)
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="What would help") as caught:
        cupy.empty(256 * MIB, cupy.uint8)
    assert "limit set to: 67,108,864 bytes" in str(caught.value) and isinstance(caught.value, MemoryError)
    assert cupy.ones(MIB).sum() == MIB
    del kept, caught


def test_cupys_graphs_capture_our_memory(cupy: Any, over_cupy: Pool) -> None:
    source = cupy.arange(1000, dtype=cupy.float32)
    (source * 2 + 1).sum()  # kernels are compiled before the capture
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.synchronize()
    with stream:
        stream.begin_capture()
        result = source * 2 + 1
        graph = stream.end_capture()
        noise = [cupy.zeros(1000, dtype=cupy.float32) for _ in range(10)]
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
    assert float(result.sum()) == 2 * 499500 + 1000 and not any(float(each.sum()) for each in noise)


def test_cupys_pinned_memory_is_ours_and_copies_are_right(cupy: Any, over_cupy: Pool) -> None:
    from vram.integrations.adaptors import pinned_pool

    cupyx = pytest.importorskip("cupyx")
    pinned = cupyx.empty_pinned(MIB, dtype="u1")
    assert pinned_pool().stats().live >= 1 and pinned_pool().pinned
    pinned[:] = 8
    assert int(cupy.asarray(pinned).sum(dtype="i8")) == 8 * MIB


def test_cupy_gets_its_own_pool_back(cupy: Any, manager: vram.MemoryManager) -> None:
    vram.cupy.install()
    ours = cupy.arange(1000)
    vram.cupy.uninstall()
    before = manager.pool("cuda:0").stats().live
    theirs = cupy.arange(1000)
    assert manager.pool("cuda:0").stats().live == before == 1
    assert int((ours + theirs).sum()) == 999000
    del ours
    assert manager.pool("cuda:0").stats().live == 0


# ---- cuda.core --------------------------------------------------------------------------------------------


@pytest.fixture
def core() -> Any:
    found = pytest.importorskip("cuda.core")
    if not hasattr(found, "MemoryResource"):
        pytest.skip("this cuda.core is older than version 1")
    found.Device(0).set_current()
    return found


def test_cuda_cores_buffers_are_ours(core: Any, manager: vram.MemoryManager, torch: Any) -> None:
    place = core.Device(0)
    stream = place.create_stream()
    resource = vram.cuda_core.MemoryResource()
    buffer = resource.allocate(MIB, stream=stream)
    known = manager.pool("cuda:0").info(int(buffer.handle))
    assert (known["requested"], known["tag"], known["stream"]) == (MIB, "cuda.core", int(stream.handle))
    assert buffer.is_device_accessible and not buffer.is_host_accessible and buffer.device_id == 0
    torch.as_tensor(_Bytes(int(buffer.handle), MIB), device="cuda").fill_(3)
    torch.cuda.synchronize()
    buffer.close()
    assert manager.pool("cuda:0").stats().live == 0


class _Bytes:
    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def test_a_buffer_closed_on_another_stream_waits_for_it(
    core: Any, manager: vram.MemoryManager, work: Work
) -> None:
    place = core.Device(0)
    first, second = place.create_stream(), place.create_stream()
    resource = vram.cuda_core.MemoryResource()
    buffer, seed = resource.allocate(4 * MIB, stream=first), work.new_seed()
    address = int(buffer.handle)
    work.fill(address, 4 * MIB, seed, int(first.handle))
    first.sync()
    work.spin(50.0, int(second.handle))
    work.check(address, 4 * MIB, seed, int(second.handle))
    buffer.close(second)
    for _ in range(3):
        other = resource.allocate(4 * MIB, stream=first)
        work.fill(int(other.handle), 4 * MIB, work.new_seed(), int(first.handle))
        other.close()
    assert work.take_counts() == (0, 4 * MIB)


def test_cuda_cores_devices_allocate_from_us(core: Any, manager: vram.MemoryManager) -> None:
    resource = vram.cuda_core.install()
    try:
        assert vram.cuda_core.install() is resource
        place = core.Device(0)
        buffer = place.allocate(MIB, stream=place.default_stream)
        assert buffer.memory_resource is resource and manager.pool("cuda:0").stats().live == 1
        manager.configure(limit="64MiB")
        with pytest.raises(vram.OutOfMemory, match="CUDA_ERROR_OUT_OF_MEMORY") as caught:
            place.allocate(256 * MIB, stream=place.default_stream)
        assert isinstance(caught.value, sys.modules["cuda.core._utils.cuda_utils"].CUDAError)
        buffer.close()
    finally:
        vram.cuda_core.uninstall()
    assert core.Device(0).memory_resource is not resource


# ---- Numba, in a process of its own: the manager is fixed when Numba first uses CUDA ----------------------

NUMBA = """
    import sys, warnings
    warnings.simplefilter("ignore")
    import numpy, vram
    from numba import cuda
"""


def run_numba(*parts: str) -> None:
    pytest.importorskip("numba.cuda")
    assert_quiet(run_program(NUMBA, *parts))


def test_numbas_arrays_live_in_our_pool() -> None:
    run_numba(
        """
        vram.numba.install(); vram.numba.install()
        data = numpy.arange(100_000, dtype=numpy.float64)
        array = cuda.to_device(data)
        pool = vram.get_memory_manager().pool("cuda:0")
        address = array.__cuda_array_interface__["data"][0]
        assert pool.info(address)["tag"] == "numba" and pool.snapshot().by_tag()["numba"] >= 800_000
        assert (array.copy_to_host() == data).all()
        assert (array[1000:2000].copy_to_host() == data[1000:2000]).all()
        stream = cuda.stream()
        again = cuda.to_device(data, stream=stream)
        again.copy_to_device(array, stream=stream)
        stream.synchronize()
        assert (again.copy_to_host() == data).all()
        pinned, mapped = cuda.pinned_array(1000), cuda.mapped_array(1000)
        pinned[:] = 2
        mapped[:] = 3
        assert (cuda.to_device(pinned).copy_to_host() == 2).all()
        with cuda.pinned(data):
            assert (cuda.to_device(data).copy_to_host() == data).all()
        free, total = cuda.current_context().get_memory_info()
        assert 0 < free <= total
        empty = cuda.device_array(0)
        del array, again, empty
        assert pool.stats().live == 0, pool.stats()
        assert pool.check() is None
        """
    )


def test_numba_kernels_run_in_our_memory(numba_cuda: Any) -> None:
    run_numba(
        """
        vram.numba.install()
        @cuda.jit
        def add(target, value):
            place = cuda.grid(1)
            if place < target.size:
                target[place] += value
        for _ in range(20):
            arrays = [cuda.to_device(numpy.zeros(100_000, numpy.int32)) for _ in range(3)]
            streams = [cuda.stream() for _ in arrays]
            for number, (array, stream) in enumerate(zip(arrays, streams)):
                add[400, 256, stream](array, number)
                add[400, 256, stream](array, number)
            cuda.synchronize()
            for number, array in enumerate(arrays):
                assert (array.copy_to_host() == 2 * number).all()
        """
    )


def test_the_environment_plugs_us_in() -> None:
    pytest.importorskip("numba.cuda")
    program = """
        array = cuda.to_device(numpy.arange(1000))
        assert vram.get_memory_manager().pool("cuda:0").stats().live == 1
    """
    environment = 'import os; os.environ["NUMBA_CUDA_MEMORY_MANAGER"] = "vram.numba"'
    assert_quiet(run_program(environment, NUMBA, program))


def test_numbas_error_has_the_drivers_code() -> None:
    run_numba(
        """
        vram.numba.install(limit="64MiB")
        from numba.cuda.cudadrv.driver import CudaAPIError
        kept = cuda.device_array(1 << 20)
        try:
            cuda.device_array(1 << 27)
        except CudaAPIError as error:
            assert error.code == 2 and "What would help" in str(error), error
        else:
            raise SystemExit("no error")
        """
    )


def test_numba_may_close_its_context_with_live_arrays() -> None:
    run_numba(
        """
        vram.numba.install()
        kept = [cuda.to_device(numpy.arange(1000)) for _ in range(10)]
        cuda.close()
        kept.append(cuda.to_device(numpy.arange(1000)))
        del kept[:5]
        """
    )


def test_install_after_numba_has_begun_says_how() -> None:
    run_numba(
        """
        array = cuda.to_device(numpy.arange(1000))
        try:
            vram.numba.install()
        except vram.DeviceError as error:
            assert "before that" in str(error)
        else:
            raise SystemExit("no error")
        """
    )


@pytest.mark.parametrize("pages", [True, False])
def test_ipc_handles_need_plain_segments(pages: bool) -> None:
    run_numba(
        f"pages = {pages}",
        """
        vram.numba.install(pages=pages)
        array = cuda.to_device(numpy.arange(1000))
        try:
            handle = cuda.current_context().get_ipc_handle(array.gpu_data)
        except vram.DeviceError as error:
            assert pages and "pages=False" in str(error)
        else:
            assert not pages and handle.size == 8000
        """,
    )


# ---- all together -----------------------------------------------------------------------------------------


def test_python_ends_in_peace_with_arrays_of_all_libraries() -> None:
    for name in ("torch", "cupy", "numba.cuda", "cuda.core"):
        pytest.importorskip(name)
    run_numba(
        """
        import builtins, cupy, torch
        from cuda.core import Device
        vram.cupy.install(); vram.numba.install()
        place = Device(0)
        place.set_current()
        vram.cuda_core.install()
        pool = vram.get_memory_manager().pool("cuda:0")
        kept = {
            "cupy": cupy.arange(1 << 20),
            "numba": cuda.to_device(numpy.arange(1 << 20)),
            "cuda.core": place.allocate(1 << 20, stream=place.default_stream),
            "torch": torch.from_dlpack(pool.allocate(1 << 20, tag="torch")),
            "pinned": cupy.cuda.alloc_pinned_memory(1000),
        }
        held = pool.snapshot().by_tag()
        assert all(held[name] >= 1 << 20 for name in ("cupy", "numba", "cuda.core", "torch")), held
        builtins.kept = kept
        """
    )
