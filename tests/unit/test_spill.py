"""Spilling from Python: options, buffers, tags, statistics, snapshots, the log, and the way back."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import re
import threading
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import vram
from vram import ConfigError, Device, OutOfMemory, Pool, config
from vram.analysis import explain
from vram.config import free_host_memory
from vram.core import spill, tags
from vram.core.journal import pool_trace
from vram.core.spill import SavedTensors
from vram.observe.status import Observatory
from vram.trace import Action, find_moves, moved_by_tag
from vram.trace.moves import RETURNED, SPILLED

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


@pytest.fixture(autouse=True)
def seconds_by_hand(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory returns only when a test calls `spill._tick`, and not in the background as well."""

    def forget_background() -> None:
        if spill._end is not None:
            spill._end()
        spill._end = None

    forget_background()
    monkeypatch.setattr(spill, "every_second", lambda work: lambda: None)
    yield
    forget_background()


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


def test_usage_has_a_peak_of_its_own(pool: Pool) -> None:
    first, second, third = (pool.allocate(BLOCK) for _ in range(3))
    third.free()
    assert pool.usage(False) == pool.usage(True) == (2 * BLOCK, 3 * BLOCK, 0)
    assert pool.usage(False) == (2 * BLOCK, 2 * BLOCK, 0)
    assert pool.stats().peak_allocated == 3 * BLOCK
    fourth = pool.allocate(BLOCK)
    pool.reset_peak()
    fourth.free()
    first.spill()
    assert pool.usage(False) == (2 * BLOCK, 3 * BLOCK, BLOCK)
    second.free()
    first.free()
    assert pool.usage(True) == (0, 3 * BLOCK, 0) and pool.usage(True) == (0, 0, 0)


def test_usage_leaves_python_to_the_work_that_a_trim_waits_for() -> None:
    device = Device.model("1GiB", pages=False, release_waits=True)
    begun, looked = threading.Event(), threading.Event()

    def late() -> None:  # the trim waits for it with the mutex of the pool
        begun.set()
        looked.wait(0.2)  # needs the GIL again afterwards

    with Pool(device) as pool, vram.Stream(device) as stream, ThreadPoolExecutor(1) as executor:
        pool.allocate("64MiB").free()
        stream.launch(lambda: stream.launch(late))
        trim = executor.submit(pool.trim, wait=True)
        assert begun.wait(10)
        pool.usage(False)
        looked.set()
        assert trim.result(10) == 64 * MIB


@pytest.mark.parametrize("seed", range(48))
def test_every_request_that_fits_the_device_is_served(seed: int) -> None:
    dice = random.Random(seed)
    capacity = dice.choice([128, 256, 512, 1024]) * MIB
    largest = capacity // dice.choice([1, 2, 3, 4, 8, 16, 32])
    most = capacity * dice.choice([1.1, 1.5, 3, 10])
    with Pool(Device.model(capacity), spill="16GiB") as pool:
        streams = [vram.Stream(pool.device) for _ in range(dice.choice([1, 3]))]
        held = list[vram.Buffer]()
        for _ in range(300):
            size = int(largest * dice.random() ** dice.choice([1, 3])) + 1
            while held and sum(each.size for each in held) + size > most:
                held.pop(dice.randrange(len(held))).free()
            held.append(pool.allocate(size, stream=dice.choice(streams)))
        assert pool.check() is None


@pytest.mark.parametrize("budget", [2, 8, 31, 32])
def test_small_pages_move_if_host_memory_is_too_small_for_large_ones(budget: int) -> None:
    with Pool(Device.model("2GiB"), spill=budget * MIB) as pool:
        large = pool.allocate("1920MiB")  # older, in pages of 32 MiB
        small = [pool.allocate(2 * MIB) for _ in range(64)]
        pool.allocate(2 * MIB)
        assert 0 < pool.stats().spilled <= budget * MIB
        assert large.spilled == (32 * MIB if budget == 32 else 0)
        assert len(small) == 64


def test_a_request_gets_memory_that_others_free_while_it_waits_for_its_turn(pool: Pool) -> None:
    kept = [pool.allocate(BLOCK) for _ in range(8)]
    pool.set_spill_callback(lambda *_: pool.suspend(keep="mapped"))  # after which nothing can move
    assert pool.allocate(BLOCK).spilled == 0
    assert pool.stats()["spill.parked_bytes"] == len(kept) * BLOCK


@pytest.mark.parametrize(("before", "after"), [("never", "ready"), ("ready", "never"), ("wait", "never")])
def test_options_can_change_while_a_request_fails(device: Device, before: str, after: str) -> None:
    with Pool(device, spill="64MiB", cross_stream=before) as pool:
        kept = [pool.allocate(BLOCK) for _ in range(8)]
        pool.on_oom(lambda *_: pool.reconfigure({"cross_stream": after}))
        kept.append(pool.allocate(BLOCK))
        assert pool.stats().spilled
        assert pool.check() is None


def test_it_is_off_by_default(device: Device) -> None:
    with Pool(device) as pool:
        kept = [pool.allocate(BLOCK) for _ in range(8)]
        with pytest.raises(OutOfMemory, match=r'spill="4') as caught:
            pool.allocate(BLOCK)
        assert "spilled to host memory" not in str(caught.value)
        with pytest.raises(ConfigError, match="needs the option spill"):
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
    with pytest.raises(ConfigError, match="is not 'first', 'never' or 'default'"):
        vram.tag("x", spill="last")  # type: ignore[arg-type]


