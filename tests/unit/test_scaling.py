"""Four times as many entries of any kind cost at most five times as much: lines of Python, or processor time.

A file of unknown origin may have any number of anything, and the process that works on it has limits in
proportion to its entries.
"""

from __future__ import annotations

import io
import json
import sys
import time
from array import array
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

import pytest
from made_jobs import MIB, trace_of

from vram.analysis import difference, explain, find_leaks, merge, summary
from vram.replay import POLICIES, replay
from vram.trace import Action, Annotation, Block, BlockState, Frame, Lifetimes, Segment, Trace, lifetimes
from vram.trace.convert import FORMATS
from vram.trace.model import COLUMNS
from vram.trace.notes import pack, unpack
from vram.web.recordings import Recording

ENTRIES = 40
MORE, MOST_COST = 4, 5
BASE = 1 << 40
Make = Callable[[int], Trace]


# ---- recordings of one kind of entry -----------------------------------------------------------------------

ALLOC, REQUESTED, COMPLETED = Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED
ONE = (ALLOC, BASE, 512)


def each(*actions: Action, apart: int = 2 * MIB, size: int = 512, down: bool = False) -> Make:
    """So many times these events, at addresses that go up or down, and an allocation."""

    def make(count: int) -> Trace:
        places = range(count, 0, -1) if down else range(count)
        return trace_of([(action, BASE + at * apart, size) for at in places for action in actions] + [ONE])

    return make


def both(first: Action, second: Action, **more: Any) -> Make:
    """All of the first action, then all of the second."""

    def make(count: int) -> Trace:
        events = [(action, BASE + at * 512, 512) for action in (first, second) for at in range(count)]
        return trace_of(events, **more)

    return make


def failed(*actions: Action) -> Make:
    """The same events again and again, then a request that fails."""

    def make(count: int) -> Trace:
        events = [(action, BASE + at * 20 * MIB, 15 * MIB) for at in range(count) for action in actions]
        return trace_of([*events, (Action.OOM, MIB, 64 * MIB)])

    return make


def ending(
    apart: int,
    size: int = 2 * MIB,
    state: BlockState = BlockState.LIVE,
    *,
    expandable: bool = False,
    blocks: int = 1,
) -> Make:
    """Segments at the end, each with a block, which overlap if they are less apart than their size."""

    def make(count: int) -> Trace:
        starts = [BASE + at * apart for at in range(count)]
        segments = [
            Segment(at, size, 0, "large", expandable, blocks=(Block(at, 512, 512, state),) * blocks)
            for at in starts
        ]
        return trace_of([ONE], segments=tuple(segments))

    return make


def blocks_of_one_segment(count: int) -> Trace:
    blocks = tuple(Block(BASE + at * 512, 512, 512, BlockState.LIVE) for at in range(count))
    return trace_of([(ALLOC, 512, 512)], segments=(Segment(BASE, count * 512, 0, "large", blocks=blocks),))


def marks(*stages: str, name: str = "a{}", then: str = "", events: int = 1) -> Make:
    """Annotations, each with its own name unless told otherwise, and as many that end them."""

    def make(count: int) -> Trace:
        made = [Annotation(stage, name.format(at), at) for at in range(count) for stage in stages]
        made += [Annotation(then, name.format(at), count) for at in range(count) if then]
        allocations = [(ALLOC, BASE + at * 512, 512) for at in range(count if events > 1 else 1)]
        return trace_of(allocations, annotations=tuple(made))

    return make


def stacks(frames: Callable[[int], list[tuple[str, int]]]) -> Make:
    """An allocation for each stack, and a stack for each number."""

    def make(count: int) -> Trace:
        numbers: dict[Frame, int] = {}
        found = [
            tuple(numbers.setdefault(Frame(file, line, "f"), len(numbers)) for file, line in frames(at))
            for at in range(count)
        ]
        events = [(ALLOC, BASE + at * 512, 512, at + 1) for at in range(count)]
        return trace_of(events, frames=tuple(numbers), stacks=((), *found))

    return make


