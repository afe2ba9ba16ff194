"""Watching a process that uses a GPU: whose the device's memory is, and that all views say the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

import vram
from vram.observe.measure import Stretch
from vram.observe.monitor import attach
from vram.observe.status import Observatory
from vram.system.doctor import examine
from vram.system.machine import info

pytestmark = pytest.mark.gpu
PARTS = ("pools", "libraries", "processes", "unknown", "free")


def gpu_of(told: dict[str, Any]) -> dict[str, Any]:
    (found,) = [device for device in told["devices"] if device["name"] == "cuda:0"]
    return dict(found)


def test_the_parts_of_a_gpu_sum_and_ours_is_what_is_reserved() -> None:
    with vram.Pool("cuda:0") as pool:
        kept = pool.allocate("1GiB", tag="weights")
        told = Observatory().status()
        device = gpu_of(told)
        assert sum(device[part] for part in PARTS) == device["total"] == pool.device.total_memory
        mine = [each for each in told["pools"] if each["memory"] == "cuda:0"]
        assert device["pools"] == sum(each["reserved"] for each in mine) >= 1 << 30
        assert device["free"] <= pool.device.total_memory - (1 << 30)
        del kept


def test_what_the_driver_counts_for_this_process_is_not_unknown() -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    with vram.Pool("cuda:0") as pool:
        kept = pool.allocate("512MiB")
        device = gpu_of(Observatory().status())
        if device["source"] != "nvml":
            pytest.skip("the driver does not tell this container which process has what")
        # The context of CUDA is neither a pool's nor nobody's.
        assert device["libraries"] > 0
        del kept


def test_memory_of_pytorchs_own_allocator_is_named() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            "import json, torch, vram\n"
            "from vram.observe.status import Observatory\n"
            "pool = vram.Pool('cuda:0'); kept = pool.allocate('64MiB')\n"
            "tensor = torch.empty(256 << 20, dtype=torch.uint8, device='cuda')\n"
            "print(json.dumps(Observatory().status()['devices']))\n",
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    (device,) = json.loads(ended.stdout)
    assert device["named"]["torch"] >= 256 << 20
    assert device["libraries"] >= device["named"]["torch"]
    assert sum(device[part] for part in PARTS) == device["total"]


def test_page_locked_memory_is_the_hosts() -> None:
    with vram.PinnedPool("cuda:0") as pinned, vram.Pool("cuda:0") as pool:
        kept = [pinned.allocate("64MiB"), pool.allocate("1MiB")]
        told = Observatory().status()
        (found,) = [each for each in told["pools"] if each["pool"] == pinned.number]
        assert (found["device"], found["memory"]) == ("cuda:0", "host")
        reserved = sum(each["reserved"] for each in told["pools"] if each["memory"] == "cuda:0")
        assert gpu_of(told)["pools"] == reserved
        del kept


def test_another_process_is_told_and_vram_top_prints_it() -> None:
    pytest.importorskip("rich_click", reason="rich-click is not installed")
    with vram.Pool("cuda:0") as pool, vram.monitor(stacks="python"):
        kept = pool.allocate("128MiB", tag="weights")
        with attach(os.getpid()) as client:
            assert gpu_of(client.status())["pools"] >= 128 << 20
        printed = subprocess.run(
            [sys.executable, "-m", "vram", "top", "-1", str(os.getpid())],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert printed.returncode == 0, printed.stderr
        assert "cuda:0: " in printed.stdout and "weights" in printed.stdout
        del kept


def test_looking_does_not_disturb_a_capture() -> None:
    ending = threading.Event()
    failures: list[BaseException] = []

    def look() -> None:
        try:
            with attach(os.getpid()) as client:
                while not ending.is_set():
                    client.status()
        except BaseException as error:
            failures.append(error)

    with vram.Pool("cuda:0") as pool, vram.monitor(interval=0.01), vram.Stream(pool.device) as stream:
        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            for value in range(50):
                with stream.capture() as graph:
                    scratch = pool.allocate("8MiB", stream=stream)
                    scratch.fill(value)
                    scratch.free()
                graph.launch()
                stream.synchronize()
                graph.close()
        finally:
            ending.set()
            watcher.join()
    assert failures == []


def test_a_stretch_measures_a_gpu() -> None:
    kept = []
    with vram.Pool("cuda:0") as pool:
        with Stretch(leaks=True) as stretch:
            pool.allocate("32MiB")
            kept.append(pool.allocate("16MiB", tag="kept"))
        assert stretch.peaks["cuda:0"] == 32 << 20
        assert [(leak.tag, leak.bytes) for leak in stretch.left] == [("kept", 16 << 20)]
        kept.clear()


def test_a_gpu_that_works_has_nothing_wrong() -> None:
    assert [finding for finding in examine() if finding.level == "wrong"] == []
    told = info()
    assert told["devices"][0]["kind"] == "cuda" and told["no_cuda"] == ""


def test_running_out_keeps_the_moment(tmp_path: Any) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pytest.importorskip("rich_click", reason="rich-click is not installed")
    script = tmp_path / "script.py"
    script.write_text(
        "import vram\npool = vram.Pool('cuda:0', limit='256MiB')\n"
        "kept = pool.allocate('200MiB', tag='weights')\n"
        "try:\n    pool.allocate('100MiB')\nexcept vram.OutOfMemory:\n    print('went on')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "vram", "run", "--on-oom", "explain,snapshot", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert (ended.returncode, ended.stdout) == (0, "went on\n"), ended.stderr
    assert "memory ran out at" in ended.stderr and "'weights' (200 MiB)" in ended.stderr
    (kept,) = tmp_path.glob("vram-oom-*.vtrace")
    explained = vram.analysis.explain(vram.open(kept))
    assert explained.request is not None and explained.request.size == 100 << 20
