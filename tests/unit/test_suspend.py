"""`Pool.suspend` and `resume`: memory really goes, addresses stay, contents come back, accounts add up."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import FORK, assert_quiet, run_program
from waiting import PATIENCE

import vram
from vram import ConfigError, Device, DeviceError, OutOfMemory, Pool, Stream, Suspended

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def pool() -> Iterator[Pool]:
    with vram.Pool("host", limit="512MiB") as made:
        yield made
        assert made.check() is None


@pytest.fixture
def model() -> Iterator[Pool]:
    with vram.Pool(Device.model("141GiB")) as made:
        yield made
        assert made.check() is None


PATTERN = np.random.default_rng(7).integers(0, 256, 80 * MIB, np.uint8)


def write(buffer: Any, seed: int) -> None:
    np.asarray(buffer)[:] = PATTERN[seed : seed + buffer.size]


def holds(buffer: Any, seed: int) -> bool:
    return bool(np.array_equal(buffer, PATTERN[seed : seed + buffer.size]))


def resident(address: int, size: int) -> int:
    """Bytes of this process's memory in a range of addresses, as the system counts them."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(None, 1)[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin < address + size and end > address
        elif inside and first == "Rss:":
            total += int(line.split()[1]) << 10
    return total


# ---- what it does -----------------------------------------------------------------------------------------


def test_contents_come_back_at_the_same_addresses(pool: Pool) -> None:
    buffers = [pool.allocate(size) for size in (100, 3 * MIB, 70 * MIB, 5000, MIB)]
    for seed, buffer in enumerate(buffers):
        write(buffer, seed)
    addresses = [buffer.ptr for buffer in buffers]
    pool.suspend()
    assert pool.stats().reserved == 0
    assert pool.stats().suspended == pool.resume()
    assert [buffer.ptr for buffer in buffers] == addresses
    assert all(holds(buffer, seed) for seed, buffer in enumerate(buffers))


def test_memory_really_goes_back_to_the_system(pool: Pool) -> None:
    buffer = pool.allocate(64 * MIB)
    np.asarray(buffer)[:] = 1
    device = Device("host")
    free = device.free_memory
    assert resident(buffer.ptr, buffer.size) == 64 * MIB
    assert pool.suspend(keep="discard") == 64 * MIB
    assert resident(buffer.ptr, buffer.size) == 0
    assert device.free_memory == free + 64 * MIB
    pool.resume()
    assert device.free_memory == free
    np.asarray(buffer)[:] = 2  # the memory is there


def test_only_what_has_the_tag_is_suspended(pool: Pool) -> None:
    with vram.tag("weights"):
        weights = [pool.allocate(20 * MIB) for _ in range(3)]
    explicit = pool.allocate(20 * MIB, tag="weights")
    other = pool.allocate(20 * MIB)
    write(other, 1)
    pool.suspend("weights")
    assert [buffer.suspended for buffer in (*weights, explicit, other)] == [True] * 4 + [False]
    assert pool.stats().reserved == 20 * MIB
    assert holds(other, 1)
    pool.resume("something else")
    assert explicit.suspended
    pool.resume("weights")
    assert not any(buffer.suspended for buffer in (*weights, explicit))


def test_tags_are_found_where_stacks_are_kept() -> None:
    with vram.Pool("host", stacks="python") as pool:
        with vram.tag("a"):
            tagged = pool.allocate(4 * MIB)
        other = pool.allocate(4 * MIB)
        pool.suspend("a")
        assert tagged.suspended
        assert not other.suspended
        pool.resume()


def test_a_page_that_another_buffer_uses_stays(pool: Pool) -> None:
    """Its neighbours lose nothing, and it goes with a later suspend once the other is gone."""
    small = [pool.allocate(10_000, tag="small") for _ in range(5)]
    neighbour = pool.allocate(10_000)
    for seed, buffer in enumerate(small):
        write(buffer, seed)
    write(neighbour, 77)
    reserved = pool.stats().reserved
    pool.suspend("small")
    assert all(buffer.suspended for buffer in small)
    assert pool.stats().reserved == reserved
    assert holds(neighbour, 77)
    neighbour.free()
    assert pool.suspend("small") == reserved
    assert pool.stats().reserved == 0
    pool.resume()
    assert all(holds(buffer, seed) for seed, buffer in enumerate(small))


