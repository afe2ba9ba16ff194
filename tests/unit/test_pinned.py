"""Page-locked memory: arrays without a copy, copies that do not wait, and no reuse before they are done."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from waiting import PATIENCE

import vram
from vram import ConfigError, Device, DeviceError, PinnedPool, Pool, Stream

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def pinned() -> Iterator[PinnedPool]:
    with PinnedPool("host") as pool:
        yield pool
        assert pool.check() is None


@pytest.fixture
def device_pool() -> Iterator[Pool]:
    with Pool("host") as pool:
        yield pool


class Gate:
    """Work that holds a stream until it is opened."""

    def __init__(self, stream: Stream) -> None:
        self._open = threading.Event()
        stream.launch(self._open.wait, PATIENCE)

    def open(self) -> None:
        self._open.set()


# ---- the pool ---------------------------------------------------------------------------------------------


def test_pages_are_not_supported() -> None:
    with pytest.raises(ConfigError, match="whole pieces"):
        PinnedPool("host", pages=True)
    with PinnedPool("host", pages=False) as pool:
        assert pool.config()["pages"] is False


def test_the_other_options_are_those_of_any_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="did you mean stream_cache"):
        PinnedPool("host", stream_cach=1)
    with PinnedPool("host", journal=8, cross_stream="wait", segment_size="8MiB") as pool:
        options = pool.config()
        assert (options["journal"], options["cross_stream"], options["segment_size"]) == (8, "wait", 8 * MIB)
    with PinnedPool("host") as pool:
        assert pool.config()["segment_size"] == 0
    monkeypatch.setenv("VRAM_CONF", "segment_size:16MiB,pages:true")
    with PinnedPool("host") as pool:
        assert pool.config()["segment_size"] == 16 * MIB


def test_it_says_what_it_is(pinned: PinnedPool) -> None:
    assert pinned.device == Device("host") and not pinned.pinned
    assert repr(pinned).startswith("<vram.PinnedPool on host")
    assert pinned.allocate(100).pool is pinned and not pinned.raw_stats()["paged"]


def test_a_share_as_limit_is_one_of_the_machines_memory() -> None:
    machine = PinnedPool("host")._memory.total_bytes
    with PinnedPool(Device.model("1GiB"), limit=0.5) as pool:
        assert pool.limit == machine // 2
        pool.limit = 0.25
        assert pool.limit == machine // 4
        pool.limit = "64MiB"
        assert pool.limit == 64 * MIB


def test_more_than_the_machine_has_is_out_of_memory(pinned: PinnedPool) -> None:
    with pytest.raises(vram.OutOfMemory) as caught:
        pinned.allocate(pinned._memory.total_bytes)
    assert caught.value.report["device_total"] == pinned._memory.total_bytes


def test_sizes_are_not_rounded_to_powers_of_two(pinned: PinnedPool) -> None:
    held = [pinned.allocate(33 * MIB) for _ in range(4)]
    stats = pinned.stats()
    assert stats.allocated == 4 * 33 * MIB and stats.reserved <= 1.02 * stats.allocated
    del held


def test_little_is_unused_at_any_size(pinned: PinnedPool) -> None:
    sizes = [int(factor * MIB * 2**power) for power in range(7) for factor in (1.01, 1.05, 1.3, 1.7, 1.95)]
    held = [pinned.allocate(size) for size in sizes]
    assert pinned.stats().reserved <= 1.02 * sum(sizes)
    assert len({each.ptr for each in held}) == len(held)


def test_similar_sizes_use_the_same_memory(pinned: PinnedPool) -> None:
    for size in (33_200 * KIB, 33_000 * KIB, 33_270 * KIB, 32_900 * KIB):
        pinned.allocate(size).free()
    assert pinned.stats().reserved <= 34 * MIB


def test_memory_is_locked_in_the_pieces_that_segment_size_says() -> None:
    with PinnedPool("host", segment_size="16MiB") as pool:
        small, large = pool.allocate(100), pool.allocate(3 * MIB)
        assert pool.stats().reserved % (2 * MIB) == 0 and pool.stats().reserved >= 16 * MIB
        assert small.ptr != large.ptr


def test_stacks_are_recorded_where_asked() -> None:
    with PinnedPool("host", stacks="python") as pool:
        held = pool.allocate(4 * KIB)
        (leak,) = pool.leaks()
        assert leak.stacks and "test_stacks_are_recorded" in str(leak.stacks) and held.size == 4 * KIB
        assert isinstance(pool, PinnedPool)


# ---- arrays -----------------------------------------------------------------------------------------------


def test_a_buffer_is_an_array_without_a_copy(pinned: PinnedPool) -> None:
    buffer = pinned.allocate(4 * KIB)
    array = np.asarray(buffer)
    assert array.dtype == np.uint8 and array.shape == (4 * KIB,) and array.ctypes.data == buffer.ptr
    array[:] = 3
    numbers = np.frombuffer(buffer, dtype=np.uint32)
    assert numbers.ctypes.data == buffer.ptr and (numbers == 0x03030303).all()
    taken = np.from_dlpack(buffer)
    assert taken.ctypes.data == buffer.ptr
    with memoryview(buffer) as view:
        view[0] = 9
    assert array[0] == numbers.view(np.uint8)[0] == 9


def test_an_array_keeps_its_memory(pinned: PinnedPool) -> None:
    buffer = pinned.allocate(4 * KIB)
    array = np.asarray(buffer)
    with pytest.raises(BufferError):
        buffer.free()
    address = buffer.ptr
    del buffer
    array[:] = 5
    assert pinned.allocate(4 * KIB).ptr != address and (array == 5).all()
    del array
    gc.collect()
    assert pinned.stats().allocated == 0


# ---- order ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["device", "pinned"])
@pytest.mark.parametrize("own", [True, False], ids=["own stream", "another stream"])
def test_a_dropped_buffer_is_not_reused_before_its_copy_has_finished(
    pinned: PinnedPool, device_pool: Pool, side: str, own: bool
) -> None:
    with Stream("host") as stream:
        owner = stream if own else None
        target = device_pool.allocate(MIB)
        source = pinned.allocate(MIB, stream=owner)
        np.asarray(source)[:] = 1
        gate = Gate(stream)
        if side == "device":
            target.copy_from(source, stream=stream)
        else:
            source.copy_to(target, stream=stream)
        address = source.ptr
        del source
        assert pinned.stats().pending == MIB
        again = pinned.allocate(MIB, stream=owner)
        np.asarray(again)[:] = 2  # the host does not ask any stream
        assert again.ptr != address
        gate.open()
        stream.synchronize()
        assert bytes(target) == b"\1" * MIB
        pinned.coalesce()
        assert pinned.stats().pending == 0 and pinned.allocate(MIB, stream=owner).ptr == address


def test_a_copy_into_a_dropped_buffer_hits_nobody_else(pinned: PinnedPool, device_pool: Pool) -> None:
    with Stream("host") as stream:
        source = device_pool.allocate(MIB)
        source.fill(1)
        device_pool.device.synchronize()
        target = pinned.allocate(MIB, stream=stream)
        gate = Gate(stream)
        source.copy_to(target, stream=stream)
        del target
        again = pinned.allocate(MIB, stream=stream)
        np.asarray(again)[:] = 2
        gate.open()
        stream.synchronize()
        assert bytes(again) == b"\2" * MIB


def test_the_device_side_of_the_copy_waits_too(pinned: PinnedPool, device_pool: Pool) -> None:
    with Stream("host") as stream, Stream("host") as other:
        target = device_pool.allocate(MIB, stream=other)
        source = pinned.allocate(MIB)
        gate = Gate(stream)
        source.copy_to(target, stream=stream)
        address = target.ptr
        del target
        assert device_pool.stats().pending == MIB
        assert device_pool.allocate(MIB, stream=other).ptr != address
        gate.open()
        stream.synchronize()


def test_a_stepped_device_reuses_exactly_when_the_copy_is_done() -> None:
    device = Device.model("1GiB", manual=True)
    backend: Any = device.backend
    with Pool(device) as pool, PinnedPool(device) as pinned, Stream(device) as stream:
        target = pool.allocate(MIB, stream=stream)
        source = pinned.allocate(MIB, stream=stream)
        address = source.ptr
        target.copy_from(source, stream=stream)
        assert backend.counts()["queued"] > 0, "the copy did not wait its turn"
        source.free()
        other = pinned.allocate(MIB, stream=stream)
        assert other.ptr != address and pinned.stats().pending == MIB
        while pinned.stats().pending and backend.step(stream.handle):
            pinned.coalesce()
        assert pinned.stats().pending == 0 and backend.executed()
        assert pinned.allocate(MIB, stream=stream).ptr == address


def test_what_a_graph_copies_is_kept_while_the_graph_lives() -> None:
    device = Device.model("1GiB", manual=True)
    backend: Any = device.backend
    with Pool(device) as pool, PinnedPool(device) as pinned, Stream(device) as stream:
        source, target = pinned.allocate(MIB, stream=stream), pool.allocate(MIB)
        address = source.ptr
        with stream.capture() as graph:
            target.copy_from(source, stream=stream)
        source.free()
        graph.launch()
        backend.run_all()
        assert pinned.allocate(MIB, stream=stream).ptr != address, "the graph reads it at its next launch"
        graph.close()
        pinned.trim(wait=True)
        assert pinned.stats().pending == 0
        assert pinned.stats().reserved == 0 and backend.refused_in_capture() == 0


def test_a_buffer_that_no_copy_uses_is_reused_at_once(pinned: PinnedPool) -> None:
    with Stream("host") as stream:
        gate = Gate(stream)
        buffer = pinned.allocate(MIB, stream=stream)
        address = buffer.ptr
        buffer.free()
        assert pinned.allocate(MIB, stream=stream).ptr == address
        gate.open()


def test_copies_of_others_are_told_by_record_stream(pinned: PinnedPool) -> None:
    with Stream("host") as stream:
        gate = Gate(stream)
        buffer = pinned.allocate(MIB, stream=stream)
        buffer.record_stream(stream)  # its own
        address = buffer.ptr
        buffer.free()
        assert pinned.allocate(MIB, stream=stream).ptr != address
        gate.open()


def test_copies_between_pinned_pools_of_one_device_are_queued(pinned: PinnedPool) -> None:
    with PinnedPool("host") as other, Stream("host") as stream:
        here, there = pinned.allocate(KIB), other.allocate(KIB)
        np.asarray(here)[:] = 4
        gate = Gate(stream)
        there.copy_from(here, stream=stream)
        gate.open()
        stream.synchronize()
        assert bytes(there) == b"\4" * KIB


def test_a_closing_stream_leaves_its_memory(pinned: PinnedPool, device_pool: Pool) -> None:
    target = device_pool.allocate(MIB)
    stream = Stream("host")
    source = pinned.allocate(MIB, stream=stream)
    target.copy_from(source, stream=stream)
    source.free()
    stream.close()
    pinned.trim(wait=True)
    assert pinned.stats().reserved == 0


def test_the_race_checker_finds_these_copies_in_order(pinned: PinnedPool) -> None:
    with vram.race_check() as races, Pool("host") as pool, Stream("host") as stream:
        for _ in range(3):
            source = pinned.allocate(MIB)
            target = pool.allocate(MIB, stream=stream)
            target.copy_from(source, stream=stream)
            del source, target
        stream.synchronize()
    assert not races.races


def test_zeros_do_not_come_after_what_the_host_writes() -> None:
    with PinnedPool("host", zero_on_allocate=True, zero_on_free=True) as pool, Stream("host") as stream:
        gate = Gate(stream)
        for _ in range(2):
            buffer = pool.allocate(MIB, stream=stream)
            assert not np.asarray(buffer).any(), "zeros were left to the stream"
            np.asarray(buffer)[:] = 1
            buffer.free()
        kept = pool.allocate(MIB, stream=stream)
        np.asarray(kept)[:] = 2
        gate.open()
        stream.synchronize()
        assert bytes(kept) == b"\2" * MIB


# ---- giving back ------------------------------------------------------------------------------------------


def test_trim_makes_no_waiting_call_unless_asked() -> None:
    device = Device.model("1GiB", pages=False, release_waits=True)
    backend: Any = device.backend
    with Pool(device) as pool, Stream(device) as stream:
        pool.allocate(40 * MIB).free()
        pool.trim()  # asks when its last use has finished
        backend.advance(1e6)  # it has
        backend.work(stream.handle, 1)
        assert pool.trim() == 0 and backend.calls("release") == 0
        backend.set_lag(0)
        assert pool.trim(wait=True) == 40 * MIB
        assert backend.busy_releases() == 1


# ---- pinning what exists ----------------------------------------------------------------------------------


def test_pin_says_what_it_pinned() -> None:
    array = np.arange(1000, dtype=np.int32)
    with vram.pin(array, "host") as pin:
        assert (pin.ptr, pin.size, pin.array is array) == (array.ctypes.data, 4000, True)
        assert pin.device == Device("host") and pin.writable and not pin.closed
        assert not pin.pinned and "no GPU" in repr(pin)
    assert pin.closed and "closed" in repr(pin)
    pin.close()


def test_pinned_memory_cannot_be_resized_away() -> None:
    memory = bytearray(64 * KIB)
    pin = vram.pin(memory, "host")
    with pytest.raises(BufferError):
        memory.append(1)
    pin.close()
    memory.append(1)
    pin = vram.pin(memory, "host")
    del pin
    memory.append(2)


def test_copies_of_pinned_memory_are_queued(device_pool: Pool) -> None:
    array = np.full(MIB, 7, dtype=np.uint8)
    back = np.zeros(MIB, dtype=np.uint8)
    buffer = device_pool.allocate(MIB)
    with Stream("host") as stream, vram.pin(array, "host") as source, vram.pin(back, "host") as target:
        gate = Gate(stream)
        buffer.copy_from(source, stream=stream)  # would stand still here if it waited
        buffer.copy_to(target, stream=stream)
        array[0] = 8
        gate.open()
        stream.synchronize()
        assert back[0] == 8 and (back[1:] == 7).all()


def test_the_end_of_the_scope_waits_for_the_copies(device_pool: Pool) -> None:
    array = np.full(MIB, 7, dtype=np.uint8)
    buffer = device_pool.allocate(MIB)
    with Stream("host") as stream:
        with vram.pin(array, "host") as pin:
            gate = Gate(stream)
            buffer.copy_from(pin, stream=stream)
            threading.Timer(0.05, gate.open).start()
        array[:] = 0
        assert bytes(buffer) == b"\7" * MIB


def test_dropping_a_pin_waits_too(device_pool: Pool) -> None:
    buffer = device_pool.allocate(MIB)
    with Stream("host") as stream:
        gate = Gate(stream)
        pin = vram.pin(np.full(MIB, 7, dtype=np.uint8), "host")
        buffer.copy_from(pin, stream=stream)
        threading.Timer(0.05, gate.open).start()
        del pin
        assert stream.query() and bytes(buffer) == b"\7" * MIB


def test_read_only_memory_is_a_source_only(device_pool: Pool) -> None:
    buffer = device_pool.allocate(5)
    with vram.pin(b"hello", "host") as pin:
        assert not pin.writable
        buffer.copy_from(pin)
        device_pool.device.synchronize()
        assert bytes(buffer) == b"hello"
        with pytest.raises(BufferError, match="read-only"):
            buffer.copy_to(pin)


def test_what_is_pinned_already_is_refused() -> None:
    array = np.zeros(64 * KIB, dtype=np.uint8)
    with vram.pin(array, "host"):
        for part in (array, array[:10], array[-10:], array[100:200]):
            with pytest.raises(DeviceError, match="pinned already") as caught:
                vram.pin(part, "host")
            assert caught.value.size == part.size
        with vram.pin(np.zeros(10), "host"):
            pass
    with vram.pin(array[100:200], "host"), vram.pin(array[200:], "host"):
        pass


def test_nothing_is_nothing(device_pool: Pool) -> None:
    with vram.pin(b"", "host") as one, vram.pin(b"", "host"):
        assert one.size == 0 and not one.pinned
        device_pool.allocate(0).copy_from(one)


def test_what_cannot_be_pinned() -> None:
    with pytest.raises(TypeError):
        vram.pin(7, "host")  # type: ignore[arg-type]
    with pytest.raises((BufferError, ValueError)):
        vram.pin(np.zeros((8, 8))[::2, ::2], "host")
    with vram.pin(np.zeros((8, 4), order="F"), "host") as pin:
        assert pin.size == 256


def test_sizes_must_agree(device_pool: Pool) -> None:
    with vram.pin(bytearray(10), "host") as pin, pytest.raises(ValueError, match="9 and 10 bytes"):
        device_pool.allocate(9).copy_from(pin)


def test_a_closed_pin_is_no_memory(device_pool: Pool) -> None:
    pin = vram.pin(bytearray(10), "host")
    pin.close()
    with pytest.raises(ValueError, match="closed"):
        device_pool.allocate(10).copy_from(pin)


def test_for_another_device_a_pin_is_host_memory(device_pool: Pool) -> None:
    device = Device.model("1GiB")
    buffer = device_pool.allocate(10)
    with vram.pin(bytearray(b"0123456789"), device) as pin:
        buffer.copy_from(pin)
        assert bytes(buffer) == b"0123456789"


def test_a_pin_outlives_a_device_that_cannot_be_waited_for() -> None:
    device = Device.model("1GiB", manual=True)
    backend: Any = device.backend
    memory = bytearray(10)
    with Stream(device) as stream:
        pin = vram.pin(memory, device)
        failures: list[Exception] = []

        def close_inside() -> None:
            try:
                pin.close()
            except DeviceError as error:
                failures.append(error)

        stream.launch(close_inside)  # it would wait for itself
        backend.run_all()
        assert failures and not pin.closed
        with pytest.raises(BufferError):
            memory.append(1)
        pin.close()
        memory.append(1)
