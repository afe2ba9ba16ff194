"""vram.torch without PyTorch: a stand-in has the interfaces, and a host pool serves what the plug is asked.
What PyTorch itself makes of it is for test_torch, which needs PyTorch and a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.fork

HERE = Path(__file__).parent

PREAMBLE = """
    import torch
    import vram.torch
    from vram import _native

    def has_devices(count):
        _native.cuda_devices = lambda: (count, "")

    def install_on_host(**config):
        "The host's pool serves as cuda:0."
        on_host = vram.MemoryManager(**config).pool("host")
        vram.get_memory_manager().pool = lambda name: on_host
        has_devices(1)
        vram.torch.install()
        return on_host, torch.cuda.memory.current
"""


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = [str(HERE / "stand_in"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(PREAMBLE) + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CXX": "", **environment},
    )


def holds(program: str, **environment: str) -> str:
    """Run a program of assertions; returns what it logged."""
    ended = run(program, **environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def test_after_the_first_use_of_cuda_it_says_what_to_do() -> None:
    holds("""
        has_devices(1)
        torch.cuda.initialized = True
        try:
            vram.torch.install()
        except vram.DeviceError as error:
            assert "before anything touches the GPU" in str(error) and "vram run --torch" in str(error)
        else:
            raise AssertionError
        assert not vram.torch.installed() and torch.cuda.memory.current is None
    """)


def test_without_a_gpu_it_says_so_and_changes_nothing() -> None:
    holds("""
        has_devices(0)
        before = torch._C._cuda_memoryStats
        try:
            vram.torch.install()
        except vram.DeviceError as error:
            assert "no CUDA device" in str(error) and "vram predict" in str(error)
        else:
            raise AssertionError
        assert not vram.torch.installed() and torch._C._cuda_memoryStats is before
    """)


def test_watching_without_a_gpu_says_what_can_be_done() -> None:
    holds("""
        has_devices(0)
        torch.cuda.available = False
        try:
            vram.torch.watch("run.vtrace")
        except vram.DeviceError as error:
            assert "finds no GPU here" in str(error)
            assert all(f"vram {name}" in str(error) for name in ("demo", "explain", "predict"))
        else:
            raise AssertionError
    """)


def test_a_wrong_option_is_refused_before_anything_is_installed() -> None:
    holds("""
        has_devices(1)
        try:
            vram.torch.install(limitt="1GiB")
        except vram.ConfigError as error:
            assert "limit" in str(error)
        else:
            raise AssertionError
        assert not vram.torch.installed()
    """)


def test_installing_twice_keeps_the_first_allocator() -> None:
    holds("""
        pool, first = install_on_host()
        vram.torch.install(stream_cache=7)
        assert vram.torch.installed() and torch.cuda.memory.current is first
        assert vram.get_memory_manager().settings["stream_cache"] == 7
    """)


def test_hooks_are_set_and_missing_ones_are_named() -> None:
    logged = holds("""
        pool, allocator = install_on_host()
        assert set(allocator.hooks) == {"record_stream", "reset", "memory_fraction", "base", "begin", "end"}
        assert all(allocator.hooks.values())
    """)
    assert "heap_release" in logged  # the stand-in has no place for it


def test_no_device_is_touched_before_its_first_use() -> None:
    holds("""
        pool, allocator = install_on_host()
        assert vram.torch._installation.pools == {}
        address = allocator.alloc(1000, 0, None)
        assert list(vram.torch._installation.pools) == [0] and pool.stats().live == 1
        allocator.free(address, 1000, 0, None)
        assert pool.stats().live == 0
    """)


def test_what_the_plug_refuses_works_again_and_is_restored() -> None:
    holds("""
        originals = dict(vars(torch._C))
        pool, allocator = install_on_host()
        assert torch._C._cuda_memoryStats(0)["allocated_bytes"]["all"]["current"] == 0
        address = allocator.alloc(3 << 20, 0, None)
        stats = torch._C._cuda_memoryStats(0)
        assert stats["allocated_bytes"]["all"] == {
            "current": 3 << 20, "peak": 3 << 20, "allocated": 3 << 20, "freed": 0
        }
        assert torch._C._cuda_memoryStats.__name__ == "_cuda_memoryStats"
        assert torch._C._cuda_memoryStats.__doc__ == "Statistics of a device."
        allocator.free(address, 0, 0, None)
        torch._C._cuda_resetPeakMemoryStats(0)
        torch._C._cuda_resetAccumulatedMemoryStats(0)
        after = torch._C._cuda_memoryStats(0)
        assert after["allocated_bytes"]["all"] == {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
        assert torch._inductor.config.triton.cudagraph_trees is False
        vram.torch.uninstall_patches()
        assert {name: vars(torch._C)[name] for name in originals} == originals
        assert torch._inductor.config.triton.cudagraph_trees is True
        vram.torch.uninstall_patches()
    """)


def test_history_has_events_stacks_and_ends() -> None:
    holds("""
        pool, allocator = install_on_host()
        kept = allocator.alloc(100, 0, None)
        torch._C._cuda_record_memory_history("all", "all", "python", 1000, False, False, False, [])
        assert torch._C._cuda_isHistoryEnabled()
        def work():
            return allocator.alloc(5 << 20, 0, None)
        allocator.free(work(), 0, 0, None)
        taken = torch._C._cuda_memorySnapshot(None)
        alloc, requested, completed = taken["device_traces"][0]
        assert [alloc["action"], requested["action"], completed["action"]] == [
            "alloc", "free_requested", "free_completed"
        ]
        assert alloc["size"] == requested["size"] == 5 << 20 and alloc["addr"] == completed["addr"]
        assert alloc["frames"][0]["name"] == "work"
        assert torch._C._cuda_memorySnapshot((0, 0, False))["device_traces"] == [[]]
        torch._C._cuda_record_memory_history(None, None, "all", 1, False, False, False, [])
        assert not torch._C._cuda_isHistoryEnabled()
        allocator.free(kept, 0, 0, None)
        assert torch._C._cuda_memorySnapshot(None)["device_traces"] == [[]]
    """)


def test_without_events_only_what_is_live_has_its_stack() -> None:
    holds("""
        pool, allocator = install_on_host()
        torch._C._cuda_record_memory_history("state", "all", "python", 10, False, False, False, [])
        def keep():
            return allocator.alloc(4096, 0, None)
        with vram.tag("kept"):
            kept = keep()
        (block,) = pool.snapshot().blocks("live")
        assert (block.address, block.tag, block.stack[0].name) == (kept, "kept", "keep")
        torch._C._cuda_record_memory_history(None, None, "all", 1, False, False, False, [])
        allocator.free(kept, 0, 0, None)
        kept = keep()
        (block,) = pool.snapshot().blocks("live")
        assert (block.tag, block.stack) == (None, ())
    """)


def test_observers_are_told_before_memory_runs_out() -> None:
    holds("""
        pool, allocator = install_on_host(limit="4MiB")
        told = []
        torch._C._cuda_attach_out_of_memory_observer(lambda *facts: told.append(facts))
        allocator.alloc(100, 0, None)
        try:
            pool.malloc("40MiB")
        except vram.OutOfMemory:
            pass
        assert [(device, size) for device, size, _reserved, _free in told] == [(0, 40 << 20)]
    """)


def test_a_mem_pool_needs_no_install() -> None:
    holds("""
        pool = vram.get_memory_manager().pool("host")
        vram.get_memory_manager().pool = lambda name: pool
        scoped = vram.torch.mem_pool()
        address = scoped.allocator.alloc(20 << 20, 0, None)
        assert pool.stats().allocated == 20 << 20 and not vram.torch.installed()
        scoped.allocator.free(address, 20 << 20, 0, None)
        pool.limit = "30MiB"
        assert scoped.allocator.alloc(1 << 40, 0, None) is None  # PyTorch words its own error
    """)


def test_a_mem_pool_beside_install_is_refused_in_words() -> None:
    holds("""
        install_on_host()
        try:
            vram.torch.mem_pool()
        except vram.DeviceError as error:
            assert "already" in str(error)
        else:
            raise AssertionError
    """)


def test_memory_freed_after_the_interpreter_began_to_end() -> None:
    ended = run("""
        import atexit, logging
        logging.getLogger("vram").setLevel(logging.CRITICAL)
        class Tensor:
            def __init__(self, allocator, size):
                self.free, self.address = allocator.free, allocator.alloc(size, 0, None)
            def __del__(self):
                self.free(self.address, 0, 0, None)
        pool, allocator = install_on_host()
        torch._C._cuda_record_memory_history("all", "all", "python", 100, False, False, False, [])
        torch.live = [Tensor(allocator, 1 << size) for size in range(9, 25)]
        live = Tensor(allocator, 1000)
        atexit.register(lambda tensor=Tensor(allocator, 3000): None)
    """)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_without_a_compiler_one_line_says_what_is_lost() -> None:
    logged = holds("install_on_host()", PATH="/nowhere", XDG_CACHE_HOME="/nowhere/to/be/found")
    line = next(line for line in logged.splitlines() if "OutOfMemoryError" in line)
    assert "RuntimeError" in line and "no C++ compiler" in line


# ---- watching PyTorch's own allocator ---------------------------------------------------------------------

WATCHED = """
    import sys, time
    from torch.cuda.memory import happens
    from vram.trace import Action, find_steps

    path = sys.argv[0] if sys.argv[0] != "-c" else "run.vtrace"

    def reopened():
        return vram.open(path, trusted=True)

    def story():
        trace = reopened()
        return [(Action(action).name, size) for action, size in zip(trace.action, trace.size)]
"""


def watched(program: str, folder: Path) -> None:
    holds(f"import os; os.chdir({str(folder)!r})\n" + textwrap.dedent(WATCHED) + textwrap.dedent(program))


def test_watching_writes_what_torch_recorded_with_steps(tmp_path: Path) -> None:
    watched(
        """
        with vram.torch.watch(path, every=1e6) as watch:
            for number in range(3):
                with vram.step(number):
                    time.sleep(0.001)
                    happens("alloc", 512 * number, 100 + number, "work", "main")
                    time.sleep(0.001)
                watch.flush()
            happens("free_requested", 0, 100)
            happens("free_completed", 0, 100)
        trace = reopened()
        assert story() == [
            ("ALLOC", 100), ("ALLOC", 101), ("ALLOC", 102), ("FREE_REQUESTED", 100), ("FREE_COMPLETED", 100)
        ]
        assert [find_steps(trace).of(row) for row in range(3)] == [0, 1, 2]
        assert [frame.name for frame in trace.frames_of(trace.stack[0])] == ["work", "main"]
        assert len(trace.segments[0].blocks) == 2 and trace.settings["allocator"] == "torch"
        assert torch.cuda.memory.history is None and watch.closed and not trace.truncated
        """,
        tmp_path,
    )


def test_watching_counts_when_torchs_ring_ran_over(tmp_path: Path) -> None:
    watched(
        """
        watch = vram.torch.watch(path, every=1e6, entries=10)
        for round in range(3):
            for number in range(7 if round == 0 else 20):
                happens("alloc", 512 * number, round)
            watch.flush()
        watch.close()
        assert [sum(size == round for _, size in story()) for round in range(3)] == [7, 10, 10]
        assert reopened().dropped == watch.dropped == 2
        """,
        tmp_path,
    )


def test_when_memory_runs_out_what_is_known_is_written_at_once(tmp_path: Path) -> None:
    watched(
        """
        watch = vram.torch.watch(path, every=1e6)
        happens("alloc", 512, 100)
        happens("oom", 7, 1 << 40)
        (observer,) = torch._C.observers
        observer(0, 1 << 40, 0, 7)
        assert story() == [("ALLOC", 100), ("OOM", 1 << 40)] and reopened().truncated
        watch.close()
        observer(0, 1 << 40, 0, 7)
        vram.torch.watch(path).close()
        assert len(torch._C.observers) == 1
        """,
        tmp_path,
    )


def test_watching_ends_with_the_process(tmp_path: Path) -> None:
    watched('vram.torch.watch(path, every=1e6); happens("alloc", 512, 100)', tmp_path)
    watched('assert story() == [("ALLOC", 100)] and not reopened().truncated', tmp_path)


def test_with_vram_installed_its_own_pools_are_recorded(tmp_path: Path) -> None:
    watched(
        """
        has_devices(1)
        vram.torch.install()
        with vram.torch.watch(path):
            pool = vram.get_memory_manager().pool("host")
            _native.plug_set_pool(0, pool)
            def forward():
                return torch.cuda.memory.current.alloc(777, 0, None)
            forward()
        trace = reopened()
        (row,) = [row for row, action in enumerate(trace.action) if action == Action.ALLOC]
        assert trace.size[row] == 777 and trace.frames_of(trace.stack[row])[0].name == "forward"
        """,
        tmp_path,
    )


def test_what_is_allocated_under_a_tag_is_suspended_and_resumed() -> None:
    holds("""
        import ctypes
        pool, allocator = install_on_host()
        before = allocator.alloc(4 << 20, 0, None)
        with vram.tag("train"):
            tagged = allocator.alloc(8 << 20, 0, None)
        after = allocator.alloc(4 << 20, 0, None)
        ctypes.memset(tagged, 7, 8 << 20)
        assert pool.info(tagged)["tag"] == "train"
        assert pool.info(before)["tag"] is None and pool.info(after)["tag"] is None
        assert vram.torch.suspend("train") == 8 << 20
        assert pool.stats().reserved == 8 << 20
        assert [block.address for block in pool.snapshot().blocks("suspended")] == [tagged]
        assert vram.torch.resume("train") == 8 << 20
        assert ctypes.string_at(tagged, 8 << 20) == bytes([7]) * (8 << 20)
        assert vram.torch.suspend(keep="discard") == 16 << 20
        allocator.free(tagged, 0, 0, None)
        assert vram.torch.resume() == 8 << 20
    """)


def test_suspending_needs_an_allocator_of_vram() -> None:
    holds("""
        for function in (vram.torch.suspend, vram.torch.resume):
            try:
                function()
            except vram.DeviceError as error:
                assert "install()" in str(error)
            else:
                raise AssertionError
    """)
