"""The driver's own pools on a GPU: attributes, order with kernels, retry, graphs, and other processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from programs import assert_quiet, run_program
from work import Hold, Marked, Work, intact_pools

from vram import ConfigError, Device, DeviceError, DriverPool, OutOfMemory, Stream

pytestmark = pytest.mark.gpu

KIB, MIB = 1 << 10, 1 << 20
GRANULE = 32 * MIB  # what the driver reserves at a time, or less
NO_REUSE = {
    "reuse_follow_event_dependencies": False,
    "reuse_allow_opportunistic": False,
    "reuse_allow_internal_dependencies": False,
}
MakePool = Callable[..., DriverPool]


@pytest.fixture
def make_pool(device: Device) -> Iterator[MakePool]:
    """Driver pools that must be intact after the test."""
    with intact_pools(device, DriverPool) as make:
        yield make


@pytest.fixture
def streams(device: Device) -> Iterator[tuple[Stream, Stream]]:
    with Stream(device) as one, Stream(device) as two:
        yield one, two


# ---- attributes ---------------------------------------------------------------------------------------


def test_the_driver_has_every_attribute_and_takes_what_can_be_set(make_pool: MakePool) -> None:
    pool = make_pool()
    assert len(dict(pool.attributes)) == 8 and pool.attributes["release_threshold"] == 0
    for name in NO_REUSE:
        assert pool.attributes[name] is True
        pool.attributes[name] = False
        assert pool.attributes[name] is False
    for given, read in (("1GiB", 1 << 30), (None, None), (0, 0)):
        pool.attributes["release_threshold"] = given
        assert pool.attributes["release_threshold"] == read


def test_what_we_refuse_the_driver_refuses_too(make_pool: MakePool) -> None:
    pool = make_pool()
    for name, value in (("used_mem_high", 5), ("reserved_mem_high", 5), ("used_mem_current", 0)):
        with pytest.raises(ConfigError):
            pool.attributes[name] = value
        with pytest.raises(DeviceError):
            pool.set_attribute(name, value)


def test_used_memory_is_what_is_allocated(make_pool: MakePool) -> None:
    pool = make_pool()
    held = [pool.allocate(size) for size in (0, 1, 513, 3 * MIB)]
    used = pool.attributes["used_mem_current"]
    assert pool.stats().allocated <= used <= pool.attributes["reserved_mem_current"]
    held.clear()
    pool.device.synchronize()
    assert pool.attributes["used_mem_current"] == 0


def test_a_high_water_mark_starts_anew_when_it_is_reset(make_pool: MakePool) -> None:
    pool = make_pool(release_threshold=None)
    pool.allocate(256 * MIB).free()
    pool.device.synchronize()
    assert pool.attributes["used_mem_high"] >= 256 * MIB
    assert pool.stats().peak_reserved >= 256 * MIB
    pool.trim(wait=True)
    pool.attributes["used_mem_high"] = 0
    pool.attributes["reserved_mem_high"] = 0
    kept = pool.allocate(MIB)
    assert kept.size <= pool.attributes["used_mem_high"] < 64 * MIB
    assert pool.attributes["reserved_mem_high"] < 256 * MIB


# ---- thresholds and trimming --------------------------------------------------------------------------


def test_a_threshold_of_0_gives_memory_back_at_a_synchronisation(make_pool: MakePool) -> None:
    giving, keeping = make_pool(), make_pool(release_threshold=None)
    for pool in (giving, keeping):
        pool.allocate(256 * MIB).free()
    giving.device.synchronize()
    assert giving.attributes["reserved_mem_current"] == 0
    assert keeping.attributes["reserved_mem_current"] >= 256 * MIB


def test_trim_gives_back_down_to_what_is_asked(make_pool: MakePool) -> None:
    pool = make_pool(release_threshold="unlimited")
    for buffer in [pool.allocate(64 * MIB) for _ in range(4)]:
        buffer.free()
    pool.device.synchronize()
    before = pool.stats().reserved
    assert pool.trim(to="128MiB") == before - pool.stats().reserved > 0
    assert 128 * MIB <= pool.stats().reserved < before
    pool.trim()
    assert pool.stats().reserved == 0


# ---- order --------------------------------------------------------------------------------------------


def test_the_own_stream_reuses_while_its_work_runs(
    make_pool: MakePool, work: Work, streams: tuple[Stream, Stream]
) -> None:
    pool, (one, _) = make_pool(), streams
    size = 8 * MIB
    with Hold(one):
        for _ in range(10):
            each = Marked(pool, work, size, one)
            each.check()
            each.buffer.free()
        assert pool.attributes["reserved_mem_current"] <= max(GRANULE, 2 * size)
    assert work.take_counts() == (0, 10 * size)


def test_a_recorded_use_is_waited_for_and_stalls_neither_stream(
    make_pool: MakePool, work: Work, streams: tuple[Stream, Stream]
) -> None:
    pool, (one, two) = make_pool(), streams
    size = 16 * MIB
    read = Marked(pool, work, size, one)
    one.synchronize()
    with Hold(two):
        read.check_on(two)
        address = read.buffer.ptr
        read.buffer.free()
        others = [Marked(pool, work, size, one) for _ in range(4)]
        assert address not in {each.buffer.ptr for each in others}
        one.synchronize()  # would not return if the free had stalled the stream
        assert not two.query()
    work.device.synchronize()
    assert work.take_counts() == (0, size)


def test_contents_survive_two_streams_sharing_a_pool(
    make_pool: MakePool, work: Work, streams: tuple[Stream, Stream]
) -> None:
    pool, (one, two) = make_pool(max_size="1GiB"), streams
    size, rounds = 24 * MIB, 100
    for number in range(rounds):
        mine, other = (one, two) if number % 2 else (two, one)
        each = Marked(pool, work, size, mine)
        other.wait_stream(mine)
        each.check_on(other)
        each.buffer.free()
    work.device.synchronize()
    assert work.take_counts() == (0, rounds * size)


def test_a_stream_may_end_before_its_memory(make_pool: MakePool, work: Work, device: Device) -> None:
    pool = make_pool()
    stream = Stream(device)
    each = Marked(pool, work, 8 * MIB, stream)
    each.check()
    stream.close()
    each.buffer.free()
    device.synchronize()
    assert work.take_counts() == (0, 8 * MIB) and pool.attributes["used_mem_current"] == 0


# ---- out of memory ------------------------------------------------------------------------------------


@pytest.mark.real_gpu
def test_what_waits_for_a_stream_is_synchronised_and_retried(
    make_pool: MakePool, streams: tuple[Stream, Stream]
) -> None:
    pool, (one, two) = make_pool(max_size="256MiB", **NO_REUSE), streams
    with Hold(one) as hold:
        pool.allocate("200MiB", stream=one).free()
        threading.Timer(0.2, hold.open).start()
        taken = pool.allocate("200MiB", stream=two)
    assert taken.size == 200 * MIB and pool.stats().rungs["host_wait"] == 1


@pytest.mark.real_gpu
def test_the_driver_enforces_the_maximum_size(make_pool: MakePool) -> None:
    pool = make_pool(max_size="256MiB")
    held = []
    with pytest.raises(OutOfMemory) as caught:
        while True:
            held.append(pool.allocate("32MiB"))
    assert 6 <= len(held) <= 8 and caught.value.limit == 256 * MIB
    held.pop()
    assert pool.allocate("32MiB").size == 32 * MIB


# ---- other kinds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pinned", "managed"])
def test_memory_that_the_host_can_read(device: Device, work: Work, kind: str) -> None:
    try:
        pool = DriverPool(device, kind=kind)
    except ConfigError as error:
        assert "CUDA" in str(error)
        pytest.skip(str(error))
    with pool:
        each = Marked(pool, work, MIB, None)
        each.check()
        assert work.take_counts() == (0, MIB)
        each.buffer.fill(7)
        device.synchronize()
        with memoryview(each.buffer) as view:
            assert bytes(view[:16]) == b"\7" * 16 == bytes(view[-16:])
        assert pool.check() is None


# ---- others in the process ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("default")
@pytest.mark.real_gpu  # CuPy contains the CUDA runtime, which needs the real driver
def test_the_default_pool_is_shared_with_cupy(device: Device, cupy: Any) -> None:
    with DriverPool.default(device) as pool, cupy.cuda.Device(0):
        before = pool.attributes["used_mem_current"]
        theirs = cupy.cuda.MemoryAsyncPool()
        with cupy.cuda.using_allocator(theirs.malloc):
            array = cupy.full(8 * MIB, 5, dtype="u1")
            ours = pool.allocate(4 * MIB)
            ours.fill(9)
            assert pool.attributes["used_mem_current"] >= before + 12 * MIB
            assert pool.stats().allocated == 4 * MIB
            pool.close()
            assert int(array.sum(dtype="u8")) == 5 * 8 * MIB
            del array


# ---- graphs -------------------------------------------------------------------------------------------


def test_what_a_capture_allocates_and_frees_works_at_every_launch(
    make_pool: MakePool, work: Work, streams: tuple[Stream, Stream]
) -> None:
    pool, (one, _) = make_pool(), streams
    size = 8 * MIB
    with one.capture() as graph:
        for _ in range(3):
            each = Marked(pool, work, size, one)
            each.check()
            each.buffer.free()
    assert work.take_counts() == (0, 0), "captured work ran"
    for _ in range(3):
        graph.launch()
    assert work.take_counts() == (0, 9 * size)
    graph.close()


def test_memory_freed_in_a_capture_stays_the_graphs(
    make_pool: MakePool, work: Work, streams: tuple[Stream, Stream]
) -> None:
    pool, (one, two) = make_pool(), streams
    size = 16 * MIB
    first = Marked(pool, work, size, one)
    address = first.buffer.ptr
    one.synchronize()
    with one.capture() as graph:
        first.check()
        first.buffer.free()
        eager = pool.allocate(size, stream=two)
    assert pool.stats().pending == size and eager.ptr != address
    others = [Marked(pool, work, size, stream) for stream in (one, two, None)]
    assert address not in {each.buffer.ptr for each in others}
    for _ in range(3):
        graph.launch()
    assert work.take_counts() == (0, 3 * size)
    graph.close()
    work.device.synchronize()


# ---- other processes ----------------------------------------------------------------------------------

IMPORTER = """
    import sys
    import vram

    with vram.DriverPool.from_fd(int(sys.argv[1]), "cuda:0") as pool:
        buffer = pool.import_buffer(bytes.fromhex(sys.argv[2]))
        seen = bytearray(buffer.size)
        buffer.copy_to(seen)
        assert seen == bytes([7]) * buffer.size, seen[:16]
        buffer.fill(8)
        pool.device.synchronize()
        try:
            pool.allocate(512)
        except vram.DeviceError:
            pass
        else:
            raise AssertionError("an imported pool allocated")
        buffer.free()
        assert pool.check() is None
