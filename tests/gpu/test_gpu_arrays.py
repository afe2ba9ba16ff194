"""Our memory in other libraries and theirs in ours, on a GPU: DLPack and the CUDA array interface."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from programs import assert_ended_well, run_program
from work import Work

import vram
from vram import Device, Pool, Stream

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other libraries' warnings are theirs

MIB = 1 << 20
MakePool = Callable[..., Pool]


def contents(buffer: Any) -> set[int]:
    data = bytearray(buffer.size)
    buffer.copy_to(data)
    return set(data)


# ---- what a buffer says of itself -------------------------------------------------------------------------


def test_the_cuda_array_interface_names_memory_and_stream(make_pool: MakePool, device: Device) -> None:
    pool, stream = make_pool(), Stream(device)
    plain, ordered, nothing = pool.allocate(1000), pool.allocate(1000, stream=stream), pool.allocate(0)
    expected = {"shape": (1000,), "typestr": "|u1", "strides": None, "version": 3}
    assert plain.__cuda_array_interface__ == {**expected, "data": (plain.ptr, False), "stream": 1}
    assert ordered.__cuda_array_interface__["stream"] == stream.handle
    assert nothing.__cuda_array_interface__["data"] == (0, False)
    plain.free()
    with pytest.raises(vram.InvalidFree):
        _ = plain.__cuda_array_interface__


def test_dlpack_names_the_device(make_pool: MakePool) -> None:
    buffer = make_pool().allocate(64)
    assert buffer.__dlpack_device__() == (2, 0)
    for request in ({"copy": True}, {"dl_device": (1, 0)}, {"dl_device": (2, 1)}):
        with pytest.raises(BufferError):
            buffer.__dlpack__(**request)
    with pytest.raises(ValueError, match="ambiguous"):
        buffer.__dlpack__(stream=0)


# ---- PyTorch and CuPy -------------------------------------------------------------------------------------


def test_pytorch_takes_a_buffer_without_a_copy(make_pool: MakePool, torch: Any) -> None:
    pool = make_pool()
    buffer = pool.allocate(MIB)
    for tensor in (torch.from_dlpack(buffer), torch.as_tensor(buffer, device="cuda")):
        assert (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)) == (buffer.ptr, torch.uint8, (MIB,))
        tensor.fill_(7)
        torch.cuda.synchronize()
        assert contents(buffer) == {7}
        buffer.fill(0)
    del buffer
    assert pool.stats().live == 1
    del tensor
    assert pool.stats().live == 0


def test_cupy_takes_a_buffer_without_a_copy(make_pool: MakePool, cupy: Any) -> None:
    pool = make_pool()
    buffer = pool.allocate(MIB)
    for array in (cupy.from_dlpack(buffer), cupy.asarray(buffer)):
        assert (array.data.ptr, array.dtype, array.shape) == (buffer.ptr, cupy.uint8, (MIB,))
        array[...] = 9
        cupy.cuda.Device().synchronize()
        assert contents(buffer) == {9}
        buffer.fill(0)
    del buffer
    assert pool.stats().live == 1
    del array
    assert pool.stats().live == 0


def test_the_consumers_stream_waits_for_ours(
    make_pool: MakePool, device: Device, work: Work, torch: Any, cupy: Any
) -> None:
    pool, ours = make_pool(), Stream(device)
    buffer = pool.allocate(MIB, stream=ours)
    for value, take in ((3, torch.from_dlpack), (5, cupy.from_dlpack)):
        work.spin(50.0, ours.handle)
        buffer.fill(value)
        if take is torch.from_dlpack:
            with torch.cuda.stream(torch.cuda.Stream()):
                total = int(take(buffer).sum(dtype=torch.int64))
        else:
            with cupy.cuda.Stream(non_blocking=True):
                total = int(take(buffer).sum(dtype=cupy.int64))
        assert total == value * MIB


def test_our_memory_is_not_reused_under_a_tensor(
    make_pool: MakePool, device: Device, work: Work, torch: Any
) -> None:
    pool, ours, theirs = make_pool(), Stream(device), torch.cuda.Stream()
    buffer, seed = pool.allocate(8 * MIB, stream=ours), work.new_seed()
    work.fill(buffer.ptr, buffer.size, seed, ours.handle)
    with torch.cuda.stream(theirs):
        tensor = torch.from_dlpack(buffer)
    work.spin(50.0, theirs.cuda_stream)
    work.check(tensor.data_ptr(), buffer.size, seed, theirs.cuda_stream)
    del tensor, buffer
    for _ in range(3):
        pool.allocate(8 * MIB, stream=ours).fill(0)
    assert work.take_counts() == (0, 8 * MIB)


def test_their_memory_is_viewed_without_a_copy(torch: Any, cupy: Any, device: Device) -> None:
    tensor = torch.arange(6, device="cuda", dtype=torch.float32).reshape(2, 3)
    view = vram.from_dlpack(tensor)
    assert (view.ptr, view.size, view.shape, view.typestr) == (tensor.data_ptr(), 24, (2, 3), "<f4")
    assert view.device == device
    array = cupy.asarray(view)
    assert array.data.ptr == tensor.data_ptr() and float(array.sum()) == 15.0
    again = vram.from_dlpack(cupy.arange(10, dtype=cupy.int64), stream=Stream(device))
    assert (again.size, again.typestr) == (80, "<i8")
    assert int(torch.from_dlpack(again).sum()) == 45


def test_a_capture_is_not_broken_by_an_export(make_pool: MakePool, torch: Any, device: Device) -> None:
    pool, side, ours = make_pool(), torch.cuda.Stream(), Stream(device)
    buffer = pool.allocate(MIB, stream=ours)
    torch.ones(4, device="cuda").add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        with pytest.raises(BufferError, match="captured"):
            torch.from_dlpack(buffer)
        inside = pool.allocate(MIB, stream=side)
        torch.from_dlpack(inside).fill_(4)
    graph.replay()
    torch.cuda.synchronize()
    assert contents(inside) == {4}


# ---- Numba and JAX ----------------------------------------------------------------------------------------


def test_numba_computes_in_a_buffer(make_pool: MakePool, numba_cuda: Any) -> None:
    buffer = make_pool().allocate(MIB)

    @numba_cuda.jit
    def set_to(target: Any, value: int) -> None:
        place = numba_cuda.grid(1)
        if place < target.size:
            target[place] = value

    set_to[MIB // 256, 256](numba_cuda.as_cuda_array(buffer), 6)
    numba_cuda.synchronize()
    assert contents(buffer) == {6}


def test_jax_takes_a_buffer_by_dlpack() -> None:
    if importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    program = """
        import os, sys, warnings
        warnings.simplefilter("ignore")
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        import jax, jax.numpy as jnp, vram
        try:
            jax.devices("cuda")
        except RuntimeError as error:
            sys.exit(f"skip: {error}")
        pool = vram.Pool("cuda:0", limit="1GiB")
        ours = vram.Stream("cuda:0")
        buffer = pool.allocate("4MiB", stream=ours)
        buffer.fill(3)
        array = jax.dlpack.from_dlpack(buffer)
        assert array.unsafe_buffer_pointer() == buffer.ptr
        assert int(array.astype(jnp.int32).sum()) == 3 * (4 << 20)
        view = vram.from_dlpack(jnp.arange(8, dtype=jnp.float32))
        assert view.size == 32 and view.device.name == "cuda:0"
    """
    ended = run_program(program)
    if "skip: " in ended.stderr:
        pytest.skip(f"this JAX has no GPU: {ended.stderr.strip()[-200:]}")
    assert_ended_well(ended)
