"""Copies between buffers of a GPU and other places, with contents; staged copies on one GPU opened twice."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import vram
from vram import Device, Event, Pool, Stream, _native
from vram.core.device import _Core

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SIZES = (1, 4 * MIB - 1, 4 * MIB, 13 * MIB + 77)


def pattern(size: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


@pytest.fixture
def twice() -> tuple[Device, Device]:
    """The first GPU, and the same one as if it were another: it cannot access itself as a peer."""
    first = Device("cuda:0")
    return first, Device._of(_Core("cuda", 0, "cuda:0 again", _native.CudaBackend(0)))


@pytest.mark.parametrize("size", SIZES)
def test_host_and_device_in_both_directions(size: int) -> None:
    data = pattern(size)
    with Pool("cuda:0") as pool, Pool("host") as host, Stream("cuda:0") as stream:
        there, back, again = pool.allocate(size, stream=stream), host.allocate(size), host.allocate(size)
        there.copy_from(data)
        back.copy_from(there)
        assert np.array_equal(np.asarray(back), data)
        there.fill(0)
        back.copy_to(there, stream=stream)
        again.copy_from(there, stream=stream)
        assert np.array_equal(np.asarray(again), data)


@pytest.mark.parametrize("size", SIZES)
def test_staged_copies_carry_contents(twice: tuple[Device, Device], size: int) -> None:
    assert not twice[0].can_access(twice[1])
    data, out = pattern(size), np.empty(size, np.uint8)
    with Pool(twice[0]) as one, Pool(twice[1]) as two, Stream(twice[0]) as here, Stream(twice[1]) as there:
        source, target = one.allocate(size, stream=here), two.allocate(size, stream=there)
        source.copy_from(data)
        for copy in (
            lambda: target.copy_from(source),
            lambda: source.copy_to(target),
            lambda: target.copy_from(source, stream=here),
        ):
            target.fill(0)
            copy()
            target.copy_to(out)
            assert np.array_equal(out, data)


def test_staged_copies_follow_the_streams_of_both_devices(twice: tuple[Device, Device]) -> None:
    """Contents change on both streams around each copy; only the right order gives the right numbers."""
    size, rounds = 24 * MIB, 30
    out = np.empty(size, np.uint8)
    with Pool(twice[0]) as one, Pool(twice[1]) as two, Stream(twice[0]) as here, Stream(twice[1]) as there:
        targets = [two.allocate(size, stream=there) for _ in range(rounds)]
        source = one.allocate(size, stream=here)
        for number, target in enumerate(targets):
            source.fill(number)
            target.copy_from(source)
        source.free()
        for number, target in enumerate(targets):
            target.copy_to(out)
            assert (out == number).all(), number
        assert one.check() is None and two.check() is None


def test_a_staged_copy_is_faster_than_its_two_halves(twice: tuple[Device, Device]) -> None:
    size = 512 * MIB
    with Pool(twice[0]) as one, Pool(twice[1]) as two, Stream(twice[1]) as stream:
        source, target = one.allocate(size), two.allocate(size, stream=stream)
        begun, ended = Event(twice[1], timing=True), Event(twice[1], timing=True)
        for _ in range(3):
            begun.record(stream)
            target.copy_from(source)
            ended.record(stream)
            stream.synchronize()
        staged = ended.elapsed_ms(begun)
        with vram.PinnedPool(twice[1]) as pinned:
            memory = pinned.allocate(size, stream=stream)
            begun.record(stream)
            target.copy_from(memory)
            target.copy_to(memory)
            ended.record(stream)
            stream.synchronize()
        halves = ended.elapsed_ms(begun)
    print(
        f"\n{size / staged / 1e6:.1f} GB/s staged; both halves one after the other {size / halves / 1e6:.1f}"
    )
    assert staged < halves


def test_streams_wait_for_events_of_the_other_device(twice: tuple[Device, Device]) -> None:
    out = np.empty(64 * MIB, np.uint8)
    with Pool(twice[0]) as pool, Stream(twice[0]) as here, Stream(twice[1]) as there:
        buffer = pool.allocate(64 * MIB, stream=here)
        for number in range(20):
            buffer.fill(number)
            there.wait_stream(here)
            there.synchronize()
            buffer.copy_to(out)
            assert (out == number).all()


def test_properties_are_those_of_the_driver() -> None:
    properties = Device("cuda:0").properties
    print(f"\n{properties}")
    assert properties.copy_engines >= 1 and properties.multiprocessors > 0
    assert properties.compute_capability is not None and properties.compute_capability >= (5, 0)
    assert properties.unified_addressing and properties.memory_pools and properties.virtual_memory
    assert properties.memory_bandwidth is None or properties.memory_bandwidth > 1e10


def test_every_pair_of_devices_answers() -> None:
    for one, other in itertools.permutations(vram.devices(), 2):
        assert one.can_access(other) in (True, False)
    assert Device("cuda:0").can_access("cuda:0")
