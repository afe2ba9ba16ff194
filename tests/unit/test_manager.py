"""The memory manager: every name of the reference design does real work, on one pool a device."""

from __future__ import annotations

import dataclasses
import io
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import FORK, assert_quiet, run_program
from waiting import PATIENCE

import vram
from vram.core.device import Device
from vram.core.manager import MemoryManager

MIB = 1 << 20


@pytest.fixture
def manager() -> Iterator[MemoryManager]:
    made = MemoryManager()
    yield made
    made.close()


@pytest.fixture
def model() -> Device:
    return Device.model("256MiB", lag_us=0.0)


# ---- the one of the process --------------------------------------------------------------------------------


def test_there_is_one_manager_and_one_pool_a_device(manager: MemoryManager, model: Device) -> None:
    assert vram.get_memory_manager() is vram.get_memory_manager()
    assert manager.pool() is manager.pool("host") is manager.pool(vram.Device())
    assert manager.pool(model) is manager.pool(model) is not manager.pool()
    assert manager.pools == (manager.pool(), manager.pool(model))


def test_many_threads_get_the_same_pool(manager: MemoryManager) -> None:
    found: list[Any] = []
    start = threading.Barrier(8, timeout=PATIENCE)

    def work() -> None:
        start.wait()
        found.append(manager.pool())
        manager.free_memory(manager.allocate_memory(4096), 4096)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1 and manager.get_statistics().total_freed == 8


def test_the_environment_configures_it() -> None:
    done = run_program(
        """
        import vram
        manager = vram.get_memory_manager()
        pool = manager.pool()
        assert pool.config()["segment_size"] == 8 << 20
        assert pool.config()["stream_cache"] == 500
        assert pool.config()["cross_stream"] == "wait"
        assert pool.stats()["cache.blocks"] == 30, pool.stats()["cache.blocks"]
        assert pool.journal().events
        """,
        VRAM_SEGMENT_SIZE="8MiB",
        VRAM_CACHE_SIZE="500",
        VRAM_WARMUP="4KiB:20,64KiB:10",
        VRAM_STATS="1",
        VRAM_CONF="cross_stream:wait",
    )
    assert done.returncode == 0, done.stderr


def test_a_wrong_environment_is_named() -> None:
    done = run_program("import vram; vram.get_memory_manager()", VRAM_CONF="limt:5")
    assert "VRAM_CONF: unknown option 'limt'; did you mean limit?" in done.stderr


@pytest.mark.fork
def test_a_child_gets_a_fresh_manager() -> None:
    done = run_program(
        FORK,
        """
        import vram
        manager = vram.get_memory_manager()
        pointer = manager.allocate_memory(4096)

        def body():
            refused(lambda: manager.allocate_memory(4096))
            fresh = vram.get_memory_manager()
            assert fresh is not manager
            fresh.free_memory(fresh.allocate_memory(4096), 4096)

        child(body)
        manager.free_memory(pointer, 4096)
        """,
    )
    assert_quiet(done)


# ---- allocation --------------------------------------------------------------------------------------------


def test_allocate_and_free(manager: MemoryManager) -> None:
    pointer = manager.allocate_memory(MIB)
    assert manager.get_statistics().current_memory_usage == MIB
    manager.free_memory(pointer, MIB)
    manager.free_memory(manager.allocate_memory("1MiB"))
    stats = manager.get_statistics()
    assert (stats.total_allocations, stats.total_freed, stats.current_memory_usage) == (2, 2, 0)


def test_wrong_frees_are_refused_and_leave_everything(manager: MemoryManager) -> None:
    pointer = manager.allocate_memory(1000)
    with pytest.raises(vram.InvalidFree, match="has 1000 bytes, not 1024") as caught:
        manager.free_memory(pointer, 1024)
    assert (caught.value.requested, caught.value.size) == (1000, 1024)
    for wrong in (pointer + 1, 12345, 0):
        with pytest.raises(vram.VramError):
            manager.free_memory(wrong)
        with pytest.raises(vram.VramError):
            manager.free_memory(wrong, 1000)
    manager.free_memory(pointer, 1000)
    with pytest.raises(vram.InvalidFree):
        manager.free_memory(pointer)