def test_tags_that_share_a_page_come_back_one_by_one(pool: Pool) -> None:
    one = pool.allocate(10_000, tag="one")
    two = pool.allocate(10_000, tag="two")
    write(one, 1)
    write(two, 2)
    pool.suspend("one")
    pool.suspend("two")
    assert pool.stats().reserved == 0
    pool.resume("two")
    assert holds(two, 2)
    assert one.suspended
    write(two, 3)
    pool.suspend("two")
    pool.resume("one")
    assert holds(one, 1)
    pool.resume()
    assert holds(two, 3)


def test_what_is_kept_stays_kept_when_the_rest_of_a_page_is_discarded(pool: Pool) -> None:
    kept = pool.allocate(10_000, tag="kept")
    other = pool.allocate(10_000, tag="other")
    write(kept, 5)
    pool.suspend("kept")
    assert pool.stats().reserved == 2 * MIB
    pool.suspend("other", keep="discard")
    assert pool.stats().reserved == 0
    pool.resume()
    assert holds(kept, 5)
    assert not other.suspended


def test_twice_is_once(pool: Pool) -> None:
    buffer = pool.allocate(10 * MIB)
    write(buffer, 9)
    assert pool.suspend() == 10 * MIB
    assert pool.suspend() == 0
    assert pool.suspend(keep="discard") == 0  # what was kept stays kept
    assert pool.resume() == 10 * MIB
    assert pool.resume() == 0
    assert holds(buffer, 9)


def test_others_allocate_meanwhile_and_never_in_suspended_addresses(pool: Pool) -> None:
    suspended = [pool.allocate(size, tag="s") for size in (10 * MIB, 100_000, 3 * MIB)]
    for seed, buffer in enumerate(suspended):
        write(buffer, seed)
    pool.suspend("s")
    others = [pool.allocate(size) for size in (100_000, 2 * MIB, 12 * MIB, 500) * 4]
    ranges = sorted((buffer.ptr, buffer.ptr + buffer.size) for buffer in (*suspended, *others))
    assert all(before[1] <= after[0] for before, after in pairwise(ranges))
    for seed, buffer in enumerate(others):
        write(buffer, 100 + seed)
    pool.resume()
    assert all(holds(buffer, seed) for seed, buffer in enumerate(suspended))
    assert all(holds(buffer, 100 + seed) for seed, buffer in enumerate(others))


def test_idle_memory_goes_too(pool: Pool) -> None:
    pool.allocate(40 * MIB).free()
    stream = Stream("host")
    pending = pool.allocate(8 * MIB)
    pending.record_stream(stream)
    pending.free()
    pool.allocate(1000).free()
    pool.suspend("nothing has this tag")
    assert pool.stats().reserved == 0


def test_a_suspend_waits_for_work_on_every_stream_that_uses_the_memory(pool: Pool) -> None:
    streams = [Stream("host"), Stream("host")]
    buffer = pool.allocate(4 * MIB, stream=streams[0])
    gate = threading.Event()
    streams[1].launch(gate.wait, PATIENCE)
    buffer.fill(7, stream=streams[1])  # recorded: it is not the buffer's own stream
    begun = pool.suspend_async()
    assert not begun.done()
    gate.set()
    assert begun.result(PATIENCE) == 4 * MIB
    assert pool.resume_async().result(PATIENCE) == 4 * MIB
    assert (np.asarray(buffer) == 7).all()


def test_a_suspend_of_one_stream_does_not_wait_for_another(pool: Pool) -> None:
    busy = Stream("host")
    gate = threading.Event()
    elsewhere = pool.allocate(4 * MIB, stream=busy)
    busy.launch(gate.wait, PATIENCE)
    elsewhere.fill(1)
    pool.allocate(4 * MIB, tag="idle").fill(3)
    buffer = pool.allocate(4 * MIB, tag="idle")
    buffer.fill(4)
    pool.suspend("idle")
    pool.resume("idle")
    assert (np.asarray(buffer) == 4).all()
    gate.set()
    busy.synchronize()


