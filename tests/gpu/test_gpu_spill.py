"""Spilling on a GPU: kernels over spilled memory find and leave the right contents, at the same addresses."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from work import Work

import vram
from vram import Device, OutOfMemory, Pool, Stream

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

MIB, GIB = 1 << 20, 1 << 30
MakePool = Callable[..., Pool]
THREADS = 8
OPERATIONS = int(os.environ.get("VRAM_GPU_SPILL_OPERATIONS", "20000"))
"""Of all threads together, in the test with random operations."""
SECONDS = float(os.environ.get("VRAM_GPU_SPILL_SECONDS", "100"))
"""After so long, this test ends. It prints how many operations it made."""


@pytest.fixture(autouse=True)
def host_pages(device: Device) -> None:
    if not device.backend.host_pages:
        pytest.skip("this device or driver has no host pages")


def written(work: Work, pool: Pool, sizes: list[int], **options: Any) -> dict[Any, int]:
    made = {pool.allocate(size, **options): work.new_seed() for size in sizes}
    for buffer, seed in made.items():
        work.fill(buffer.ptr, buffer.size, seed, buffer.stream)
    return made


def differing(work: Work, buffers: dict[Any, int], stream: int = 0) -> int:
    for buffer, seed in buffers.items():
        work.check(buffer.ptr, buffer.size, seed, stream)
    return work.take_counts()[0]


def test_kernels_work_on_spilled_memory(device: Device, work: Work, make_pool: MakePool) -> None:
    pool = make_pool(spill="4GiB")
    buffers = written(work, pool, [2 * MIB, 40 * MIB, 300 * MIB, 7 * MIB])
    addresses = [buffer.ptr for buffer in buffers]
    for _ in range(3):
        for buffer in buffers:
            assert buffer.spill() >= buffer.size
            assert buffer.spilled == buffer.size
        assert [buffer.ptr for buffer in buffers] == addresses
        assert differing(work, buffers) == 0  # kernels read it there
        for buffer in buffers:  # … and write
            buffers[buffer] = work.new_seed()
            work.fill(buffer.ptr, buffer.size, buffers[buffer], buffer.stream)
        assert differing(work, buffers) == 0
        for buffer in buffers:
            buffer.prefetch()
            assert buffer.spilled == 0
        assert differing(work, buffers) == 0


def test_spilled_memory_frees_device_memory(device: Device, work: Work, make_pool: MakePool) -> None:
    pool = make_pool(limit="1GiB", spill="4GiB")
    buffers = written(work, pool, [128 * MIB] * 16)  # twice the limit
    assert pool.stats().reserved <= GIB
    assert pool.stats().spilled >= GIB
    assert pool.stats()["rung.spill"] > 0
    assert differing(work, buffers) == 0
    for buffer in list(buffers)[::2]:
        del buffers[buffer]
        buffer.free()
    device.synchronize()
    for _ in range(20):
        pool.bring_back(GIB)
        if pool.stats().spilled == 0:
            break
        time.sleep(0.05)
    assert pool.stats().spilled <= 128 * MIB  # a margin stays free
    assert differing(work, buffers) == 0


def test_host_memory_runs_out(device: Device, work: Work, make_pool: MakePool) -> None:
    pool = make_pool(limit="256MiB", spill="128MiB")
    buffers = written(work, pool, [64 * MIB] * 6)
    with pytest.raises(OutOfMemory) as caught:
        pool.allocate("64MiB")
    assert caught.value.report["spilled"] == 128 * MIB
    assert differing(work, buffers) == 0


def test_work_of_other_threads_during_swaps(device: Device, work: Work, make_pool: MakePool) -> None:
    pool = make_pool(spill="4GiB")
    streams = [Stream(device) for _ in range(4)]
    buffers = [pool.allocate("48MiB", stream=stream) for stream in streams]
    seeds = [work.new_seed() for _ in buffers]
    for buffer, seed, stream in zip(buffers, seeds, streams, strict=True):
        work.fill(buffer.ptr, buffer.size, seed, stream.handle)
    done = threading.Event()

    def check(number: int) -> None:
        while not done.is_set():
            work.check(buffers[number].ptr, buffers[number].size, seeds[number], streams[number].handle)
            streams[number].synchronize()

    threads = [threading.Thread(target=check, args=(number,)) for number in range(len(buffers))]
    for thread in threads:
        thread.start()
    for _ in range(10):
        for buffer in buffers:
            assert buffer.spill() > 0
        for buffer in buffers:
            assert buffer.prefetch() > 0
    done.set()
    for thread in threads:
        thread.join()
    device.synchronize()
    assert work.take_counts()[0] == 0


def test_random_work_of_many_threads(device: Device, work: Work, make_pool: MakePool) -> None:
    """Twice as much memory as the limit allows, moved by hand and by shortage; each thread has a stream."""
    pool = make_pool(limit="2GiB", spill="4GiB")
    share = 4 * GIB // THREADS
    failures: list[Exception] = []
    made = [0] * THREADS
    end = time.monotonic() + SECONDS

    def run(number: int) -> None:
        chance, stream, live = random.Random(number), Stream(device), dict[Any, int]()
        used = 0
        while made[number] < OPERATIONS // THREADS and time.monotonic() < end:
            made[number] += 1
            size = int(2 ** chance.uniform(12, 26)) // 512 * 512
            what = chance.random()
            if (what < 0.35 or not live) and used + size <= share:
                buffer = pool.allocate(size, stream=stream)
                used += size
                live[buffer] = work.new_seed()
                work.fill(buffer.ptr, buffer.size, live[buffer], stream.handle)
                continue
            buffer = chance.choice(tuple(live))
            if what < 0.6:
                work.check(buffer.ptr, buffer.size, live[buffer], stream.handle)
            elif what < 0.7:
                live[buffer] = work.new_seed()
                work.fill(buffer.ptr, buffer.size, live[buffer], stream.handle)
            elif what < 0.9:
                work.check(buffer.ptr, buffer.size, live.pop(buffer), stream.handle)
                used -= buffer.size
                buffer.free()
            elif what < 0.95:
                buffer.spill()
            else:
                with contextlib.suppress(OutOfMemory):  # there may be no room for it
                    buffer.prefetch()
        for buffer, seed in live.items():
            work.check(buffer.ptr, buffer.size, seed, stream.handle)
            buffer.free()
        stream.synchronize()

    def guarded(number: int) -> None:
        try:
            run(number)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    device.synchronize()
    stats = pool.stats()
    print(f"{sum(made)} operations:", {key: stats[key] for key in stats if key.startswith("spill.")})
    assert not failures, failures
    assert work.take_counts()[0] == 0
    assert stats["spill.count"] > 0 and stats.allocated == 0
    assert min(made) > 100


def test_legacy_and_thread_default_streams_are_held(device: Device, work: Work, make_pool: MakePool) -> None:
    pool = make_pool(spill="1GiB")
    buffer = pool.allocate("64MiB")
    seed = work.new_seed()
    for stream in (0, 1, 2):  # the default stream under its two names, and this thread's
        work.fill(buffer.ptr, buffer.size, seed, stream)
        assert buffer.spill() > 0
        work.check(buffer.ptr, buffer.size, seed, stream)
        assert buffer.prefetch() > 0
        work.check(buffer.ptr, buffer.size, seed, stream)
        device.synchronize()
    assert work.take_counts()[0] == 0


def test_a_captured_graph_works_on_spilled_memory(device: Device, work: Work, make_pool: MakePool) -> None:
    pool = make_pool(spill="1GiB")
    stream = Stream(device)
    buffer = pool.allocate("64MiB", stream=stream)
    seed = work.new_seed()
    with stream.capture() as graph:
        work.fill(buffer.ptr, buffer.size, seed, stream.handle)
    assert buffer.spill() > 0
    graph.launch(stream)
    stream.synchronize()
    assert differing(work, {buffer: seed}, stream.handle) == 0
    assert buffer.prefetch() > 0
    assert differing(work, {buffer: seed}, stream.handle) == 0


def test_torch_computes_the_same(torch: Any, device: Device, make_pool: MakePool) -> None:
    pool = make_pool(spill="4GiB")
    size = 4096
    first, second = (pool.allocate(size * size * 4) for _ in range(2))
    one, two = (
        torch.from_dlpack(buffer).view(torch.float32).view(size, size).normal_() for buffer in (first, second)
    )
    on_device = (one @ two).clone()
    torch.cuda.synchronize()
    assert first.spill() > 0
    on_host = one @ two
    torch.cuda.synchronize()
    assert first.spilled == first.size
    assert torch.equal(on_device, on_host)
    assert first.prefetch() > 0
    assert torch.equal(on_device, one @ two)
    torch.cuda.synchronize()


def test_the_first_spill_is_logged_once(
    device: Device, make_pool: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool(limit="64MiB", spill="1GiB")
    kept = [pool.allocate("32MiB") for _ in range(5)]
    lines = [record.message for record in caplog.records if "host memory" in record.message]
    assert len(lines) == 1
    assert vram.Device("cuda:0").name in lines[0]
    del kept