def test_a_pointer_is_given_back_to_the_pool_it_came_from(manager: MemoryManager, model: Device) -> None:
    here, there = manager.allocate_memory(4096), manager.allocate_memory(4096, device=model)
    manager.free_memory(there, 4096)
    manager.free_memory(here, 4096)
    assert manager.pool().stats().live == manager.pool(model).stats().live == 0
    with pytest.raises(vram.InvalidFree):
        manager.free_memory(there, device=model)


def test_batches_and_futures(manager: MemoryManager) -> None:
    pointers = manager.allocate_batch([4096] * 4)
    assert [pointer - pointers[0] for pointer in pointers] == [0, 4096, 8192, 12288]
    later = manager.allocate_async(MIB).result(timeout=PATIENCE)
    for pointer in (*pointers, later):
        manager.free_memory(pointer)
    assert manager.get_statistics().current_memory_usage == 0


def test_warm_up_fills_the_cache(manager: MemoryManager) -> None:
    manager.warmup_cache([4096, "64KiB"], [10, 5])
    with manager.performance_context() as perf:
        manager.allocate_batch([])
        pointers = [manager.allocate_memory(size) for size in (4096, 65536) for _ in range(5)]
    assert perf.stats.cache_hits == perf.stats.total_allocations == 10
    assert perf.stats.efficiency_score() == perf.stats.cache_hit_rate == 1
    with pytest.raises(vram.ConfigError, match="2 sizes need as many counts, not 1"):
        manager.warmup_cache([1, 2], [3])
    for pointer in pointers:
        manager.free_memory(pointer)


# ---- settings ----------------------------------------------------------------------------------------------


def test_configure_changes_pools_in_use_and_those_to_come(manager: MemoryManager, model: Device) -> None:
    pool = manager.pool()
    manager.configure(
        segment_size=8 * MIB,
        cache_sizes={"stream_local": 100, "global": 500},
        warmup_sizes=[(4096, 5), (65536, 2)],
    )
    for each in (pool, manager.pool(model)):
        assert each.config()["segment_size"] == 8 * MIB
        assert (each.config()["stream_cache"], each.config()["release_threshold"]) == (100, 1000 * MIB)
        assert each.stats()["cache.blocks"] == 7


def test_configure_resets_nothing_else(manager: MemoryManager) -> None:
    pool = manager.pool()
    manager.configure(stream_cache=77, cross_stream="wait")
    manager.configure({"segment_size": "4MiB", "coalescing_threshold": 0.1}, enable_stats=True)
    options = pool.config()
    assert (options["stream_cache"], options["cross_stream"]) == (77, "wait")
    assert options["segment_size"] == 4 * MIB and manager.settings["coalescing_threshold"] == 0.1


def test_the_limit_may_be_a_share(manager: MemoryManager, model: Device) -> None:
    manager.configure(limit=0.5)
    assert manager.pool(model).limit == 128 * MIB
    manager.configure(limit=0.25)
    assert manager.pool(model).limit == 64 * MIB
    assert manager.pool().limit == vram.Device().total_memory // 4


def test_wrong_settings_are_named_and_change_nothing(manager: MemoryManager) -> None:
    pool = manager.pool()
    with pytest.raises(vram.ConfigError, match="unknown option 'cachesize'"):
        manager.configure(stream_cache=5, cachesize=3)
    assert pool.config()["stream_cache"] == 4096 == manager.settings["stream_cache"]
    with pytest.raises(vram.ConfigError, match="pages cannot change while a pool is in use"):
        manager.configure(pages=False)
    manager.close()
    manager.configure(pages=False)
    assert manager.pool().config()["pages"] is False


def test_strategy_and_warm_up_switches(manager: MemoryManager) -> None:
    manager.configure({"allocation_strategy": "good_fit", "enable_warmup": False, "warmup_sizes": {4096: 3}})
    assert manager.pool().config()["best_fit"] is False
    assert manager.pool().stats()["cache.blocks"] == 0
    manager.configure(enable_warmup=True)
    assert manager.pool().stats()["cache.blocks"] == 3


def test_configure_of_the_module_is_that_of_the_process() -> None:
    done = run_program(
        """
        import vram
        vram.configure({
            "segment_size": 8 << 20, "enable_warmup": True, "enable_stats": True,
            "allocation_strategy": "best_fit", "coalescing_threshold": 0.1,
        })
        pool = vram.get_memory_manager().pool()
        assert pool.config()["segment_size"] == 8 << 20 and pool.config()["best_fit"]
        assert pool.stats()["cache.blocks"] == 80
        vram.configure(limit="1GiB")
        assert pool.limit == 1 << 30
        """
    )
    assert done.returncode == 0, done.stderr


