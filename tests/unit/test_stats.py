"""Statistics: PyTorch's keys, sums that agree, our own numbers, and measurements that nest and overlap."""

from __future__ import annotations

import itertools

import pytest

import vram
from vram.core.device import Device

MIB = 1 << 20
STATS = (
    "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
    "inactive_split_bytes", "requested_bytes",
)  # fmt: skip
MEASURES = ("current", "peak", "allocated", "freed")


@pytest.fixture
def pool() -> vram.Pool:
    return vram.Pool(Device.model("1GiB"))


# ---- the mapping ------------------------------------------------------------------------------------------


def test_every_key_of_pytorch_is_there(pool: vram.Pool) -> None:
    expected = {
        ".".join(parts) for parts in itertools.product(STATS, ("all", "small_pool", "large_pool"), MEASURES)
    }
    expected |= {
        "num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free",
        "max_split_size",
    }  # fmt: skip
    expected |= {f"oversize_{kind}.{m}" for kind in ("allocations", "segments") for m in MEASURES}
    assert expected <= set(pool.stats())


def test_pools_add_up_to_all_and_current_is_what_was_not_freed(pool: vram.Pool) -> None:
    kept = [pool.allocate(size) for size in (100, 600, 3 * MIB, 20 * MIB)]
    pool.allocate(5 * MIB).free()
    stats = pool.stats()
    for stat in STATS:
        for measure in ("current", "allocated", "freed"):
            parts = stats[f"{stat}.small_pool.{measure}"] + stats[f"{stat}.large_pool.{measure}"]
            assert stats[f"{stat}.all.{measure}"] == parts, (stat, measure)
        for part in ("all", "small_pool", "large_pool"):
            current, peak, allocated, freed = (stats[f"{stat}.{part}.{measure}"] for measure in MEASURES)
            assert current == allocated - freed and peak >= current, (stat, part)
    assert stats["allocation.all.current"] == len(kept) == stats.live


def test_inactive_memory_counts_what_became_inactive_and_what_came_into_use_again(pool: vram.Pool) -> None:
    def counted() -> list[int]:
        stats = pool.stats()
        return [int(stats[f"inactive_split{unit}.all.freed"]) for unit in ("", "_bytes")]

    buffers = [pool.allocate("64KiB") for _ in range(8)]
    before = counted()
    for buffer in buffers:
        buffer.free()
    assert counted() == before
    again = [pool.allocate("64KiB") for _ in range(8)]
    blocks, size = (now - was for now, was in zip(counted(), before, strict=True))
    assert blocks == 8 and size == 8 * (64 << 10)
    peak = pool.stats()["inactive_split_bytes.all.peak"]
    pool.reset_peak()
    assert pool.stats()["inactive_split_bytes.all.peak"] == peak - 8 * (64 << 10)
    del again


def test_the_numbers_of_a_small_history(pool: vram.Pool) -> None:
    kept = pool.allocate(1000)
    pool.allocate(3 * MIB).free()
    stats = pool.stats()
    assert (stats.allocations, stats.frees, stats.live) == (2, 1, 1)
    assert (stats.allocated, stats.requested) == (1024, 1000)
    assert stats["allocated_bytes.all.current"] == 1024 and stats["requested_bytes.all.current"] == 1000
    assert stats["allocated_bytes.all.peak"] == stats.peak_allocated == 3 * MIB + 1024
    assert stats["allocated_bytes.small_pool.current"] == 1024
    assert stats["allocated_bytes.large_pool.freed"] == 3 * MIB
    assert stats.reserved == stats["reserved_bytes.all.current"] >= 1024
    assert stats["waste.rounding_bytes"] == 24
    assert stats.reserved == stats.allocated + stats.pending + stats.cached + stats.free
    assert kept.size == 1000


def test_peaks_of_bytes_are_not_added_up_over_different_moments(pool: vram.Pool) -> None:
    streams = [vram.Stream(pool.device) for _ in range(2)]
    for size, count in ((100_000, 100), (10 * MIB, 1)):
        for stream in streams:
            for buffer in [pool.allocate(size, stream=stream) for _ in range(count)]:
                buffer.free()
    stats = pool.stats()
    peaks = [stats[f"{name}_bytes.all.peak"] for name in ("requested", "allocated", "reserved")]
    assert peaks == sorted(peaks) and peaks[0] >= 10 * MIB
    for kind in ("small_pool", "large_pool"):
        assert stats[f"requested_bytes.{kind}.peak"] <= stats[f"allocated_bytes.{kind}.peak"] <= peaks[1]


def test_our_own_numbers(pool: vram.Pool) -> None:
    for _ in range(10):
        pool.allocate(4096).free()
    stats = pool.stats()
    assert (stats.hits, stats["cache.hits"], stats["cache.misses"]) == (9, 9, 1)
    assert stats.hit_rate == stats["cache.hit_rate"] == 0.9
    assert stats["rung.stream_cache"] == stats.rungs["stream_cache"] == 9
    assert stats["waste.ratio"] == stats.waste_ratio == stats.peak_reserved / stats.peak_allocated
    assert stats["cache.blocks"] == 1 and stats.cached == 4096
    assert stats.streams[0]["handle"] == 0
    assert 0 <= stats["fragmentation"] == stats.fragmentation <= 1
    assert stats.largest_free <= stats.free
    assert stats.to_dict() == dict(stats) and "4 KiB" not in repr(stats)


