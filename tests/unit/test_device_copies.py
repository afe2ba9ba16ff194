"""Copies between buffers in every direction, and models that stand for the GPUs of one machine."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import vram
from vram import Buffer, Device, DeviceError, DriverPool, Event, Pool, Stream
from vram.errors import ConfigError

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(params=[True, False], ids=["peers", "staged"])
def both(request: pytest.FixtureRequest) -> tuple[Device, Device]:
    first, second = Device.models(2, "4GiB", peer_access=request.param)
    return first, second


@pytest.fixture
def pools(both: tuple[Device, Device]) -> Iterator[tuple[Pool, Pool]]:
    with Pool(both[0]) as first, Pool(both[1]) as second:
        yield first, second
        assert (first.check(), second.check()) == (None, None)
    assert [each.backend.check() for each in both] == [None, None]  # type: ignore[attr-defined]


def took_ms(device: Device, work: Callable[[Stream], object]) -> float:
    """The time of the work on the device's clock."""
    with Stream(device) as stream:
        begun, ended = Event(device, timing=True), Event(device, timing=True)
        begun.record(stream)
        work(stream)
        ended.record(stream)
        stream.synchronize()
        return ended.elapsed_ms(begun)


# ---- every direction --------------------------------------------------------------------------------------


def places() -> dict[str, Pool]:
    one, two = Device.models(2, "1GiB")
    apart, _ = Device.models(2, "1GiB", peer_access=False)
    pools = {"host": Pool("host"), "one": Pool(one), "two": Pool(two), "staged": Pool(apart)}
    pools["alone"] = Pool(Device.model("1GiB"))
    pools["driver"] = DriverPool(two)
    pools["pinned"] = vram.PinnedPool(one, limit="64MiB")
    return pools


PLACES = ("host", "one", "two", "staged", "alone", "driver", "pinned")


@pytest.mark.parametrize("source", PLACES)
@pytest.mark.parametrize("target", PLACES)
def test_a_buffer_is_copied_from_any_place_to_any_other(source: str, target: str) -> None:
    pools = places()
    for size in (0, 100, 9 * MIB):
        here, there = pools[target].allocate(size), pools[source].allocate(size)
        here.copy_from(there)
        there.copy_to(here)
        with Stream(here.device) as stream, Stream(there.device) as theirs:
            here.copy_from(there, stream=stream)
            there.copy_to(here, stream=stream)  # of the other buffer's device
            here.copy_from(there, stream=theirs)
            there.copy_to(here, stream=theirs)
            stream.synchronize()
            theirs.synchronize()
        here.free()
        there.free()
    for pool in pools.values():
        pool.device.synchronize()
        assert pool.check() is None


def test_a_buffer_on_the_host_takes_the_contents_of_another_pool() -> None:
    """Between two pools on the host the contents show that the direction is right."""
    with Pool("host") as one, Pool("host", pages=False) as two, Stream("host") as stream:
        left, right = one.allocate(64), two.allocate(64, stream=stream)
        left.copy_from(b"L" * 64)
        right.copy_from(left, stream=stream)
        left.copy_from(b"l" * 64, stream=stream)
        stream.synchronize()
        assert (bytes(left), bytes(right)) == (b"l" * 64, b"L" * 64)


def test_a_copy_into_host_memory_has_completed_on_return() -> None:
    device = Device.model("1GiB", lag_us=100.0)
    with Pool("host") as host, Pool(device) as pool:
        here, there = host.allocate(MIB), pool.allocate(MIB)
        backend: Any = device.backend
        before = backend.now()
        here.copy_from(there)
        assert backend.now() - before >= 100.0
        assert backend.counts()["queued"] == 0


def test_sizes_and_freed_buffers_are_refused(pools: tuple[Pool, Pool]) -> None:
    ours, theirs = pools[0].allocate(MIB), pools[1].allocate(2 * MIB)
    for copy in (ours.copy_from, ours.copy_to):
        with pytest.raises(ValueError, match="sizes differ: 1048576 and 2097152 bytes"):
            copy(theirs)
    theirs.free()
    for copy in (ours.copy_from, ours.copy_to):
        with pytest.raises(vram.InvalidFree):
            copy(theirs)


def test_a_stream_of_a_third_device_is_refused(pools: tuple[Pool, Pool]) -> None:
    ours, theirs = pools[0].allocate(MIB), pools[1].allocate(MIB)
    with Stream(Device.model("1GiB")) as stream, pytest.raises(DeviceError, match="belongs to"):
        ours.copy_from(theirs, stream=stream)


