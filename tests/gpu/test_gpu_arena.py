"""Arenas on a GPU: arrays of other libraries without a copy, order by streams, graphs over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from work import Work

import vram
from vram import Arena, Device, InvalidFree, OutOfMemory, Pool, Stream

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other libraries' warnings are theirs

MIB = 1 << 20
MakePool = Callable[..., Pool]


# ---- arrays of other libraries ----------------------------------------------------------------------------


@pytest.mark.real_gpu
def test_pytorch_takes_an_array_without_a_copy(make_pool: MakePool, torch: Any) -> None:
    with Arena(make_pool()) as arena:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            piece = arena.empty((3, 5), dtype)
            tensor = torch.from_dlpack(piece)
            assert (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)) == (piece.ptr, dtype, (3, 5))
            assert tensor.is_contiguous() and tensor.is_cuda
            tensor.fill_(1)
            assert float(tensor.sum()) == 15
        tensor = torch.as_tensor(arena.empty((4, 2), "float64"), device="cuda")
        assert tensor.dtype == torch.float64 and tuple(tensor.shape) == (4, 2)
        del tensor, piece


@pytest.mark.real_gpu  # CuPy contains the CUDA runtime, which needs the real driver
def test_cupy_takes_an_array_without_a_copy(make_pool: MakePool, cupy: Any) -> None:
    with Arena(make_pool()) as arena:
        piece = arena.empty((2, 3, 4), "float16")
        for array in (cupy.from_dlpack(piece), cupy.asarray(piece)):
            assert (array.data.ptr, array.dtype, array.shape) == (piece.ptr, cupy.float16, (2, 3, 4))
            array[...] = 2
            assert float(array.sum()) == 48
        del array, piece


@pytest.mark.real_gpu
def test_filled_arrays_have_their_values(make_pool: MakePool, device: Device) -> None:
    with Stream(device) as stream, Arena(make_pool(), stream=stream) as arena:
        for dtype in ("float16", "float32", "float64", "int16", "uint8", "complex128"):
            for made, expected in (
                (arena.zeros(1001, dtype), np.zeros(1001, dtype)),
                (arena.ones((7, 11, 13), dtype), np.ones((7, 11, 13), dtype)),
                (arena.full(1001, 3, dtype), np.full(1001, 3, dtype)),
            ):
                read = bytearray(made.size)
                made.copy_to(read)
                assert bytes(read) == expected.tobytes()
        arena.reset()


def test_the_array_interface_has_shape_type_and_stream(make_pool: MakePool, device: Device) -> None:
    with Stream(device) as stream, Arena(make_pool(), stream=stream) as arena:
        piece = arena.empty((7, 2), "int32")
        interface = piece.__cuda_array_interface__
        assert (interface["shape"], interface["typestr"], interface["data"]) == (
            (7, 2),
            "<i4",
            (piece.ptr, False),
        )
        assert (interface["stream"], piece.__dlpack_device__()) == (stream.handle, (2, 0))
        assert piece.ptr % 256 == 0
        with arena.scope():
            late = arena.empty(1)
        with pytest.raises(InvalidFree):
            _ = late.__cuda_array_interface__


# ---- growth and reset -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pages", [True, False])
def test_an_iteration_like_the_last_asks_for_nothing(make_pool: MakePool, torch: Any, pages: bool) -> None:
    pool = make_pool(pages=pages)
    with Arena(pool) as arena:
        places, reserved = [], []
        for iteration in range(4):
            tensors = [torch.from_dlpack(arena.empty(n, "float32")) for n in (10, 9 * MIB, 1000, 30 * MIB)]
            for tensor in tensors:
                tensor.fill_(iteration)
            assert all(bool((tensor == iteration).all()) for tensor in tensors)
            places.append([tensor.data_ptr() for tensor in tensors])
            reserved.append((pool.stats().reserved, arena.stats().requests))
            del tensors, tensor
            arena.reset()
        assert places[0] == places[1] == places[2] == places[3] and len(set(reserved)) == 1
        assert arena.check() is None and pool.check() is None


def test_a_limit_in_the_middle_of_a_scope(make_pool: MakePool) -> None:
    pool = make_pool(limit="64MiB")
    with Arena(pool, checked=True) as arena:
        kept = arena.empty(8 * MIB, "uint8")
        with pytest.raises(OutOfMemory), arena.scope():
            for _ in range(100):
                last = arena.empty(8 * MIB, "uint8")
        assert last.freed and not kept.freed and arena.used == 8 * MIB and arena.check() is None
        arena.empty(40 * MIB, "uint8").fill(1)


# ---- order ------------------------------------------------------------------------------------------------


def test_a_reset_waits_by_stream_order(make_pool: MakePool, device: Device, work: Work) -> None:
    size = 8 * MIB
    with Stream(device) as own, Stream(device) as other, Arena(make_pool(), stream=own) as arena:
        for _ in range(3):
            piece, seed = arena.empty(size, "uint8"), work.new_seed()
            work.fill(piece.ptr, size, seed, own.handle)
            other.wait_stream(own)
            work.spin(50.0, other.handle)
            work.check(piece.ptr, size, seed, other.handle)
            arena.record_stream(other)
            arena.reset()
            assert not other.query()  # the host has not waited
            again = arena.empty(size, "uint8")
            assert again.ptr == piece.ptr
            again.fill(0)
            arena.reset()
        assert work.take_counts() == (0, 3 * size)


def test_a_tensor_on_its_own_stream_is_waited_for(
    make_pool: MakePool, device: Device, work: Work, torch: Any
) -> None:
    size, theirs = 8 * MIB, torch.cuda.Stream()
    with Stream(device) as own, Arena(make_pool(), stream=own) as arena:
        piece, seed = arena.empty(size, "uint8"), work.new_seed()
        work.fill(piece.ptr, size, seed, own.handle)
        with torch.cuda.stream(theirs):
            tensor = torch.from_dlpack(piece)  # waits for ours, and tells the arena
        work.spin(50.0, theirs.cuda_stream)
        work.check(tensor.data_ptr(), size, seed, theirs.cuda_stream)
        del tensor
        arena.reset()
        arena.empty(size, "uint8").fill(0)
        assert work.take_counts() == (0, size)
        del piece


def test_zeroing_is_queued(make_pool: MakePool, device: Device, work: Work, torch: Any) -> None:
    with Stream(device) as own, Arena(make_pool(), stream=own) as arena:
        arena.empty(4 * MIB, "float32").fill(255)
        work.spin(50.0, own.handle)
        arena.reset(zero=True)
        piece = arena.empty(4 * MIB, "float32")
        assert not own.query()
        with torch.cuda.stream(torch.cuda.ExternalStream(own.handle)):
            assert int(torch.from_dlpack(piece).count_nonzero()) == 0
        del piece


@pytest.mark.real_gpu
def test_what_python_cannot_see_reads_nan(make_pool: MakePool, torch: Any) -> None:
    with Arena(make_pool(), checked=True) as arena:
        with arena.scope():
            piece = arena.empty(1000, torch.float32)
            tensor = torch.from_dlpack(piece)
            tensor.fill_(1)
        assert bool(tensor.isnan().all())
        with pytest.raises(InvalidFree, match="test_what_python_cannot_see"):
            torch.from_dlpack(piece)
        del tensor, piece


# ---- graphs -----------------------------------------------------------------------------------------------


def test_a_graph_runs_again_over_the_same_addresses(make_pool: MakePool, torch: Any) -> None:
    side = torch.cuda.Stream()
    with Arena(make_pool(), stream=side) as arena:

        def step(source: Any) -> tuple[Any, Any]:
            held = arena.empty((1000,), torch.float32)
            out = torch.from_dlpack(held)
            torch.mul(source, 2, out=out)
            return held, out

        source = torch.ones(1000, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            step(source)  # grows before the capture
        side.synchronize()
        arena.reset()
        requests, graph = arena.stats().requests, torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            held, out = step(source)
        assert arena.stats().requests == requests
        for value in (3.0, 5.0):
            source.fill_(value)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            assert bool((out == 2 * value).all())
        del graph, held, out


# ---- pinned -----------------------------------------------------------------------------------------------


def test_pinned_arrays_are_numpys_and_copied_without_waiting(device: Device, work: Work, torch: Any) -> None:
    with Arena(device, size="8MiB", pinned=True) as arena:
        side = torch.cuda.Stream()
        array = arena.empty(MIB, np.float32)
        array[:] = 3
        tensor = torch.from_numpy(array)
        assert isinstance(array, np.ndarray) and tensor.is_pinned()
        with torch.cuda.stream(side):
            work.spin(50.0, side.cuda_stream)
            there = tensor.to("cuda", non_blocking=True)
        arena.record_stream(side)
        arena.reset()
        assert not side.query() and arena.stats().resting == 8 * MIB  # nobody has waited
        other = arena.empty(MIB, np.float32)
        other[:] = 9
        side.synchronize()
        assert bool((there == 3).all())
        arena.reset()
        assert arena.stats().host_waits == 0
        del array, other, tensor


def test_the_managers_pool_serves_a_device_by_name(torch: Any) -> None:
    with vram.Arena("cuda:0", "1MiB", name="by name") as arena:
        assert arena.pool is vram.get_memory_manager().pool("cuda:0")
        tensor = torch.from_dlpack(arena.empty((10, 10), "float32"))
        tensor.zero_()
        assert float(tensor.sum()) == 0.0
        del tensor
