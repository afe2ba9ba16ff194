"""What every pool promises about allocating and giving back, on every backend."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest

from vram import ConfigError, Device, DeviceError, InvalidFree, OutOfMemory, Pool, Stream, VramError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
UNIT = 512
SIZES = [0, 1, 511, 512, 513, 4 * KIB, 64 * KIB, MIB - 1, MIB, MIB + 1, 2 * MIB, 5 * MIB, 33 * MIB]


def rounded(size: int) -> int:
    return max(UNIT, -(-size // UNIT) * UNIT)


def disjoint(ranges: list[tuple[int, int]]) -> bool:
    ranges = sorted(ranges)
    return all(start + size <= after for (start, size), (after, _) in itertools.pairwise(ranges))


# ---- allocate and free --------------------------------------------------------------------------------


def test_blocks_never_overlap_and_start_on_512_bytes(pool: Pool) -> None:
    buffers = [pool.allocate(size) for size in SIZES * 3]
    assert disjoint([(buffer.ptr, rounded(buffer.size)) for buffer in buffers])
    assert all(buffer.ptr % UNIT == 0 for buffer in buffers)
    assert [buffer.size for buffer in buffers] == SIZES * 3


def test_what_is_freed_is_counted_out(pool: Pool) -> None:
    buffers = [pool.allocate(size) for size in SIZES]
    assert pool.stats().allocated == sum(map(rounded, SIZES))
    assert pool.stats().requested == sum(SIZES)
    for buffer in buffers:
        buffer.free()
    assert (pool.stats().allocated, pool.stats().requested, pool.stats().live) == (0, 0, 0)
    assert pool.stats().frees == pool.stats().allocations == len(SIZES)


def test_dropping_a_buffer_frees_it(pool: Pool) -> None:
    buffer = pool.allocate(MIB)
    del buffer
    assert pool.stats().live == 0
    pool.allocate(4 * KIB)
    assert pool.stats().live == 0


def test_raw_memory_is_freed_by_its_address(pool: Pool) -> None:
    addresses = [pool.malloc(size) for size in SIZES]
    assert len(set(addresses)) == len(SIZES)
    assert pool.info(addresses[-1])["requested"] == SIZES[-1]
    for address in addresses:
        pool.free(address)
    assert pool.stats().live == 0


def test_freed_memory_serves_again(pool: Pool) -> None:
    def step() -> None:
        for size in SIZES:
            pool.allocate(size).free()

    step()
    step()
    settled = pool.stats()
    for _ in range(20):
        step()
    assert pool.stats().reserved == settled.reserved
    assert pool.stats().rungs["growth"] == settled.rungs["growth"]


def test_a_buffer_keeps_its_pool_alive(kind: Any) -> None:
    pool = kind.make()
    gone = weakref.ref(pool)
    buffer = pool.allocate(MIB)
    del pool
    gc.collect()
    assert gone() is not None and buffer.pool is gone() and buffer.pool.stats().live == 1
    del buffer
    gc.collect()
    assert gone() is None


def test_size_0_is_a_valid_buffer_of_its_own(pool: Pool) -> None:
    buffers = [pool.allocate(0) for _ in range(10)]
    assert len({buffer.ptr for buffer in buffers}) == 10 and 0 not in {buffer.ptr for buffer in buffers}
    assert all(buffer.size == len(buffer) == 0 for buffer in buffers)
    address = pool.malloc(0)
    assert address not in {buffer.ptr for buffer in buffers}
    pool.free(address)


@pytest.mark.parametrize("align", [1, 512, 4 * KIB, 64 * KIB, 2 * MIB, 16 * MIB, 64 * MIB])
def test_alignment_is_what_was_asked(pool: Pool, align: int) -> None:
    buffers = [pool.allocate(size, align=align) for size in (0, 1, 4 * KIB, 3 * MIB)]
    assert all(buffer.ptr % max(align, UNIT) == 0 for buffer in buffers)
    assert disjoint([(buffer.ptr, rounded(buffer.size)) for buffer in buffers])


def test_alignment_may_be_written_as_a_size(pool: Pool) -> None:
    assert pool.allocate("1MiB", align="2MiB").ptr % (2 * MIB) == 0


@pytest.mark.parametrize("align", [3, 0, 513, 2**63, -1])
def test_alignment_that_is_no_power_of_two_is_refused(pool: Pool, align: int) -> None:
    with pytest.raises(ValueError):
        pool.allocate(MIB, align=align)
    assert pool.stats().live == 0


# ---- batches ------------------------------------------------------------------------------------------


def test_a_batch_is_adjacent(pool: Pool, kind: Any) -> None:
    if not kind.places:
        pytest.skip("the driver chooses addresses")
    pool.allocate(KIB).free()
    for size in (4 * KIB, 256 * KIB, 3 * MIB):
        batch = pool.allocate_batch([size] * 6)
        addresses = sorted(buffer.ptr for buffer in batch)
        assert addresses == [addresses[0] + index * size for index in range(6)]
        assert [buffer.size for buffer in batch] == [size] * 6


def test_a_batch_of_mixed_sizes_is_in_the_order_asked(pool: Pool) -> None:
    batch = pool.allocate_batch([*SIZES, "1MiB"])
    assert [buffer.size for buffer in batch] == [*SIZES, MIB]
    assert disjoint([(buffer.ptr, rounded(buffer.size)) for buffer in batch])
    assert pool.stats().live == len(SIZES) + 1
    batch[3].free()
    del batch
    assert pool.stats().live == 0


def test_an_empty_batch_is_empty(pool: Pool) -> None:
    assert pool.allocate_batch([]) == [] and pool.malloc_batch([]) == []


def test_a_batch_is_all_or_nothing(limited: Pool) -> None:
    kept = limited.allocate(5 * MIB)
    before = limited.stats()
    for sizes in ([16 * MIB] * 5, [KIB, 63 * MIB], [KIB, 2**62]):
        with pytest.raises(OutOfMemory):
            limited.allocate_batch(sizes)
        with pytest.raises(OutOfMemory):
            limited.malloc_batch(sizes)
        assert limited.stats().allocated == before.allocated and limited.stats().live == 1
        assert limited.check() is None
    with pytest.raises(VramError):
        limited.allocate_batch([KIB, -1])
    assert limited.stats().live == 1
    assert len(limited.allocate_batch([8 * MIB] * 4)) == 4
    assert kept.size == 5 * MIB


# ---- warm-up, trim, coalesce --------------------------------------------------------------------------


def test_warmed_sizes_are_hits(pool: Pool, kind: Any) -> None:
    if not kind.places:
        pytest.skip("the driver's pool has no cache for each stream")
    pool.reconfigure({"zero_on_allocate": False, "zero_on_free": False})  # what is zeroed is not cached
    pool.warmup({4 * KIB: 20, "64KiB": 5, MIB: 3})
    before = pool.stats()
    held = [pool.allocate(size) for size in [4 * KIB] * 20 + [64 * KIB] * 5 + [MIB] * 3]
    after = pool.stats()
    assert after.hits - before.hits == len(held)
    assert after.reserved == before.reserved


def test_trim_gives_everything_unused_back(pool: Pool) -> None:
    for buffer in [pool.allocate(size) for size in SIZES]:
        buffer.free()
    reserved = pool.stats().reserved
    assert pool.trim(wait=True) == reserved
    stats = pool.stats()
    assert (stats.reserved, stats.cached, stats.free) == (0, 0, 0)
    assert pool.allocate(MIB).size == MIB


def test_trim_keeps_what_is_live_and_what_is_asked(pool: Pool) -> None:
    kept = [pool.allocate(3 * MIB) for _ in range(4)]
    for buffer in [pool.allocate(10 * MIB) for _ in range(5)]:
        buffer.free()
    # Without pages a live block keeps its whole segment.
    segment = 0 if pool.raw_stats()["paged"] else pool.config()["segment_size"] + 3 * MIB
    pool.trim("30MiB", wait=True)
    assert pool.stats().allocated == 12 * MIB <= pool.stats().reserved <= max(62 * MIB, segment)
    pool.trim(wait=True)
    assert 12 * MIB <= pool.stats().reserved <= max(40 * MIB, segment)
    assert pool.stats().live == 4 and len({buffer.ptr for buffer in kept}) == 4


def test_coalesce_merges_what_is_free(pool: Pool) -> None:
    for buffer in [pool.allocate(64 * KIB) for _ in range(32)]:
        buffer.free()
    pool.coalesce()
    assert pool.stats().cached == 0
    reserved = pool.stats().reserved
    merged = pool.allocate(256 * KIB)
    assert pool.stats().reserved == reserved and merged.size == 256 * KIB


def test_an_uncached_pool_caches_nothing(pool: Pool) -> None:
    pool.reconfigure({"stream_cache": 0})
    pool.allocate(4 * KIB).free()
    assert pool.stats().cached == 0


# ---- limits and out of memory -------------------------------------------------------------------------


def test_the_limit_is_never_exceeded(limited: Pool, kind: Any) -> None:
    held = []
    with pytest.raises(OutOfMemory):
        while True:
            held.append(limited.allocate(3 * MIB))
    # A driver reserves in pieces of its own; there the limit is of what is allocated.
    stats = limited.stats()
    assert (stats.peak_reserved if kind.places else stats.peak_allocated) <= 64 * MIB
    assert len(held) >= 18, "less than 54 of 64 MiB could be used"


def test_a_limit_can_be_raised_in_use(limited: Pool) -> None:
    assert limited.limit == 64 * MIB
    with pytest.raises(OutOfMemory):
        limited.allocate(100 * MIB)
    limited.limit = "128MiB"
    assert limited.allocate(100 * MIB).size == 100 * MIB


def test_out_of_memory_explains_itself_and_leaves_the_pool_usable(limited: Pool) -> None:
    held = limited.allocate(40 * MIB, tag="activations")
    with pytest.raises(OutOfMemory) as caught:
        limited.allocate(32 * MIB)
    error = caught.value
    assert isinstance(error, MemoryError) and isinstance(error, VramError)
    assert (error.requested, error.allocated, error.limit) == (32 * MIB, 40 * MIB, 64 * MIB)
    assert error.report["requested"] == 32 * MIB and error.report["reserved"] == limited.stats().reserved
    assert error.report["tags"] == {"activations": 40 * MIB}
    assert "32 MiB" in str(error) and "64 MiB" in str(error) and "activations" in str(error)
    assert limited.check() is None and limited.stats().out_of_memory == 1
    held.free()
    assert limited.allocate(32 * MIB).size == 32 * MIB


def test_memory_free_in_pieces_serves_after_a_flush(limited: Pool) -> None:
    pieces = [limited.allocate(64 * KIB) for _ in range(16 * 32)]  # half the limit in small cached blocks
    for piece in pieces:
        piece.free()
    assert limited.allocate(60 * MIB).size == 60 * MIB


def test_a_callback_may_free_and_have_it_tried_again(limited: Pool) -> None:
    hoard = [limited.allocate(30 * MIB), limited.allocate(30 * MIB)]
    asked: list[tuple[int, int]] = []

    def release(size: int, stream: int) -> bool:
        asked.append((size, stream))
        hoard.clear()
        return True

    limited.on_oom(release)
    assert limited.allocate(50 * MIB).size == 50 * MIB
    assert asked == [(50 * MIB, 0)] and hoard == []


def test_a_callback_that_does_not_help_leaves_out_of_memory(limited: Pool) -> None:
    calls: list[int] = []
    handle = limited.on_oom(lambda size: calls.append(size))
    with pytest.raises(OutOfMemory):
        limited.allocate(65 * MIB)
    handle.remove()
    with pytest.raises(OutOfMemory):
        limited.allocate(65 * MIB)
    assert calls == [65 * MIB]


# ---- misuse: a typed error, and the pool as it was ----------------------------------------------------


@pytest.mark.parametrize("size", [2**40 + 1, 2**62, 2**63, 2**64 - 1, 2**64, 2**64 + 512, 10**30])
def test_a_size_beyond_everything_is_out_of_memory(pool: Pool, size: int) -> None:
    with pytest.raises(OutOfMemory):
        pool.allocate(size)
    with pytest.raises(OutOfMemory):
        pool.malloc(size)
    with pytest.raises(OutOfMemory):
        pool.allocate(size, align=2 * MIB)
    assert pool.stats().live == 0 and pool.allocate(1).size == 1


@pytest.mark.parametrize("size", [-1, -(2**63), -(2**64), -(10**30)])
def test_a_negative_size_is_refused(pool: Pool, size: int) -> None:
    for allocate in (pool.allocate, pool.malloc, lambda size: pool.allocate_batch([512, size])):
        with pytest.raises(ConfigError, match="negative"):
            allocate(size)
    assert pool.stats().live == 0


@pytest.mark.parametrize("size", [None, 1.5, "lots", b"1MiB", [1]])
def test_what_is_no_size_is_refused(pool: Pool, size: Any) -> None:
    for allocate in (pool.allocate, pool.malloc, lambda size: pool.allocate_batch([512, size])):
        with pytest.raises((TypeError, ConfigError)):
            allocate(size)
    assert pool.stats().live == 0


def test_a_double_free_is_refused(pool: Pool) -> None:
    for size in (0, 4 * KIB, MIB, 33 * MIB):
        buffer, address = pool.allocate(size), pool.malloc(size)
        buffer.free()
        with pytest.raises(InvalidFree):
            buffer.free()
        pool.free(address)
        with pytest.raises(InvalidFree):
            pool.free(address)
    assert pool.stats().live == 0


def test_a_foreign_pointer_is_refused(pool: Pool, kind: Any) -> None:
    kept = pool.allocate(MIB)
    with kind.make() as other:
        theirs = other.malloc(MIB)
        for address in (theirs, 0, 512, kept.ptr ^ (1 << 46), 2**64 - 512, 2**64, 2**70, -512):
            if address == kept.ptr:  # each model counts its addresses from the same place
                continue
            with pytest.raises(InvalidFree):
                pool.free(address)
    assert pool.stats().live == 1 and not kept.freed


def test_a_pointer_inside_an_allocation_is_refused(pool: Pool) -> None:
    for size in (4 * KIB, 5 * MIB, 33 * MIB):
        buffer = pool.allocate(size)
        for offset in (1, 512, size // 2, size - 512):
            with pytest.raises(InvalidFree):
                pool.free(buffer.ptr + offset)
        assert pool.stats().live == 1
        buffer.free()


def test_a_pointer_that_is_no_number_is_refused(pool: Pool) -> None:
    for pointer in (None, 1.5, "0x10"):
        with pytest.raises(TypeError):
            pool.free(pointer)  # type: ignore[arg-type]


def test_a_freed_buffer_is_refused_everywhere(pool: Pool) -> None:
    buffer, live = pool.allocate(4 * KIB), pool.allocate(4 * KIB)
    buffer.free()
    uses = [
        buffer.free,
        lambda: buffer.record_stream(None),
        lambda: buffer.fill(0),
        lambda: buffer.copy_from(bytes(4 * KIB)),
        lambda: buffer.copy_to(bytearray(4 * KIB)),
        lambda: live.copy_from(buffer),
        lambda: live.copy_to(buffer),
        lambda: memoryview(buffer),
        buffer.__dlpack__,
    ]
    for use in uses:
        with pytest.raises(InvalidFree):
            use()
    assert buffer.freed and not live.freed


def test_a_stream_of_another_device_is_refused(pool: Pool) -> None:
    buffer = pool.allocate(KIB)
    with Stream(Device.model("1GiB")) as foreign:
        uses = [
            lambda: pool.allocate(KIB, stream=foreign),
            lambda: pool.malloc(KIB, foreign),
            lambda: pool.allocate_batch([KIB], stream=foreign),
            lambda: buffer.record_stream(foreign),
            lambda: buffer.fill(0, stream=foreign),
            lambda: pool.warmup({KIB: 1}, stream=foreign),
        ]
        for use in uses:
            with pytest.raises(DeviceError, match="belongs to"):
                use()
    assert pool.stats().live == 1


def test_a_stream_that_does_not_exist_is_refused(pool: Pool) -> None:
    if pool.device.kind == "cuda":
        pytest.skip("the driver takes a stream's handle for an address and cannot tell")
    buffer = pool.allocate(KIB)
    unknown = 0x7777_7777
    uses = [
        lambda: pool.allocate(KIB, stream=unknown),
        lambda: pool.malloc(KIB, unknown),
        lambda: pool.allocate_batch([KIB, KIB], stream=unknown),
        lambda: buffer.record_stream(unknown),
        lambda: buffer.fill(0, stream=unknown),
        lambda: pool.warmup({KIB: 1}, stream=unknown),
    ]
    for use in uses:
        with pytest.raises(DeviceError) as caught:
            use()
        assert caught.value.code == "invalid"
    assert pool.stats().live == 1


def test_what_is_no_stream_is_refused(pool: Pool) -> None:
    buffer = pool.allocate(KIB)
    for handle in (-1, 2**64):
        with pytest.raises(ValueError):
            pool.allocate(KIB, stream=handle)
    for nothing in ("0", 1.5, object()):
        with pytest.raises(TypeError):
            pool.allocate(KIB, stream=nothing)
    assert pool.stats().live == 1 and not buffer.freed


def test_a_closed_stream_is_refused(pool: Pool) -> None:
    stream = Stream(pool.device)
    stream.close()
    with pytest.raises(DeviceError, match="closed"):
        pool.allocate(KIB, stream=stream)


def test_after_close_every_call_is_refused(kind: Any) -> None:
    pool = kind.make()
    buffer, address = pool.allocate(4 * KIB), pool.malloc(4 * KIB)
    pool.close()
    pool.close()
    assert pool.closed
    uses = [
        lambda: pool.allocate(4 * KIB),
        lambda: pool.allocate(4 * KIB, align=MIB),
        lambda: pool.malloc(4 * KIB),
        lambda: pool.free(address),
        lambda: pool.allocate_batch([1, 2, 3]),
        lambda: pool.malloc_batch([1]),
        lambda: pool.warmup({4 * KIB: 1}),
        lambda: pool.record_stream(address, None),
        lambda: pool.info(address),
        pool.trim,
        pool.coalesce,
        lambda: pool.reconfigure({"best_fit": False}),
        lambda: setattr(pool, "limit", "1GiB"),
        pool.allocate_async(4 * KIB).result,
        buffer.free,
        lambda: buffer.record_stream(None),
        lambda: buffer.fill(0),
        lambda: buffer.copy_from(bytes(4 * KIB)),
        lambda: buffer.copy_to(bytearray(4 * KIB)),
        lambda: memoryview(buffer),
        buffer.__dlpack__,
    ]
    for use in uses:
        with pytest.raises(DeviceError) as caught:
            use()
        assert caught.value.code == "closed"
    assert "closed" in repr(pool)
    assert buffer.size == 4 * KIB and repr(buffer)


def test_a_pool_closes_at_the_end_of_its_block(kind: Any) -> None:
    with kind.make() as pool:
        assert pool.allocate(MIB).size == MIB
    assert pool.closed


def test_an_unknown_option_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match="stream_cache"):
        kind.make(stream_cash=1)
