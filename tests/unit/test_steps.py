"""Which events belong to which step."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from made_jobs import trace_of

from vram.trace import Action, Annotation, Trace, find_steps, open_trace

TRACES = Path(__file__).parents[2] / "traces"


def at_times(times: list[int], *marks: Annotation) -> Trace:
    return trace_of([(Action.ALLOC, 0, 0)] * len(times), time_us=array("q", times), annotations=marks)


def test_an_out_of_memory_in_the_eighth_step_is_in_the_eighth_step() -> None:
    trace = open_trace(TRACES / "oom_llama_varlen_ckpt_13400.pickle.xz", trusted=True)
    steps = find_steps(trace)
    assert steps.numbers == tuple(range(1, 9))
    assert steps.of(trace.events - 1) == 8
    assert steps.of(0) == 1


@pytest.mark.parametrize(
    ("name", "count"),
    [("gpt2_train", 4), ("llama_varlen_ckpt", 10), ("resnet_multiscale", 10), ("multistream_prefetch", 20)],
)
def test_what_is_freed_after_the_last_optimizer_step_is_no_step(name: str, count: int) -> None:
    trace = open_trace(TRACES / f"{name}.pickle.xz", trusted=True)
    steps = find_steps(trace)
    assert steps.numbers == tuple(range(1, count + 1))
    assert steps.of(trace.events - 1) == count


def test_marks_of_ours_count_before_an_optimizers() -> None:
    trace = at_times(
        [0, 10, 20, 30, 40],
        Annotation("START", "step#5", 10),
        Annotation("END", "Optimizer.step#Adam.step", 15),
        Annotation("START", "step#6", 30),
        Annotation("START", "forward", 31),
    )
    steps = find_steps(trace)
    assert [steps.of(event) for event in range(5)] == [None, 5, 5, 6, 6]
    assert steps.range(5) == range(1, 3)
    assert steps.range(6) == range(3, 5)
    with pytest.raises(KeyError):
        steps.range(7)


def test_without_marks_there_are_no_steps() -> None:
    steps = find_steps(at_times([0, 1]))
    assert len(steps) == 0
    assert steps.of(1) is None


def test_hostile_numbers_are_no_steps() -> None:
    assert len(find_steps(at_times([0], Annotation("START", "step#" + "9" * 5000, 0)))) == 0
    assert len(find_steps(at_times([0], Annotation("START", "step#-1", 0)))) == 0