def one_deep_stack(count: int) -> Trace:
    frames = tuple(Frame("/torch/x.py", line, "f") for line in range(count))
    short = [(0, min(1, at)) for at in range(count)]
    events = [(ALLOC, BASE + at * 512, 512, at + 1) for at in range(count + 1)]
    return trace_of(events, frames=frames, stacks=((), *short, (0, *range(count))))


def tags(count: int) -> Trace:
    names = ("", *(f"tag {at}" for at in range(count)))
    tag = array("I", range(1, count + 1))
    return trace_of([(ALLOC, BASE + at * 512, 512) for at in range(count)], tag=tag, tags=names)


def streams(count: int) -> Trace:
    events = [(ALLOC, BASE + at * 512, 512) for at in range(count)]
    return trace_of(events, stream=array("I", range(count)), streams=tuple(range(count)))


SPILLED = {"frames": (Frame("vram", 0, "spill"),), "stacks": ((), (0,))}
KINDS: dict[str, Make] = {
    "allocations": each(ALLOC, apart=512),
    "allocations, downwards": each(ALLOC, apart=512, down=True),
    "allocations at one address": each(ALLOC, apart=0),
    "allocations and frees": each(ALLOC, REQUESTED, COMPLETED),
    "frees without an allocation": each(REQUESTED, apart=512),
    "completed frees without an allocation": each(COMPLETED, apart=512),
    "pending frees": both(ALLOC, REQUESTED),
    "segments": each(Action.SEGMENT_ALLOC, size=2 * MIB),
    "segments with an allocation": each(Action.SEGMENT_ALLOC, ALLOC, size=MIB),
    "segments at one address": each(Action.SEGMENT_ALLOC, apart=0),
    "segments that overlap": each(Action.SEGMENT_ALLOC, ALLOC, apart=512, size=64 * MIB),
    "segments that overlap, downwards": each(
        Action.SEGMENT_ALLOC, ALLOC, apart=512, size=64 * MIB, down=True
    ),
    "released segments": each(Action.SEGMENT_FREE),
    "segments and their release": each(Action.SEGMENT_ALLOC, Action.SEGMENT_FREE),
    "mappings": each(Action.SEGMENT_MAP, size=MIB),
    "mappings, downwards": each(Action.SEGMENT_MAP, size=MIB, down=True),
    "mappings that overlap": each(Action.SEGMENT_MAP, ALLOC, apart=512, size=64 * MIB),
    "unmappings": each(Action.SEGMENT_UNMAP, size=MIB),
    "growth of a vram pool": lambda count: trace_of([(Action.SEGMENT_MAP, 0, 2 * MIB)] * count + [ONE]),
    "snapshots": each(Action.SNAPSHOT),
    "marks of the user": each(Action.USER_DEFINED),
    "moves to the host": both(ALLOC, Action.USER_DEFINED, **SPILLED),
    "failures": each(Action.OOM, size=64 * MIB),
    "failures and allocations": each(ALLOC, Action.OOM),
    "a failure after segments": failed(Action.SEGMENT_ALLOC, ALLOC),
    "a failure after mappings": failed(Action.SEGMENT_MAP, ALLOC),
    "a failure after releases": failed(Action.SEGMENT_ALLOC, ALLOC, COMPLETED, Action.SEGMENT_FREE),
    "segments at the end": ending(2 * MIB),
    "segments at the end, at one address": ending(0),
    "segments at the end that overlap": ending(512, 64 * MIB),
    "segments at the end with pending blocks": ending(2 * MIB, state=BlockState.PENDING),
    "segments at the end without blocks": ending(2 * MIB, blocks=0),
    "expandable segments at the end": ending(2 * MIB, expandable=True),
    "expandable segments at the end that overlap": ending(512, 64 * MIB, expandable=True),
    "blocks of one segment": blocks_of_one_segment,
    "annotations that begin": marks("START"),
    "annotations that end": marks("START", "END"),
    "nested annotations": marks("START", then="END"),
    "nested annotations of one name": marks("START", name="a", then="END"),
    "steps": marks("START", name="step#{}", events=2),
    "optimizer steps": marks("END", name="Optimizer.step#SGD", events=2),
    "optimizers": marks("END", name="Optimizer.step#{}", events=2),
    "tags": tags,
    "streams": streams,
    "stacks": stacks(lambda at: [(f"file{at}.py", at)]),
    "stacks with one label": stacks(lambda at: [("train.py", 1), ("/torch/x.py", at), ("/torch/y.py", 0)]),
    "lines of one function": stacks(lambda at: [("train.py", at)]),
    "a deep stack": one_deep_stack,
}


