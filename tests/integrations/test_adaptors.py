"""The adaptors to CuPy, Numba and cuda.core as far as they go without a GPU, with the libraries themselves.

Pools of the host stand in for those of a GPU: the libraries only hand the addresses on. For GPUs: tests/gpu.
"""

from __future__ import annotations

import gc
import importlib
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from programs import assert_quiet, run_program

import vram
from vram import DeviceError, OutOfMemory, Pool
from vram.integrations.adaptors import DevicePools

MIB = 1 << 20
WITHOUT_GPU = pytest.mark.skipif(
    any(each.kind == "cuda" for each in vram.devices()), reason="there is a CUDA device"
)


class HostPools(DevicePools):
    """As the adaptors allocate, but from a pool of the host for every device."""

    def pool(self, device: int) -> Pool:
        pool = self._pools[device] = Pool("host", limit="64MiB")
        return pool


def adaptor(name: str, library: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own, that there is no GPU
        pytest.importorskip(library)
        return importlib.import_module(name)


@pytest.fixture
def pools() -> Iterator[HostPools]:
    made = HostPools("library")
    yield made
    for pool in made._pools.values():
        assert pool.check() is None
        pool.close()


# ---- what they share --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cupy", "numba", "cuda_core", "dask"])
def test_a_missing_library_is_named(name: str) -> None:
    program = """
        import sys
        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("cupy", "numba", "cuda", "distributed"):
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Missing())
        import vram
        def ask():
            vram.NAME.install
        def fetch():
            import vram.NAME
        for use, kind in (ask, AttributeError), (fetch, ImportError):
            try:
                use()
            except kind as error:
                assert "vram's adaptor for" in str(error) and "Install" in str(error), error
            else:
                raise SystemExit("it was imported")
    """
    assert_quiet(run_program(program.replace("NAME", name)))


@WITHOUT_GPU
@pytest.mark.parametrize(
    ("name", "library"),
    [("vram.cupy", "cupy"), ("vram.numba", "numba.cuda"), ("vram.cuda_core", "cuda.core")],
)
def test_without_a_gpu_install_says_so(name: str, library: str) -> None:
    with pytest.raises(DeviceError, match="there is no device cuda:0"):
        adaptor(name, library).install()


def test_allocations_bear_the_librarys_name_or_the_users(pools: HostPools) -> None:
    first = pools.allocate(MIB, 0, 0)
    with vram.tag("mine"):
        second = pools.allocate(MIB, 0, 0)
    assert (first.tag, second.tag) == ("library", "mine")


def test_a_closed_pool_is_replaced(pools: HostPools) -> None:
    first = pools.allocate(MIB, 0, 0).pool
    first.close()
    assert pools.allocate(MIB, 0, 0).pool is not first


# ---- CuPy -------------------------------------------------------------------------------------------------


@pytest.fixture
def vram_cupy() -> Any:
    return adaptor("vram.cupy", "cupy")


def test_a_pointer_of_cupy_holds_our_memory(vram_cupy: Any, pools: HostPools) -> None:
    allocator = vram_cupy.make_allocator(pools.allocate, lambda: (3, 0))
    pointer = allocator(1000)
    pool = pools._pools[3]
    assert pool.info(pointer.ptr)["requested"] == 1000 and pointer.device_id == 3
    part = pointer + 100
    del pointer
    assert pool.stats().live == 1
    del part
    assert pool.stats().live == 0


def test_cupys_stream_orders_the_memory(vram_cupy: Any, pools: HostPools) -> None:
    pools.pool(0)
    with vram.Stream("host") as stream:
        pointer = vram_cupy.make_allocator(pools.allocate, lambda: (0, stream.handle))(MIB)
        assert pools._pools[0].info(pointer.ptr)["stream"] == stream.handle
        del pointer


def test_size_0_is_a_null_pointer_as_in_cupy(vram_cupy: Any, pools: HostPools) -> None:
    pointer = vram_cupy.make_allocator(pools.allocate, lambda: (0, 0))(0)
    assert (pointer.ptr, pointer.mem.size) == (0, 0)


def test_out_of_memory_is_cupys_error_with_our_report(vram_cupy: Any, pools: HostPools) -> None:
    allocator = vram_cupy.make_allocator(pools.allocate, lambda: (0, 0))
    kept = allocator(8 * MIB)
    error_type = sys.modules["cupy"].cuda.memory.OutOfMemoryError
    with pytest.raises(error_type, match="What would help") as caught:
        allocator(100 * MIB)
    assert "allocated so far: 8,388,608 bytes, limit set to: 67,108,864" in str(caught.value)
    assert isinstance(caught.value.__cause__, OutOfMemory)
    del kept


def test_cupys_pinned_memory_is_ours(vram_cupy: Any) -> None:
    with vram.PinnedPool("host") as pinned:
        pointer = vram_cupy.make_pinned_allocator(pinned.allocate)(1000)
        assert pointer.size() == 1000 and pinned.stats().live == 1
        view = memoryview(pointer)
        del pointer
        assert view.nbytes == 1000 and pinned.stats().live == 1
        del view
        assert pinned.stats().live == 0


# ---- Numba ------------------------------------------------------------------------------------------------


class Context:
    """What the manager asks of a context of Numba."""

    device = SimpleNamespace(id=0)


@pytest.fixture
def vram_numba(monkeypatch: pytest.MonkeyPatch, pools: HostPools) -> Any:
    module = adaptor("vram.numba", "numba.cuda")
    monkeypatch.setattr(module, "_pools", pools)
    return module


def test_numba_finds_the_manager_by_the_modules_name(vram_numba: Any) -> None:
    manager = vram_numba._numba_memory_manager(context=None)
    assert manager.interface_version == 1
    manager.reset()  # before initialize


def test_memory_of_numba_goes_back_with_its_pointer(vram_numba: Any, pools: HostPools) -> None:
    context = Context()
    pointer = vram_numba.VramMemoryManager(context=context).memalloc(1000)
    pool = pools._pools[0]
    assert int(pointer.handle) and pool.info(int(pointer.handle))["requested"] == 1000
    del pointer
    assert pool.stats().live == 0


def test_pointers_survive_a_reset_and_their_manager(vram_numba: Any, pools: HostPools) -> None:
    context = Context()
    manager = vram_numba.VramMemoryManager(context=context)
    pointers = [manager.memalloc(MIB) for _ in range(3)]
    manager.reset()
    pool = pools._pools[0]
    assert pool.stats().live == 3
    pointers.append(manager.memalloc(MIB))
    del manager
    pointers.clear()
    gc.collect()
    assert pool.stats().live == 0


def test_nothing_is_freed_while_cleanup_is_deferred(vram_numba: Any, pools: HostPools) -> None:
    context = Context()
    manager = vram_numba.VramMemoryManager(context=context)
    pointer = manager.memalloc(MIB)
    with manager.defer_cleanup(), manager.defer_cleanup():
        del pointer
        assert pools._pools[0].stats().live == 1
    assert pools._pools[0].stats().live == 0


def test_out_of_memory_is_numbas_error_with_the_drivers_code(vram_numba: Any) -> None:
    manager = vram_numba.VramMemoryManager(context=Context())
    error_type = sys.modules["numba.cuda.cudadrv.driver"].CudaAPIError
    with pytest.raises(error_type, match="What would help") as caught:
        manager.memalloc(100 * MIB)
    assert caught.value.code == 2


def test_a_free_waits_for_what_is_queued(vram_numba: Any, pools: HostPools) -> None:
    with Pool(vram.Device.model("1GiB")) as model:
        pools._pools[0] = model
        context = Context()
        manager = vram_numba.VramMemoryManager(context=context)
        pointer = manager.memalloc(MIB)
        address = int(pointer.handle)
        model.allocate(MIB).fill(1)  # work on the default stream
        del pointer
        assert model.stats().live == 0
        assert int(manager.memalloc(MIB).handle) != address
        model.device.synchronize()
        model.coalesce()
        assert int(manager.memalloc(MIB).handle) == address
        manager.reset()
    del pools._pools[0]
