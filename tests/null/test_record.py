"""`vram run --record` of an unchanged PyTorch program, on a null GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import vram
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


def record(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    return subprocess.run(
        [*(sys.executable, "-m", "vram", "run", "--null-gpu", "h200", "--record", "run.vtrace"), "train.py"],
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
