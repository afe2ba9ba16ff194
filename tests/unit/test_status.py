"""Whose the memory of a device is: parts that sum, whatever the readings say."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vram
from vram.core.observer import open_pools
from vram.observe.status import Observatory, _Budgeted, _by_process, _memory_of, split_device

SIZES = st.integers(0, 1 << 40)
PARTS = ("pools", "libraries", "processes", "unknown", "free")


@given(SIZES, SIZES, SIZES, SIZES, st.none() | SIZES, SIZES)
def test_the_parts_sum_whatever_is_read(
    total: int, free: int, ours: int, libraries: int, process: int | None, processes: int
) -> None:
    split = split_device(
        total=total, free=free, ours=ours, libraries=libraries, process=process, processes=processes
    )
    assert sum(split[part] for part in PARTS) == split["total"] == total
    assert all(split[part] >= 0 for part in PARTS)
    assert split["pools"] == min(ours, total)


@given(st.lists(SIZES, min_size=5, max_size=5))
def test_readings_that_agree_come_back_as_they_are(parts: list[int]) -> None:
    ours, libraries, processes, _, free = parts
    total = sum(parts)
    for process in (None, ours + libraries):
        split = split_device(
            total=total, free=free, ours=ours, libraries=libraries, process=process, processes=processes
        )
        assert [split[part] for part in PARTS] == parts


def test_what_no_library_names_is_theirs_where_the_driver_counts_the_process() -> None:
    split = split_device(total=100, free=40, ours=20, process=35, processes=15)
    assert split == {"total": 100, "pools": 20, "libraries": 15, "processes": 15, "unknown": 10, "free": 40}


def test_a_list_without_this_process_says_nothing() -> None:
    assert _by_process([(7, 5), (8, 6)], own=9) is None
    assert _by_process([(7, 5), (8, None), (9, 6)], own=9) == {"process": 6, "processes": 5}


def test_what_is_dear_is_looked_at_less_often() -> None:
    calls = []
    seen = _Budgeted(lambda: calls.append(1) or len(calls))
    assert seen.look() == 1
    seen._cost = 3600.0
    assert seen.look() == 1
    seen._cost = 0.0
    assert seen.look() == 2


def test_holders_are_the_live_blocks_by_tag_and_stack() -> None:
    with vram.Pool(vram.Device.model("1GiB"), stacks="python") as pool:
        kept = [pool.allocate(1000, tag=f"t{number % 3}") for number in range(10)]
        kept += [pool.allocate(5000)]
        del kept[0]
        held = pool.raw_holders()
        blocks = list(pool.snapshot().blocks("live"))
        assert sum(count for _, _, count, *_ in held) == len(blocks) == 10
        assert sum(size for _, _, _, size, *_ in held) == sum(block.size for block in blocks)
        assert sum(asked for *_, asked, _spilled in held) == 9 * 1000 + 5000
        assert {tag for tag, *_ in held} == {"t0", "t1", "t2", None}
        assert all(stack[0].filename == __file__ for _, stack, *_ in held)


def test_every_open_pool_is_known_and_no_other() -> None:
    before = open_pools()
    with vram.Pool(vram.Device.model("1GiB")) as one, vram.PinnedPool(vram.Device.model("1GiB")) as two:
        assert open_pools() == [*before, one, two]
        told = Observatory().status()
        assert [pool["memory"] for pool in told["pools"][-2:]] == [one.device.name, "host"]
    assert open_pools() == before


class FakeGpu:
    """A device as far as the driver's management library is asked about it."""

    name, kind, index = "cuda:0", "cuda", 0

    class backend:
        @staticmethod
        def attribute(number: int) -> int:
            return {50: 1, 33: 0x1B, 34: 0}[number]

        @staticmethod
        def memory_info() -> tuple[int, int]:
            return 60, 100


def fake_nvml(running: list[tuple[int, int | None]], seen: list[bytes]) -> SimpleNamespace:
    def find(bus: bytes) -> str:
        seen.append(bus)
        return "handle"

    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByPciBusId=find,
        nvmlDeviceGetComputeRunningProcesses=lambda _handle: [
            SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in running
        ],
        nvmlDeviceGetGraphicsRunningProcesses=lambda _handle: [],
        nvmlDeviceGetUtilizationRates=lambda _handle: SimpleNamespace(gpu=87, memory=12),
    )


def test_the_driver_is_asked_about_the_right_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([(os.getpid(), 25), (1, 10)], seen))
    about, memory = _memory_of(FakeGpu())  # type: ignore[arg-type]
    assert set(seen) == {b"00000001:1b:00.0"}
    assert about["source"] == "nvml"
    split = split_device(ours=20, **memory)
    assert split == {"total": 100, "pools": 20, "libraries": 5, "processes": 10, "unknown": 5, "free": 60}


@pytest.mark.parametrize("nvml", [None, SimpleNamespace(), fake_nvml([(1, 10)], []), fake_nvml([], [])])
def test_a_driver_that_does_not_say_leaves_the_rest_unknown(
    monkeypatch: pytest.MonkeyPatch, nvml: object
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    about, memory = _memory_of(FakeGpu())  # type: ignore[arg-type]
    assert about["source"] == "device"
    split = split_device(ours=20, **memory)
    assert split == {"total": 100, "pools": 20, "libraries": 0, "processes": 0, "unknown": 20, "free": 60}


def test_the_driver_tells_who_else_is_there_and_how_busy_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = os.getppid()
    running = [(os.getpid(), 25), (parent, 10), (2**22 + 1, None)]
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(running, []))
    about, _ = _memory_of(FakeGpu())  # type: ignore[arg-type]
    assert about["utilization"] == 87
    known, unseen = about["others"]
    assert (known["pid"], known["bytes"]) == (parent, 10) and known["name"]
    assert unseen == {"pid": 2**22 + 1, "name": "", "bytes": None}


def test_libraries_say_what_they_hold_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_initialized=lambda: True, memory_reserved=lambda _index: 7)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())  # broken: it says nothing
    monkeypatch.setitem(sys.modules, "pynvml", None)
    about, memory = _memory_of(FakeGpu())  # type: ignore[arg-type]
    assert about["named"] == {"torch": 7}
    assert split_device(ours=20, **memory)["libraries"] == 7
    monkeypatch.setitem(sys.modules, "vram.torch", SimpleNamespace(uses_pools=lambda: True))
    assert _memory_of(FakeGpu())[0]["named"] == {}  # type: ignore[arg-type]


def test_a_device_that_is_lost_is_shown_as_far_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> tuple[int, int]:
        raise vram.DeviceError("gone", code="failed")

    monkeypatch.setattr(FakeGpu.backend, "memory_info", staticmethod(lost))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    _, memory = _memory_of(FakeGpu())  # type: ignore[arg-type]
    assert sum(split_device(ours=20, **memory)[part] for part in PARTS) == 0