"""


@pytest.mark.parametrize("align", [512, 64 * KIB])
@pytest.mark.real_gpu
def test_another_process_reads_and_writes_our_memory(make_pool: MakePool, align: int) -> None:
    pool = make_pool(shareable="fd")
    buffer = pool.allocate(3 * MIB, align=align)
    buffer.fill(7)
    pool.device.synchronize()
    fd = pool.export()
    try:
        words = pool.export_buffer(buffer).hex()
        ended = subprocess.run(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(IMPORTER), str(fd), words],
            pass_fds=[fd],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(fd)
    assert ended.returncode == 0, ended.stderr
    seen = bytearray(buffer.size)
    buffer.copy_to(seen)
    assert seen == b"\10" * buffer.size, "what the other process wrote is not here"
    buffer.free()


def test_the_default_pool_cannot_be_exported(device: Device) -> None:
    with DriverPool.default(device) as pool:
        with pytest.raises(ConfigError, match="default pool cannot be exported"):
            pool.export()
        with pytest.raises(DeviceError):
            pool.export_fd()  # the driver agrees


@pytest.mark.fork
def test_a_program_may_end_with_a_pool_in_use() -> None:
    assert_quiet(
        run_program(
            """
            import vram

            stream = vram.Stream("cuda:0")
            pools = [vram.DriverPool("cuda:0"), vram.DriverPool.default("cuda:0")]
            held = [pool.allocate(1 << 20, stream=stream) for pool in pools]
            for buffer in held:
                buffer.fill(1)
            """
        )
    )
