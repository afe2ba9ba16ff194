"""`vram attach` to an unchanged PyTorch program, on a null GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from attaching import UNHARMED, WORK, assert_clean, attach, require_gdb, target

import vram
from vram.predict.environment import cuda_of_torch
from vram.trace import Action

pytestmark = [
    pytest.mark.fork,
    pytest.mark.slow,
    pytest.mark.skipif(not cuda_of_torch(), reason="no CUDA build of PyTorch can be imported"),
]

ON_NULL_GPU = (sys.executable, "-m", "vram", "run", "--null-gpu", "h200", "--")
TRAINING = """
    import sys, torch
    kept = [torch.empty(3 << 20, dtype=torch.uint8, device="cuda") for _ in range(5)]

    def step():
        torch.empty(1 << 20, dtype=torch.uint8, device="cuda")

    def more():
        return torch._C._cuda_isHistoryEnabled() or "torch._inductor" in sys.modules
"""
OWN_HISTORY = 'torch.cuda.memory._record_memory_history(stacks="python", max_entries=1000)\n'


def test_what_pytorch_holds_is_written_and_explained(tmp_path: Path) -> None:
    require_gdb()
    with target(tmp_path, TRAINING, WORK, command=ON_NULL_GPU) as other:
        ended = attach(other.pid, "-o", "now.pickle", cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        assert other.end() == {**UNHARMED, "more": False}
    assert "now.pickle: PyTorch" in ended.stdout
    trace = vram.open(tmp_path / "now.pickle")
    sizes = [block.requested_size for segment in trace.segments for block in segment.blocks]
    assert sizes.count(3 << 20) == 5
    words = [sys.executable, "-m", "vram", "explain", str(tmp_path / "now.pickle")]
    assert "Verdict" in subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert_clean(tmp_path)


def test_allocations_are_recorded_with_stacks_and_the_history_is_off_again(tmp_path: Path) -> None:
    require_gdb()
    with target(tmp_path, TRAINING, WORK, command=ON_NULL_GPU) as other:
        ended = attach(other.pid, "-o", "run.pickle", "--for", "500ms", cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        assert other.end() == {**UNHARMED, "more": False}
    trace = vram.open(tmp_path / "run.pickle")
    asked = [event for event in range(trace.events) if trace.action[event] == Action.ALLOC]
    assert {trace.size[event] for event in asked} == {1 << 20}
    for event in asked:
        assert any(frame.name == "step" for frame in trace.frames_of(trace.stack[event]))
    assert_clean(tmp_path)


def test_a_history_of_the_program_itself_stays_on(tmp_path: Path) -> None:
    require_gdb()
    with target(tmp_path, TRAINING, OWN_HISTORY, WORK, command=ON_NULL_GPU) as other:
        ended = attach(other.pid, "-o", "run.pickle", "--for", "200ms", cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        assert other.end() == {**UNHARMED, "more": True}
    assert "the program keeps PyTorch's history itself" in ended.stderr
    assert vram.open(tmp_path / "run.pickle").events


def test_a_program_that_has_not_used_cuda_is_left_so(tmp_path: Path) -> None:
    require_gdb()
    unused = "import torch\nstep = lambda: None\nmore = torch.cuda.is_initialized\n"
    with target(tmp_path, unused, WORK, command=ON_NULL_GPU) as other:
        ended = attach(other.pid, "-o", "run.pickle", "--for", "200ms", cwd=tmp_path)
        assert ended.returncode == 2 and "has not used CUDA yet" in ended.stderr
        assert other.end()["more"] is False