# ---- numbers -----------------------------------------------------------------------------------------------


def test_statistics_in_the_words_of_the_reference(manager: MemoryManager) -> None:
    empty = manager.get_statistics()
    assert (empty.total_allocations, empty.efficiency_score(), empty.cache_hit_rate) == (0, 1.0, 0.0)
    for _ in range(10):
        manager.free_memory(manager.allocate_memory(4096), 4096)
    stats = manager.get_statistics()
    assert (stats.total_allocations, stats.total_freed) == (10, 10)
    assert (stats.cache_hits, stats.cache_misses) == (9, 1)
    assert stats.cache_hit_rate == stats.efficiency_score() == 0.9
    assert stats.peak_memory_usage == 4096 and 0 <= stats.fragmentation_ratio <= 1


def test_a_performance_context_sees_only_its_block(manager: MemoryManager, model: Device) -> None:
    before = manager.allocate_memory(8 * MIB)
    with manager.performance_context() as perf:
        with manager.performance_context() as inner:
            manager.free_memory(manager.allocate_memory(MIB), MIB)
        kept = manager.allocate_memory(2 * MIB, device=model)  # this pool is made inside
    manager.free_memory(before)
    assert (inner.stats.total_allocations, inner.stats.peak_memory_usage) == (1, MIB)
    assert (perf.stats.total_allocations, perf.stats.total_freed) == (2, 1)
    assert perf.stats.peak_memory_usage == 3 * MIB and perf.stats.current_memory_usage == 2 * MIB
    manager.free_memory(kept, device=model)