def test_a_copy_between_devices_cannot_be_captured(pools: tuple[Pool, Pool]) -> None:
    with Stream(pools[0].device) as stream:
        ours, theirs = pools[0].allocate(MIB, stream=stream), pools[1].allocate(MIB)
        with stream.capture() as graph, pytest.raises(DeviceError, match="captur"):
            ours.copy_from(theirs)
        graph.close()


# ---- order ------------------------------------------------------------------------------------------------


def test_a_copy_waits_for_both_streams_and_both_wait_for_it(pools: tuple[Pool, Pool]) -> None:
    (first, second), backends = pools, [pool.device.backend for pool in pools]
    with Stream(first.device) as one, Stream(second.device) as two:
        source, target = first.allocate(44 * MIB, stream=one), second.allocate(44 * MIB, stream=two)
        order: list[str] = []
        backends[0].set_lag(2000.0)  # type: ignore[attr-defined]
        one.launch(order.append, "source written")
        target.copy_from(source)
        two.launch(order.append, "target read")
        one.launch(order.append, "source reused")
        two.synchronize()
        one.synchronize()
        assert order[0] == "source written" and len(order) == 3
        assert backends[0].now() >= 2000.0  # type: ignore[attr-defined]


def test_memory_is_not_reused_before_the_copy_has_completed(pools: tuple[Pool, Pool]) -> None:
    with Stream(pools[0].device) as one, Stream(pools[1].device) as two, Stream(pools[1].device) as third:
        source, target = pools[0].allocate(64 * MIB, stream=one), pools[1].allocate(64 * MIB, stream=two)
        target.copy_from(source, stream=third)
        source.free()
        target.free()
        assert pools[1].stats().pending == 64 * MIB  # used on another stream
        third.synchronize()
        one.synchronize()
        pools[1].coalesce()
        assert pools[1].stats().pending == 0


def test_streams_wait_for_events_of_linked_devices() -> None:
    first, second = Device.models(2, "1GiB")
    with Pool(first) as pool, Stream(first) as one, Stream(second) as two:
        buffer = pool.allocate(550 * MIB, stream=one)
        with vram.pin(bytearray(550 * MIB), first) as memory:
            buffer.copy_from(memory)
            two.wait_event(one.record_event())
            two.synchronize()
            assert first.backend.now() >= 10_000.0  # type: ignore[attr-defined]
        two.wait_stream(one)
    alone = Device.model("1GiB")
    with Stream(alone) as stream, pytest.raises(DeviceError, match="belongs to"):
        stream.wait_event(Event(first))


# ---- links ------------------------------------------------------------------------------------------------


def test_copies_take_the_time_of_their_link() -> None:
    first, second = Device.models(2, "4GiB", link_gb_per_s=100.0, host_gb_per_s=10.0)
    with Pool(first) as one, Pool(second) as two:
        source, target = one.allocate(100 * MIB), two.allocate(100 * MIB)
        assert took_ms(second, lambda stream: target.copy_from(source, stream=stream)) == pytest.approx(
            100 * MIB / 100e6, rel=0.01
        )
        data = bytearray(10 * MIB)
        part = one.allocate(10 * MIB)
        assert took_ms(first, lambda stream: part.copy_to(data, stream=stream)) == pytest.approx(
            10 * MIB / 10e6, rel=0.01
        )


def test_staged_copies_overlap_their_two_halves() -> None:
    """Each chunk is uploaded while the next is downloaded, so the copy takes the time of one half."""
    first, second = Device.models(2, "4GiB", peer_access=False, host_gb_per_s=50.0)
    with Pool(first) as one, Pool(second) as two:
        source, target = one.allocate(400 * MIB), two.allocate(400 * MIB)
        took = took_ms(second, lambda stream: target.copy_from(source, stream=stream))
    assert 400 * MIB / 50e6 <= took <= 1.02 * 400 * MIB / 50e6


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_upload_download_and_peer_copies_share_the_engines(engines: int) -> None:
    first, second = Device.models(
        2, "4GiB", copy_engines=engines, link_gb_per_s=10.0, host_gb_per_s=10.0, lag_us=0.0
    )
    assert (first.copy_engines, first.properties.copy_engines) == (engines, engines)
    with Pool(first) as one, Pool(second) as two, vram.PinnedPool(first, segment_size="32MiB") as pinned:
        streams = [Stream(first) for _ in range(3)]
        buffers = [one.allocate(10 * MIB, stream=stream) for stream in streams]
        before = first.backend.now()  # type: ignore[attr-defined]
        buffers[0].copy_from(pinned.allocate(10 * MIB))
        buffers[1].copy_to(pinned.allocate(10 * MIB))
        buffers[2].copy_to(two.allocate(10 * MIB))
        for stream in streams:
            stream.synchronize()
        took = (first.backend.now() - before) * 1e-3  # type: ignore[attr-defined]
    rounds = {1: 3, 2: 2, 3: 1}[engines]
    assert took == pytest.approx(rounds * 10 * MIB / 10e6, rel=0.01)