def test_wishes_count_for_moves_by_hand(pool: Pool) -> None:
    with vram.tag("stays by test_spill", spill="never"):
        never = pool.allocate(BLOCK)
    other = pool.allocate(BLOCK)
    assert never.spill() == 0
    assert pool.suspend(keep="mapped") == BLOCK
    assert (never.spilled, other.spilled) == (0, BLOCK)


def test_a_wish_can_be_taken_back(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tags, "_wishes", {})  # it is the only one
    vram.tag("changes its mind", spill="never")
    buffer = pool.allocate(BLOCK, tag="changes its mind")
    assert buffer.spill() == 0
    vram.tag("changes its mind")
    assert buffer.spill() == 0
    for _ in range(2):
        vram.tag("changes its mind", spill="default")
    assert buffer.spill() == BLOCK


def test_wishes_count_for_allocations_with_stacks(device: Device) -> None:
    with Pool(device, spill="64MiB", stacks="python") as pool:
        with vram.tag("with stacks", spill="never"):
            never = pool.allocate(BLOCK)
        rest = [pool.allocate(BLOCK) for _ in range(9)]
        assert never.spilled == 0
        assert rest[0].spilled == BLOCK


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


def test_what_returned_too_early_returns_later_next_time(pool: Pool) -> None:
    kept = [pool.allocate(BLOCK) for _ in range(5)]

    def seconds_until_it_returns() -> int:
        more = [pool.allocate(BLOCK) for _ in range(6)]
        assert pool.stats().spilled
        more.clear()
        gc.collect()
        before = pool.stats()["spill.returns"]
        for second in range(1, 200):
            pool.device.synchronize()
            pool.device.backend.advance(1e5)
            spill._tick()
            if pool.stats()["spill.returns"] > before:
                return second
        return 200

    waits = [seconds_until_it_returns() for _ in range(9)]
    assert all(later >= earlier for earlier, later in pairwise(waits)), waits
    assert waits[5] > 8 * waits[0] and len(set(waits)) > 5
    assert max(waits) <= spill.MOST_PATIENCE + waits[0]
    del kept


def in_pages(bytes: int) -> int:
    return bytes // (2 * MIB) * (2 * MIB)