# ---- a suspended buffer -----------------------------------------------------------------------------------


def test_touching_a_suspended_buffer_is_a_typed_error(pool: Pool) -> None:
    buffer, other = pool.allocate(MIB, tag="s"), pool.allocate(MIB)
    stream = Stream("host")
    pool.suspend("s")
    uses = [
        lambda: buffer.fill(0),
        lambda: buffer.copy_from(bytes(MIB)),
        lambda: buffer.copy_to(bytearray(MIB)),
        lambda: buffer.copy_from(other),
        lambda: other.copy_from(buffer),
        lambda: other.copy_to(buffer),
        lambda: memoryview(buffer),
        lambda: np.from_dlpack(buffer),
        lambda: buffer.__dlpack__(),
        lambda: buffer.record_stream(stream),
        lambda: pool.record_stream(buffer.ptr, stream),
    ]
    for use in uses:
        with pytest.raises(Suspended, match="resume"):
            use()
    assert buffer.size == MIB
    assert buffer.ptr
    pool.resume()
    buffer.fill(0)


def test_the_error_survives_pickling() -> None:
    with vram.Pool("host") as pool:
        buffer = pool.allocate(MIB)
        pool.suspend()
        with pytest.raises(Suspended) as caught:
            buffer.fill(1)
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, RuntimeError)
    assert again.code == "suspended"


def test_freeing_a_suspended_buffer_gives_up_its_contents_and_addresses(pool: Pool) -> None:
    one, two = pool.allocate(30 * MIB), pool.allocate(30 * MIB)
    write(two, 2)
    pool.suspend()
    one.free()
    assert one.freed
    assert pool.raw_stats()["kept"] == 30 * MIB
    assert pool.stats().suspended == 30 * MIB
    pool.resume()
    assert holds(two, 2)
    assert pool.stats().reserved == 30 * MIB
    assert pool.store.stats().allocated == 0


def test_dropping_suspended_buffers_leaves_nothing(pool: Pool) -> None:
    buffers = [pool.allocate(size) for size in (100, 5000, 3 * MIB, 40 * MIB)]
    pool.suspend()
    buffers.clear()
    gc.collect()
    assert pool.stats().allocated == pool.stats().suspended == pool.raw_stats()["kept"] == 0
    assert pool.store.stats().allocated == 0
    assert pool.resume() == 0


def test_frees_while_a_suspend_is_under_way(pool: Pool) -> None:
    """They do not wait for it, and are done when it is."""
    stream = Stream("host")
    gate = threading.Event()
    buffers = [pool.allocate(5 * MIB, stream=stream) for _ in range(4)]
    stream.launch(gate.wait, PATIENCE)
    buffers[0].fill(1)
    begun = pool.suspend_async()
    while not buffers[-1].suspended:
        pass
    buffers[1].free()
    assert not begun.done()
    gate.set()
    begun.result(PATIENCE)
    assert pool.check() is None
    assert pool.stats().live == 3
    pool.resume()


def test_threads_allocate_and_free_meanwhile(pool: Pool) -> None:
    buffers = [pool.allocate(size, tag="s") for size in (20_000, 3 * MIB, 30 * MIB) * 2]
    for seed, buffer in enumerate(buffers):
        write(buffer, seed)
    stop = threading.Event()
    failures: list[BaseException] = []

    def churn(byte: int) -> None:
        stream = Stream("host")
        try:
            while not stop.is_set():
                held = [pool.allocate(size, stream=stream) for size in (700, 20_000, 2 * MIB, 5 * MIB)]
                for each in held:
                    each.fill(byte)
                stream.synchronize()
                assert all(bytes(each).count(byte) == each.size for each in held)
                del held
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=churn, args=(byte,)) for byte in (1, 2)]
    for thread in threads:
        thread.start()
    for keep in ("host", "host", "discard") * 3:
        pool.suspend("s", keep)
        assert pool.check() is None
        pool.resume()
        if keep == "host":
            assert all(holds(buffer, seed) for seed, buffer in enumerate(buffers))
        for seed, buffer in enumerate(buffers):
            write(buffer, seed)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert failures == []


