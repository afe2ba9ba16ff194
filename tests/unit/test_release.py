"""Release thresholds: what a pool keeps when memory becomes unused, and when it is released."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import vram
from vram.core import release, ticker

MIB = 1 << 20
SIZES = ["4KiB", "200KiB", "600KiB", "3MiB", "50MiB"]


@pytest.fixture(params=["host", "model", "model-plain"])
def device(request: pytest.FixtureRequest) -> vram.Device:
    if request.param == "host":
        return vram.Device("host")
    return vram.Device.model("4GiB", pages=request.param == "model")


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The background thread does nothing: what happens is due to the program's own calls."""
    monkeypatch.setattr(release, "_release", lambda *_: None)
    yield


def filled(pool: vram.Pool, size: str | int = "50MiB", count: int = 4) -> None:
    for buffer in [pool.allocate(size) for _ in range(count)]:
        buffer.free()


def soon(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("option", ["release_threshold", "idle_limit"])
@pytest.mark.parametrize("size", SIZES)
def test_waiting_for_the_device_leaves_what_the_threshold_allows(
    device: vram.Device, option: str, size: str
) -> None:
    pool = vram.Pool(device, **{option: "8MiB"})
    filled(pool, size, max(4, 200 * MIB // vram.sizes.parse_size(size) if size != "4KiB" else 4096))
    device.synchronize()
    assert pool.stats().reserved <= 8 * MIB
    filled(pool, size, 3)  # and it serves again
    pool.close()


@pytest.mark.usefixtures("still")
def test_a_free_of_a_large_block_releases_at_once() -> None:
    pool = vram.Pool("host", release_threshold="8MiB")
    buffers = [pool.allocate("50MiB") for _ in range(4)]
    held = []
    for buffer in buffers:
        buffer.free()
        held.append(pool.stats().reserved)
    assert held == sorted(held, reverse=True) and held[-1] <= 8 * MIB


@pytest.mark.usefixtures("still")
def test_a_second_wave_keeps_the_threshold_without_a_call_to_the_device() -> None:
    pool = vram.Pool("host", release_threshold="64MiB")
    filled(pool, "10MiB", 4)
    before = pool.stats()
    filled(pool, "10MiB", 4)
    assert pool.stats().reserved == before.reserved == 40 * MIB


@pytest.mark.parametrize("wait", ["stream", "event"])
def test_waiting_for_a_stream_or_an_event_counts(device: vram.Device, wait: str) -> None:
    pool, stream = vram.Pool(device, release_threshold=0), vram.Stream(device)
    filled(pool, "100KiB", 100)
    device.synchronize()
    assert pool.stats().reserved == 0
    for buffer in [pool.allocate("100KiB", stream=stream) for _ in range(100)]:
        buffer.free()
    assert pool.stats().reserved > 0
    event = stream.record_event()
    (stream if wait == "stream" else event).synchronize()
    if (
        device.kind == "model"
    ):  # its time stands still, and the pool has asked just now whether the last use is over
        stream.synchronize()
    assert pool.stats().reserved == 0


@pytest.mark.slow
def test_what_no_call_notices_is_released_in_the_background() -> None:
    pool = vram.Pool("host", release_threshold="1MiB")
    filled(pool, "100KiB", 100)
    assert pool.stats().reserved > MIB
    assert soon(lambda: pool.stats().reserved <= MIB)


def test_memory_in_use_stays(device: vram.Device) -> None:
    pool = vram.Pool(device, release_threshold=0)
    kept = pool.allocate("20MiB")
    filled(pool, "5MiB")
    device.synchronize()
    assert 20 * MIB <= pool.stats().reserved < 24 * MIB
    kept.free()
    device.synchronize()
    assert pool.stats().reserved == 0


def test_the_threshold_can_change(device: vram.Device) -> None:
    pool = vram.Pool(device)
    filled(pool)
    device.synchronize()
    assert pool.stats().reserved == 200 * MIB
    pool.reconfigure({"release_threshold": "16MiB"})
    device.synchronize()
    assert pool.stats().reserved <= 16 * MIB
    pool.reconfigure({"idle_limit": None})
    filled(pool)
    device.synchronize()
    assert pool.stats().reserved == 200 * MIB
    with pytest.raises(vram.ConfigError, match="pages cannot change"):
        pool.reconfigure({"pages": False})


def test_the_cache_sizes_of_the_manager_hold_too() -> None:
    manager = vram.MemoryManager(cache_sizes={"global": 4})  # pages of 2 MiB
    pool = manager.pool("host")
    for address in [manager.allocate_memory("50MiB", device="host") for _ in range(4)]:
        manager.free_memory(address, device="host")
    pool.device.synchronize()
    assert pool.stats().reserved <= 8 * MIB
    manager.close()


def test_both_names_at_once_are_refused() -> None:
    with pytest.raises(vram.ConfigError, match="release_threshold is given twice"):
        vram.Pool("host", release_threshold="1MiB", idle_limit="2MiB")


def test_without_a_threshold_there_is_no_thread_and_no_list() -> None:
    gc.collect()
    before = set(release._bounded)
    pool = vram.Pool("host")
    filled(pool)
    assert set(release._bounded) <= before
    bounded = vram.Pool("host", release_threshold=0)
    assert id(bounded) in release._bounded
    del bounded
    gc.collect()
    assert set(release._bounded) <= before


def test_the_ticker_goes_on_after_a_failure_and_ends_with_its_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ticker, "SECOND", 0.001)
    mine = ticker._Ticker()
    calls: list[int] = []
    twice = threading.Event()

    def work() -> None:
        calls.append(len(calls))
        if len(calls) > 1:
            twice.set()
        raise RuntimeError("on purpose")

    end = mine.add(work)
    assert twice.wait(60)
    end()
    assert soon(lambda: mine._thread is None)
    assert "on purpose" in caplog.text
    end = mine.add(work)
    assert mine._thread is not None
    mine.stop()
    assert not mine._thread.is_alive()


def test_what_a_graph_keeps_for_itself_is_no_reason_to_release_the_rest() -> None:
    device = vram.Device.model("16GiB")
    pool, stream = vram.Pool(device, release_threshold="256MiB"), vram.Stream(device)
    with stream.capture() as graph:
        pool.allocate("512MiB", stream=stream).free()
    pool.allocate("64MiB").free()
    device.synchronize()
    before = pool.stats()
    for _ in range(10):
        pool.allocate("64MiB").free()
        device.synchronize()
    assert pool.stats()["num_device_alloc"] == before["num_device_alloc"]
    for _ in range(10):
        pool.allocate("4KiB").free()
        stream.synchronize()
    assert pool.stats().stream_cache_hits - before.stream_cache_hits == 9
    graph.close()


def test_changes_of_options_do_not_undo_each_other() -> None:
    pool, end = vram.Pool("host"), threading.Event()

    def reconfigure() -> None:
        while not end.is_set():
            pool.reconfigure({"stream_cache": 100})

    thread = threading.Thread(target=reconfigure)
    thread.start()
    try:
        for limit in range(1, 500):
            pool.limit = limit << 20
            assert pool.limit == limit << 20
    finally:
        end.set()
        thread.join()