def test_devices_say_whom_they_can_access(both: tuple[Device, Device]) -> None:
    linked = both[0].can_access(both[1])
    assert linked == both[1].can_access(both[0])
    assert both[0].can_access(both[0])
    assert not both[0].can_access("host") and not Device("host").can_access(both[0])
    assert not both[0].can_access(Device.model("1GiB"))
    with pytest.raises(TypeError):
        both[0].can_access(3)  # type: ignore[arg-type]


def test_links_have_sensible_numbers() -> None:
    for wrong in ({"count": 0}, {"link_gb_per_s": 0}, {"host_gb_per_s": -1}, {"copy_engines": 4}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Device.models(**{"count": 2, **wrong})  # type: ignore[arg-type]
    assert len({device.name for device in Device.models(5, "1GiB")}) == 5


# ---- access -----------------------------------------------------------------------------------------------


def kernel(device: Device, buffer: Buffer) -> None:
    """Work on the device that uses the buffer's memory."""
    device.backend.work(0, 1, buffer.ptr, buffer.size)  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [Pool, lambda device: Pool(device, pages=False), DriverPool])
def test_a_pool_opens_its_memory_to_another_device(make: Callable[[Device], Pool]) -> None:
    first, second, third = Device.models(3, "4GiB")
    with make(first) as pool:
        early = pool.allocate(40 * MIB)
        with pytest.raises(DeviceError):
            kernel(second, early)
        pool.allow_access(second)
        late = pool.allocate(80 * MIB)
        for buffer in (early, late):
            kernel(first, buffer)
            kernel(second, buffer)
            with pytest.raises(DeviceError):
                kernel(third, buffer)
        pool.allow_access(second)
        pool.allow_access(first)  # its own
        for device in (first, second):
            device.synchronize()
        assert pool.check() is None


def test_access_that_is_not_possible_is_refused_with_advice() -> None:
    first, second = Device.models(2, "1GiB", peer_access=False)
    with Pool(first) as pool, pytest.raises(DeviceError, match=r"cannot use memory of model.*copy_from"):
        pool.allow_access(second)
    with Pool("host") as host, pytest.raises(DeviceError, match="memory on the host"):
        host.allow_access(first)


@pytest.mark.parametrize("call", ["add_peer", "set_access", "open_plain", "pool_open"])
def test_access_that_fails_can_be_asked_for_again(call: str) -> None:
    first, second = Device.models(2, "1GiB")
    failing: Any = (second if call == "open_plain" else first).backend
    pool = DriverPool(first) if call == "pool_open" else Pool(first, pages=call != "open_plain")
    with pool:
        buffer = pool.allocate(4 * MIB)
        failing.fail(call, 1, "failed", 700)
        with pytest.raises(DeviceError):
            pool.allow_access(second)
        assert pool.check() is None
        pool.allow_access(second)
        kernel(second, buffer)
        second.synchronize()


# ---- failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
def test_each_call_of_a_copy_fails_in_turn(both: tuple[Device, Device], side: int, push: bool) -> None:
    """An error, or a copy that completed; afterwards copies work and nothing is lost."""
    backends: list[Any] = [device.backend for device in both]
    failures, nth = 0, 0
    while True:
        nth += 1
        with Pool(both[0]) as one, Pool(both[1]) as two:
            source, target = one.allocate(9 * MIB), two.allocate(9 * MIB)
            before = backends[side].total_calls()
            backends[side].fail_any(nth, "failed", 700)
            try:
                source.copy_to(target) if push else target.copy_from(source)
            except DeviceError as error:
                failures += 1
                assert error.native == 700
            made = backends[side].total_calls() - before
            backends[side].clear_failures()
            target.copy_from(source)
            target.copy_to(source)
            for device in both:
                device.synchronize()
            assert one.check() is None and two.check() is None
        for backend in backends:
            counts = backend.counts()
            assert counts["pages"] == counts["plain_ranges"] == counts["queued"] == 0
            assert counts["events"] <= 4  # two relays keep one for each of their pieces
        if made < nth:
            break
    assert failures >= 2


def test_a_model_that_is_gone_leaves_the_others() -> None:
    first, second = Device.models(2, "1GiB", peer_access=False)
    with Pool(first) as one, Pool(second) as two:
        one.allocate(MIB).copy_to(two.allocate(MIB))
    del second, two
    third = Device.model("1GiB")
    with Pool(first) as one, Pool(third) as two:
        one.allocate(MIB).copy_to(two.allocate(MIB))
        first.synchronize()


