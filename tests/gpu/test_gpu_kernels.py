"""The kernels as the driver compiles them: patterns, time, place."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import pytest

import vram
from vram.lab.kernels import MULTIPROCESSORS, Kernels, pattern

pytestmark = pytest.mark.gpu

SIZE = 1 << 20


@pytest.fixture
def kernels() -> Kernels:
    return Kernels("cuda:0")


@pytest.fixture
def stream() -> Iterator[vram.Stream]:
    with vram.Stream("cuda:0") as made:
        yield made


@pytest.fixture
def memory(stream: vram.Stream) -> Iterator[vram.Buffer]:
    with vram.Pool("cuda:0") as pool:
        yield pool.allocate(SIZE, stream=stream)
        stream.synchronize()


def contents(memory: vram.Buffer, size: int) -> bytes:
    found = bytearray(memory.size)
    memory.copy_to(found)
    return bytes(found[:size])


def test_the_device_writes_the_pattern_that_python_computes(
    kernels: Kernels, memory: vram.Buffer, stream: vram.Stream
) -> None:
    kernels.fill(memory, seed=3, stream=stream)
    stream.synchronize()
    assert contents(memory, 4096) == pattern(1024, 3).tobytes()


def test_a_planted_error_is_found(kernels: Kernels, memory: vram.Buffer, stream: vram.Stream) -> None:
    kernels.fill(memory, seed=3, stream=stream)
    assert kernels.check(memory, seed=3, stream=stream).count() == 0
    memory.device.backend.fill(memory.ptr + SIZE - 4, 0x5A, 4, stream.handle)
    assert kernels.check(memory, seed=3, stream=stream).count() == 1
    assert kernels.check(memory.ptr, SIZE - 4, seed=3, stream=stream).count() == 0
    wrong = kernels.check(memory, seed=4, stream=stream).count()
    assert SIZE // 4 - 2 <= wrong <= SIZE // 4


def test_a_size_that_no_block_divides_is_filled_to_its_end_and_no_further(
    kernels: Kernels, memory: vram.Buffer, stream: vram.Stream
) -> None:
    memory.fill(0)
    kernels.fill(memory.ptr, 4 * 1001, seed=5, stream=stream)
    stream.synchronize()
    assert contents(memory, 4 * 1003) == pattern(1001, 5).tobytes() + bytes(8)


@pytest.mark.parametrize("ms", [5.0, 50.0])
def test_spin_takes_as_long_as_asked_and_leaves_the_host_alone(
    ms: float, kernels: Kernels, stream: vram.Stream
) -> None:
    start = time.perf_counter()
    kernels.spin(stream, ms)
    queued = time.perf_counter() - start
    stream.synchronize()
    spent = time.perf_counter() - start
    assert queued < ms / 2e3
    assert 0.9 * ms / 1e3 <= spent <= 2 * ms / 1e3 + 0.005


def test_churn_computes_on_every_word(kernels: Kernels, memory: vram.Buffer, stream: vram.Stream) -> None:
    memory.fill(0)
    kernels.churn(memory, rounds=2, stream=stream)
    stream.synchronize()
    value = (1013904223 * 1664525 + 1013904223) & 0xFFFFFFFF
    assert contents(memory, SIZE) == struct.pack("<I", value) * (SIZE // 4)


def test_where_tells_multiprocessors_and_times(kernels: Kernels, stream: vram.Stream) -> None:
    total = vram.Device("cuda:0").backend.attribute(MULTIPROCESSORS)  # type: ignore[attr-defined]
    places = kernels.where(stream, 2, blocks=total, threads=1024).read()
    assert len(places) == total
    assert all(0 <= place.multiprocessor < total for place in places)
    assert len({place.multiprocessor for place in places}) > total // 2
    assert all(1.8e6 <= place.end_ns - place.start_ns <= 20e6 for place in places)


def test_modules_are_loaded_once_for_a_device(kernels: Kernels) -> None:
    assert Kernels("cuda:0")._work is kernels._work


def test_two_streams_overlap(kernels: Kernels) -> None:
    with vram.Stream("cuda:0") as first, vram.Stream("cuda:0") as second:
        one, two = kernels.where(first, 20), kernels.where(second, 20)
        (a,), (b,) = one.read(), two.read()
    assert min(a.end_ns, b.end_ns) > max(a.start_ns, b.start_ns)


def test_results_of_many_kernels_do_not_mix(
    kernels: Kernels, memory: vram.Buffer, stream: vram.Stream
) -> None:
    kernels.fill(memory, seed=1, stream=stream)
    checks = [kernels.check(memory.ptr, 4 * (index + 1), seed=2, stream=stream) for index in range(100)]
    assert [each.count() for each in checks] == [index + 1 for index in range(100)]
