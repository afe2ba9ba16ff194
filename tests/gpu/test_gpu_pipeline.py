"""Pipelines on a GPU: right results through every library, real overlap, pinned memory as it is, no leaks."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import vram
from vram import Device, Event, OutOfMemory, PinnedPool, Pipeline, Pool, Stream, _native
from vram.lab.kernels import Kernels

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other libraries' warnings are theirs

KIB, MIB = 1 << 10, 1 << 20
Make = Callable[..., Pipeline]


@pytest.fixture
def pools() -> Iterator[tuple[Pool, PinnedPool]]:
    with Pool("cuda:0") as pool, PinnedPool("cuda:0") as pinned:
        yield pool, pinned
        gc.collect()
        for each in (pool, pinned):
            assert each.check() is None
            assert each.stats().live == 0


@pytest.fixture
def make(pools: tuple[Pool, PinnedPool]) -> Iterator[Make]:
    with contextlib.ExitStack() as stack:

        def made(compute: Callable[[Any], Any], *arguments: Any, **options: Any) -> Pipeline:
            options = {"pool": pools[0], "pinned": pools[1], **options}
            return stack.enter_context(Pipeline(compute, *arguments, **options))

        yield made


def locked(pinned: PinnedPool, array: Any) -> Any:
    """A copy of an array in page-locked memory."""
    copy = np.frombuffer(pinned.allocate(array.nbytes), array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def random_words(count: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(0, 1 << 30, count, dtype=np.int32)


# ---- time and host copies on a GPU ------------------------------------------------------------------------


def test_timing_events_measure_a_kernel(device: Device) -> None:
    with Stream(device) as stream:
        begin, end = Event(device, timing=True), Event(device, timing=True)
        begin.record(stream)
        Kernels(device).spin(stream, 5.0)
        end.record(stream)
        end.synchronize()
        assert 4.9 <= end.elapsed_ms(begin) < 500


def test_host_copies_run_in_the_order_of_a_stream(device: Device, pools: tuple[Pool, PinnedPool]) -> None:
    copies = _native.HostCopies()
    data = random_words(4 * MIB)
    there, back = pools[1].allocate(data.nbytes), np.zeros_like(data)
    with Stream(device) as stream:
        Kernels(device).spin(stream, 20.0)
        copies.queue(device.backend, stream.handle, there.ptr, data.ctypes.data, data.nbytes)
        copies.queue(device.backend, stream.handle, back.ctypes.data, there.ptr, data.nbytes)
        assert not stream.query()
        del copies
        stream.synchronize()
    assert np.array_equal(back, data)


def test_page_locked_memory_is_known_whoever_locked_it(
    device: Device, pools: tuple[Pool, PinnedPool], torch: Any
) -> None:
    backend = device.backend
    assert isinstance(backend, _native.CudaBackend)
    ordinary = np.zeros(MIB, np.uint8)
    assert not backend.host_pinned(ordinary.ctypes.data, ordinary.nbytes)
    buffer = pools[1].allocate(MIB)
    assert backend.host_pinned(buffer.ptr, MIB) and not backend.host_pinned(buffer.ptr, 0)
    with vram.pin(ordinary, device):
        assert backend.host_pinned(ordinary.ctypes.data, ordinary.nbytes)
    assert not backend.host_pinned(ordinary.ctypes.data, ordinary.nbytes)
    tensor = torch.zeros(MIB, dtype=torch.uint8).pin_memory()
    assert backend.host_pinned(tensor.data_ptr(), MIB)


# ---- every library ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["pinned", "pageable"])
def test_pytorch(make: Make, pools: tuple[Pool, PinnedPool], torch: Any, memory: str) -> None:
    streams: set[int] = set()

    def compute(x: Any) -> Any:
        streams.add(torch.cuda.current_stream().cuda_stream)
        return x.view(-1) * 3 + 1

    pipe = make(compute, "4MiB", like="torch")
    data = random_words(8 * MIB + 777)
    source = locked(pools[1], data) if memory == "pinned" else data
    assert np.array_equal(pipe.run(source), data * 3 + 1)
    assert streams == {pipe.stream.handle}
    lanes = {span.lane for span in pipe.report().spans}
    assert ("stage in" in lanes) == (memory == "pageable")
    assert "stage out" in lanes  # run() made an ordinary out
    out = locked(pools[1], np.zeros_like(data))
    assert pipe.run(source, out=out) is out and np.array_equal(out, data * 3 + 1)
    assert "stage out" not in {span.lane for span in pipe.report().spans}


def test_pytorch_types_structures_and_gradients(make: Make, torch: Any) -> None:
    weight = torch.nn.Parameter(torch.full((4, 2), 0.5, device="cuda"))

    def compute(batch: dict[str, Any]) -> Any:
        y = batch["x"] @ weight
        assert y.requires_grad
        return {"y": y, "t": y.t(), "mask": y > 0, "name": batch["name"], "sum": batch["k"].sum()}

    batches = [
        {"x": np.random.default_rng(n).random((n, 4), np.float32), "k": np.arange(n), "name": f"b{n}"}
        for n in (1, 5, 100, 3)
    ]
    for out, batch in zip(make(compute, like="torch").map(batches), batches, strict=True):
        expected = batch["x"] @ np.full((4, 2), 0.5, np.float32)
        assert np.allclose(out["y"], expected) and np.allclose(out["t"], expected.T)
        assert out["mask"].dtype == bool and out["name"] == batch["name"]
        assert out["sum"].shape == () and out["sum"] == batch["k"].sum()
    if "ml_dtypes" not in sys.modules:  # which teaches NumPy the type
        with pytest.raises(TypeError, match="bfloat16"):
            list(make(lambda x: x.bfloat16(), like="torch").map([np.zeros(3, np.float32)]))


@pytest.mark.parametrize("staging", [None, True, False])
def test_cupy(make: Make, cupy: Any, staging: bool | None) -> None:
    def compute(x: Any) -> Any:
        assert cupy.cuda.get_current_stream().ptr == pipe.stream.handle
        return (x.reshape(-1, 3).T, x.astype(cupy.float64).sum())

    pipe = make(compute, like="cupy", staging=staging)
    batches = [random_words(3 * n, n) for n in (1, 1000, 500_000, 7)]
    for (turned, total), batch in zip(pipe.map(batches), batches, strict=True):
        assert np.array_equal(turned, batch.reshape(-1, 3).T)
        assert total == batch.astype(np.float64).sum()


def test_numba(make: Make, numba_cuda: Any) -> None:
    @numba_cuda.jit  # type: ignore[untyped-decorator]
    def triple(x: Any, out: Any) -> None:
        place = numba_cuda.grid(1)
        if place < x.size:
            out[place] = 3 * x[place]

    def compute(x: Any) -> Any:
        out = numba_cuda.device_array(x.shape, np.int64, stream=x.stream)
        triple[-(-x.size // 256), 256, x.stream](x, out)
        return out

    data = random_words(MIB)
    assert np.array_equal(make(compute, "512KiB", like="numba").run(data), data.astype(np.int64) * 3)


def test_buffers_and_kernels_of_our_own(make: Make, device: Device) -> None:
    kernels = Kernels(device)

    def compute(buffer: vram.Buffer) -> vram.Buffer:
        kernels.fill(buffer, seed=7, stream=pipe.stream)
        return buffer

    pipe = make(compute, like="buffer", depth=2)
    with Pool("host") as host, Stream("host") as stream:
        wanted = host.allocate(64 * KIB, stream=stream)
        Kernels("host").fill(wanted, seed=7, stream=stream)
        stream.synchronize()
        for out in pipe.map(np.zeros(64 * KIB, np.uint8) for _ in range(10)):
            assert bytes(out) == bytes(wanted)
        del out


# ---- order ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["pinned", "pageable"])
def test_upload_compute_and_download_overlap(
    make: Make, pools: tuple[Pool, PinnedPool], torch: Any, device: Device, memory: str
) -> None:
    """By order of events: the next chunk is up before a long compute ends, and the last one is down."""
    kernels = Kernels(device)

    def compute(x: Any) -> Any:
        kernels.spin(pipe.stream, 20.0)
        return x + 1

    pipe = make(compute, "4MiB", like="torch")
    data = random_words(16 * MIB)
    source, out = (locked(pools[1], data) if memory == "pinned" else data.copy() for _ in range(2))
    pipe.run(source, out)
    pipe.run(source, out)
    assert np.array_equal(out, data + 1)
    spans = {(span.lane, span.chunk): span for span in pipe.report().spans}
    last = pipe.report().chunks - 1
    for number in range(1, last - 1):
        assert spans["upload", number + 1].end_ms < spans["compute", number].end_ms
        assert spans["download", number - 1].end_ms < spans["compute", number].end_ms
        assert spans["compute", number].end_ms <= spans["download", number].begin_ms + 0.01
        assert spans["upload", number].end_ms <= spans["compute", number].begin_ms + 0.01
    assert pipe.report().limit == "compute"


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
@pytest.mark.parametrize("staging", [None, False])
def test_nothing_is_overwritten_too_early(
    make: Make, torch: Any, device: Device, depth: int, staging: bool | None
) -> None:
    """Random sizes, kernels of random length, results in place or not, kept or not: every word is right."""
    chance = np.random.default_rng(depth)
    kernels = Kernels(device)
    lengths = chance.integers(1, 2 * MIB, 60)

    def compute(x: Any) -> Any:
        count = len(x)
        if count % 3 == 0:
            kernels.spin(pipe.stream, count % 4)
        if count % 2:
            x += 5
            return x
        return x + 5

    pipe = make(compute, depth=depth, like="torch", staging=staging)
    kept: list[tuple[int, Any]] = []
    batches = (random_words(int(length), number) for number, length in enumerate(lengths))
    for number, out in enumerate(pipe.map(batches)):
        if number % 4 == 0:
            kept.append((number, out))
        else:
            assert np.array_equal(out, random_words(int(lengths[number]), number) + 5)
    for number, out in kept:
        assert np.array_equal(out, random_words(int(lengths[number]), number) + 5)
    del out
    kept.clear()


def test_two_loops_over_one_pipeline(make: Make, torch: Any) -> None:
    pipe = make(lambda x: x * 2, like="torch")
    one = pipe.map(random_words(100_000, number) for number in range(20))
    two = pipe.map(random_words(50_000, number) for number in range(100, 120))
    for number, (first, second) in enumerate(zip(one, two, strict=True)):
        assert np.array_equal(first, random_words(100_000, number) * 2)
        assert np.array_equal(second, random_words(50_000, number + 100) * 2)
    del first, second


# ---- memory and errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["pinned", "pageable"])
def test_an_array_larger_than_the_memory_goes_through(torch: Any, memory: str) -> None:
    with Pool("cuda:0", limit="64MiB") as pool, PinnedPool("cuda:0") as pinned:
        data = random_words(128 * MIB)  # 512 MiB
        source = locked(pinned, data) if memory == "pinned" else data
        with Pipeline(lambda x: x + 1, pool=pool, pinned=pinned, like="torch") as pipe:
            assert np.array_equal(pipe.run(source), data + 1)
            assert pipe.report().measured["chunk"] <= 11 * MIB
        assert pool.stats().peak_reserved <= 64 * MIB
        del source


def test_no_more_than_depth_chunks_take_memory(make: Make, torch: Any) -> None:
    pipe = make(lambda x: x[:1].clone(), like="torch", depth=2)
    for _ in pipe.map(np.zeros(8 * MIB, np.uint8) for _ in range(20)):
        assert pipe.pool.stats().allocated <= 2 * 8 * MIB
    assert pipe.pool.stats().peak_allocated <= 2 * 8 * MIB
    assert pipe.pinned.stats().peak_allocated <= 2 * 8 * MIB + 64 * KIB


def test_errors_come_in_their_place_and_early_exits_release_everything(make: Make, torch: Any) -> None:
    def compute(x: Any) -> Any:
        if x[0] == 4:
            raise ZeroDivisionError
        return x * 2

    pipe = make(compute, like="torch")
    got: list[int] = []
    with pytest.raises(ZeroDivisionError) as caught:
        for out in pipe.map(np.full(MIB, number) for number in range(10)):
            got.append(int(out[0]))
    assert got == [0, 2, 4, 6] and "in chunk 4 of" in caught.value.__notes__[0]
    out = None
    assert pipe.pool.stats().live == pipe.pinned.stats().live == 0
    for _out in pipe.map(np.full(MIB, 1) for _ in range(10)):
        break
    del _out
    gc.collect()
    assert pipe.pool.stats().live == pipe.pinned.stats().live == 0


def test_out_of_memory_in_the_middle(torch: Any) -> None:
    with (
        Pool("cuda:0", limit="32MiB") as pool,
        PinnedPool("cuda:0") as pinned,
        Pipeline(lambda x: x.sum(), pool=pool, pinned=pinned, like="torch") as pipe,
    ):
        batches = [np.ones(MIB, np.uint8), np.ones(20 * MIB, np.uint8), np.ones(64 * MIB, np.uint8)]
        got: list[int] = []
        with pytest.raises(OutOfMemory):
            for out in pipe.map(batches):
                got.append(int(out))
        out = None
        assert got == [MIB, 20 * MIB]
        assert pool.stats().live == pinned.stats().live == 0


def test_pytorch_gives_its_cache_back_after_the_pipeline_is_gone(make: Make, torch: Any) -> None:
    """Its allocator may still speak to the stream that memory was allocated on."""
    for _ in range(3):
        with make(lambda x: x * 2, "1MiB", like="torch") as pipe:
            assert pipe.run(np.ones(MIB, np.float32))[-1] == 2
        torch.cuda.empty_cache()
    torch.cuda.synchronize()


def test_the_library_is_inferred_from_what_is_loaded(make: Make, torch: Any) -> None:
    assert make(lambda x: x).library.name == "torch"