# ---- CUDA's calls, on GPUs without contents ---------------------------------------------------------------

TWO_GPUS = """
import vram
from vram import Device, DriverPool, Event, Pool, Stream, _native
from vram.core.device import _Core
first, second = Device("cuda:0"), Device("cuda:1")
assert first.can_access(second) and second.can_access(first) and first.can_access(first)
assert not first.can_access("host")
with Pool(first) as one, Pool(second) as two, Pool("host") as host:
    with Stream(first) as here, Stream(second) as there:
        source, target = one.allocate(3 << 20, stream=here), two.allocate(3 << 20, stream=there)
        source.fill(7)
        target.copy_from(source)
        memory = host.allocate(3 << 20)
        memory.copy_from(target)
        assert set(bytes(memory)) == {7}
        target.fill(8)
        target.copy_to(source)
        source.copy_to(target, stream=there)
        memory.copy_from(source, stream=here)
        assert set(bytes(memory)) == {8}
        there.wait_event(here.record_event())
        here.wait_stream(there)
for pool in (Pool(first), Pool(first, pages=False), DriverPool(first)):
    with pool:
        held = pool.allocate(3 << 20)
        pool.allow_access(second)
        pool.allow_access("cuda:1")
        later = pool.allocate(64 << 20)
        assert pool.check() is None
# The same GPU opened twice cannot access itself as a peer, so copies are staged.
again = Device._of(_Core("cuda", 0, "cuda:0 again", _native.CudaBackend(0)))
assert not first.can_access(again)
with Pool(first) as one, Pool(again) as two:
    source, target, out = one.allocate(3 << 20), two.allocate(3 << 20), bytearray(3 << 20)
    source.copy_from(bytes(range(256)) * (12 << 10))
    target.copy_from(source)
    target.copy_to(out)
    assert out == bytes(range(256)) * (12 << 10)
properties = first.properties
assert (properties.name, properties.copy_engines, first.copy_engines) == ("NVIDIA H200", 3, 3)
assert (properties.multiprocessors, properties.most_concurrent_kernels) == (132, 128)
assert properties.compute_capability == (9, 0) and properties.warps_per_multiprocessor == 64
assert properties.unified_addressing and properties.memory_pools and properties.virtual_memory
assert not properties.integrated and 4e12 < properties.memory_bandwidth < 5e12
print("done")
"""


def test_the_calls_of_cuda_on_two_null_gpus(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO_GPUS)
    command = [sys.executable, "-m", "vram", "run", "--null-gpu", "h200:2", "two.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


def test_properties_of_devices_without_a_driver() -> None:
    host, model = Device("host").properties, Device.model("1GiB").properties
    assert (host.copy_engines, Device("host").copy_engines, host.integrated) == (0, 0, True)
    assert not host.memory_pools and host.compute_capability is None
    assert (model.copy_engines, model.integrated, model.memory_pools) == (3, False, True)
    assert model.virtual_memory and not Device.model("1GiB", pages=False).properties.virtual_memory


@pytest.mark.parametrize("outwards", [True, False], ids=["from the host", "to the host"])
@pytest.mark.parametrize("by_host", [True, False], ids=["the host's method", "the other's method"])
def test_a_buffer_on_the_host_is_copied_in_the_order_of_its_stream(outwards: bool, by_host: bool) -> None:
    with Stream("host") as stream, Pool("host") as pool, Pool(Device.model("1GiB")) as other:
        ours, theirs = pool.allocate(4096, stream=stream), other.allocate(4096)
        begin, done = threading.Event(), []
        stream.launch(lambda: (begin.wait(60), done.append(True)))
        threading.Timer(0.05, begin.set).start()
        if by_host:
            (ours.copy_to if outwards else ours.copy_from)(theirs)
        else:
            (theirs.copy_from if outwards else theirs.copy_to)(ours)
        assert done


@pytest.mark.parametrize("linked", [True, False])
def test_threads_that_wait_for_one_model_do_not_fail_each_other(linked: bool) -> None:
    device = Device.models(2, "1GiB")[0] if linked else Device.model("1GiB", lag_us=5)
    failures: list[DeviceError] = []

    def use(pool: Pool) -> None:
        buffer = pool.allocate(4096)
        for _ in range(3000):
            buffer.fill(0)
            try:
                device.synchronize()
            except DeviceError as error:
                failures.append(error)

    with Pool(device) as pool:
        threads = [threading.Thread(target=use, args=(pool,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