def test_fragmentation_is_free_memory_in_pieces() -> None:
    pool = vram.Pool(Device.model("1GiB"), stream_cache=0)
    blocks = [pool.allocate(MIB // 2) for _ in range(64)]
    assert pool.stats().fragmentation == 0
    del blocks[::2]
    assert pool.stats().fragmentation == pytest.approx(0.5, abs=0.05)
    del blocks
    assert pool.stats().fragmentation == 0


def test_an_untouched_pool_has_calm_numbers(pool: vram.Pool) -> None:
    stats = pool.stats()
    assert (stats.hit_rate, stats.waste_ratio, stats.fragmentation, stats.reserved) == (0, 1, 0, 0)


@pytest.mark.parametrize(("size", "kind"), [(2 * MIB, "large_pool"), (MIB // 2, "small_pool")])
def test_pending_memory_is_active(size: int, kind: str) -> None:
    device = Device.model("1GiB", manual=True)
    pool, side = vram.Pool(device), vram.Stream(device)
    buffer = pool.allocate(size)
    buffer.record_stream(side)
    side.launch(lambda: None)
    buffer.free()
    stats = pool.stats()
    assert (stats.allocated, stats.pending) == (0, size)
    for pools in ("all", kind):
        assert (stats[f"active.{pools}.current"], stats[f"active_bytes.{pools}.current"]) == (1, size)
    assert all(value >= 0 for key, value in stats.items() if key.startswith("active"))
    device.synchronize()
    pool.coalesce()


def test_failures_are_counted() -> None:
    pool = vram.Pool(Device.model("16MiB"))
    with pytest.raises(vram.OutOfMemory):
        pool.allocate("32MiB")
    assert pool.stats()["num_ooms"] == pool.stats().out_of_memory == 1


def test_a_missing_key_is_a_key_error(pool: vram.Pool) -> None:
    with pytest.raises(KeyError):
        pool.stats()["no.such.key"]


# ---- peaks and measurements -------------------------------------------------------------------------------


def test_reset_peak_starts_anew(pool: vram.Pool) -> None:
    pool.allocate(8 * MIB).free()
    kept = pool.allocate(MIB)
    pool.reset_peak()
    assert pool.stats().peak_allocated == kept.size == MIB
    pool.allocate(2 * MIB).free()
    assert pool.stats().peak_allocated == 3 * MIB


def test_a_measurement_counts_its_own(pool: vram.Pool) -> None:
    before = pool.allocate(4 * MIB)
    with pool.measure() as step:
        kept = pool.allocate(MIB)
        for _ in range(10):
            pool.allocate(1000).free()
        before.free()
    pool.allocate(9 * MIB).free()
    assert (step.allocations, step.frees, step.hits) == (11, 11, 9)
    assert (step.bytes, step.requested) == (MIB + 10 * 1024, MIB + 10_000)
    assert (step.peak, step.peak_allocated) == (MIB + 1024, 5 * MIB + 1024)
    assert step.kept == kept.size - 4 * MIB
    assert step.hit_rate == 9 / 11
    assert 0 <= step.fragmentation <= 1
    assert set(step.to_dict()) >= {"allocations", "peak", "hits", "fragmentation"}


def test_measurements_nest_without_disturbing_anyone(pool: vram.Pool) -> None:
    pool.allocate(32 * MIB).free()
    with pool.measure() as outer:
        pool.allocate(16 * MIB).free()
        with pool.measure() as inner:
            pool.allocate(2 * MIB).free()
            assert inner.peak == 2 * MIB and outer.peak == 16 * MIB
        pool.allocate(4 * MIB).free()
    assert (inner.allocations, inner.peak) == (1, 2 * MIB)
    assert (outer.allocations, outer.peak) == (3, 16 * MIB)
    assert pool.stats().peak_allocated == 32 * MIB


def test_measurements_may_overlap(pool: vram.Pool) -> None:
    one, two = pool.measure(), pool.measure()
    one.__enter__()
    pool.allocate(8 * MIB).free()
    two.__enter__()
    pool.allocate(2 * MIB).free()
    one.__exit__()
    pool.allocate(4 * MIB).free()
    two.__exit__()
    assert (one.allocations, one.peak) == (2, 8 * MIB)
    assert (two.allocations, two.peak) == (2, 4 * MIB)


def test_reset_peak_inside_leaves_the_measurement_its_peak(pool: vram.Pool) -> None:
    with pool.measure() as step:
        pool.allocate(8 * MIB).free()
        pool.reset_peak()
    assert step.peak == 8 * MIB and pool.stats().peak_allocated == 0


def test_an_error_inside_ends_the_measurement(pool: vram.Pool) -> None:
    with pytest.raises(ZeroDivisionError), pool.measure() as step:
        pool.allocate(MIB).free()
        _ = 1 / 0
    assert step.allocations == 1


def test_a_measurement_has_one_life(pool: vram.Pool) -> None:
    step = pool.measure()
    assert "not begun" in repr(step)
    with pytest.raises(RuntimeError, match="enter it"):
        _ = step.allocations
    with step:
        assert step.allocations == 0
    with pytest.raises(RuntimeError, match="entered once"), step:
        pass
    assert "0 allocations" in repr(step)