def test_zeroed_on_free_also_what_is_suspended() -> None:
    with vram.Pool("host", zero_on_free=True, stream_cache=0) as pool:
        one, two = pool.allocate(5000, tag="s"), pool.allocate(5000)
        write(one, 3)
        address = one.ptr
        pool.suspend("s")
        one.free()
        pool.coalesce()
        again = pool.allocate(5000)
        assert again.ptr == address
        pool.device.synchronize()
        assert not np.asarray(again).any()
        assert two.size == 5000
        assert pool.check() is None


# ---- what it costs, and says ------------------------------------------------------------------------------


def test_accounts_add_up(pool: Pool) -> None:
    buffers = [pool.allocate(size, tag="s") for size in (10_000, 3 * MIB, 10 * MIB)]
    other = pool.allocate(3 * MIB)
    before = pool.stats()
    pool.suspend("s")
    stats, snapshot = pool.stats(), pool.snapshot()
    assert stats.reserved + stats.suspended == before.reserved
    assert stats.allocated == before.allocated == snapshot.allocated
    assert stats["suspended.blocks"] == 3 == len([*snapshot.blocks("suspended")])
    assert stats["suspended.bytes"] == stats.suspended == snapshot.suspended
    assert 0 <= stats.free <= stats.reserved
    assert stats["waste.bytes"] >= 0
    assert {block.address for block in snapshot.allocations()} == {b.ptr for b in (*buffers, other)}
    assert snapshot.by_tag()["s"] == pool.snapshot().by_tag()["s"] > 13 * MIB
    assert sum(leak.count for leak in pool.leaks()) == 4


def test_suspended_memory_makes_room_under_the_limit() -> None:
    with vram.Pool("host", limit="64MiB") as pool:
        first = pool.allocate(40 * MIB, tag="first")
        write(first, 4)
        pool.suspend("first")
        second = pool.allocate(50 * MIB)
        write(second, 5)
        with pytest.raises(OutOfMemory) as caught:
            pool.resume()
        assert caught.value.requested == 40 * MIB
        assert caught.value.report["suspended"] == 40 * MIB
        assert "40 MiB are suspended" in str(caught.value)
        assert first.suspended
        assert pool.stats().reserved == 50 * MIB
        second.free()
        assert pool.resume() == 40 * MIB
        assert holds(first, 4)


def test_a_resume_that_finds_no_memory_leaves_all_suspended() -> None:
    device = Device.model("256MiB")
    with vram.Pool(device) as pool, vram.Pool(device) as rival:
        buffers = [pool.allocate(40 * MIB) for _ in range(4)]
        pool.suspend()
        taken = rival.allocate(130 * MIB)
        for _ in range(3):
            with pytest.raises(OutOfMemory):
                pool.resume()
            assert all(buffer.suspended for buffer in buffers)
            assert (pool.stats().reserved, pool.stats().suspended) == (0, 160 * MIB)
            assert pool.check() is None
        taken.free()
        rival.trim(wait=True)
        assert pool.resume() == 160 * MIB


def test_idle_memory_makes_room_for_a_resume() -> None:
    with vram.Pool("host", limit="64MiB") as pool:
        buffer = pool.allocate(60 * MIB, tag="s")
        pool.suspend("s")
        pool.allocate(60 * MIB).free()
        assert pool.stats().reserved == 60 * MIB
        pool.resume()
        assert not buffer.suspended


def test_without_host_memory_nothing_is_suspended() -> None:
    with vram.Pool("host") as pool, vram.PinnedPool("host", limit="32MiB") as store:
        buffers = [pool.allocate(30 * MIB) for _ in range(3)]
        for seed, buffer in enumerate(buffers):
            write(buffer, seed)
        with pytest.raises(OutOfMemory, match="limit of 32 MiB") as caught:
            pool.suspend(store=store)
        assert "nothing was suspended" in caught.value.__notes__[0]
        assert not any(buffer.suspended for buffer in buffers)
        assert all(holds(buffer, seed) for seed, buffer in enumerate(buffers))
        assert store.stats().allocated == 0
        assert pool.check() is None


