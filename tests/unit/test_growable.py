"""GrowableBuffer and Scratch: lengths, views, errors, and what the pool sees of them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

import vram
from vram import (
    ConfigError,
    Device,
    DeviceError,
    GrowableBuffer,
    InvalidFree,
    OutOfMemory,
    Pool,
    Scratch,
    Stream,
)
from vram.lifetimes.scratch import WINDOW
from vram.trace.model import Action

MIB = 1 << 20
STEP = 2 * MIB


@pytest.fixture(params=["host", "model"])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    made = vram.Pool(Device("host") if request.param == "host" else Device.model("1GiB"))
    yield made
    gc.collect()
    assert made.check() is None
    made.close()


@pytest.fixture
def host() -> Iterator[Pool]:
    with vram.Pool("host") as made:
        yield made
        gc.collect()
        assert made.check() is None


def opened(pool: Pool, most: int | str = "64MiB", **options: Any) -> GrowableBuffer:
    return GrowableBuffer(most, pool, **{"ahead": 0, **options})


# ---- lengths ------------------------------------------------------------------------------------------


def test_it_begins_empty_and_takes_only_addresses(pool: Pool) -> None:
    buffer = opened(pool, "512MiB")
    assert (buffer.size, buffer.capacity, buffer.max_size, len(buffer)) == (0, 0, 512 * MIB, 0)
    assert buffer.ptr % STEP == 0
    assert pool.stats().allocated == pool.stats().reserved == 0


def test_it_grows_and_shrinks_where_it_is(pool: Pool) -> None:
    buffer = opened(pool)
    address = buffer.ptr
    for size, capacity in [(1, 2), (2 * MIB, 2), (2 * MIB + 1, 4), (33 * MIB, 34), (5 * MIB, 6), (0, 0)]:
        assert buffer.resize(size) == buffer.size == size
        assert buffer.ptr == address
        assert buffer.capacity == capacity * MIB
        assert pool.stats().allocated == capacity * MIB
        assert pool.check() is None
    assert buffer.grow("3MiB") == 0
    assert buffer.grow(10) == 3 * MIB
    assert buffer.shrink(11) == 3 * MIB - 1
    assert buffer.shrink("1GiB") == 0


def test_contents_stay_when_it_grows_and_shrinks(host: Pool) -> None:
    numpy = pytest.importorskip("numpy")
    buffer = opened(host, size=STEP)
    words = numpy.arange(STEP // 8)
    buffer.array(words.shape, words.dtype)[:] = words
    for size in (3 * MIB, 64 * MIB, 40 * MIB, STEP + 1, 20 * MIB):
        buffer.resize(size)
        assert (buffer.array(words.shape, words.dtype) == words).all()
    tail = buffer.array(STEP, offset=18 * MIB)
    tail[:] = 9
    assert (buffer.array(words.shape, words.dtype) == words).all()


def test_beyond_the_most_is_a_typed_error_and_changes_nothing(pool: Pool) -> None:
    buffer = opened(pool, "9MiB", size="9MiB")
    with pytest.raises(ConfigError, match="larger max_size") as caught:
        buffer.grow(1)
    assert (caught.value.requested, caught.value.max_size) == (9 * MIB + 1, 9 * MIB)
    assert isinstance(caught.value, ValueError)
    assert buffer.size == 9 * MIB


@pytest.mark.parametrize("most", [0, "2TiB", -1, None])
def test_a_bad_most_is_refused(most: Any) -> None:
    with pytest.raises(ConfigError):
        GrowableBuffer(most, Device.model("1GiB"))


def test_out_of_memory_leaves_the_old_length(pool: Pool) -> None:
    pool.limit = "16MiB"
    buffer = opened(pool, size="6MiB")
    other = pool.allocate("8MiB")
    with pytest.raises(OutOfMemory) as caught:
        buffer.resize("12MiB")
    assert caught.value.report["requested"] == 6 * MIB
    assert (buffer.size, buffer.capacity) == (6 * MIB, 6 * MIB)
    assert pool.stats().allocated == 14 * MIB
    del other
    assert buffer.resize("12MiB") == 12 * MIB


def test_addresses_that_run_out_are_a_typed_error() -> None:
    pool = vram.Pool(Device.model("64MiB"))  # a space of 16 GiB
    held = [opened(pool, "4GiB") for _ in range(3)]
    with pytest.raises(OutOfMemory, match="addresses"):
        opened(pool, "8GiB")
    for buffer in held:
        buffer.close()
    assert opened(pool, "8GiB").size == 0


def test_an_oom_callback_may_shrink_others_but_not_the_one_that_grows(pool: Pool) -> None:
    pool.limit = "16MiB"
    grows, gives = opened(pool, size="4MiB"), opened(pool, size="10MiB")
    seen: list[Exception] = []

    def callback() -> bool:
        for change in (lambda: grows.resize(0), grows.close):
            with pytest.raises(DeviceError, match="being resized") as caught:
                change()
            seen.append(caught.value)
        gives.resize("2MiB")
        return True

    pool.on_oom(callback)
    assert grows.resize("12MiB") == 12 * MIB
    assert len(seen) == 2
    assert gives.size == 2 * MIB


def test_zeroing_pools_zero_what_is_new() -> None:
    with vram.Pool("host", zero_on_allocate=True, zero_on_free=True) as pool:
        buffer = opened(pool)
        for size in ("4MiB", "8MiB", "2MiB", "6MiB"):
            before = buffer.capacity
            buffer.resize(size)
            pool.device.synchronize()
            part = memoryview(buffer.view(min(before, buffer.size)))
            assert not any(part)
            part.release()
            buffer.view().fill(7)
        pool.device.synchronize()


# ---- stream order -------------------------------------------------------------------------------------


def test_what_a_shrink_gives_up_serves_others_once_the_stream_has_come_that_far() -> None:
    device = Device.model("1GiB", manual=True)
    backend: Any = device.backend
    pool, stream = vram.Pool(device), Stream(device)
    buffer = opened(pool, stream=stream, size="16MiB")
    buffer.view().fill(1)
    buffer.resize("2MiB")
    assert buffer.stats()["pending"] == 14 * MIB
    created = backend.calls("page_create")
    held = [pool.allocate("6MiB", stream=stream)]
    assert backend.calls("page_create") > created, "the pages may still be at work"
    backend.run_all()
    created = backend.calls("page_create")
    held.append(pool.allocate("14MiB", stream=stream))
    assert backend.calls("page_create") == created, "now they serve"
    assert buffer.stats()["pending"] == 0
    assert backend.host_waits() == 0
    del held
    assert pool.check() is None


def test_growing_again_takes_the_same_pages_back_at_once() -> None:
    device = Device.model("1GiB", manual=True)
    backend: Any = device.backend
    pool, stream = vram.Pool(device), Stream(device)
    buffer = opened(pool, stream=stream, size="16MiB")
    buffer.view().fill(1)
    calls = backend.memory_calls()
    for size in ("2MiB", "10MiB", 0, "16MiB"):
        buffer.resize(size)
    assert backend.memory_calls() == calls
    assert backend.host_waits() == 0
    assert pool.check() is None


def test_uses_on_other_streams_are_waited_for_too() -> None:
    device = Device.model("1GiB", manual=True)
    backend: Any = device.backend
    pool, stream, other = vram.Pool(device), Stream(device), Stream(device)
    buffer = opened(pool, stream=stream, size="4MiB")
    buffer.view().fill(1, stream=other)  # recorded
    buffer.close()
    while backend.step(stream.handle):
        pass
    pool.coalesce()
    assert pool.stats().pending == 4 * MIB
    backend.run_all()
    pool.coalesce()
    assert pool.stats().pending == 0


def test_a_closed_stream_is_said_so() -> None:
    pool = vram.Pool(Device.model("1GiB"))
    stream = Stream(pool.device)
    buffer = opened(pool, stream=stream, size="4MiB")
    stream.close()
    with pytest.raises(DeviceError, match="closed"):
        buffer.resize("8MiB")
    assert buffer.size == 4 * MIB
    buffer.close()
    assert pool.check() is None


def test_a_captured_stream_keeps_its_length() -> None:
    device = Device.model("1GiB")
    pool, stream = vram.Pool(device), Stream(device)
    buffer = opened(pool, stream=stream, size="4MiB")
    with stream.capture() as graph:
        buffer.resize("3MiB")  # no page comes or goes
        for size in ("6MiB", "1MiB"):
            with pytest.raises(DeviceError, match="captured") as caught:
                buffer.resize(size)
            assert caught.value.code == "capturing"
        with pytest.raises(DeviceError, match="captured"):
            opened(pool, stream=stream)
        buffer.view().fill(3)
    assert buffer.size == 3 * MIB
    buffer.resize("6MiB")
    del graph
    assert pool.check() is None


# ---- ahead of need ------------------------------------------------------------------------------------


def wait_until_ready(buffer: GrowableBuffer, size: int) -> None:
    wait_until(lambda: buffer.ready >= size)


def test_the_next_pages_are_ready_before_they_are_asked_for() -> None:
    device = Device.model("1GiB")
    backend: Any = device.backend
    pool = vram.Pool(device)
    buffer = GrowableBuffer("512MiB", pool)
    wait_until_ready(buffer, STEP)
    for step, ahead in [(STEP, STEP), (8 * MIB, 8 * MIB), (100 * MIB, 32 * MIB)]:
        buffer.grow(step)
        wait_until_ready(buffer, ahead)
        assert buffer.ready == ahead
        assert pool.stats().allocated == buffer.capacity, "what is ready is nobody's yet"
        assert pool.stats().reserved == buffer.capacity + ahead
    assert backend.host_waits() == 0
    buffer.close()


def test_pages_may_be_made_ready_on_demand(pool: Pool) -> None:
    buffer = opened(pool, size="4MiB")
    assert buffer.prepare("20MiB") == buffer.ready == 20 * MIB
    assert buffer.prepare("1GiB") == 60 * MIB, "all that it may ever hold"
    assert (buffer.size, pool.stats().allocated) == (4 * MIB, 4 * MIB)
    pool.limit = "64MiB"
    other = pool.allocate("50MiB")
    assert buffer.prepare("20MiB") >= 2 * MIB, "it prepares as much as there is memory for"
    del other
    buffer.close()
    with pytest.raises(InvalidFree):
        buffer.prepare(1)


def test_taking_what_is_ready_calls_nobody() -> None:
    device = Device.model("1GiB")
    backend: Any = device.backend
    buffer = GrowableBuffer("8MiB", vram.Pool(device), ahead="8MiB")
    wait_until_ready(buffer, STEP)
    buffer.resize(STEP)
    wait_until_ready(buffer, 6 * MIB)  # all there is
    calls = backend.memory_calls()
    for size in ("4MiB", "6MiB", "8MiB"):
        buffer.resize(size)
    assert backend.memory_calls() == calls


def test_what_is_ready_stays_within_the_limit_and_serves_whoever_needs_it() -> None:
    pool = vram.Pool(Device.model("1GiB"), limit="10MiB")
    buffer = GrowableBuffer("64MiB", pool, size="4MiB", ahead="32MiB")
    wait_until_ready(buffer, STEP)  # not as much as wished for, but the next page
    assert pool.stats().reserved <= 10 * MIB
    held = pool.allocate("6MiB")
    assert pool.stats().allocated == 10 * MIB
    assert pool.check() is None
    del held


def test_ready_pages_of_one_buffer_are_not_taken_for_another_ahead() -> None:
    pool = vram.Pool(Device.model("1GiB"))
    buffers = [GrowableBuffer("64MiB", pool, ahead="4MiB") for _ in range(4)]
    for buffer in buffers:
        wait_until_ready(buffer, 4 * MIB)
    for buffer in buffers:
        assert buffer.ready == 4 * MIB
    assert pool.stats().allocated == 0
    assert pool.trim() == 16 * MIB, "they are free, so a trim takes them"
    assert pool.check() is None


# ---- views --------------------------------------------------------------------------------------------


def test_views_stay_valid_when_it_grows_and_are_freed_when_it_shrinks_below_them(host: Pool) -> None:
    buffer = opened(host, size="4MiB")
    low, high = buffer.view(0, 100), buffer.view("3MiB")
    assert (low.ptr, high.ptr, high.size) == (buffer.ptr, buffer.ptr + 3 * MIB, MIB)
    assert low.base is buffer and low.pool is host
    buffer.resize("40MiB")
    low.fill(1)
    high.fill(2)
    host.device.synchronize()
    assert bytes(memoryview(high)[:2]) == b"\2\2"
    gc.collect()
    buffer.resize("3MiB")
    assert (low.freed, high.freed) == (False, True)
    with pytest.raises(InvalidFree):
        high.fill(3)
    low.fill(4)
    low.free()
    assert buffer.size == 3 * MIB, "freeing a view frees no memory"


def test_bytes_in_other_hands_cannot_be_given_up(host: Pool) -> None:
    numpy = pytest.importorskip("numpy")
    buffer = opened(host, size="8MiB")
    array = buffer.array((256, 1024), "float32", offset="2MiB")  # up to 3 MiB
    memory = memoryview(buffer.view("4MiB", 10))
    for size in (0, "2MiB", 3 * MIB - 1, "4MiB"):
        with pytest.raises(BufferError, match="drop them"):
            buffer.resize(size)
        assert buffer.size == 8 * MIB
    with pytest.raises(BufferError):
        buffer.close()
    assert not buffer.closed
    memory.release()
    buffer.resize("3MiB")
    capsule = numpy.from_dlpack(buffer)
    assert capsule.shape == (3 * MIB,)
    with pytest.raises(BufferError):
        buffer.resize(3 * MIB - 1)
    del array, capsule
    buffer.close()


def test_a_device_array_is_in_other_hands_as_long_as_it_lives() -> None:
    pytest.importorskip("numpy")
    buffer = opened(vram.Pool(Device.model("1GiB")), size="8MiB")
    array = buffer.array((2, 1024), "int16")
    assert (array.shape, array.typestr, array.size, array.ptr) == ((2, 1024), "<i2", 4096, buffer.ptr)
    assert "<i2[2, 1024]" in repr(array)
    with pytest.raises(BufferError):
        buffer.resize(4095)
    with pytest.raises(AttributeError):
        _ = array.__cuda_array_interface__
    buffer.resize(4096)
    del array
    buffer.resize(0)


@pytest.mark.parametrize(("offset", "size"), [(0, 101), (101, None), (50, 51), ("1GiB", 0)])
def test_a_view_beyond_the_length_is_refused(pool: Pool, offset: Any, size: Any) -> None:
    buffer = opened(pool, size=100)
    with pytest.raises(ConfigError, match="grow it first"):
        buffer.view(offset, size)


def test_a_view_keeps_it_alive(pool: Pool) -> None:
    buffer = opened(pool, size="4MiB")
    gone = weakref.ref(buffer)
    view = buffer.view()
    del buffer
    gc.collect()
    assert gone() is not None
    assert pool.stats().allocated == 4 * MIB
    view.fill(1)
    del view
    gc.collect()
    assert gone() is None
    assert pool.stats().allocated == 0
    pool.device.synchronize()


# ---- what the pool sees -------------------------------------------------------------------------------


def test_the_pool_accounts_for_it() -> None:
    pool = vram.Pool(Device.model("1GiB"), journal=100)
    with vram.tag("kv"):
        buffer = opened(pool, size="4MiB", tag="cache")
    buffer.resize("10MiB")
    (block,) = pool.snapshot().blocks("live")
    assert (block.address, block.size, block.tag) == (buffer.ptr, 10 * MIB, "cache")
    (leak,) = pool.leaks()
    assert leak.tag == "cache"
    assert pool.info(buffer.ptr)["bytes"] == 10 * MIB
    buffer.close()
    journal = pool.journal()
    kinds = (Action.ALLOC, Action.FREE_REQUESTED)
    told = [each for each in zip(journal.action, journal.size, strict=True) if each[0] in kinds]
    assert told == [
        (Action.ALLOC, 4 * MIB),
        (Action.FREE_REQUESTED, 4 * MIB),
        (Action.ALLOC, 10 * MIB),
        (Action.FREE_REQUESTED, 10 * MIB),
    ]


def test_it_keeps_the_tag_it_was_opened_under() -> None:
    pool = vram.Pool(Device.model("1GiB"))
    with vram.tag("kv"):
        buffer = opened(pool)
    buffer.resize("4MiB")
    assert buffer.tag == "kv"
    assert [block.tag for block in pool.snapshot().blocks("live")] == ["kv"]


def test_a_recording_reads_as_one_allocation_at_a_time(tmp_path: Path) -> None:
    pool = vram.Pool(Device.model("1GiB"))
    with vram.record(pool, tmp_path / "run.vtrace"):
        with opened(pool, size="4MiB") as buffer:
            for size in ("20MiB", "2MiB", 0, "6MiB"):
                buffer.resize(size)
        pool.allocate("3MiB").free()
        pool.device.synchronize()
        pool.coalesce()
    trace = vram.open(tmp_path / "run.vtrace")
    assert trace.complete
    live = most = 0
    for action, size in zip(trace.action, trace.size, strict=True):
        if action == Action.ALLOC:
            live += size
        elif action == Action.FREE_COMPLETED:
            live -= size
        most = max(most, live)
    assert (live, most) == (0, 20 * MIB)


def test_the_pool_does_not_take_its_pointer_for_an_allocation(pool: Pool) -> None:
    buffer = opened(pool, size="4MiB")
    with pytest.raises(InvalidFree):
        pool.free(buffer.ptr)
    assert buffer.resize("6MiB") == 6 * MIB


def test_a_trim_leaves_it_alone_and_takes_what_it_gave_up(pool: Pool) -> None:
    buffer = opened(pool, size="16MiB")
    buffer.resize("4MiB")
    pool.trim(wait=True)
    assert pool.stats().reserved == 4 * MIB
    buffer.close()
    assert pool.trim(wait=True) == 4 * MIB


def test_requests_of_random_length_create_no_page_in_the_long_run() -> None:
    import random

    device = Device.model("1GiB", lag_us=100)
    backend: Any = device.backend
    pool = vram.Pool(device)
    chance = random.Random(5)
    warm = [opened(pool, "32MiB", size="32MiB") for _ in range(4)]
    for buffer in warm:
        buffer.close()
    created = backend.calls("page_create")
    live: list[GrowableBuffer] = []
    for _ in range(1000):
        buffer = opened(pool, "32MiB")
        live.append(buffer)
        length = chance.randrange(1, 33) * MIB
        while buffer.size < length:
            buffer.grow(min(700_000, length - buffer.size))
        buffer.view().fill(1)
        if len(live) == 4:
            live.pop(chance.randrange(4)).close()
        backend.advance(50)
    assert backend.calls("page_create") == created
    assert backend.host_waits() == 0
    assert pool.check() is None


def test_pools_without_pages_are_refused() -> None:
    for without in (vram.Pool(Device.model("1GiB", pages=False)), vram.Pool("host", pages=False)):
        with pytest.raises(DeviceError, match="needs a pool with pages") as caught:
            GrowableBuffer("1MiB", without)
        assert caught.value.code == "unsupported"
    with pytest.raises(DeviceError, match="needs a pool with pages"):
        GrowableBuffer("1MiB", vram.PinnedPool("host"))
    with pytest.raises(DeviceError, match="needs a pool with pages"):
        GrowableBuffer("1MiB", vram.DriverPool(Device.model("1GiB")))


def test_the_device_may_be_named() -> None:
    with GrowableBuffer("4MiB", "host", size=10) as buffer:
        assert buffer.device.name == "host"
        assert buffer.pool is vram.get_memory_manager().pool("host")
    with GrowableBuffer("4MiB", Device("host")) as buffer:
        assert buffer.pool.device == Device("host")


def test_race_check_knows_it() -> None:
    device = Device.model("1GiB")
    pool, one, two = vram.Pool(device), Stream(device), Stream(device)
    with vram.race_check("collect") as found:
        buffer = opened(pool, stream=one, size="4MiB")
        buffer.view(100, 100).fill(1)
        buffer.resize("8MiB")
        buffer.view("6MiB").fill(1)
        buffer.close()
    assert not list(found.races)
    with vram.race_check("collect") as found:
        buffer = opened(pool, stream=one, size="4MiB")
        buffer.view(100, 100).fill(1)
        buffer.view().fill(2, stream=two)
        buffer.close()
    assert [race.kind for race in found.races] == ["unordered"]


# ---- end ----------------------------------------------------------------------------------------------


def test_after_the_end_everything_is_a_typed_error(pool: Pool) -> None:
    buffer = opened(pool, size="4MiB")
    view = buffer.view()
    buffer.close()
    buffer.close()
    assert buffer.closed and view.freed
    for use in (lambda: buffer.resize(1), buffer.view, buffer.stats, lambda: buffer.array(1)):
        with pytest.raises(InvalidFree):
            use()
    assert "closed" in repr(buffer)
    assert pool.stats().allocated == 0


def test_a_closed_pool_ends_it() -> None:
    pool = vram.Pool(Device.model("1GiB"))
    buffer = opened(pool, size="4MiB")
    pool.close()
    assert buffer.closed
    with pytest.raises(DeviceError) as caught:
        buffer.resize(1)
    assert caught.value.code == "closed"
    buffer.close()


def test_a_failed_beginning_gives_the_addresses_back() -> None:
    pool = vram.Pool(Device.model("8MiB"))
    for _ in range(40):
        with pytest.raises(OutOfMemory):
            opened(pool, "2GiB", size="16MiB")
    assert pool.check() is None


def test_threads_take_turns(host: Pool) -> None:
    buffer = opened(host, "256MiB")
    shared = opened(host, "256MiB")

    def work() -> None:
        own = opened(host, "32MiB")
        for n in range(40):
            shared.grow(100_000)
            own.resize((n % 5) * MIB)
        own.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared.size == 4 * 40 * 100_000
    assert buffer.size == 0


# ---- scratch ------------------------------------------------------------------------------------------


def test_scratch_serves_the_same_bytes_again(pool: Pool) -> None:
    scratch = Scratch(Stream(pool.device), pool=pool)
    with scratch.get("3MiB") as workspace:
        address = workspace.ptr
        workspace.fill(1)
    for size in (10, "40MiB", 0, "1MiB"):
        with scratch.get(size) as workspace:
            assert workspace.ptr == address
    assert scratch.size == 40 * MIB
    scratch.close()
    pool.device.synchronize()


def test_workspaces_held_together_do_not_overlap(pool: Pool) -> None:
    scratch = Scratch(pool=pool)
    with scratch.get(1000) as outer:
        with scratch.get("30MiB", align=4096) as inner:
            assert inner.ptr >= outer.ptr + 1000 and inner.ptr % 4096 == 0
            third = scratch.get(1)
            assert third.ptr >= inner.ptr + inner.size
        again = scratch.get(1)  # the top is still held
        assert again.ptr > third.ptr
        del third, again
        with scratch.get(5) as next_one:
            assert next_one.ptr == outer.ptr + 1024
    empty = [scratch.get(0), scratch.get(0)]
    assert empty[0].ptr != empty[1].ptr
    del empty, next_one, inner, outer
    scratch.close()


def test_scratch_shrinks_by_its_rule() -> None:
    device = Device.model("1GiB")
    backend: Any = device.backend
    pool = vram.Pool(device)
    scratch = Scratch(pool=pool)

    def ask(size: int, times: int) -> None:
        for _ in range(times):
            scratch.get(size).free()

    ask(64 * MIB, 1)
    ask(20 * MIB, WINDOW - 1)
    assert scratch.size == 64 * MIB, "the window has seen 64 MiB"
    ask(20 * MIB, WINDOW - 1)
    assert scratch.size == 64 * MIB
    ask(20 * MIB, 1)
    assert scratch.size == 20 * MIB, "64 requests with at most half of it"
    ask(11 * MIB, 3 * WINDOW)
    assert scratch.size == 20 * MIB, "more than half"
    ask(100 * MIB, 1)
    assert scratch.size == 100 * MIB, "it grows at once"
    assert backend.host_waits() == 0
    assert scratch.trim() == 0
    assert pool.check() is None


def test_a_workspace_that_is_held_is_never_cut_off() -> None:
    scratch = Scratch(pool=vram.Pool(Device.model("1GiB")))
    held = scratch.get("10MiB")
    scratch.get("100MiB").free()
    for _ in range(3 * WINDOW):
        scratch.get(1000).free()
    assert scratch.size == 12 * MIB
    held.fill(1)


def test_scratch_says_what_it_refuses() -> None:
    scratch = Scratch(pool=vram.Pool(Device.model("1GiB")), max_size="8MiB")
    with pytest.raises(ConfigError):
        scratch.get("9MiB")
    with pytest.raises(ConfigError, match="power of two"):
        scratch.get(1, align=48)
    assert "of 0 B" in repr(scratch)
    scratch.close()
    assert scratch.closed
    with pytest.raises(InvalidFree):
        scratch.get(1)


def test_scratch_follows_its_stream() -> None:
    with Stream("host") as stream:
        scratch = Scratch(stream)
        assert scratch.pool is vram.get_memory_manager().pool("host")
        total = 0
        for n in range(1, 50):
            with scratch.get(n * 100_000) as workspace:
                workspace.fill(n % 256)
                copy = bytearray(workspace.size)
                workspace.copy_to(copy)
                total += copy[-1]
        assert total == sum(range(1, 50))
        scratch.close()
