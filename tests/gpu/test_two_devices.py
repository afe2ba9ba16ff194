"""Two devices in one process: each call goes to its own, and neither becomes the current one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from work import undisturbed

from vram import Device, DeviceError, DriverPool, Pool, Stream, devices

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other libraries' warnings are theirs

MIB = 1 << 20


@pytest.fixture
def both() -> tuple[Device, Device]:
    there = [device for device in devices() if device.kind == "cuda"]
    if len(there) < 2:
        pytest.skip("one CUDA device")
    return there[0], there[1]


@pytest.fixture
def pools(both: tuple[Device, Device]) -> Iterator[tuple[Pool, Pool]]:
    with Pool(both[0]) as first, Pool(both[1]) as second:
        yield first, second
        assert (first.check(), second.check()) == (None, None)


def contents(buffer: Any) -> set[int]:
    data = bytearray(buffer.size)
    buffer.copy_to(data)
    return set(data)


@undisturbed
def test_memory_is_taken_from_the_device_that_was_asked(pools: tuple[Pool, Pool]) -> None:
    for pool, other in (pools, pools[::-1]):
        before, theirs = pool.device.free_memory, other.device.free_memory
        held = pool.allocate("2GiB")
        assert before - pool.device.free_memory >= held.size - 64 * MIB
        assert abs(other.device.free_memory - theirs) < 64 * MIB
        held.free()
        pool.trim(wait=True)


def test_each_buffer_keeps_its_own_contents(pools: tuple[Pool, Pool]) -> None:
    buffers = [pool.allocate(3 * MIB) for pool in pools * 4]
    for number, buffer in enumerate(buffers):
        buffer.fill(number)
    assert [contents(buffer) for buffer in buffers] == [{number} for number in range(8)]
    assert [buffer.device.index for buffer in buffers] == [0, 1] * 4


def test_a_stream_of_the_other_device_is_refused(pools: tuple[Pool, Pool]) -> None:
    with Stream(pools[1].device) as theirs:
        buffer = pools[0].allocate(MIB)
        for use in (
            lambda: pools[0].allocate(MIB, stream=theirs),
            lambda: buffer.record_stream(theirs),
            lambda: buffer.fill(1, stream=theirs),
        ):
            with pytest.raises(DeviceError, match="belongs to"):
                use()


def test_contents_are_copied_between_the_devices(pools: tuple[Pool, Pool]) -> None:
    """Whether they can access each other or not."""
    for one, other in (pools, pools[::-1]):
        with Stream(one.device) as here, Stream(other.device) as there:
            source, target = (
                one.allocate(13 * MIB + 5, stream=here),
                other.allocate(13 * MIB + 5, stream=there),
            )
            for number, copy in enumerate(
                (
                    lambda: target.copy_from(source),  # noqa: B023
                    lambda: source.copy_to(target),  # noqa: B023
                    lambda: target.copy_from(source, stream=here),  # noqa: B023
                )
            ):
                source.fill(number)
                copy()
                source.fill(99)  # behind the copy
                assert contents(target) == {number}


@pytest.mark.parametrize("make", [Pool, lambda device: Pool(device, pages=False), DriverPool])
def test_memory_that_is_opened_is_used_by_the_other_device(both: tuple[Device, Device], make: Any) -> None:
    if not both[1].can_access(both[0]):
        pytest.skip("the devices cannot access each other")
    with make(both[0]) as pool, Pool(both[1]) as other:
        early = pool.allocate(3 * MIB)
        pool.allow_access(both[1])
        for buffer in (early, pool.allocate(40 * MIB)):
            both[0].synchronize()
            both[1].backend.fill(buffer.ptr, 5, buffer.size, 0)  # work of the other device
            both[1].synchronize()
            assert contents(buffer) == {5}
        assert other.check() is None


def test_the_current_device_stays_the_current_one(pools: tuple[Pool, Pool], torch: Any) -> None:
    for current in (0, 1):
        torch.cuda.set_device(current)
        for pool in pools:
            with Stream(pool.device) as stream:
                buffer = pool.allocate(5 * MIB, stream=stream)
                buffer.fill(current)
                assert contents(buffer) == {current}
            assert torch.cuda.current_device() == current
    torch.cuda.set_device(0)


def test_events_are_made_on_the_device_of_their_stream(pools: tuple[Pool, Pool], torch: Any) -> None:
    torch.cuda.set_device(0)
    pool = pools[1]
    with Stream(pool.device) as one, Stream(pool.device) as two:
        for _ in range(20):
            buffer = pool.allocate(3 * MIB, stream=one)
            buffer.fill(7)
            buffer.record_stream(two)
            buffer.free()
        pool.device.synchronize()
        pool.coalesce()
        assert pool.stats().pending == 0