def test_the_store_is_kept_for_the_next_time_and_can_be_made_ready(pool: Pool) -> None:
    pool.store.reserve("64MiB")
    buffer = pool.allocate(60 * MIB)
    for _ in range(3):
        pool.suspend()
        pool.resume()
        assert pool.store.stats().reserved == 64 * MIB
    assert buffer.size == 60 * MIB
    assert pool.store.trim(wait=True) == 64 * MIB


def test_a_callback_of_the_store_may_free_and_not_suspend_again(pool: Pool) -> None:
    buffer = pool.allocate(30 * MIB)
    told: list[DeviceError] = []
    with vram.PinnedPool("host", limit="32MiB") as store:
        held = [store.allocate(20 * MIB)]

        def make_room(*_: Any) -> bool:
            for call in (pool.suspend, pool.resume, pool.close):
                with pytest.raises(DeviceError, match="callback of the store") as caught:
                    call()
                told.append(caught.value)
            held.clear()
            return True

        store.on_oom(make_room)
        assert pool.suspend(store=store) == 30 * MIB
        assert len(told) == 3
        assert "suspended" in repr(buffer)
        pool.resume()


def test_a_closed_store_loses_contents_and_says_so(pool: Pool) -> None:
    buffer = pool.allocate(4 * MIB)
    store = vram.PinnedPool("host")
    pool.suspend(store=store)
    store.close()
    with pytest.raises(DeviceError, match="stored their contents was closed"):
        pool.resume()
    assert buffer.suspended
    buffer.free()
    assert pool.resume() == 0


# ---- where it cannot --------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["host", "discard"])
def test_plain_segments_cannot(keep: str) -> None:
    for pool in (
        vram.Pool("host", pages=False),
        vram.PinnedPool("host"),
        vram.DriverPool(Device.model("1GiB")),
    ):
        with pool:
            buffer = pool.allocate(MIB)
            with pytest.raises(DeviceError, match="plain segments") as caught:
                pool.suspend(keep=keep)
            assert caught.value.code == "unsupported"
            assert not buffer.suspended


def test_bad_arguments(pool: Pool) -> None:
    with pytest.raises(ConfigError, match="discard"):
        pool.suspend(keep="disk")
    with pytest.raises(TypeError, match="tag"):
        pool.suspend(7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="host memory"):
        pool.suspend(store=pool)
    with pytest.raises(TypeError, match="host memory"):
        pool.suspend(store=vram.Pool(Device.model("1GiB")))


def test_closing_while_suspended_gives_the_store_back() -> None:
    store = vram.PinnedPool("host")
    pool = vram.Pool("host")
    buffer = pool.allocate(40 * MIB)
    pool.suspend(store=store)
    assert store.stats().allocated == 40 * MIB
    pool.close()
    assert store.stats().allocated == 0
    assert not buffer.suspended  # it is gone
    with pytest.raises(DeviceError):
        pool.resume()
    with pytest.raises(DeviceError):
        pool.suspend()


def test_exit_and_fork_while_suspended() -> None:
    done = run_program(
        FORK,
        """
        import vram
        pool = vram.Pool("host")
        buffer = pool.allocate("16MiB")
        buffer.fill(3)
        pool.suspend()

        def body():
            global buffer
            refused(pool.resume)
            del buffer

        child(body)
        pool.resume()
        assert bytes(memoryview(buffer)[:3]) == bytes([3, 3, 3])
        pool.suspend()
        print("ended suspended")
        """,
    )
    assert_quiet(done)
    assert done.stdout.strip() == "ended suspended"


# ---- a large device, and graphs ---------------------------------------------------------------------------


def test_a_large_model(model: Pool) -> None:
    buffers = [model.allocate(3 * GIB, tag="weights") for _ in range(30)]
    caches = [model.allocate(GIB) for _ in range(10)]
    free = model.device.free_memory
    assert model.suspend("weights") == 90 * GIB
    assert model.device.free_memory == free + 90 * GIB
    serving = [model.allocate(GIB) for _ in range(100)]
    with pytest.raises(OutOfMemory):
        model.resume()
    del serving
    assert model.resume() == 90 * GIB
    assert model.device.free_memory == free
    assert len(buffers) + len(caches) == 40


