"""Spilling from Python: options, buffers, tags, statistics, snapshots, the log, and the way back."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest

import vram
from vram import ConfigError, Device, DeviceError, OutOfMemory, Pool
from vram.config import free_host_memory
from vram.core import spill

MIB = 1 << 20
BLOCK = 4 * MIB


@pytest.fixture
def device() -> Device:
    return Device.model("32MiB")


@pytest.fixture
def pool(device: Device) -> Iterator[Pool]:
    with Pool(device, spill="64MiB") as made:
        yield made
        assert made.check() is None


def test_a_full_pool_spills(pool: Pool) -> None:
    buffers = [pool.allocate(BLOCK) for _ in range(12)]
    stats = pool.stats()
    assert stats.allocated == 12 * BLOCK
    assert stats.reserved <= 32 * MIB
    assert stats.spilled == stats["spill.bytes"] >= 4 * BLOCK
    assert stats["spill.moved_out_bytes"] >= stats.spilled
    assert stats["spill.count"] > 0
    assert stats["rung.spill"] > 0
    assert stats["waste.bytes"] >= 0
    assert buffers[0].spilled == BLOCK
    assert buffers[-1].spilled == 0


def test_it_is_off_by_default(device: Device) -> None:
    with Pool(device) as pool:
        kept = [pool.allocate(BLOCK) for _ in range(8)]
        with pytest.raises(OutOfMemory, match=r'spill="4') as caught:
            pool.allocate(BLOCK)
        assert "spilled to host memory" not in str(caught.value)
        with pytest.raises(DeviceError):
            kept[0].spill()
        assert pool.config()["spill"] == 0
        assert pool.spilled() == []


def test_the_report_of_an_error_has_what_was_spilled(device: Device) -> None:
    with Pool(device, spill=2 * BLOCK) as pool:
        kept = [pool.allocate(BLOCK) for _ in range(10)]
        with pytest.raises(OutOfMemory, match="8 MiB are spilled to host memory") as caught:
            pool.allocate(BLOCK)
        assert caught.value.report["spilled"] == 2 * BLOCK
        assert caught.value.report["spill"] == 2 * BLOCK
        assert caught.value.allocated == 8 * BLOCK
        assert len(kept) == 10


def test_spilled_lists_what_is_on_the_host(pool: Pool) -> None:
    with vram.tag("old"):
        old = pool.allocate(3 * BLOCK)
    young = pool.allocate(BLOCK)
    assert pool.spilled() == []
    moved = old.spill()
    assert moved >= old.size
    (found,) = pool.spilled()
    assert (found.address, found.size, found.bytes, found.tag) == (old.ptr, old.size, old.size, "old")
    blocks = {block.address: block for block in pool.snapshot().allocations()}
    assert blocks[old.ptr].spilled == old.size
    assert blocks[young.ptr].spilled == 0
    assert pool.snapshot().spilled == pool.stats().spilled
    assert old.prefetch() == moved
    assert pool.spilled() == []


def test_moving_a_freed_buffer_is_an_error(pool: Pool) -> None:
    buffer = pool.allocate(BLOCK)
    buffer.free()
    assert buffer.spilled == 0
    for move in (buffer.spill, buffer.prefetch):
        with pytest.raises(vram.VramError):
            move()


def test_wishes_of_tags(pool: Pool) -> None:
    with vram.tag("kept by test_spill", spill="never"):
        never = pool.allocate(BLOCK)
    old = pool.allocate(BLOCK)
    with vram.tag("goes by test_spill", spill="first"):
        first = pool.allocate(BLOCK)
    rest = [pool.allocate(BLOCK) for _ in range(6)]
    assert first.spilled == BLOCK
    assert old.spilled == 0
    rest += [pool.allocate(BLOCK) for _ in range(5)]
    assert old.spilled == BLOCK
    assert never.spilled == 0
    with pytest.raises(ConfigError, match="neither 'first' nor 'never'"):
        vram.tag("x", spill="last")  # type: ignore[arg-type]


def test_wishes_count_for_allocations_with_stacks(device: Device) -> None:
    with Pool(device, spill="64MiB", stacks="python") as pool:
        with vram.tag("with stacks", spill="never"):
            never = pool.allocate(BLOCK)
        rest = [pool.allocate(BLOCK) for _ in range(9)]
        assert never.spilled == 0
        assert rest[0].spilled == BLOCK


def test_the_first_spill_is_logged(
    device: Device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING, "vram"), Pool(device, spill="1GiB") as pool:
        kept = [pool.allocate(BLOCK) for _ in range(12)]
        (line,) = [record.getMessage() for record in caplog.records]
        assert pool.device.name in line
        assert "4 MiB more needed" in line
        assert "1 GiB" in line
        kept.clear()


def test_memory_returns_when_there_is_room(pool: Pool) -> None:
    buffers = [pool.allocate(BLOCK) for _ in range(12)]
    spilled = pool.stats().spilled
    assert spilled
    spill._tick()
    assert pool.stats().spilled == spilled  # there is no room
    del buffers[5:]
    gc.collect()
    pool.device.synchronize()
    for _ in range(8):  # the first ones only see that nothing was spilled, and record fences
        spill._tick()
        pool.device.synchronize()
        pool.device.backend.advance(1e5)
    assert pool.stats().spilled == 0
    assert pool.stats()["spill.moved_back_bytes"] >= spilled - BLOCK
    assert all(buffer.spilled == 0 for buffer in buffers)


def test_trim_releases_host_memory_that_is_not_in_use(pool: Pool) -> None:
    buffer = pool.allocate(BLOCK)
    buffer.spill()
    buffer.prefetch()
    assert pool.stats()["spill.host_bytes"] == BLOCK
    pool.trim()
    assert pool.stats()["spill.host_bytes"] == 0


def test_options(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    with Pool(device, spill="auto") as pool:
        assert 0 < pool.config()["spill"] <= free_host_memory()
        pool.reconfigure({"spill": "1GiB"})
        assert pool.config()["spill"] == 1 << 30
        kept = [pool.allocate(BLOCK) for _ in range(10)]
        assert pool.stats().spilled
        pool.reconfigure({"spill": 0})
        with pytest.raises(OutOfMemory):
            pool.allocate("16MiB")
        kept.clear()
    monkeypatch.setenv("VRAM_CONF", "spill:8MiB")
    with Pool(device) as pool, Pool(Device("host")) as host, vram.PinnedPool(device) as pinned:
        assert pool.config()["spill"] == 8 * MIB
        assert host.config()["spill"] == pinned.config()["spill"] == 0
    with pytest.raises(ConfigError, match="spill"):
        Pool(device, spill="much")
    with pytest.raises(ConfigError, match="host memory already"):
        Pool("host", spill="1GiB")


def test_pools_without_pages_do_not_spill(device: Device) -> None:
    with Pool(device, spill="1GiB", pages=False) as pool:
        kept = [pool.allocate(BLOCK) for _ in range(8)]
        with pytest.raises(OutOfMemory):
            pool.allocate(BLOCK)
        with pytest.raises(DeviceError):
            kept[0].spill()


def test_suspend_and_spill_together(pool: Pool) -> None:
    with vram.tag("one"):
        one = pool.allocate(BLOCK)
    two = pool.allocate(BLOCK)
    one.spill()
    pool.suspend()
    assert pool.stats().reserved == 0
    assert two.suspended
    pool.resume()
    assert one.spilled == BLOCK
    assert two.spilled == 0
    assert one.prefetch() == BLOCK