def test_the_trace_tells_what_is_live_and_what_happened(
    manager: MemoryManager, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager.configure(enable_stats=True)
    with vram.tag("left"):
        pointer = manager.allocate_memory(5000)
    text = manager.dump_allocation_trace(io.StringIO())
    assert "live: 1 × 4.88 KiB tagged 'left'" in text
    assert "allocate" in text and f"{pointer:#x}" in text and "tag 'left'" in text
    manager.dump_allocation_trace(tmp_path / "trace.txt")
    assert (tmp_path / "trace.txt").read_text(encoding="utf-8") == text
    manager.dump_allocation_trace()
    assert capsys.readouterr().err == text
    assert "allocations seen (journal)" in str(manager.analyze_allocation_patterns())
    manager.free_memory(pointer)


# ---- caches and pressure -----------------------------------------------------------------------------------


def test_cleanup_gives_unused_memory_back(manager: MemoryManager, model: Device) -> None:
    kept = manager.allocate_memory(10 * MIB, device=model)
    manager.free_memory(manager.allocate_memory(90 * MIB, device=model), device=model)
    reserved = manager.get_statistics().reserved_memory
    assert manager.cleanup_cache(threshold=1.0) == 0
    some = manager.cleanup_cache(threshold=0.5)
    assert 0 < some <= reserved
    rest = manager.cleanup_cache()
    assert some + rest == reserved - manager.get_statistics().reserved_memory
    manager.free_memory(kept, device=model)
    assert manager.cleanup_cache(force=True) > 0 and manager.get_statistics().reserved_memory == 0
    with pytest.raises(vram.ConfigError, match="from 0 to 1"):
        manager.cleanup_cache(threshold=5)


def test_force_waits_for_work_that_still_uses_memory(manager: MemoryManager) -> None:
    model = Device.model("256MiB", lag_us=1000.0)
    pool, side = manager.pool(model), vram.Stream(model)
    buffer = pool.allocate(32 * MIB)
    buffer.record_stream(side)
    side.launch(lambda: None)
    buffer.free()
    assert pool.stats().pending == 32 * MIB
    manager.cleanup_cache(force=True)
    assert pool.stats().reserved == pool.stats().pending == 0


def test_expanding_and_aggressive_coalescing(manager: MemoryManager) -> None:
    pool = manager.pool()
    manager.configure(stream_cache=100)
    assert manager.expand_cache_size(1.5) == 150 == pool.config()["stream_cache"]
    manager.free_memory(manager.allocate_memory(4096))
    assert pool.stats()["cache.blocks"] == 1
    manager.enable_aggressive_coalescing()
    assert pool.stats()["cache.blocks"] == 0
    manager.free_memory(manager.allocate_memory(4096))
    assert pool.stats()["cache.blocks"] == 0 == pool.config()["stream_cache"]
    manager.enable_aggressive_coalescing()
    manager.enable_aggressive_coalescing(False)
    assert pool.config()["stream_cache"] == 150
    manager.enable_aggressive_coalescing()
    manager.configure(stream_cache=60)  # chosen by hand: nothing is left to return to
    manager.enable_aggressive_coalescing(False)
    assert pool.config()["stream_cache"] == 60
    manager.configure(stream_cache=150)
    manager.enable_aggressive_coalescing()
    assert manager.expand_cache_size(2) == 300
    assert manager.expand_cache_size(1e9) == 65536
    with pytest.raises(vram.ConfigError, match="factor must be a number"):
        manager.expand_cache_size(0)


def test_coalescing_empties_the_caches(manager: MemoryManager) -> None:
    manager.warmup_cache([4096], [20])
    manager.coalesce_free_blocks()
    assert manager.pool().stats()["cache.blocks"] == 0


def test_garbage_collection_frees_what_only_cycles_hold(manager: MemoryManager) -> None:
    buffer: Any = manager.pool().allocate("8MiB")
    cycle: list[Any] = [buffer]
    cycle.append(cycle)
    del buffer, cycle
    assert manager.garbage_collect() >= 8 * MIB
    assert manager.get_statistics().current_memory_usage == 0


def test_adapting_to_pressure(manager: MemoryManager, model: Device) -> None:
    manager.configure(limit="100MiB", stream_cache=100)
    pool = manager.pool(model)
    kept, more = pool.allocate(40 * MIB), pool.allocate(45 * MIB)
    pool.allocate(10 * MIB).free()
    assert manager.memory_pressure() == pytest.approx(0.85)
    assert manager.adapt() == "clean"
    assert pool.stats().reserved < 90 * MIB and pool.config()["stream_cache"] == 0
    more.free()
    assert manager.adapt() == "rest" and pool.config()["stream_cache"] == 100
    kept.free()
    pool.trim()
    assert manager.adapt() == "expand" and pool.config()["stream_cache"] == 150
    manager.configure(pressure_low=0.0, pressure_high=0.1)
    assert manager.adapt() == "rest"
    assert manager.adapt(0.2) == "clean"


def test_the_adaptive_mode_looks_every_so_many_operations(
    manager: MemoryManager, model: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vram.core.manager.every_second", lambda work: lambda: None)
    manager.configure(stream_cache=100, adaptive=True, adapt_every=10, expand_factor=2)
    pool = manager.pool(model)
    for _ in range(5):
        manager.free_memory(manager.allocate_memory(4096, device=model), device=model)
    assert pool.config()["stream_cache"] == 200
    manager.configure(adaptive=False)
    for _ in range(50):
        manager.free_memory(manager.allocate_memory(4096, device=model), device=model)
    assert pool.config()["stream_cache"] == 200


def test_fragmentation_above_the_threshold_is_merged(manager: MemoryManager, model: Device) -> None:
    manager.configure(coalescing_threshold=0.0, pressure_low=0.0)
    pool = manager.pool(model)
    kept = pool.allocate(1000)
    pool.allocate(4096).free()
    assert manager.adapt() == "rest" and pool.stats()["cache.blocks"] == 0 and kept.size


def test_closing_makes_room_for_new_pools(manager: MemoryManager) -> None:
    old = manager.pool()
    manager.close()
    assert old.closed and manager.pools == () and manager.pool() is not old
    manager.pool().close()
    assert not manager.pool().closed
    assert "vram.MemoryManager" in repr(manager)


# ---- what the troubleshooting code of the reference sees --------------------------------------------------


def test_a_warm_up_is_neither_a_miss_nor_a_peak(manager: MemoryManager) -> None:
    manager.warmup_cache([4096, MIB], [300, 92])
    warm = manager.get_statistics()
    assert (warm.total_allocations, warm.total_freed, warm.cache_misses, warm.peak_memory_usage) == (
        0,
        0,
        0,
        0,
    )
    assert (warm.efficiency_score(), warm.fragmentation_ratio) == (1.0, 0.0)
    pointers = [manager.allocate_memory(4096) for _ in range(100)]
    stats = manager.get_statistics()
    assert stats.cache_hit_rate == stats.stream_cache_hit_rate == stats.efficiency_score() == 1.0
    assert (stats.total_allocations, stats.peak_memory_usage) == (100, 100 * 4096)
    assert not any("warm" in text for text in manager.analyze_allocation_patterns().suggestions)
    manager.warmup_cache([4096], [10])
    again = manager.get_statistics()
    assert dataclasses.replace(again, fragmentation_ratio=0.0) == dataclasses.replace(
        stats, fragmentation_ratio=0.0
    )
    for pointer in pointers:
        manager.free_memory(pointer)
    assert manager.get_statistics().total_freed == 100


def test_a_hit_is_an_allocation_without_a_driver_call(model: Device) -> None:
    manager = MemoryManager()
    held = manager.allocate_memory(32 * MIB, device=model)
    manager.free_memory(held, device=model)
    # One block is split into several sizes: no cache has them, and the driver is not called.
    pointers = [manager.allocate_memory(size * MIB, device=model) for size in (9, 10, 8)]
    stats = manager.get_statistics()
    assert (stats.cache_hits, stats.cache_misses, stats.stream_cache_hits) == (3, 1, 0)
    assert manager.pool(model).stats()["cache.hit_rate"] == 0.75
    for pointer in pointers:
        manager.free_memory(pointer, device=model)
    assert manager.get_statistics().fragmentation_ratio == 0
    manager.close()


@pytest.mark.parametrize("pages", [True, False])
def test_with_nothing_live_nothing_is_fragmented(pages: bool) -> None:
    pool = vram.Pool(Device.model("1GiB", pages=pages), segment_size="4MiB")
    blocks = [pool.allocate(size * 100_000) for size in range(1, 30)]
    for block in blocks:
        block.free()
    assert pool.stats().fragmentation == 0


def test_a_large_segment_size_holds_for_small_requests_too() -> None:
    for pages in (True, False):
        pool = vram.Pool(Device.model("4GiB", pages=pages), segment_size="1GiB")
        pool.allocate(512)
        assert pool.stats().reserved == 1 << 30
        pool.close()


# ---- adaptive mode, whoever allocates ----------------------------------------------------------------------


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vram.core.ticker.SECOND", 0.01)


def eventually(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
    return condition()


@pytest.mark.usefixtures("ticks")
def test_under_pressure_it_cleans_and_at_ease_it_expands(model: Device) -> None:
    manager = MemoryManager(limit="100MiB", stream_cache=64)
    pool = manager.pool(model)
    idle = [pool.allocate("1MiB") for _ in range(90)]
    for buffer in idle:
        buffer.free()
    manager.configure(adaptive=True)
    assert pool.stats().reserved >= 90 * MIB  # idle memory is no pressure
    assert eventually(lambda: pool.config()["stream_cache"] > 64)
    held = [pool.allocate("1MiB") for _ in range(85)]
    assert eventually(lambda: pool.config()["stream_cache"] == 0)
    held.pop().free()
    assert eventually(lambda: pool.stats().reserved < 90 * MIB), pool.stats()
    del held[40:]
    assert eventually(lambda: pool.config()["stream_cache"] > 0)
    manager.close()


@pytest.mark.usefixtures("ticks")
def test_a_coalescing_threshold_acts_by_itself(model: Device) -> None:
    manager = MemoryManager(coalescing_threshold=0.1)
    pool = manager.pool(model)
    held = [pool.allocate("300KiB") for _ in range(200)]
    for buffer in held[1::2]:
        buffer.free()
    pool.coalesce()  # what is free is between blocks in use
    kept = held[::2]
    assert pool.stats().fragmentation > 0.1
    pool.allocate("100KiB").free()
    assert eventually(lambda: pool.stats()["cache.blocks"] == 0)
    manager.configure(coalescing_threshold=1.0)
    assert kept and manager._end_upkeep is not None
    manager.close()
    assert manager._end_upkeep is None


def test_a_manager_without_upkeep_has_no_thread(model: Device) -> None:
    manager = MemoryManager()
    manager.pool(model)
    assert manager._end_upkeep is None
    manager.configure(adaptive=True)
    assert manager._end_upkeep is not None
    manager.configure(adaptive=False)
    assert manager._end_upkeep is None


# ---- asynchronous pools ------------------------------------------------------------------------------------


def test_an_asynchronous_pool(model: Device) -> None:
    with vram.AsyncMemoryPool("64MiB", model) as pool:
        futures = [pool.allocate_async("4MiB") for _ in range(16)]
        addresses = [future.result(60) for future in futures]
        assert len(set(addresses)) == 16
        assert pool.stats().reserved == pool.pool.limit == 64 * MIB
        with pytest.raises(vram.OutOfMemory):
            pool.allocate_async("4MiB").result(60)
        for address in addresses:
            pool.free(address)
        assert (pool.stats().allocations, pool.stats().rungs["growth"]) == (16, 0)
        assert "AsyncMemoryPool" in repr(pool)
    assert pool.pool.closed


def test_the_size_of_an_asynchronous_pool_is_its_limit() -> None:
    with pytest.raises(TypeError, match="limit"):
        vram.AsyncMemoryPool("64MiB", limit="1MiB")


def test_an_asynchronous_pool_larger_than_its_device_serves_what_there_is() -> None:
    with vram.AsyncMemoryPool(device=Device.model("8MiB")) as pool:
        assert pool.allocate_async("6MiB").result(60)


# ---- warm-ups beside other threads -------------------------------------------------------------------------


def test_a_warm_up_takes_nothing_from_what_other_threads_count(model: Device) -> None:
    pool, end, made = vram.Pool(model), threading.Event(), 0

    def allocate() -> None:
        nonlocal made
        while not end.is_set():
            pool.allocate(1000).free()
            made += 1

    thread = threading.Thread(target=allocate)
    thread.start()
    for _ in range(20):
        pool.warmup({8192: 200, 2 * MIB: 3})
    end.set()
    thread.join()
    stats = pool.stats()
    assert (stats.allocations, stats.frees, stats.live) == (made, made, 0)
    assert sum(stats.rungs.values()) == made >= stats.hits >= stats.stream_cache_hits >= 0
    negative = {key: value for key, value in stats.items() if value < 0}
    assert negative == {"max_split_size": -1}


def test_a_peak_during_a_warm_up_counts() -> None:
    pool = vram.Pool(Device.model("256MiB"), limit="64MiB")
    kept = []

    def grow() -> bool:
        if not kept:
            kept.append(pool.allocate("20MiB"))
        return False

    pool.on_oom(grow)
    with pytest.raises(vram.OutOfMemory):
        pool.warmup({"40MiB": 2})
    assert pool.stats().live == 1 and pool.stats().peak_allocated == 20 * MIB


def test_a_warm_up_that_calls_the_program_holds_no_lock(model: Device) -> None:
    manager = MemoryManager(limit="64MiB")
    pool, inside, measured = manager.pool(model), threading.Event(), threading.Event()

    def measure() -> None:
        inside.wait(PATIENCE)
        with manager.performance_context():
            measured.set()

    def handle_oom() -> bool:
        inside.set()
        assert measured.wait(PATIENCE)
        manager.garbage_collect()
        return False

    thread = threading.Thread(target=measure)
    thread.start()
    pool.on_oom(handle_oom)
    kept = pool.allocate("40MiB")
    with pytest.raises(vram.OutOfMemory):
        pool.warmup({"16MiB": 3})
    thread.join(PATIENCE)
    assert measured.is_set() and kept.size
    manager.close()


@pytest.mark.usefixtures("ticks")
def test_upkeep_leaves_a_warm_up_alone(model: Device) -> None:
    manager = MemoryManager(adaptive=True, enable_warmup=True)
    pool = manager.pool(model)
    pool.warmup({1024: 5000})
    warm = pool.stats()["cache.blocks"]
    room = pool.config()["stream_cache"]
    expanded = manager.settings["stream_cache"]
    assert eventually(lambda: manager.settings["stream_cache"] > expanded)
    assert pool.stats()["cache.blocks"] == warm >= 5000 and pool.config()["stream_cache"] >= room > 5000
    manager.close()


@pytest.mark.usefixtures("ticks")
def test_upkeep_beside_closing(model: Device, caplog: pytest.LogCaptureFixture) -> None:
    manager = MemoryManager(adaptive=True)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        manager.pool(model).allocate(1000).free()
        manager.close()
    assert "upkeep in the background failed" not in caplog.text