@pytest.mark.parametrize(("size", "pages"), [(16 * MIB, 256), (64 * MIB, 256), (GIB, 64), (8 * GIB, 64)])
def test_pages_come_back_larger_than_they_went(model: Pool, size: int, pages: int) -> None:
    """What comes back together is made as for one request: 8 GiB are few handles and not thousands.

    Those of 128 MiB are within one buffer. Pages are joined and never cut, so that a few stay as they were.
    """
    backend: Any = model.device.backend
    buffers = [model.allocate(size) for _ in range(8 * GIB // size)]
    model.suspend(keep="discard")
    before = backend.calls("page_create")
    model.resume()
    assert pages <= backend.calls("page_create") - before <= pages + 8
    assert model.suspend() == 8 * GIB
    assert all(buffer.suspended for buffer in buffers)


def test_small_pools_keep_small_pages(model: Pool) -> None:
    backend: Any = model.device.backend
    buffer = model.allocate(32 * MIB)
    model.suspend()
    before = backend.calls("page_create")
    model.resume()
    assert backend.calls("page_create") - before == 16
    assert buffer.size == 32 * MIB


def test_a_captured_graph_runs_again_after_resume(model: Pool) -> None:
    device = model.device
    stream = Stream(device)
    static = model.allocate(10 * MIB)
    with stream.capture() as graph:
        inner = model.allocate(8 * MIB, stream=stream)
        inner.fill(1)
        inner.free()
        other = model.allocate(12 * MIB, stream=stream)
        other.fill(2)
        static.fill(3, stream=stream)
        result = model.allocate(2 * MIB, stream=stream)
        result.fill(4)
        other.free()
    graph.launch()
    free = device.free_memory
    given = model.suspend()
    assert device.free_memory == free + given == device.total_memory
    with pytest.raises(DeviceError):  # a GPU would fault here
        graph.launch()
    model.allocate(100 * MIB).free()
    assert model.resume() >= 12 * MIB
    graph.launch()
    stream.synchronize()
    model.suspend()
    graph.close()
    model.trim(wait=True)
    assert model.check() is None
    model.resume()
    assert not result.suspended


def test_not_while_a_stream_is_captured(model: Pool) -> None:
    stream = Stream(model.device)
    buffer = model.allocate(4 * MIB, stream=stream)
    with stream.capture():
        with pytest.raises(DeviceError) as caught:
            model.suspend()
        assert caught.value.code == "capturing"
        assert not buffer.suspended
    assert model.suspend() == 4 * MIB


def test_memory_of_a_stream_that_goes_while_suspended(model: Pool) -> None:
    stream = Stream(model.device)
    buffer = model.allocate(10 * MIB, stream=stream)
    model.suspend()
    stream.close()
    model.allocate(4 * MIB).free()
    assert model.check() is None
    assert model.resume() == 10 * MIB
    buffer.free()
    assert model.trim(wait=True)


def test_a_piece_of_an_arena_is_suspended_with_its_chunk(pool: Pool) -> None:
    arena = vram.Arena(pool, size="8MiB")
    piece = arena.allocate(MIB)
    write(piece, 3)
    pool.suspend()
    with pytest.raises(Suspended):
        piece.fill(0)
    pool.resume()
    assert holds(piece, 3)
    arena.close()


def test_a_growable_buffer_stays_and_grows_meanwhile(pool: Pool) -> None:
    weights = pool.allocate(16 * MIB)
    write(weights, 1)
    with vram.GrowableBuffer("64MiB", pool, size="4MiB") as cache:
        write(cache.view(), 2)
        pool.suspend()
        assert weights.suspended and pool.check() is None
        assert holds(cache.view(), 2)
        cache.resize("12MiB")
        assert bool(np.array_equal(np.asarray(cache.view())[: 4 * MIB], PATTERN[2 : 2 + 4 * MIB]))
        pool.resume()
    assert holds(weights, 1)
