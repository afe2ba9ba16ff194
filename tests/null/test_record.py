"""`vram run --record` of an unchanged PyTorch program, on a null GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import vram
from vram.analysis import merge
from vram.predict.environment import cuda_of_torch
from vram.trace import Action, find_steps

pytestmark = [
    pytest.mark.fork,
    pytest.mark.slow,
    pytest.mark.skipif(not cuda_of_torch(), reason="no CUDA build of PyTorch can be imported"),
]

PLAIN = """
import torch
kept = [torch.empty(3 << 20, dtype=torch.uint8, device="cuda") for _ in range(5)]
"""
STEPS = """
import torch, vram
kept = []
for number in range(3):
    with vram.step(number):
        kept.append(torch.empty(4 << 20, dtype=torch.uint8, device="cuda"))
"""


def record(
    folder: Path, text: str, *options: str, file: str = "run.vtrace"
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    command = [sys.executable, "-m", "vram", "run", "--null-gpu", "h200", "--record", file]
    return subprocess.run(
        [*command, *options, "train.py"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=folder,
    )


def test_pytorchs_own_allocator_is_recorded_with_stacks(tmp_path: Path) -> None:
    ended = record(tmp_path, PLAIN)
    assert ended.returncode == 0, ended.stderr
    trace = vram.open(tmp_path / "run.vtrace")
    asked = [event for event in range(trace.events) if trace.action[event] == Action.ALLOC]
    assert [trace.size[event] for event in asked] == [3 << 20] * 5
    for event in asked:
        assert any(frame.filename.endswith("train.py") for frame in trace.frames_of(trace.stack[event]))
    assert trace.settings["allocator"] == "torch" and trace.segments


def test_steps_of_the_program_are_in_the_recording(tmp_path: Path) -> None:
    ended = record(tmp_path, STEPS)
    assert ended.returncode == 0, ended.stderr
    trace = vram.open(tmp_path / "run.vtrace")
    steps = find_steps(trace)
    asked = [event for event in range(trace.events) if trace.action[event] == Action.ALLOC]
    assert [steps.of(event) for event in asked] == [0, 1, 2]


def test_a_failed_program_is_recorded_and_keeps_its_exit_code(tmp_path: Path) -> None:
    ended = record(tmp_path, PLAIN + "raise SystemExit(7)\n")
    assert ended.returncode == 7, ended.stderr
    assert vram.open(tmp_path / "run.vtrace").events


def test_a_program_that_uses_no_gpu_memory_is_an_error_with_the_reason(tmp_path: Path) -> None:
    ended = record(tmp_path, "import torch\nprint(torch.zeros(3).sum())\n")
    assert ended.returncode == 2 and "tensor(0.)" in ended.stdout
    assert "nothing was recorded: the program imported PyTorch, but allocated no GPU memory" in ended.stderr


HISTORY = """
import torch

def ask():
    return torch.empty(3 << 20, dtype=torch.uint8, device="cuda")

first = ask()
torch.cuda.memory._record_memory_history(max_entries=100)
second = ask()
assert any(torch.cuda.memory._snapshot()["device_traces"])
torch.cuda.memory._record_memory_history(enabled=None)
third = ask()
"""


def test_a_program_that_switches_pytorchs_history_on_and_off_is_recorded(tmp_path: Path) -> None:
    ended = record(tmp_path, HISTORY)
    assert ended.returncode == 0, ended.stderr
    trace = vram.open(tmp_path / "run.vtrace")
    asked = [event for event in range(trace.events) if trace.action[event] == Action.ALLOC]
    assert [trace.size[event] for event in asked] == [3 << 20] * 3
    assert trace.dropped == 0


@pytest.mark.parametrize("options", [(), ("--torch",)])
def test_a_file_that_cannot_be_written_is_an_error_before_the_program_runs(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    ended = record(tmp_path, "print('runs')\n" + PLAIN, *options, file="missing/run.vtrace")
    assert ended.returncode == 2 and ended.stdout == ""
    assert "cannot record to" in ended.stderr and "there is no directory" in ended.stderr
    assert "Traceback" not in ended.stderr


FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
"""


@pytest.mark.parametrize("options", [(), ("--torch",)])
def test_a_full_disk_does_not_end_the_program(tmp_path: Path, options: tuple[str, ...]) -> None:
    for end, status in (("raise SystemExit(7)", 7), ("", 2)):
        ended = record(tmp_path, f"{FULL}{PLAIN}print('done')\n{end}\n", *options)
        assert (ended.returncode, ended.stdout) == (status, "done\n"), ended.stderr
        assert "Traceback" not in ended.stderr and "File too large" in ended.stderr


def watch(folder: Path, text: str) -> None:
    (folder / "watched.py").write_text(text)
    command = [sys.executable, "-m", "vram", "run", "--null-gpu", "h200", "watched.py"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=folder)
    assert ended.returncode == 0, ended.stderr


def test_watching_can_begin_before_the_first_use_of_cuda(tmp_path: Path) -> None:
    watch(
        tmp_path,
        "import vram.torch\nwatched = vram.torch.watch('run.vtrace')\n" + PLAIN + "watched.close()\n",
    )
    assert vram.open(tmp_path / "run.vtrace").events


def test_a_history_that_the_program_keeps_is_left_on(tmp_path: Path) -> None:
    watched = """
import torch, vram.torch
torch.cuda.init()
torch.cuda.memory._record_memory_history()
with vram.torch.watch("inner.vtrace"):
    first = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
second = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
events = torch.cuda.memory._snapshot()["device_traces"][0]
assert [each["size"] for each in events if each["action"] == "alloc"] == [3 << 20, 5 << 20]
"""
    watch(tmp_path, watched)


def test_reading_pytorchs_history_imports_nothing(tmp_path: Path) -> None:
    """PyTorch would import torch._inductor to resolve stacks: in the thread of the recording, at any time."""
    program = "import sys, vram.torch\nwatched = vram.torch.watch('run.vtrace')\n" + PLAIN
    watch(tmp_path, program + "watched.flush()\nassert 'torch._inductor' not in sys.modules\n")


RANK = """
import os, torch
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("gloo")
kept = torch.empty(int(os.environ["RANK"]) + 3 << 20, dtype=torch.uint8, device="cuda")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_ranks_of_torchrun_have_a_file_each_which_merge_compares(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANK)
    vram_run = ["-m", "vram", "run"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *vram_run, "--null-gpu", "h200:2", "--", sys.executable, *torchrun]
    ended = subprocess.run(
        [*command, *vram_run, "--record", "run.vtrace", "train.py"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    files = sorted(tmp_path.glob("run.rank-*.vtrace"))
    assert [file.name for file in files] == ["run.rank-0.vtrace", "run.rank-1.vtrace"]
    merged = merge([vram.open(file) for file in files])
    assert {rank.name: rank.peak_allocated >> 20 for rank in merged.ranks} == {"rank 0": 3, "rank 1": 4}
