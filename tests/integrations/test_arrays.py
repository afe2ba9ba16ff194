"""Buffers as other libraries take them, and their memory as vram takes it: DLPack and the array interfaces.

Here with NumPy on host memory, and on models, whose streams show what waits for what. GPUs are in tests/gpu.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from programs import assert_quiet, run_program

import vram
from vram import Device, DeviceError, Pool, Stream
from vram.core.dlpack import View

MIB = 1 << 20
EXTENSION = 12  # DLPack's type of devices that only those who know them can use


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool("host") as made:
        yield made
        assert made.check() is None


@pytest.fixture
def model() -> Iterator[Pool]:
    """A pool on a model whose work takes until its clock is advanced."""
    with Pool(Device.model("1GiB")) as made:
        yield made
        assert made.check() is None


# ---- which interfaces a buffer has ------------------------------------------------------------------------


def test_only_memory_of_a_gpu_has_the_cuda_array_interface(pool: Pool, model: Pool) -> None:
    for buffer in (pool.allocate(64), model.allocate(64), vram.PinnedPool("host").allocate(64)):
        assert not hasattr(buffer, "__cuda_array_interface__")


def test_a_model_says_by_dlpack_that_it_is_none_of_the_known_devices(model: Pool) -> None:
    buffer = model.allocate(64)
    assert buffer.__dlpack_device__() == (EXTENSION, model.device.index)
    with pytest.raises(BufferError, match="not \\(2, 0\\)"):
        buffer.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="without a copy"):
        buffer.__dlpack__(copy=True)
    view = vram.from_dlpack(buffer)
    assert (view.ptr, view.size, view.device) == (buffer.ptr, 64, model.device)


def test_pinned_memory_is_the_hosts_by_dlpack() -> None:
    with vram.PinnedPool("host") as pinned:
        buffer = pinned.allocate(1000)
        assert buffer.__dlpack_device__() == (1, 0)
        array = np.from_dlpack(buffer)
        assert array.ctypes.data == buffer.ptr
        del array


# ---- streams ----------------------------------------------------------------------------------------------


def test_the_consumers_stream_waits_for_the_buffers(model: Pool) -> None:
    producer, consumer = Stream(model.device), Stream(model.device)
    buffer = model.allocate(MIB, stream=producer)
    buffer.fill(1)
    assert not producer.query() and consumer.query()
    capsule = buffer.__dlpack__(stream=consumer)
    assert not consumer.query()
    producer.synchronize()
    assert consumer.query()
    del capsule


@pytest.mark.parametrize("default", [None, 1])
def test_without_a_stream_the_default_stream_waits(model: Pool, default: int | None) -> None:
    producer = Stream(model.device)
    buffer = model.allocate(MIB, stream=producer)
    buffer.fill(1)
    capsule = buffer.__dlpack__(stream=default)
    assert not Stream.default(model.device).query()
    del capsule


def test_minus_one_asks_for_no_order(model: Pool) -> None:
    producer = Stream(model.device)
    buffer = model.allocate(MIB, stream=producer)
    buffer.fill(1)
    capsule = buffer.__dlpack__(stream=-1)
    assert Stream.default(model.device).query()
    del capsule


def test_stream_0_is_refused_as_ambiguous(model: Pool) -> None:
    with pytest.raises(ValueError, match="ambiguous"):
        model.allocate(MIB).__dlpack__(stream=0)
    with pytest.raises(ValueError, match="handle"):
        model.allocate(MIB).__dlpack__(stream=-2)
    with pytest.raises(TypeError, match="not a stream"):
        model.allocate(MIB).__dlpack__(stream="1")


@pytest.mark.parametrize(("exported", "reused"), [(True, False), (False, True)])
def test_memory_is_not_reused_under_the_consumer(model: Pool, exported: bool, reused: bool) -> None:
    producer, consumer = Stream(model.device), Stream(model.device)
    buffer = model.allocate(MIB, stream=producer)
    address = buffer.ptr
    capsule = buffer.__dlpack__(stream=consumer if exported else -1)
    other = model.allocate(MIB, stream=consumer)
    other.fill(2)  # what the consumer still does with the memory
    del capsule, buffer
    assert (model.allocate(MIB, stream=producer).ptr == address) is reused


def test_a_capture_is_not_broken_by_an_export(model: Pool) -> None:
    captured = Stream(model.device)
    buffer = model.allocate(MIB)
    with captured.capture() as graph:
        with pytest.raises(BufferError, match="captured"):
            buffer.__dlpack__(stream=captured)
        inside = model.allocate(MIB, stream=captured)
        with pytest.raises(BufferError, match="captured"):
            inside.__dlpack__(stream=None)
        del inside
    buffer.free()
    graph.close()


def test_a_failed_export_takes_no_hold_of_the_buffer(model: Pool) -> None:
    ours = Stream(model.device)
    buffer = model.allocate(MIB, stream=ours)
    model.device.backend.fail("event_create", 1)
    with pytest.raises(DeviceError):
        buffer.__dlpack__(stream=None)
    buffer.free()


# ---- from_dlpack ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["u1", "i2", "f4", "f8", "c16", "?"])
def test_a_numpy_array_is_viewed_without_a_copy(dtype: str) -> None:
    array = np.zeros((3, 4), dtype)
    view = vram.from_dlpack(array)
    assert (view.ptr, view.size, view.shape, view.strides) == (
        array.ctypes.data,
        array.nbytes,
        (3, 4),
        (4, 1),
    )
    assert view.device == Device("host") and view.contiguous and not view.readonly
    again = np.asarray(view)
    assert again.dtype == array.dtype
    again[1, 2] = 1
    assert array[1, 2] == 1 and np.shares_memory(np.from_dlpack(view), array)


def test_a_view_keeps_strides(pool: Pool) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    view = vram.from_dlpack(array)
    assert view.shape == (4, 3) and view.strides == (1, 4) and not view.contiguous
    assert (np.asarray(view) == array).all()


def test_a_view_says_whether_the_memory_may_be_written() -> None:
    array = np.arange(4)
    array.flags.writeable = False
    view = vram.from_dlpack(array)
    assert view.readonly and not np.asarray(view).flags.writeable


def test_a_view_keeps_the_memory_alive(pool: Pool) -> None:
    view = vram.from_dlpack(pool.allocate(MIB))
    gc.collect()
    assert pool.stats().live == 1 and view.size == MIB
    del view
    assert pool.stats().live == 0


def test_a_view_lets_the_array_go() -> None:
    class Array(np.ndarray):
        """One that can be watched."""

    array = np.zeros(4).view(Array)
    gone = weakref.ref(array)
    view = vram.from_dlpack(array)
    del array
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_a_view_of_nothing(pool: Pool) -> None:
    view = vram.from_dlpack(pool.allocate(0))
    assert (view.ptr, view.size, view.shape) == (0, 0, (0,)) and np.asarray(view).size == 0


def test_exporters_that_know_no_versions_are_served(pool: Pool) -> None:
    class Old:
        def __init__(self, buffer: vram.Buffer) -> None:
            self.buffer = buffer

        def __dlpack__(self, stream: Any = None) -> Any:
            return self.buffer.__dlpack__(stream=stream)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.buffer.__dlpack_device__()

    buffer = pool.allocate(64)
    assert vram.from_dlpack(Old(buffer)).ptr == buffer.ptr


def test_a_capsule_that_was_consumed_is_refused(pool: Pool) -> None:
    buffer = pool.allocate(64)
    capsule = buffer.__dlpack__()
    ctypes.pythonapi.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
    used = b"used_dltensor"
    ctypes.pythonapi.PyCapsule_SetName(capsule, used)
    with pytest.raises(DeviceError, match="used_dltensor"):
        View(buffer, capsule)
    ctypes.pythonapi.PyCapsule_SetName(capsule, b"dltensor")


# ---- other libraries, as far as they go without a GPU -----------------------------------------------------


def test_pytorch_and_we_share_host_memory(pool: Pool) -> None:
    torch = pytest.importorskip("torch")
    buffer = pool.allocate(1000)
    tensor = torch.from_dlpack(buffer)
    assert (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)) == (buffer.ptr, torch.uint8, (1000,))
    tensor.fill_(3)
    assert bytes(buffer) == b"\3" * 1000
    del tensor
    source = torch.arange(6, dtype=torch.float32).reshape(2, 3).T
    view = vram.from_dlpack(source)
    assert (view.ptr, view.shape, view.strides) == (source.data_ptr(), (3, 2), (1, 3))
    assert vram.from_dlpack(torch.zeros(3, dtype=torch.bfloat16)).typestr == "|V2"


def test_jax_and_we_share_host_memory(pool: Pool) -> None:
    jax = pytest.importorskip("jax")
    buffer = pool.allocate(4096)
    buffer.copy_from(b"\2" * 4096)
    array = jax.dlpack.from_dlpack(buffer)
    assert array.unsafe_buffer_pointer() == buffer.ptr and int(array.sum(dtype="int32")) == 8192
    del array
    gc.collect()
    assert vram.from_dlpack(jax.numpy.arange(5, dtype="float32")).typestr == "<f4"


# ---- the end of Python ------------------------------------------------------------------------------------


def test_python_ends_without_errors_with_arrays_in_our_memory() -> None:
    assert_quiet(
        run_program(
            """
            import numpy as np, vram
            pool = vram.Pool("host")
            arrays = [np.from_dlpack(pool.allocate(1 << 16)) for _ in range(100)]
            views = [vram.from_dlpack(array) for array in arrays]
            import builtins
            builtins.kept = views  # outlives the module
            """
        )
    )


def test_what_is_no_array_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match="int has no __dlpack__"):
        vram.from_dlpack(5)
