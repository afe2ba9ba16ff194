"""Several libraries in one process on one device: each works on its own streams, in memory of one pool."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from typing import Any

import pytest
from programs import assert_ended_well, run_program
from work import Bytes, Marked, Work

from vram import Device, Pool

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other libraries' warnings are theirs

MIB = 1 << 20
MakePool = Callable[..., Pool]


@pytest.fixture
def streams(torch: Any, cupy: Any, numba_cuda: Any) -> dict[str, Any]:
    """A stream of each library."""
    return {
        "torch": torch.cuda.Stream(),
        "cupy": cupy.cuda.Stream(non_blocking=True),
        "numba": numba_cuda.stream(),
    }


def test_a_stream_of_each_library_orders_our_memory(
    make_pool: MakePool, work: Work, streams: dict[str, Any]
) -> None:
    pool = make_pool()
    for stream in streams.values():
        first = Marked(pool, work, 3 * MIB, stream)
        first.check()
        address = first.buffer.ptr
        first.buffer.free()
        second = Marked(pool, work, 3 * MIB, stream)
        second.check()
        assert second.buffer.ptr == address and second.buffer.stream not in (0, 1, 2)
    assert work.take_counts() == (0, 3 * 2 * 3 * MIB)
    assert len({each["handle"] for each in pool.stats().streams}) >= 3


def test_each_library_computes_in_our_memory(
    make_pool: MakePool, torch: Any, cupy: Any, numba_cuda: Any, streams: dict[str, Any]
) -> None:
    pool = make_pool()
    buffers = {name: pool.allocate(MIB, stream=stream) for name, stream in streams.items()}
    views = {name: Bytes(buffer.ptr, buffer.size) for name, buffer in buffers.items()}
    with torch.cuda.stream(streams["torch"]):
        torch.as_tensor(views["torch"], device="cuda").fill_(3)
    with streams["cupy"]:
        cupy.asarray(views["cupy"])[...] = 4

    @numba_cuda.jit
    def set_to(target: Any, value: int) -> None:
        place = numba_cuda.grid(1)
        if place < target.size:
            target[place] = value

    set_to[MIB // 256, 256, streams["numba"]](numba_cuda.as_cuda_array(views["numba"]), 5)
    for name, value in {"torch": 3, "cupy": 4, "numba": 5}.items():
        data = bytearray(MIB)
        buffers[name].copy_to(data)
        assert data.count(value) == MIB, name


def test_memory_goes_from_library_to_library_under_pressure(
    make_pool: MakePool, work: Work, torch: Any, cupy: Any, streams: dict[str, Any]
) -> None:
    """The pool serves all their streams within a tight limit while the libraries' own pools are busy too."""
    pool = make_pool(limit="128MiB")
    dice, held = random.Random(4), list[Marked]()
    matrix = torch.rand(1024, 1024, device="cuda")
    vector = cupy.arange(1 << 20, dtype=cupy.float32)
    for _ in range(300):
        while sum(each.size for each in held) > 80 * MIB:
            gone = held.pop(dice.randrange(len(held)))
            gone.check()
            gone.buffer.free()
        stream = dice.choice([*streams.values()])
        held.append(Marked(pool, work, dice.choice([4096, MIB, 5 * MIB, 17 * MIB]), stream))
        with torch.cuda.stream(streams["torch"]):
            matrix @ matrix
        with streams["cupy"]:
            vector * 2
    for each in held:
        each.check()
    wrong, checked = work.take_counts()
    assert wrong == 0 and checked > 300 * MIB
    assert float(vector.sum()) == pytest.approx(sum(range(1 << 20)), rel=1e-3)
    held.clear()


def test_a_recorded_use_by_another_library_is_waited_for(
    make_pool: MakePool, work: Work, device: Device, streams: dict[str, Any]
) -> None:
    pool = make_pool()
    theirs = streams["torch"]
    buffer = Marked(pool, work, 8 * MIB)
    device.synchronize()
    work.spin(50.0, theirs.cuda_stream)
    work.check(buffer.buffer.ptr, buffer.size, buffer.seed, theirs.cuda_stream)
    buffer.buffer.record_stream(theirs)
    address = buffer.buffer.ptr
    buffer.buffer.free()
    others = [Marked(pool, work, 8 * MIB) for _ in range(3)]
    assert address not in {other.buffer.ptr for other in others}
    assert work.take_counts() == (0, 8 * MIB)


def test_jax_torch_cupy_and_numba_in_one_process() -> None:
    if importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    program = """
        import os, warnings
        warnings.simplefilter("ignore")
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        import jax.numpy as jnp, numpy, torch, cupy, numba.cuda
        import vram
        pool = vram.Pool("cuda:0", limit="1GiB")
        buffer = pool.allocate("64MiB")
        buffer.fill(9)
        results = [
            float(jnp.arange(1000.0).sum()),
            float(torch.arange(1000.0, device="cuda").sum()),
            float(cupy.arange(1000.0).sum()),
            float(numba.cuda.to_device(numpy.arange(1000.0)).copy_to_host().sum()),
        ]
        assert results == [499500.0] * 4, results
        held = [pool.allocate("1MiB", stream=torch.cuda.Stream()) for _ in range(100)]
        data = bytearray(64 << 20)
        buffer.copy_to(data)
        assert data.count(9) == len(data)
        assert pool.check() is None
    """
    assert_ended_well(run_program(program))
