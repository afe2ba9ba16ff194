"""Memory of a real device: its end, what remapping keeps, what goes back, and whose context is current."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from work import Marked, Work, undisturbed

from vram import Device, DeviceError, OutOfMemory, Pool, Stream

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other libraries' warnings are theirs

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
TIMEOUT = 60.0  # seconds after which a missing wake-up is an error
SLACK = 512 * MIB  # what the driver and other libraries may take or give beside us
with_and_without_pages = pytest.mark.parametrize("pages", [True, False], ids=["pages", "plain"])
MakePool = Callable[..., Pool]


def fill_up(pool: Pool, size: int, tag: str | None = None) -> tuple[list[Any], OutOfMemory]:
    """Allocate `size` at a time until there is no more; returns the buffers and the error."""
    held: list[Any] = []
    with pytest.raises(OutOfMemory) as caught:
        while True:
            held.append(pool.allocate(size, tag=tag))
    return held, caught.value


def assert_report_adds_up(report: dict[str, Any]) -> None:
    parts = ("allocated", "pending", "cached", "free_pages", "free_elsewhere", "stranded")
    assert sum(report[part] for part in parts) == report["reserved"], report
    assert report["device_free"] + report["reserved"] + report["outside"] == report["device_total"], report
    assert sum(report["tags"].values()) == report["allocated"], report


# ---- the end of memory --------------------------------------------------------------------------------


@with_and_without_pages
def test_a_limit_is_kept_and_explained(make_pool: MakePool, work: Work, pages: bool) -> None:
    pool = make_pool(limit="1GiB", pages=pages)
    held, error = fill_up(pool, 48 * MIB, tag="weights")
    report = error.report
    assert_report_adds_up(report)
    assert (error.requested, error.limit, report["tags"]) == (
        48 * MIB,
        GIB,
        {"weights": 48 * MIB * len(held)},
    )
    assert len(held) == 21 and pool.stats().peak_reserved <= GIB < report["device_free"]
    assert "1 GiB" in str(error) and "weights" in str(error)
    held[4].free()
    assert Marked(pool, work, 48 * MIB).size == 48 * MIB
    held.clear()


@with_and_without_pages
@undisturbed
def test_at_the_real_end_of_the_device_everything_goes_on(
    make_pool: MakePool, work: Work, device: Device, torch: Any, pages: bool
) -> None:
    if device.free_memory < 16 * GIB:
        pytest.skip(f"needs 16 GiB, but only {device.free_memory >> 20} MiB of the device are free")
    theirs = torch.full((4 * GIB,), 7, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    before = device.free_memory
    pool = make_pool(pages=pages)
    first = Marked(pool, work, 64 * MIB)
    held, error = fill_up(pool, 2 * GIB)
    report = error.report
    assert pool.stats().allocated > before - 3 * GIB, "the pool failed to allocate memory that was free"
    assert_report_adds_up(report)
    assert report["device_free"] < 2 * GIB + SLACK and report["outside"] >= theirs.numel()
    assert error.limit is None and "what others hold on the device" in str(error)

    held[0].fill(1)
    held[-1].fill(2)
    first.check()
    assert work.take_counts() == (0, 64 * MIB)
    assert int(theirs[0]) == int(theirs[-1]) == 7, "memory of another library changed"

    held.clear()
    again = Marked(pool, work, 8 * GIB)
    again.check()
    assert work.take_counts() == (0, 8 * GIB)
    del again, first
    pool.trim(wait=True)
    assert pool.stats().reserved == 0 and abs(device.free_memory - before) < SLACK
    del theirs
    torch.cuda.empty_cache()


def test_another_librarys_memory_is_ours_once_it_gives_it_back(
    make_pool: MakePool, device: Device, torch: Any
) -> None:
    half = device.free_memory // 2 // (2 * MIB) * (2 * MIB)
    theirs = torch.empty(half + GIB, dtype=torch.uint8, device="cuda")
    pool = make_pool()
    with pytest.raises(OutOfMemory) as caught:
        pool.allocate(half)
    assert caught.value.report["outside"] > half
    del theirs
    torch.cuda.empty_cache()
    assert pool.allocate(half).size == half


# ---- contents -----------------------------------------------------------------------------------------


@with_and_without_pages
@pytest.mark.parametrize("streams", [1, 3])
def test_contents_survive_whatever_happens_around_them(
    make_pool: MakePool, work: Work, device: Device, pages: bool, streams: int
) -> None:
    pool = make_pool(pages=pages, limit="2GiB")
    sizes = [512, 5 * KIB, 300 * KIB, MIB, 2 * MIB, 3 * MIB + 512, 9 * MIB, 30 * MIB, 130 * MIB]
    dice, held = random.Random(3), list[Marked]()
    on = [Stream(device) for _ in range(streams)]
    for step in range(600):
        while sum(each.size for each in held) > 1200 * MIB:
            gone = held.pop(dice.randrange(len(held)))
            gone.check()
            gone.buffer.free()
        held.append(Marked(pool, work, dice.choice(sizes), dice.choice(on)))
        if step % 100 == 99:
            pool.trim(wait=step % 200 == 99)
            assert pool.check() is None
    for each in held:
        each.check()
    wrong, checked = work.take_counts()
    assert wrong == 0 and checked > 4 * GIB
    held.clear()


def test_free_pages_between_live_blocks_serve_a_large_one(make_pool: MakePool, work: Work) -> None:
    pool = make_pool(limit="256MiB")
    pieces = [Marked(pool, work, 2 * MIB) for _ in range(128)]
    kept = pieces[::2]
    for each in pieces[1::2]:
        each.buffer.free()
    assert pool.stats().allocated == 128 * MIB
    large = Marked(pool, work, 120 * MIB)
    assert pool.stats().reserved <= 256 * MIB
    for each in (*kept, large):
        each.check()
    assert work.take_counts() == (0, 64 * 2 * MIB + 120 * MIB)


# ---- giving back --------------------------------------------------------------------------------------


@with_and_without_pages
@undisturbed
def test_trim_gives_memory_back_to_the_device(make_pool: MakePool, device: Device, pages: bool) -> None:
    pool = make_pool(pages=pages)
    before = device.free_memory
    for buffer in [pool.allocate(GIB) for _ in range(4)]:
        buffer.free()
    taken = device.free_memory
    assert before - taken >= 4 * GIB - SLACK and pool.stats().reserved >= 4 * GIB
    assert pool.trim(wait=True) >= 4 * GIB
    assert device.free_memory - taken >= 4 * GIB - SLACK and pool.stats().reserved == 0


@undisturbed
def test_closing_a_pool_gives_memory_back_to_the_device(device: Device) -> None:
    before = device.free_memory
    with Pool(device) as pool:
        held = [pool.allocate(GIB) for _ in range(4)]
        assert before - device.free_memory >= 4 * GIB - SLACK and len(held) == 4
    assert before - device.free_memory < SLACK


def test_without_pages_a_pool_takes_plain_segments_and_says_so(make_pool: MakePool, work: Work) -> None:
    pool = make_pool(pages=False)
    each = Marked(pool, work, 3 * MIB)
    each.check()
    assert work.take_counts() == (0, 3 * MIB)
    assert not pool.raw_stats()["paged"] and pool.stats()["pages.mappings"] == 0
    assert all(segment.plain for segment in pool.snapshot().segments)


def test_with_pages_a_pool_maps_them_and_says_so(make_pool: MakePool, device: Device) -> None:
    if not device.pages:
        pytest.skip(f"no pages here: {device.backend.no_pages}")
    pool = make_pool()
    held = pool.allocate(3 * MIB)
    assert pool.raw_stats()["paged"] and pool.stats()["pages.mappings"] >= 1 and held.size == 3 * MIB
    assert not any(segment.plain for segment in pool.snapshot().segments)


# ---- errors -------------------------------------------------------------------------------------------


NOWHERE = 0x1000
REFUSED: dict[str, tuple[Callable[[Any], object], str, str]] = {
    "release": (lambda b: b.release(NOWHERE, 2 * MIB), "cuMemFree", "CUDA_ERROR_INVALID_VALUE"),
    "unmap": (lambda b: b.unmap(2 * MIB, 2 * MIB), "cuMemUnmap", "CUDA_ERROR_INVALID_VALUE"),
    "module": (lambda b: b.module_load("no kernel"), "cuModuleLoadData", "CUDA_ERROR_"),
}


@pytest.mark.parametrize("what", ["release", "unmap", pytest.param("module", marks=pytest.mark.real_gpu)])
def test_an_error_carries_call_code_and_the_drivers_name(device: Device, what: str) -> None:
    use, call, name = REFUSED[what]
    with pytest.raises(DeviceError) as caught:
        use(device.backend)
    error = caught.value
    assert (error.call, error.native > 0) == (call, True)
    assert name in str(error) and str(error.native) in str(error) and call in str(error)
    device.synchronize()  # the device still works


def test_more_than_the_device_has_is_out_of_memory_with_the_drivers_name(device: Device) -> None:
    with pytest.raises(OutOfMemory) as caught:
        device.backend.reserve(1 << 44)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in str(caught.value) and caught.value.call == "cuMemAlloc"


# ---- contexts and threads -----------------------------------------------------------------------------


def current_context() -> int:
    driver = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    assert driver.cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value or 0


def use_everything(device: Device) -> None:
    with Pool(device) as pool, Stream(device) as stream, Stream(device) as other:
        for size in (KIB, 3 * MIB, 40 * MIB):
            buffer = pool.allocate(size, stream=stream)
            buffer.fill(3)
            buffer.record_stream(other)
            data = bytearray(size)
            buffer.copy_to(data)
            assert data.count(3) == size
            buffer.free()
        pool.trim(wait=True)
        stream.record_event().wait(other)
    device.synchronize()
    assert device.free_memory > 0


@pytest.mark.real_gpu
def test_the_current_device_and_context_stay_as_they_are(device: Device, torch: Any) -> None:
    torch.zeros(1, device="cuda")
    before = (current_context(), torch.cuda.current_device())
    assert before[0] != 0
    use_everything(device)
    assert (current_context(), torch.cuda.current_device()) == before


@pytest.mark.real_gpu
def test_a_thread_without_a_context_works_and_stays_without(device: Device) -> None:
    def run() -> tuple[int, int]:
        before = current_context()
        use_everything(device)
        return before, current_context()

    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(run).result(TIMEOUT) == (0, 0)


# ---- default streams by their special handles ---------------------------------------------------------

LEGACY, PER_THREAD = 1, 2


def test_the_legacy_handle_is_the_default_stream(make_pool: MakePool, device: Device) -> None:
    pool = make_pool()
    assert device.backend.canonical(LEGACY) == 0
    by_name = pool.allocate(MIB, stream=LEGACY)
    address = by_name.ptr
    by_name.free()
    assert pool.allocate(MIB).ptr == address


def test_each_thread_has_a_default_stream_of_its_own(device: Device) -> None:
    def mine() -> int:
        return device.backend.canonical(PER_THREAD)

    with ThreadPoolExecutor(1) as executor:
        theirs = executor.submit(mine).result(TIMEOUT)
    assert theirs != mine() == mine() and 0 not in (theirs, mine())


@pytest.mark.parametrize("cross_stream", ["ready", "wait", "never"])
def test_threads_on_their_default_streams_never_share_what_is_in_use(
    make_pool: MakePool, work: Work, cross_stream: str
) -> None:
    pool = make_pool(cross_stream=cross_stream, limit="64MiB")
    turns, rounds, size = threading.Barrier(2), 20, 7 * MIB

    def run(milliseconds: float) -> set[int]:
        addresses = set()
        for _ in range(rounds):
            turns.wait(TIMEOUT)
            buffer, seed = pool.allocate(size, stream=PER_THREAD), work.new_seed()
            addresses.add(buffer.ptr)
            work.fill(buffer.ptr, size, seed, PER_THREAD)
            work.spin(milliseconds, PER_THREAD)
            work.check(buffer.ptr, size, seed, PER_THREAD)
            buffer.free()
        return addresses

    with ThreadPoolExecutor(2) as executor:
        futures = [executor.submit(run, milliseconds) for milliseconds in (5.0, 0.1)]
        assert all(future.result(TIMEOUT) for future in futures)
    assert work.take_counts() == (0, 2 * rounds * size)