def test_host_memory_is_created_ahead_of_need(pool: Pool) -> None:
    buffers = [pool.allocate(BLOCK) for _ in range(3)]
    spill._tick()
    assert pool.stats()["spill.host_bytes"] == 0  # less than half of the device is in use
    buffers += [pool.allocate(BLOCK) for _ in range(2)]
    spill._tick()
    ahead = pool.stats()["spill.host_bytes"]
    assert ahead == in_pages(32 * MIB // spill.AHEAD_SHARE)
    spill._tick()
    assert pool.stats()["spill.host_bytes"] == ahead
    created = pool.device.backend.calls("host_page_create")
    buffers += [pool.allocate(BLOCK) for _ in range(5)]
    assert pool.stats().spilled == 2 * BLOCK <= ahead
    assert pool.device.backend.calls("host_page_create") == created
    spill._tick()
    assert pool.stats()["spill.host_bytes"] == ahead  # what is in use will be spare again


def test_host_memory_that_was_released_is_not_created_until_it_was_needed(pool: Pool) -> None:
    buffers = [pool.allocate(BLOCK) for _ in range(6)]
    spill._tick()
    pool.trim()
    for _ in range(3):
        spill._tick()
    assert pool.stats()["spill.host_bytes"] == 0
    buffers.append(pool.allocate(BLOCK))
    buffers[0].spill()
    spill._tick()
    assert pool.stats()["spill.host_bytes"] == in_pages(32 * MIB // spill.AHEAD_SHARE)


def test_host_memory_ahead_of_need_is_a_share_of_what_there_is(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def created(free: int, count: int = 3, **options: Any) -> int:
        monkeypatch.setattr(spill, "free_host_memory", lambda: free)
        with Pool(device, **options) as pool:
            buffers = [pool.allocate(BLOCK) for _ in range(count)]
            spill._tick()
            del buffers
            return int(pool.stats()["spill.host_bytes"])

    assert created(1 << 40, limit="20MiB", spill="64MiB") == 6 * MIB
    assert created(1 << 40, limit="20MiB", spill="8MiB") == 2 * MIB
    assert created(8 * MIB, limit="20MiB", spill="64MiB") == 2 * MIB
    assert created(1 << 40, limit="28MiB", spill="64MiB") == 0
    assert created(1 << 40, 5, spill="64MiB") == created(1 << 40, 5, limit="1GiB", spill="64MiB") == 10 * MIB


def test_host_memory_ahead_of_need_may_be_lacking(pool: Pool) -> None:
    buffers = [pool.allocate(BLOCK) for _ in range(6)]
    pool.device.backend.fail("host_page_create", nth=2, code="out_of_memory")
    for _ in range(3):
        spill._tick()
    assert pool.device.backend.calls("host_page_create") == 2  # it is not tried again and again
    buffers += [pool.allocate(BLOCK) for _ in range(6)]  # nothing else is affected
    assert pool.stats().spilled


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
    with Pool(device, spill="AUTO") as pool:
        assert pool.config()["spill"] > 0
    for wrong in ("much", -1, "0.5", 0.5, 1 << 63, True):
        with pytest.raises(ConfigError, match="spill cannot be"):
            Pool(device, spill=wrong)
    with pytest.raises(ConfigError, match="host memory already"):
        Pool("host", spill="1GiB")


def test_auto_leaves_host_memory_to_other_pools_and_processes(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "free_host_memory", lambda: 64 << 30)
    with (
        Pool(device, spill="auto") as one,
        Pool(device, spill="auto") as two,
        Pool(device, spill="1GiB") as other,
    ):
        assert [pool.config()["spill"] >> 30 for pool in (one, two)] == [32, 16]
        other.reconfigure({"spill": "auto"})
        assert other.config()["spill"] >> 30 == 8
        one.reconfigure({"spill": "auto"})
        assert one.config()["spill"] >> 30 == 20
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with Pool(device, spill="auto") as pool:
        assert pool.config()["spill"] >> 30 == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "9" * 5000)  # no number of processes
    with Pool(device, spill="auto") as pool:
        assert pool.config()["spill"] >> 30 == 32


def test_pools_without_pages_do_not_spill(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="the option pages is off"):
        Pool(device, spill="1GiB", pages=False)
    monkeypatch.setenv("VRAM_CONF", "spill:1GiB")
    with Pool(device, pages=False) as pool:
        assert pool.config()["spill"] == 0
        with pytest.raises(ConfigError, match="the option pages is off"):
            pool.reconfigure({"spill": 1 << 30})
        with pytest.raises(ConfigError, match=r"spill\(\) does not apply to this memory: the option pages"):
            pool.allocate(BLOCK).spill()
    with (
        vram.PinnedPool(device) as pinned,
        pytest.raises(
            ConfigError, match=r"spill\(\) does not apply to this memory: it is host memory already"
        ),
    ):
        pinned.allocate(BLOCK).spill()


def test_errors_name_the_memory_that_is_missing(device: Device) -> None:
    with Pool(device, spill=2 * BLOCK) as pool:
        kept = [pool.allocate(BLOCK) for _ in range(3)]
        for buffer in kept[:2]:
            buffer.spill()
        with pytest.raises(OutOfMemory, match="does not allow so much host memory"):
            kept[2].spill()
        more = [pool.allocate(BLOCK) for _ in range(7)]
        with pytest.raises(OutOfMemory, match="a larger spill, because all host memory that it") as caught:
            pool.allocate(BLOCK)
        assert len(more) == 7 and "So far, 8 MiB moved there and 0 B back" in str(caught.value)
    with Pool(device, spill="1GiB") as pool:
        buffer = pool.allocate(BLOCK)
        for nth in (1, 2):  # it waits for what was freed, and tries again
            device.backend.fail("host_page_create", nth=nth, code="out_of_memory")
        with pytest.raises(OutOfMemory, match="the host has no memory left"):
            buffer.spill()
        kept = [pool.allocate(BLOCK) for _ in range(7)]
        for nth in range(1, 20):
            device.backend.fail("host_page_create", nth=nth, code="out_of_memory")
        with pytest.raises(OutOfMemory, match="freeing host memory, because the host has no memory left"):
            pool.allocate(BLOCK)
        device.backend.clear_failures()
    for allowed in ("1GiB", "2MiB"):  # a larger one would not help
        with Pool(device, spill=allowed) as pool, vram.tag("kept by test_spill", spill="never"):
            kept = [pool.allocate(BLOCK) for _ in range(8)]
            with pytest.raises(OutOfMemory, match="has a tag with spill='never'"):
                pool.allocate(BLOCK)
            assert len(kept) == 8


def test_errors_say_how_much_host_memory_is_left(device: Device) -> None:
    with Pool(device, spill="13MiB") as pool:
        kept = [pool.allocate(BLOCK) for _ in range(11)]
        with pytest.raises(
            OutOfMemory, match="a larger spill, because only 1 MiB of 13 MiB are left"
        ) as caught:
            pool.allocate(BLOCK)
        assert len(kept) == 11 and caught.value.report["spill_left"] == MIB
    with Pool(device, spill="8MiB") as pool:
        kept = [pool.allocate(256 << 10) for _ in range(64)]
        for buffer in kept:
            if kept.index(buffer) % 8:  # the rest of their pages is free
                buffer.free()
        with pytest.raises(
            OutOfMemory, match="a larger spill, because all host memory that it allows is in use"
        ):
            while True:
                kept.append(pool.allocate("6MiB"))


@pytest.mark.parametrize("call", ["map", "set_access", "stream_create", "copy"])
def test_errors_do_not_blame_the_option_for_a_full_device(device: Device, call: str) -> None:
    with Pool(device, spill="1GiB") as pool:
        kept = [pool.allocate(BLOCK) for _ in range(8)]
        for nth in range(1, 30):
            device.backend.fail(call, nth=nth, code="out_of_memory")
        with pytest.raises(OutOfMemory, match="the device refused to move memory") as caught:
            pool.allocate(BLOCK)
        device.backend.clear_failures()
        assert caught.value.report["spill_refused"] == "failed" and len(kept) == 8


def test_moves_by_hand_do_not_wait_without_need() -> None:
    device = Device.model("64MiB")
    with Pool(device, spill=BLOCK) as pool, vram.Stream(device) as stream:
        buffer = pool.allocate(4 * BLOCK)
        ran = threading.Event()
        device.backend.set_lag(1e6)
        stream.launch(ran.set)
        with pytest.raises(OutOfMemory):
            buffer.spill()
        assert not ran.is_set()  # nothing was freed, so waiting does not help


def test_the_tags_that_are_named_are_not_said_to_have_most(device: Device) -> None:
    with Pool(device, spill="1GiB") as pool:
        with vram.tag("tiny"):
            kept = [pool.allocate(2 * MIB)]
        kept += [pool.allocate(2 * MIB) for _ in range(8)]
        for buffer in kept:
            buffer.spill()
        with pytest.raises(OutOfMemory) as caught:
            pool.allocate("1GiB")
        text = str(caught.value)
        assert (
            "some of it with the tag 'tiny' (2 MiB)" in text
            and "'tiny' (0 B)" not in text
            and "most of it" not in text
        )


def test_advice_where_others_hold_the_device(device: Device) -> None:
    with Pool(device) as other, Pool(device, spill="1GiB") as pool:
        theirs = other.allocate("16MiB")
        with pytest.raises(OutOfMemory, match=r"releasing memory that other .* hold \(16 MiB\)"):
            pool.allocate("24MiB")
        mine = pool.allocate("8MiB", tag="kept by test_spill")
        vram.tag("kept by test_spill", spill="never")
        with pytest.raises(OutOfMemory) as caught:
            pool.allocate("28MiB")
        assert "freeing" not in str(caught.value)  # 16 MiB of others leave too little for it
        assert theirs and mine


def test_memory_of_others_is_no_memory_that_may_spill(device: Device) -> None:
    with Pool(device) as other, Pool(device, spill="1GiB") as pool:
        theirs = other.allocate("24MiB")
        mine = pool.allocate(BLOCK)
        mine.spill()
        with pytest.raises(OutOfMemory) as caught:
            pool.allocate("16MiB")
        text = str(caught.value)
        assert "Verdict: foreign" in text and theirs
        assert "memory that may spill" not in text and "freeing part of" not in text


def test_errors_name_a_capture(device: Device) -> None:
    with Pool(device, spill="1GiB") as pool, vram.Stream(device) as stream:
        kept = [pool.allocate(BLOCK) for _ in range(8)]
        device.backend.capture_begin(stream.handle)
        with pytest.raises(OutOfMemory, match="nothing moves while a stream is captured") as caught:
            pool.allocate(BLOCK)
        device.backend.capture_end(stream.handle)
        assert caught.value.report["spill_refused"] == "capture"
        kept.append(pool.allocate(BLOCK))
        assert pool.stats().spilled == BLOCK


def test_errors_name_a_call_from_work_on_a_stream() -> None:
    caught: list[OutOfMemory] = []
    device = Device.model("32MiB")
    with Pool(device, spill="1GiB") as pool, vram.Stream(device) as stream:
        kept = [pool.allocate(BLOCK) for _ in range(8)]

        def work() -> None:
            try:
                pool.allocate(BLOCK)
            except OutOfMemory as error:
                caught.append(error)

        stream.launch(work)
        stream.launch(lambda: None)
        stream.synchronize()
        assert "making the request from another thread" in str(caught[0])
        assert caught[0].report["spill_refused"] == "deadlock" and len(kept) == 8


def test_what_cannot_return_says_why(device: Device) -> None:
    with Pool(device, spill="1GiB") as pool:
        buffer = pool.allocate("24MiB")
        buffer.spill()
        pool.trim()
        pool.reconfigure({"limit": "16MiB"})
        with pytest.raises(OutOfMemory, match="the limit of the pool does not allow") as caught:
            buffer.prefetch()
        assert caught.value.call == "limit" and 0 < buffer.spilled < buffer.size
        pool.reconfigure({"limit": "none"})
        with Pool(device) as other:
            other.allocate(device.free_memory)
            other.trim()
            hold = other.allocate(device.free_memory)
            with pytest.raises(OutOfMemory, match="the device has no memory left"):
                buffer.prefetch()
            hold.free()


def test_host_memory_of_freed_buffers_is_awaited(device: Device) -> None:
    with Pool(device, spill=2 * BLOCK) as pool:
        for move in (lambda buffer: buffer.spill(), lambda _: pool.suspend(keep="mapped")):
            freed = pool.allocate(2 * BLOCK)
            assert freed.spill() == 2 * BLOCK
            stream = vram.Stream(device)
            freed.record_stream(stream)
            stream.launch(lambda: time.sleep(0.2))
            freed.free()
            buffer = pool.allocate(BLOCK)
            move(buffer)
            assert buffer.spilled == BLOCK
            buffer.free()
            device.synchronize()
        for _ in range(600):  # and is reused
            buffer = pool.allocate(BLOCK // 2)
            buffer.spill()
            buffer.free()


def test_a_request_gets_the_memory_that_was_moved_for_it(device: Device) -> None:
    """The hook after a move gives others time to take it, so it is called once."""
    taken: list[Any] = []
    with Pool(device, spill="1GiB") as pool:
        calls: list[int] = []

        def take(_needed: int, moved: int) -> None:
            calls.append(moved)
            if moved:
                with ThreadPoolExecutor(1) as other:
                    other.submit(lambda: taken.append(pool.allocate(BLOCK))).result()

        pool.set_spill_callback(take)
        kept = [pool.allocate(BLOCK) for _ in range(14)]
        assert len(kept) == 14 and len(taken) == 1
        assert len([moved for moved in calls if moved]) == 1 < len(calls) - 1
        pool.set_spill_callback(None)
        taken.clear()


def test_a_limit_that_was_lowered_counts(device: Device) -> None:
    """Other memory leaves, so that the next request stays within it."""
    with Pool(Device.model("64MiB"), spill="1GiB") as pool:
        kept = [pool.allocate("16MiB") for _ in range(4)]
        pool.reconfigure({"limit": "32MiB"})
        kept.append(pool.allocate("8MiB"))
        assert pool.stats().reserved <= 32 * MIB
        assert pool.stats().spilled >= 40 * MIB
        with pytest.raises(OutOfMemory):
            pool.allocate("40MiB")
        assert len(kept) == 5
    with Pool(device, spill=2 * BLOCK) as pool:
        kept = [pool.allocate(BLOCK) for _ in range(8)]
        pool.reconfigure({"limit": "16MiB"})
        with pytest.raises(OutOfMemory, match="a larger spill"):
            pool.allocate(BLOCK)
        assert pool.stats().spilled == 0 and len(kept) == 8  # what would not have been enough stays


def test_a_smaller_spill_releases_host_memory(pool: Pool) -> None:
    kept, returned, freed = (pool.allocate(2 * BLOCK) for _ in range(3))
    for buffer in (kept, returned, freed):
        buffer.spill()
    returned.prefetch()
    freed.free()
    pool.reconfigure({"spill": 5 * BLOCK})
    assert pool.stats()["spill.host_bytes"] == 5 * BLOCK
    pool.reconfigure({"spill": BLOCK})
    assert pool.stats()["spill.host_bytes"] == 4 * BLOCK
    pool.device.synchronize()  # queued work could have used what was freed
    pool.reconfigure({"spill": 0})
    assert pool.stats()["spill.host_bytes"] == kept.spilled == 2 * BLOCK
    full = pool.allocate("24MiB")
    with pytest.raises(OutOfMemory, match='spill="12 MiB" or more') as caught:  # with what is there already
        pool.allocate(BLOCK)
    assert "8 MiB are spilled to host memory" in str(caught.value) and full


def test_a_buffer_has_at_most_its_size_in_host_memory(pool: Pool) -> None:
    small = pool.allocate(100)
    small.spill()
    assert small.spilled == 100
    with vram.Arena(pool, size=2 * BLOCK) as arena:
        pieces = [arena.allocate(BLOCK // 2) for _ in range(3)]
        pieces[1].spill()  # moves the chunk of the arena
        assert [piece.spilled for piece in pieces] == [BLOCK // 2] * 3


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


# ---- what tells of it --------------------------------------------------------------------------------------


def test_snapshots_show_what_is_in_host_memory(pool: Pool) -> None:
    with vram.tag("old"):
        old = pool.allocate(2 * BLOCK)
    young = pool.allocate(BLOCK)
    assert "in host memory" not in pool.snapshot()._repr_html_()
    old.spill()
    shown = pool.snapshot()
    assert shown.spilled_by_tag() == {"old": 2 * BLOCK}
    page = shown._repr_html_()
    assert "8 MiB in host memory" in page
    assert "live 4 MiB" in page  # on the device
    assert "moved to host memory so far" in pool.stats()._repr_html_()
    assert "live 4 MiB" in pool._repr_html_()
    assert young.spilled == 0


def test_the_report_of_an_error_names_tags(device: Device) -> None:
    with Pool(device, spill=2 * BLOCK) as pool:
        with vram.tag("cold"):
            kept = [pool.allocate(BLOCK) for _ in range(2)]
        with vram.tag("warm"):
            kept += [pool.allocate(BLOCK) for _ in range(8)]
        with pytest.raises(
            OutOfMemory, match=r"\(spill\), most of it with the tag 'cold' \(8 MiB\)"
        ) as caught:
            pool.allocate(BLOCK)
        assert caught.value.report["spilled_tags"] == {"cold": 2 * BLOCK}
        assert caught.value.report["tags"] == {"warm": 8 * BLOCK, "cold": 0}
        moved = r"So far, 8 MiB moved there, most of it with the tag 'cold' \(8 MiB\), and 0 B back, while"
        assert re.search(moved, str(caught.value))


def test_what_moved_is_counted_by_tag(pool: Pool) -> None:
    assert pool.spilled_tags() == []
    with vram.tag("small"):
        small = [pool.allocate(BLOCK // 4) for _ in range(8)]
    with vram.tag("large"):
        large = pool.allocate(2 * BLOCK)
    nameless = pool.allocate(BLOCK)
    for buffer in (large, *small, nameless):
        buffer.spill()
    large.prefetch()
    large.spill()
    small[0].free()
    found = {each.tag: each for each in pool.spilled_tags()}
    assert list(found) == ["large", "small", None]  # most moved first
    assert (found["large"].bytes, found["large"].moved_out_bytes) == (2 * BLOCK, 4 * BLOCK)
    assert found["large"].moved_back_bytes == 2 * BLOCK
    assert (found["small"].bytes, found["small"].moved_out_bytes) == (7 * BLOCK // 4, 2 * BLOCK)
    assert found[None].bytes == BLOCK
    numbers = pool.stats()
    assert sum(each.moved_out_bytes for each in found.values()) == numbers["spill.moved_out_bytes"]
    assert sum(each.moved_back_bytes for each in found.values()) == numbers["spill.moved_back_bytes"]
    assert sum(each.seconds for each in found.values()) == pytest.approx(numbers["spill.seconds"])
    assert all(each.seconds > 0 for each in found.values())


def test_the_tags_of_small_allocations_have_all_of_the_time(pool: Pool) -> None:
    """The rest of their page is free, and has no tag."""
    buffer = pool.allocate(100, tag="small")
    buffer.spill()
    (small,) = pool.spilled_tags()
    assert small.bytes == small.moved_out_bytes == 512
    assert small.seconds == pool.stats()["spill.seconds"] > 0


def test_what_moved_is_counted_by_tag_where_stacks_are_kept(device: Device) -> None:
    """An allocation's label stands for its tag and its stack then."""
    with Pool(device, spill="64MiB", stacks="python") as pool:
        with vram.tag("one"):
            first = pool.allocate(BLOCK)
            second = pool.allocate(BLOCK)
        first.spill()
        second.spill()
        (one,) = pool.spilled_tags()
    assert (one.tag, one.bytes, one.moved_out_bytes) == ("one", 2 * BLOCK, 2 * BLOCK)


def test_a_process_tells_what_is_spilled(pool: Pool) -> None:
    with vram.tag("told by test_spill"):
        buffer = pool.allocate(BLOCK)
    buffer.spill()
    told = Observatory().status()
    (found,) = [each for each in told["pools"] if each["pool"] == pool.number]
    assert found["spilled"] == BLOCK
    assert (found["spill"]["moved_out_bytes"], found["spill"]["count"]) == (BLOCK, 1)
    (tag,) = [each for each in told["tags"] if each["tag"] == "told by test_spill"]
    assert (tag["bytes"], tag["spilled"]) == (BLOCK, BLOCK)
    (moved,) = [each for each in told["spilled"] if each["tag"] == "told by test_spill"]
    assert (moved["pool"], moved["bytes"], moved["moved_out_bytes"]) == (pool.number, BLOCK, BLOCK)
    assert moved["seconds"] == pool.stats()["spill.seconds"]


def test_prometheus_gets_what_is_spilled(pool: Pool) -> None:
    client = pytest.importorskip("prometheus_client")
    with vram.tag("spilled to prometheus"):
        buffer = pool.allocate(BLOCK)
    buffer.spill()
    with vram.metrics(None, registry=client.CollectorRegistry()) as offered:
        labels = {"device": pool.memory, "pool": str(pool.number), "kind": "Pool"}
        value = offered.registry.get_sample_value
        assert value("vram_memory_spilled_bytes", labels) == BLOCK
        assert value("vram_spill_moved_out_bytes_total", labels) == BLOCK
        assert value("vram_spill_held_seconds_total", labels) == pool.stats()["spill.seconds"]
        tag = {"tag": "spilled to prometheus"}
        assert value("vram_tag_spilled_bytes", tag) == BLOCK
        tag |= labels
        assert value("vram_tag_spill_moved_out_bytes_total", tag) == BLOCK
        assert value("vram_tag_spill_moved_back_bytes_total", tag) == 0
        assert value("vram_tag_spill_held_seconds_total", tag) == pool.stats()["spill.seconds"]


def test_counters_of_tags_never_decrease() -> None:
    client = pytest.importorskip("prometheus_client")
    name = "vram_tag_spill_moved_out_bytes_total"
    pools = [Pool(Device.model("1GiB"), spill="1GiB") for _ in range(2)]
    rows: list[dict[tuple[str, ...], float]] = []
    with vram.metrics(None, registry=client.CollectorRegistry()) as offered, contextlib.ExitStack() as stack:
        for pool in pools:
            stack.enter_context(pool)
        for tags in (["x"], [f"t{n}" for n in range(60)], ["x", "t59", "t0"]):
            for pool in pools:
                for tag in tags:
                    pool.allocate(BLOCK, tag=tag).spill()
            found = [each for family in offered.registry.collect() for each in family.samples]
            rows.append({tuple(each.labels.values()): each.value for each in found if each.name == name})
    for before, after in pairwise(rows):
        assert all(after[series] >= value for series, value in before.items())
    assert {series[-1] for series in rows[-1]} == {"x", *(f"t{n}" for n in range(49)), "(other)"}


def test_pressure_does_not_count_what_is_spilled() -> None:
    manager = vram.MemoryManager(spill="64MiB")
    device = Device.model("32MiB")
    kept = [manager.allocate_memory(BLOCK, device=device) for _ in range(12)]
    assert manager.memory_pressure() <= 1.0
    assert len(kept) == 12
    manager.close()


def test_recordings_have_the_moves(pool: Pool, tmp_path: Path) -> None:
    with vram.record(pool, tmp_path / "run.vtrace"):
        with vram.tag("moved"):
            buffer = pool.allocate(3 * BLOCK)
        pool.allocate(BLOCK).spill()
        buffer.spill()
        buffer.prefetch()
    trace = vram.open(tmp_path / "run.vtrace")
    moves = find_moves(trace)
    assert [(move.tag, move.size, move.back) for move in moves] == [
        ("", BLOCK, False),
        ("moved", 3 * BLOCK, False),
        ("moved", 3 * BLOCK, True),
    ]
    assert moves[1].address == buffer.ptr
    assert moved_by_tag(trace) == {"moved": (3 * BLOCK, 3 * BLOCK), "": (BLOCK, 0)}
    # A reader that knows no moves sees events of a kind that it knows and skips.
    assert {trace.action[move.event] for move in moves} == {Action.USER_DEFINED}
    assert trace.frames_of(trace.stack[moves[0].event]) == (SPILLED,)
    assert trace.frames_of(trace.stack[moves[-1].event]) == (RETURNED,)
    assert vram.trace.peak_allocated(vram.trace.lifetimes(trace)) == 4 * BLOCK
    # A user's own event is no move.
    nothing = array("I", [0] * trace.events)
    assert find_moves(replace(trace, stack=nothing)) == []


def test_the_summary_of_a_recording_has_the_moves(pool: Pool, tmp_path: Path, vram_command: Any) -> None:
    file = tmp_path / "run.vtrace"
    with vram.record(pool, file):
        buffer = pool.allocate(BLOCK, tag="moved")
        buffer.spill()
    code, out, _ = vram_command("summary", str(file))
    assert code == 0
    assert "Spilled, memory tagged 'moved': 4 MiB moved to host memory, 0 B back." in out
    code, out, _ = vram_command("summary", str(file), "--json")
    assert json.loads(out)["spilled"] == {"moved": {"out": BLOCK, "back": 0}}


def test_the_journal_has_the_moves(device: Device) -> None:
    with Pool(device, spill="64MiB", journal=100) as pool:
        buffer = pool.allocate(BLOCK)
        buffer.spill()
        assert [move.size for move in find_moves(pool_trace(pool))] == [BLOCK]


# ---- suspend(keep="mapped") --------------------------------------------------------------------------------


def test_a_tag_can_be_suspended_and_stay_usable(pool: Pool) -> None:
    with vram.tag("model"):
        weights = pool.allocate(2 * BLOCK)
    cache = pool.allocate(BLOCK)
    address, free = weights.ptr, pool.device.free_memory
    assert pool.suspend("model", keep="mapped") == 2 * BLOCK
    assert pool.device.free_memory == free + 2 * BLOCK
    assert (weights.spilled, weights.ptr, weights.suspended) == (weights.size, address, False)
    assert (cache.spilled, pool.stats()["spill.parked_bytes"]) == (0, 2 * BLOCK)
    weights.fill(1)  # works, over the bus
    for _ in range(3):
        spill._tick()  # there is room, and yet it stays
    assert weights.spilled == weights.size
    assert pool.resume("model") == 2 * BLOCK
    assert (weights.spilled, weights.ptr) == (0, address)
    assert pool.stats()["spill.parked_bytes"] == 0


def test_a_tag_that_is_suspended_leaves_pages_of_others_alone(pool: Pool) -> None:
    """Also those that are in host memory already."""
    with vram.tag("model"):
        ours = pool.allocate(MIB // 2)
    theirs = pool.allocate(MIB // 2)  # on the same page
    theirs.spill()
    assert ours.spilled == ours.size
    pool.suspend("model", keep="mapped")
    assert pool.stats()["spill.parked_bytes"] == 0
    assert theirs.prefetch() == 2 * MIB


def test_everything_can_be_suspended_and_stay_usable(pool: Pool) -> None:
    buffers = [pool.allocate(BLOCK) for _ in range(4)]
    assert pool.suspend_async(keep="mapped").result() == 4 * BLOCK
    assert pool.stats().reserved == 0
    assert all(buffer.spilled == BLOCK for buffer in buffers)
    assert pool.resume_async().result() == 4 * BLOCK
    assert pool.stats().spilled == 0


@pytest.mark.parametrize("lag", [0, 1000])
def test_what_was_freed_last_serves_memory_that_returns_by_hand(device: Device, lag: float) -> None:
    device.backend.set_lag(lag)
    with Pool(device, spill="64MiB") as pool:
        mapped = pool.allocate(4 * BLOCK)
        pool.suspend(keep="mapped")
        pool.allocate(8 * BLOCK).free()
        assert pool.resume() == 4 * BLOCK and mapped.spilled == 0
        mapped.spill()
        pool.allocate(8 * BLOCK).free()
        assert mapped.prefetch() == 4 * BLOCK and mapped.spilled == 0


def test_memory_moved_by_hand_stays_until_the_pool_is_short(pool: Pool) -> None:
    buffer = pool.allocate(BLOCK)
    buffer.spill()
    following = spill._followed[id(pool)]
    for _ in range(3):
        following.look(pool)
    assert buffer.spilled == BLOCK
    kept = [pool.allocate(BLOCK) for _ in range(9)]  # one too many
    del kept
    gc.collect()
    for _ in range(4):
        following.look(pool)
        pool.device.synchronize()
        pool.device.backend.advance(1e5)
    assert buffer.spilled == 0


def test_an_explanation_of_a_recording_that_began_later(pool: Pool, tmp_path: Path) -> None:
    """It does not say what was in host memory before."""
    cold = pool.allocate(BLOCK)
    cold.spill()
    with vram.record(pool, tmp_path / "run.vtrace"):
        cold.prefetch()
        with pytest.raises(OutOfMemory):
            pool.allocate("1GiB")
    assert explain(vram.open(tmp_path / "run.vtrace")).spilled == 0


def test_an_explanation_has_what_was_in_host_memory(device: Device, tmp_path: Path) -> None:
    with Pool(device, spill=2 * BLOCK) as pool, vram.record(pool, tmp_path / "run.vtrace"):
        kept = [pool.allocate(BLOCK, tag="cold") for _ in range(10)]
        kept[0].free()
        kept.append(pool.allocate(BLOCK, tag="cold"))
        with pytest.raises(OutOfMemory):
            pool.allocate(BLOCK)
        away = pool.stats().spilled
        kept.pop().free()
        kept[1].prefetch()  # what moves after the failure does not count
        assert pool.stats().spilled < away
    found = explain(vram.open(tmp_path / "run.vtrace"))
    assert found.spilled == found.to_json()["spilled"] == away == 2 * BLOCK
    assert (
        "with 8 MiB spilled to host memory, 32 MiB allocated on the device and 32 MiB reserved"
        in found.headline
    )
    assert "would complete with a larger spill" in [remedy.what for remedy in found.remedies]


def test_the_log_says_once_that_memory_moved(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    with Pool(device, spill="1GiB") as pool:
        with pytest.raises(OutOfMemory):
            pool.allocate(100 * BLOCK)  # more than there is: nothing moves
        assert caplog.messages == []
        kept = [pool.allocate(BLOCK) for _ in range(12)]
        assert len(kept) == 12
        (line,) = caplog.messages
        assert pool.device.name in line and "up to 1 GiB" in line
        assert "4 MiB more needed): 4 MiB of cold memory moved to host memory" in line


def test_resume_returns_only_what_was_suspended(pool: Pool) -> None:
    one, two = pool.allocate(BLOCK, tag="one"), pool.allocate(BLOCK)
    two.spill()
    pool.suspend("one", keep="mapped")
    assert pool.resume() == BLOCK
    assert (one.spilled, two.spilled) == (0, BLOCK)


def test_what_needs_host_pages_says_so(device: Device) -> None:
    with Pool(device) as plain, Pool("host") as host, Pool(device, pages=False) as fixed:
        for pool in (plain, host, fixed):
            with pytest.raises(ConfigError, match=r"needs the option spill|does not apply to this memory"):
                pool.suspend(keep="mapped")
    with Pool(device, spill=BLOCK) as small:
        kept = [small.allocate(BLOCK) for _ in range(2)]
        with pytest.raises(OutOfMemory):
            small.suspend(keep="mapped")
        assert small.stats().spilled == 0
        with pytest.raises(ConfigError, match="omit store"):
            small.suspend(keep="mapped", store=small.store)
        assert len(kept) == 2


# ---- together with the rest --------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [0, 1])
def test_a_page_that_another_librarys_stream_uses_does_not_return(pool: Pool, used: int) -> None:
    buffers = [pool.allocate(MIB) for _ in range(2)]  # on one page
    assert buffers[0].spill() == 2 * MIB
    buffers[used].record_stream(pool.device.backend.foreign_create())
    assert [buffer.prefetch() for buffer in buffers] == [0, 0]
    assert pool.bring_back(1 << 30) == 0
    assert [buffer.spilled for buffer in buffers] == [MIB, MIB]


def test_other_threads_queue_work_while_pages_move(pool: Pool) -> None:
    """For a moment the addresses have no page, and the device refuses work on them."""
    buffer = pool.allocate(4 * BLOCK)
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            buffer.spill()
            buffer.prefetch()

    with ThreadPoolExecutor(1) as executor:
        swapping = executor.submit(swap)
        try:
            while not swapping.done() and pool.raw_stats()["spill"]["spills"] < 1500:
                for _ in range(20):
                    buffer.fill(1)
        finally:
            done.set()
        swapping.result()


def test_the_race_checker_sees_no_race_in_a_swap_and_finds_those_there_are(device: Device) -> None:
    with Pool(device, spill="64MiB") as pool, vram.race_check("collect") as checker:
        one, two = vram.Stream(device), vram.Stream(device)
        buffer = pool.allocate(BLOCK, stream=one)
        buffer.fill(1, stream=one)
        buffer.spill()
        two.wait_stream(one)
        buffer.fill(2, stream=two)
        buffer.prefetch()
        pool.suspend(keep="mapped")
        pool.resume()
        one.wait_stream(two)
        buffer.fill(3, stream=one)
        assert not checker.races
        buffer.fill(4, stream=two)  # unordered, on whichever pages it is
        assert len(checker.races) == 1


def test_arenas_and_growable_buffers_beside_memory_that_spills(pool: Pool, tmp_path: Path) -> None:
    """Everything at once, under a recording: contents of the accounts stay right."""
    with vram.record(pool, tmp_path / "run.vtrace"):
        arena = vram.Arena(pool)
        growable = vram.GrowableBuffer("16MiB", pool, size="2MiB")
        held = []
        for round_ in range(6):
            parts = [arena.allocate(1 << 20) for _ in range(3)]
            held.append(pool.allocate(BLOCK, tag=f"round {round_ % 2}"))
            growable.resize((round_ + 2) * MIB)
            if round_ % 2:
                pool.suspend("round 1", keep="mapped")
            else:
                pool.suspend("round 0", keep="discard")
            assert pool.check() is None
            with contextlib.suppress(OutOfMemory):  # the device is smaller than all of it
                pool.resume()
            assert pool.check() is None
            parts.clear()
            arena.reset()
        assert pool.stats()["spill.count"] > 0
        growable.close()
        arena.close()
        held.clear()
        gc.collect()
        pool.device.synchronize()
        assert pool.stats().allocated == 0
    trace = vram.open(tmp_path / "run.vtrace")
    assert find_moves(trace)
    assert not trace.truncated and trace.dropped == 0


def test_an_error_says_what_saved_tensors_take(pool: Pool) -> None:
    buffers: list[Any] = []
    pool._saved["activations"] = SavedTensors(24 * MIB, 40 * MIB, 16 * MIB)
    pool._saved[None] = SavedTensors(0, MIB, MIB)
    numbers = pool.stats()
    totals = [numbers[f"spill.saved{each}"] for each in ("_bytes", "_out_bytes", "_back_bytes")]
    assert totals == [24 * MIB, 41 * MIB, 17 * MIB]
    first = pool.spilled_tags()[0]
    assert (first.tag, first.saved_out_bytes) == ("activations", 40 * MIB)
    assert pool.take_host_bytes(24 * MIB)
    with pytest.raises(OutOfMemory, match="Saved tensors take 24 MiB of that limit") as caught:
        while True:
            buffers.append(pool.allocate(BLOCK))
    assert caught.value.report["saved"] == 24 * MIB
