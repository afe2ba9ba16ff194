"""The pool's Python side: options, asynchronous allocation, warm-up, limits, callbacks, errors, leaks."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import re
import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError
from typing import Any

import pytest
from programs import FORK, assert_quiet, run_program
from waiting import PATIENCE, wait_until

import vram
from vram.core.device import Device
from vram.core.oom import explain_out_of_memory
from vram.trace import Action

MIB = 1 << 20


@pytest.fixture
def model() -> Device:
    return Device.model("256MiB", lag_us=0.0)


@pytest.fixture
def pool(model: Device) -> vram.Pool:
    return vram.Pool(model)


# ---- making one -------------------------------------------------------------------------------------------


def test_a_pool_is_made_on_the_default_device_a_name_or_a_device(model: Device) -> None:
    assert vram.Pool().device == vram.Device() and vram.Pool("host").device.name == "host"
    assert vram.Pool(model).device == model
    assert vram.Pool("model:1GiB").device.total_memory == 1 << 30


def test_a_new_pool_takes_nothing(pool: vram.Pool) -> None:
    assert pool.stats().reserved == 0
    assert "0 B allocated, 0 B reserved" in repr(pool)


def test_options_reach_the_native_pool(model: Device) -> None:
    pool = vram.Pool(model, cross_stream="wait", stream_cache=7, segment_size="4MiB", limit=0.5)
    options = pool.config()
    assert (options["cross_stream"], options["stream_cache"]) == ("wait", 7)
    assert (options["segment_size"], options["limit"]) == (4 * MIB, 128 * MIB)


def test_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, model: Device) -> None:
    monkeypatch.setenv("VRAM_CONF", "cross_stream:never,adaptive:true,limit:64MiB")
    monkeypatch.setenv("VRAM_CACHE_SIZE", "9")
    pool = vram.Pool(model, limit="32MiB")
    assert (pool.config()["cross_stream"], pool.config()["stream_cache"]) == ("never", 9)
    assert pool.limit == 32 * MIB


def test_wrong_options_make_no_pool(model: Device) -> None:
    with pytest.raises(vram.ConfigError, match="did you mean limit"):
        vram.Pool(model, limt=5)
    with pytest.raises(vram.ConfigError, match="memory manager"):
        vram.Pool(model, adaptive=True)
    with pytest.raises(vram.DeviceError):
        vram.Pool("nowhere")


def test_subclasses_are_pools(model: Device) -> None:
    class Own(vram.Pool):
        pass

    assert type(Own(model)) is Own and Own(model).allocate(5).size == 5


# ---- allocation -------------------------------------------------------------------------------------------


def test_asynchronous_allocation_gives_a_buffer_or_the_error(pool: vram.Pool) -> None:
    with vram.tag("later"):
        futures = [pool.allocate_async("1MiB") for _ in range(20)]
    buffers = [future.result(timeout=PATIENCE) for future in futures]
    assert len({buffer.ptr for buffer in buffers}) == 20
    assert {buffer.tag for buffer in buffers} == {"later"}
    assert pool.allocate_async(5, tag="own").result(timeout=PATIENCE).tag == "own"
    with pytest.raises(vram.OutOfMemory):
        pool.allocate_async("1GiB").result(timeout=PATIENCE)
    with pytest.raises(vram.ConfigError):
        pool.allocate_async(-1).result(timeout=PATIENCE)


def test_a_result_nobody_takes_is_freed(pool: vram.Pool) -> None:
    future = pool.allocate_async(MIB)
    future.result(timeout=PATIENCE)
    del future
    gc.collect()
    wait_until(lambda: pool.stats().live == 0)  # the thread that served it may hold it a moment longer


def test_a_callback_may_close_the_pool_of_an_asynchronous_allocation(model: Device) -> None:
    pool = vram.Pool(model, limit="4MiB")
    pool.on_oom(pool.close)
    for future in [pool.allocate_async("8MiB") for _ in range(4)]:
        with pytest.raises((vram.DeviceError, CancelledError)):
            future.result(timeout=30)
    assert pool.closed


@pytest.mark.parametrize("entries", [-1, 2**24 + 1, 10**9, 2**32, 2**64, 2**70])
def test_a_journal_of_more_events_than_can_be_kept_is_refused(pool: vram.Pool, entries: int) -> None:
    with pytest.raises(vram.ConfigError, match=str(entries)):
        pool.journal_start(entries)
    with pytest.raises(vram.ConfigError, match=str(entries)):
        vram.Pool(pool.device, journal=entries)
    pool.journal_start(2**24)  # costs what is used of it
    pool.allocate(100)
    assert pool.journal().action[-1] == Action.FREE_COMPLETED


def test_numbers_that_do_not_fit_are_refused(pool: vram.Pool) -> None:
    with pytest.raises(vram.ConfigError, match="stream_cache cannot be 4294967296; valid: an integer from 0"):
        pool.reconfigure({"stream_cache": 2**32})


def test_closing_waits_for_what_runs_and_cancels_the_rest(model: Device) -> None:
    pool, gate, entered = vram.Pool(model), threading.Event(), threading.Event()

    def callback() -> bool:
        entered.set()
        return gate.wait(PATIENCE)

    pool.on_oom(callback)
    futures = [pool.allocate_async("1GiB") for _ in range(50)]
    assert entered.wait(PATIENCE)
    futures[-1].add_done_callback(lambda _: gate.set())  # close() cancels it, and only then waits
    pool.close()
    assert all(future.done() for future in futures)
    assert any(future.cancelled() for future in futures)
    with pytest.raises(vram.DeviceError):
        pool.allocate_async(5).result(timeout=PATIENCE)


def test_warm_sizes_are_served_by_the_cache(pool: vram.Pool) -> None:
    pool.warmup({4096: 50, "64KiB": 20, MIB: 10})
    assert pool.stats()["cache.blocks"] == 80
    before = pool.stats()
    kept = [pool.allocate(size) for size in (4096, 65536, MIB) for _ in range(10)]
    after = pool.stats()
    assert after.hits - before.hits == len(kept) and after.reserved == before.reserved


def test_warm_up_goes_to_the_stream_named(model: Device, pool: vram.Pool) -> None:
    side = vram.Stream(model)
    pool.warmup([(4096, 3)], stream=side)
    cached = {stream["handle"]: stream["cached"] for stream in pool.stats().streams}
    assert cached[side.handle] == 3 * 4096 and cached.get(0, 0) == 0


def test_warm_up_is_all_or_nothing(pool: vram.Pool) -> None:
    with pytest.raises(vram.OutOfMemory):
        pool.warmup({MIB: 10, "100MiB": 10})
    assert pool.stats().live == 0
    for wrong in ({4096: -1}, {4096: True}, {4096: 1.5}, {"x": 1}):
        with pytest.raises(vram.ConfigError):
            pool.warmup(wrong)  # type: ignore[arg-type]
    pool.warmup({})


def test_warm_up_may_exceed_the_cache(model: Device) -> None:
    pool = vram.Pool(model, stream_cache=2)
    pool.warmup({4096: 10})
    assert pool.stats()["cache.blocks"] == 10


# ---- limits and housekeeping ------------------------------------------------------------------------------


def test_the_limit_is_bytes_a_text_a_share_or_none(pool: vram.Pool) -> None:
    assert pool.limit is None
    for given, limit in [
        (64 * MIB, 64 * MIB),
        ("32MiB", 32 * MIB),
        (0.25, 64 * MIB),
        (None, None),
        (1.0, 256 * MIB),
    ]:
        pool.limit = given
        assert pool.limit == limit
    with pytest.raises(vram.ConfigError, match="limit cannot be -5"):
        pool.limit = -5
    assert pool.limit == 256 * MIB


def test_the_limit_holds(pool: vram.Pool) -> None:
    pool.limit = "16MiB"
    kept = pool.allocate("12MiB")
    with pytest.raises(vram.OutOfMemory) as caught:
        pool.allocate("12MiB")
    assert caught.value.limit == 16 * MIB and pool.stats().peak_reserved <= 16 * MIB
    pool.limit = None
    assert pool.allocate("12MiB").size == kept.size


def test_trim_returns_what_went(pool: vram.Pool) -> None:
    kept = pool.allocate("10MiB")
    pool.allocate("50MiB").free()
    reserved = pool.stats().reserved
    released = pool.trim()
    assert released == reserved - pool.stats().reserved >= 48 * MIB
    assert pool.trim("1GiB") == 0
    kept.free()
    assert pool.trim() > 0 and pool.stats().reserved == 0


def test_a_closed_stream_leaves_its_memory_to_others(model: Device, pool: vram.Pool) -> None:
    side = vram.Stream(model)
    pool.allocate("200MiB", stream=side).free()
    side.close()
    model.synchronize()
    assert pool.allocate("200MiB").size == 200 * MIB


def test_a_dropped_pool_is_gone_and_gives_its_memory_back(model: Device) -> None:
    pool = vram.Pool(model)
    pool.on_oom(pool.coalesce)  # a cycle through the callback
    buffer = pool.allocate(MIB)
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is not None  # the buffer keeps it
    del buffer
    gc.collect()
    assert gone() is None and model.free_memory == model.total_memory
    vram.Stream(model).close()  # nobody listens any more


def test_closing(model: Device) -> None:
    with vram.Pool(model) as pool:
        buffer = pool.allocate(MIB)
    assert pool.closed and repr(pool) == f"<vram.Pool on {model.name}, closed>"
    assert model.free_memory == model.total_memory
    pool.close()
    for use in (lambda: pool.allocate(1), lambda: pool.malloc(1), buffer.free, lambda: pool.trim(),
                lambda: pool.warmup({4096: 1}), lambda: setattr(pool, "limit", 5)):  # fmt: skip
        with pytest.raises(vram.VramError):
            use()


# ---- out of memory ----------------------------------------------------------------------------------------


def test_a_lack_of_addresses_is_not_called_a_lack_of_memory() -> None:
    pool = vram.Pool(Device.model("1GiB"))
    with pytest.raises(vram.OutOfMemory, match="1 MiB with an alignment of 1 TiB") as caught:
        pool.allocate("1MiB", align="1TiB")
    assert "16 GiB of addresses have no free place for it" in str(caught.value)
    assert "What would help: a smaller alignment." in str(caught.value)
    assert caught.value.report["verdict"] == "addresses" and pool.stats().reserved == 0
    with pytest.raises(vram.OutOfMemory) as caught:
        pool.allocate("2GiB")
    assert caught.value.report["verdict"] == "true-demand" and "align" not in str(caught.value)


def full(pool: vram.Pool) -> vram.OutOfMemory:
    with pytest.raises(vram.OutOfMemory) as caught:
        pool.allocate("200MiB")
    return caught.value


def test_the_error_says_what_was_asked_and_who_holds_it(model: Device, pool: vram.Pool) -> None:
    with vram.tag("weights"):
        kept = pool.allocate("100MiB")
    error = full(pool)
    text = str(error)
    assert f"failed to allocate 200 MiB on stream 0 of {model.name}" in text
    assert "100 MiB are allocated" in text and "'weights' (100 MiB)" in text
    assert "What would help: freeing 44 MiB of the allocated memory" in text
    assert (error.requested, error.allocated, error.limit) == (200 * MIB, kept.size, None)
    assert error.report["tags"] == {"weights": 100 * MIB}
    assert error.report["device_total"] == 256 * MIB
    assert isinstance(error, MemoryError)


def test_the_error_survives_pickling(pool: vram.Pool) -> None:
    kept = pool.allocate("100MiB")
    error = full(pool)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (str(other), other.requested, other.report) == (str(error), 200 * MIB, error.report)
    assert kept.size == error.allocated


def test_the_error_names_what_holds_memory_outside(model: Device) -> None:
    other = vram.Pool(model)
    theirs = other.allocate("150MiB")
    error = full(vram.Pool(model))
    assert error.report["outside"] >= theirs.size
    assert f"foreign {vram.format_size(error.report['outside'])}: held outside the allocator" in str(error)
    assert error.report["verdict"] == "foreign"


def test_the_error_names_the_limit(model: Device) -> None:
    error = full(vram.Pool(model, limit="150MiB"))
    assert "limit of 150 MiB" in str(error) and "this one alone exceeds" in str(error)
    assert "a limit of at least 200 MiB" in str(error)
    pool = vram.Pool(model, limit="220MiB")
    kept = pool.allocate("50MiB")
    assert "a limit of at least 250 MiB" in str(full(pool)) and kept.size


def test_the_limit_that_the_error_asks_for_is_enough(model: Device) -> None:
    def fill(limit: str) -> int:
        pool = vram.Pool(model, limit=limit)
        return sum(buffer.size for buffer in [pool.allocate(MIB) for _ in range(65)])

    with pytest.raises(vram.OutOfMemory) as failed:
        fill("64MiB")
    asked = re.search(r"a limit of at least (\d+ MiB)", str(failed.value))
    assert asked and fill(asked[1]) == 65 * MIB


def test_the_parts_of_the_report_sum_to_the_device(model: Device) -> None:
    other, pool = vram.Pool(model), vram.Pool(model, limit="128MiB")
    theirs, kept = other.allocate("40MiB"), pool.allocate("100MiB")
    odd = pool.allocate(3000)
    report = full(pool).report
    assert sum(report["bytes"].values()) == report["device_total"] == 256 * MIB
    assert report["bytes"]["foreign"] >= theirs.size and report["bytes"]["withheld"] > 0
    assert report["bytes"]["rounding"] == -odd.size % 512 and kept.size == 100 * MIB
    assert report["verdict"] == "true-demand"


def explained(**changes: Any) -> str:
    nothing = ("limit", "device_free", "pending", "cached", "free_pages", "free_elsewhere", "stranded")
    facts = dict.fromkeys(nothing, 0)
    facts |= {"requested": 8 * MIB, "device_total": 64 * MIB, "reserved": 64 * MIB, "allocated": 40 * MIB}
    cross_stream = changes.pop("cross_stream", "ready")
    streams, places = changes.pop("pending_streams", {}), changes.pop("places", {})
    error = explain_out_of_memory(
        "model:0",
        8 * MIB,
        0,
        facts | changes,
        tags={},
        pending_streams=streams,
        places=places,
        cross_stream=cross_stream,
    )
    return str(error)


def test_the_error_says_why_free_memory_does_not_serve() -> None:
    text = explained(stranded=24 * MIB)
    assert "Verdict: fragmentation" in text and "allocating long-lived blocks from a separate pool" in text
    assert "fragmentation 24 MiB: free, but split up by blocks in use" in text
    text = explained(pending=24 * MIB, pending_streams={7: 24 * MIB})
    assert "Verdict: pending" in text
    assert "work on a stream may still use it, allocated on stream 7 (24 MiB)" in text
    assert "waiting for the streams that still use freed memory" in text
    text = explained(free_elsewhere=24 * MIB, cross_stream="never")
    assert "Verdict: cached" in text
    assert "24 MiB in free pages of other streams" in text and 'cross_stream="ready"' in text
    assert 'cross_stream="ready"' not in explained(free_elsewhere=24 * MIB)
    text = explained(cached=4 * MIB, free_pages=2 * MIB, stranded=18 * MIB)
    assert "cached 6 MiB: cached for reuse" in text
    assert "(4 MiB in stream caches, 2 MiB in free pages of this stream)" in text
    assert "40 MiB allocated at train.py:7 in step" in explained(places={"train.py:7 in step": 40 * MIB})


def test_absurd_sizes_are_out_of_memory(pool: vram.Pool) -> None:
    for size in (1 << 62, 2**64 - 1, 2**70):
        with pytest.raises(vram.OutOfMemory, match="a smaller request"):
            pool.allocate(size)
    assert pool.check() is None


def test_callbacks_run_in_order_and_may_free(pool: vram.Pool) -> None:
    kept, calls = [pool.allocate("100MiB")], []

    def first(size: int, stream: int) -> None:
        calls.append(("first", size, stream))

    def second(size: int) -> bool:
        calls.append(("second", size))
        kept.clear()
        return True

    pool.on_oom(first)
    pool.on_oom(second)
    assert pool.allocate("200MiB").size == 200 * MIB
    assert calls == [("first", 200 * MIB, 0), ("second", 200 * MIB)]


def test_a_removed_callback_is_not_called(pool: vram.Pool) -> None:
    calls: list[int] = []
    handle = pool.on_oom(lambda *arguments: calls.append(len(arguments)))
    kept = pool.allocate("100MiB")
    full(pool)
    handle.remove()
    handle.remove()
    full(pool)
    assert calls == [2] and kept.size
    with pytest.raises(TypeError, match="takes a callable"):
        pool.on_oom(5)  # type: ignore[arg-type]


def test_a_failing_callback_corrupts_nothing(pool: vram.Pool, caplog: pytest.LogCaptureFixture) -> None:
    kept = [pool.allocate("100MiB")]
    pool.on_oom(lambda: 1 / 0)
    with caplog.at_level(logging.ERROR, "vram"):
        error = full(pool)
    assert error.report["callback_errors"] == ("ZeroDivisionError('division by zero')",)
    assert "out-of-memory callback" in caplog.text
    pool.on_oom(lambda: kept.clear() or True)
    with caplog.at_level(logging.CRITICAL, "vram"):
        assert pool.allocate("200MiB").size == 200 * MIB
    assert pool.check() is None


def test_a_callback_that_runs_out_itself_is_not_called_again(pool: vram.Pool) -> None:
    kept, calls = pool.allocate("100MiB"), []

    def callback() -> bool:
        calls.append(1)
        with pytest.raises(vram.OutOfMemory):
            pool.allocate("250MiB")
        return False

    pool.on_oom(callback)
    full(pool)
    assert calls == [1] and kept.size and pool.check() is None


# ---- snapshots, leaks, patterns ---------------------------------------------------------------------------


def test_a_snapshot_holds_every_block(pool: vram.Pool) -> None:
    with vram.tag("big"):
        big = pool.allocate("5MiB")
    small = pool.allocate(100)
    pool.allocate(200).free()
    shot = pool.snapshot()
    live = {block.address: block for block in shot.blocks("live")}
    assert set(live) == {big.ptr, small.ptr}
    assert (live[big.ptr].tag, live[big.ptr].requested, live[small.ptr].size) == ("big", 5 * MIB, 512)
    assert shot.by_tag() == {"big": 5 * MIB, None: 512}
    assert (shot.allocated, shot.reserved) == (pool.stats().allocated, pool.stats().reserved)
    assert {segment.kind for segment in shot.segments} == {"small", "large"}
    assert len(list(shot.blocks("cached"))) == 1
    plain = shot.to_dict()
    assert plain["segments"][0]["blocks"][0]["address"] and "2 live blocks" in repr(shot)


def test_leaks_are_what_outlived_the_mark(pool: vram.Pool) -> None:
    old = pool.allocate(1000)
    mark = pool.mark()
    assert pool.leaks(since=mark) == []
    with vram.tag("cache"):
        kept = [pool.allocate(5000) for _ in range(3)]
    other = pool.allocate(MIB)
    first, second = pool.leaks(since=mark)
    assert (first.tag, first.size, first.count, first.bytes) == (None, MIB, 1, MIB)
    assert (second.tag, second.size, second.count) == ("cache", 5000, 3)
    assert set(second.addresses) == {buffer.ptr for buffer in kept}
    assert str(second) == "3 × 4.88 KiB tagged 'cache'"
    assert len(pool.leaks()) == 3 and old.size and other.size
    del kept, other, first
    assert pool.leaks(since=mark) == []


def test_a_block_allocated_again_at_the_same_address_is_new(pool: vram.Pool) -> None:
    buffer = pool.allocate(4096)
    address, mark = buffer.ptr, pool.mark()
    del buffer
    again = pool.allocate(4096)
    assert again.ptr == address
    assert [leak.addresses for leak in pool.leaks(since=mark)] == [(address,)]


def test_stacks_say_who_allocated(model: Device) -> None:
    pool = vram.Pool(model, stacks="python")

    def guilty() -> vram.Buffer:
        return pool.allocate(777)

    kept = [guilty(), guilty(), *pool.allocate_batch([1, 2])]
    raw = [pool.malloc(888), *pool.malloc_batch([3])]
    leaks = {leak.size: leak for leak in pool.leaks()}
    (stack,) = leaks[777].stacks[:1]
    assert stack[0].name.endswith("guilty") and stack[0].filename == __file__
    assert "allocated at" in str(leaks[777]) and len(kept) == 4
    assert leaks[888].stacks[0][0].name == "test_stacks_say_who_allocated"
    assert leaks[1].stacks and leaks[3].stacks
    for address in raw:
        pool.free(address)


def test_a_stack_is_kept_once_however_often_it_allocates(model: Device) -> None:
    pool = vram.Pool(model, stacks="python", stream_cache=0)
    kept = [pool.allocate(512) for _ in range(10)]
    for _ in range(5000):
        pool.allocate(512)
    assert len(pool.leaks()[0].stacks) == 1 and pool.leaks()[0].count == len(kept)
    stacks = [block.stack for block in pool.snapshot().blocks("live")]
    assert all(stack is stacks[0] for stack in stacks)


def test_stacks_go_with_their_tags(model: Device) -> None:
    pool = vram.Pool(model, stacks="python")
    tags = ("one", "two", None)
    kept = [pool.allocate(512, tag=tag) for tag in tags]
    assert tuple(buffer.tag for buffer in kept) == tags
    assert {leak.tag: leak.stacks[0][0].filename for leak in pool.leaks()} == dict.fromkeys(tags, __file__)


def test_out_of_memory_says_which_lines_hold_it(model: Device) -> None:
    pool = vram.Pool(model, stacks="python", limit="64MiB")

    def hoard() -> vram.Buffer:
        return pool.allocate("40MiB")

    kept = hoard()
    with pytest.raises(
        vram.OutOfMemory, match=r"40 MiB allocated at .*test_pool.py:\d+ in .*hoard"
    ) as caught:
        pool.allocate("40MiB")
    assert list(caught.value.report["places"].values()) == [kept.size]


def test_of_a_deep_stack_the_innermost_calls_are_kept(model: Device) -> None:
    pool = vram.Pool(model, stacks="python")

    def deeper(depth: int) -> vram.Buffer:
        return deeper(depth - 1) if depth else pool.allocate(512)

    kept = deeper(200)
    (stack,) = pool.leaks()[0].stacks
    assert len(stack) == 64 and {frame.name.rpartition(".")[2] for frame in stack} == {"deeper"}
    assert kept.size == 512 and stack[0].line == stack[1].line


def test_plain_pools_keep_native_methods(pool: vram.Pool) -> None:
    for name in ("malloc", "free", "allocate", "allocate_batch", "record_stream"):
        assert name not in vars(vram.Pool)


def test_patterns_from_the_journal(model: Device) -> None:
    pool = vram.Pool(model, journal=10_000, stream_cache=0)
    for _ in range(100):
        both = [pool.allocate(4096), pool.allocate(4096)]
        del both
    kept = pool.allocate(MIB)
    found = pool.patterns()
    assert found.source == "journal" and found.allocations == 201
    assert (found.sizes[0].size, found.sizes[0].allocations, found.sizes[0].most_live) == (4096, 200, 2)
    assert found.histogram == {4096: 200, MIB: 1} and found.warmup == {4096: 2}
    assert found.hit_rate == 199 / 201 and found.stream_cache_hit_rate == 0 and found.churn == 200 / 201
    assert any("stream_cache" in text for text in found.suggestions), found.suggestions
    assert "up to 4 KiB: 200" in str(found) and found.to_dict()["allocations"] == 201
    assert kept.size


def test_patterns_suggest_a_warm_up(model: Device) -> None:
    pool = vram.Pool(model, journal=10_000)
    for size in range(2000, 2000 + 512 * 150, 512):
        pool.allocate(size).free()
    assert pool.patterns().hit_rate > 0.9 and pool.patterns().stream_cache_hit_rate == 0
    assert not pool.patterns().suggestions  # the driver was called once
    released = vram.Pool(model, journal=10_000, release_threshold=0)
    for size in range(2000, 2000 + 512 * 150, 512):
        released.allocate(size).free()
        model.synchronize()
    (text,) = [text for text in released.patterns().suggestions if "without calling the driver" in text]
    assert "raise release_threshold" in text
    fresh = vram.Pool(model, journal=10_000)
    for _ in range(60):
        for size in (9 * MIB, 11 * MIB):
            fresh.allocate(size).free()
            fresh.trim(wait=True)
    (text,) = [text for text in fresh.patterns().suggestions if "without calling the driver" in text]
    assert "pool.warmup({" in text


def test_patterns_without_a_journal_and_without_history(pool: vram.Pool) -> None:
    assert pool.patterns().source == "statistics"
    assert pool.patterns().suggestions == ("only 0 allocations so far: too few for a pattern",)
    kept = [pool.allocate(MIB + MIB // 8) for _ in range(200)]
    assert any("little to reuse" in text for text in pool.patterns().suggestions) and kept


# ---- high-water marks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [vram.Pool, vram.DriverPool])
def test_a_soft_cap_calls_back_once_each_time_it_is_passed(kind: Any) -> None:
    pool, seen = kind(Device.model("1GiB", lag_us=0.0)), []
    pool.on_high_water("200MiB", seen.append)
    held = [pool.allocate("64MiB") for _ in range(2)]
    assert not seen
    held += [pool.allocate("64MiB") for _ in range(3)]
    assert len(seen) == 1 and seen[0] >= 200 * MIB
    del held[1:]
    pool.trim(wait=True)
    held.append(pool.allocate("10MiB"))
    held += [pool.allocate("64MiB") for _ in range(3)]
    assert len(seen) == 2
    pool.on_high_water(None)
    del held[1:]
    pool.trim(wait=True)
    held += [pool.allocate("64MiB") for _ in range(8)]
    assert len(seen) == 2
    pool.close()


def test_a_soft_cap_may_change_the_pool(pool: vram.Pool) -> None:
    buffers = [pool.allocate("60MiB") for _ in range(2)]
    calls: list[int] = []

    def shrink(reserved: int) -> None:
        calls.append(reserved)
        pool.allocate(MIB).free()
        buffers.pop().free()
        pool.trim(wait=True)

    pool.on_high_water(0.5, shrink)  # of 256 MiB
    kept = pool.allocate("40MiB")
    assert len(calls) == 1 and pool.stats().reserved <= 100 * MIB and kept.size
    for wrong in (5, "x", []):
        with pytest.raises((TypeError, ValueError)):
            pool.on_high_water(MIB, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a callable"):
        pool.on_high_water(MIB)
    with pytest.raises(vram.ConfigError, match="mark cannot be -1"):
        pool.on_high_water(-1, shrink)


def test_reserving_is_no_request_of_the_program(pool: vram.Pool) -> None:
    pool.reserve("40MiB")
    stats = pool.stats()
    assert (stats.allocations, stats.frees, stats.peak_allocated) == (0, 0, 0)
    assert stats.reserved == 40 * MIB
    pool.allocate("40MiB").free()
    assert pool.stats().hit_rate == 1


def test_a_soft_cap_that_fails_is_reported(pool: vram.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", lambda failure: reported.append(failure.exc_type))
    pool.on_high_water("10MiB", lambda reserved: 1 // 0)
    assert pool.allocate("20MiB").size == 20 * MIB
    assert reported == [ZeroDivisionError]


def test_a_batch_and_a_growable_buffer_pass_it_too(model: Device) -> None:
    for grow in (
        lambda pool: pool.allocate_batch(["40MiB", "40MiB"]),
        lambda pool: vram.GrowableBuffer("128MiB", pool, size="80MiB"),
    ):
        pool, seen = vram.Pool(model), []
        pool.on_high_water("60MiB", seen.append)
        held = grow(pool)
        assert len(seen) == 1 and held
        del held
        pool.close()


# ---- processes --------------------------------------------------------------------------------------------


@pytest.mark.fork
def test_a_child_allocates_asynchronously_in_pools_of_its_own() -> None:
    done = run_program(
        FORK,
        """
        import vram
        pool = vram.Pool("host")
        pool.allocate_async(5).result()

        def body():
            refused(lambda: pool.allocate(5))
            vram.Pool("host").allocate_async(5).result(timeout=120)

        child(body)
        """,
    )
    assert_quiet(done)


def test_exit_with_live_buffers_callbacks_and_futures() -> None:
    done = run_program(
        """
        import vram
        pool = vram.Pool("host", limit="64MiB", stacks="python")
        pool.on_oom(lambda: False)
        kept = [pool.allocate("1MiB"), pool.allocate_async("1MiB").result()]
        future = pool.allocate_async("2MiB")
        try:
            pool.allocate("1GiB")
        except vram.OutOfMemory as error:
            text = str(error)
        """
    )
    assert done.returncode == 0, done.stderr


def test_the_tour_runs() -> None:
    command = [sys.executable, "-W", "error", "-m", "vram", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    for line in (
        "the copy saw 7, 7",
        "without record_stream the other stream reads 31, WRONG",
        "with record_stream the other stream reads 2, right",
        "vram.race_check found it at tour.py:",
        "made 1 request(s) to the pool and hold 2 MiB",
        ": x.record_stream(copy)",
        "3 × 64 KiB tagged 'kv-cache'",
        "What would help: freeing 76 MiB",
        "Verdict: fragmentation: there was enough free memory in total",
        "  1 of 54  vram",
        "Next steps",
    ):
        assert line in done.stdout


# ---- growth ahead of need -----------------------------------------------------------------------------


def test_what_is_reserved_serves_without_growth(model: Device) -> None:
    pool = vram.Pool(model)
    pool.reserve("256MiB")
    backend: Any = model.backend
    calls = backend.memory_calls()
    buffers = [pool.allocate("31MiB") for _ in range(8)]
    assert backend.memory_calls() == calls and pool.stats().reserved == 256 << 20
    pool.reserve("8MiB")
    assert backend.memory_calls() == calls, "what is ready already counts"
    pool.reserve("4MiB")  # of another band of sizes: other addresses, the same pages
    assert pool.stats().reserved == 256 << 20
    del buffers


def test_reserving_on_another_thread(model: Device) -> None:
    pool = vram.Pool(model)
    pool.reserve_async("128MiB").result()
    assert pool.stats().reserved == 128 << 20 and pool.stats().allocated == 0
    with pytest.raises(vram.OutOfMemory):
        pool.reserve_async("2GiB").result()
    assert pool.check() is None