# ---- what is done with them --------------------------------------------------------------------------------


def read(trace: Trace) -> None:
    unpack(json.loads(json.dumps(pack(trace))), {name: getattr(trace, name) for name in COLUMNS}, "")


def show(trace: Trace) -> None:
    """What the page asks for first."""
    recording = Recording(trace)
    recording.summary()
    recording.events(0, 500)
    recording.bands("event", 0, 1e9, 1000)
    start = recording.about()["start"]
    for by in ("stack", "tag"):
        recording.level("event", 0, 1e9, 100, by)
        recording.holders(start, by)
    recording.moment(start)


def convert(trace: Trace) -> None:
    for each_format in FORMATS.values():
        each_format.write(trace, io.BytesIO())


WORK: dict[str, Callable[[Trace], object]] = {
    "read": read,
    "explain": explain,
    "summary by step": lambda trace: summary(trace, "step"),
    "leaks": find_leaks,
    "merge": lambda trace: merge([trace, trace], names=["a", "b"]),
    "diff by line": lambda trace: difference(trace, trace),
    "convert": convert,
    "page": show,
}


def steps(work: Callable[[Trace], object], trace: Trace) -> int:
    """Lines of Python that `work` runs."""
    count = 0

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += 1
        return line

    before = sys.gettrace()
    sys.settrace(line)
    try:
        work(trace)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("kind", KINDS)
def test_steps_grow_no_faster_than_the_entries_of_a_kind(kind: str) -> None:
    few, many = KINDS[kind](ENTRIES), KINDS[kind](MORE * ENTRIES)
    for name, work in WORK.items():
        steps(work, KINDS[kind](1))  # imports, and what is computed once
        cost, more = steps(work, few), steps(work, many)
        assert more <= MOST_COST * cost, f"{name}: {cost} steps, then {more}"


def test_quadratic_work_would_be_found() -> None:
    def compare_all(trace: Trace) -> int:
        return sum(one == other for one in trace.address for other in trace.address)

    few, many = (each(ALLOC)(count) for count in (ENTRIES, MORE * ENTRIES))
    assert steps(compare_all, many) > 2 * MOST_COST * steps(compare_all, few)


PROGRAMS = {
    "allocations": 5000,
    "allocations at one address": 5000,
    "allocations and frees": 2500,
    "completed frees without an allocation": 5000,
    "pending frees": 2500,
    "a failure after segments": 1000,
}
REPEATS = 4
SCANS = {("rmm-arena", "a failure after segments")}
"""RMM looks at one superblock after the other, and so does its policy."""


@cache
def programs(kind: str) -> tuple[Lifetimes, Lifetimes]:
    return lifetimes(KINDS[kind](PROGRAMS[kind])), lifetimes(KINDS[kind](MORE * PROGRAMS[kind]))


def seconds(program: Lifetimes, policy: str, times: int) -> float:
    """Processor time of one replay. The clock may have steps of 4 ms, so several are measured together."""
    begun = time.process_time()
    for _ in range(times):
        replay(program, policy)
    return (time.process_time() - begun) / times


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("policy", POLICIES)
def test_replays_cost_no_more_than_their_operations(policy: str, kind: str) -> None:
    pytest.importorskip("vram._native")
    few, many = programs(kind)
    cost = more = float("inf")
    for _ in range(1 if (policy, kind) in SCANS else 10):  # a busy machine may disturb some
        cost = min(cost, seconds(few, policy, MORE * REPEATS))
        more = min(more, seconds(many, policy, REPEATS))
        if more <= MOST_COST * cost:
            return
    assert (policy, kind) in SCANS, f"{cost:.4f} s, then {more:.4f} s"
