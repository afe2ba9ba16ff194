"""Recordings that are valid and unlike any other: names, depths, sums and numbers at their limits."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_jobs import MIB, trace_of

import vram
from vram.analysis import merge, summary
from vram.analysis.groups import MOST_LEVELS, holders
from vram.analysis.memory import _Mapped, memory_at
from vram.analysis.places import Phases
from vram.replay import replay
from vram.replay.run import MOST_STREAMS
from vram.trace import Action, Annotation, Frame, Segment, Trace, TraceWriter

Command = Callable[..., tuple[int, str, str]]
ALLOC, REQUESTED, COMPLETED = Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED


def written(
    path: Path, events: list[tuple[int, int, int]], *, streams: int = 1, frames: tuple[Frame, ...] = ()
) -> Path:
    """A recording of (action, address, size), the stream of each its number modulo `streams`."""
    with TraceWriter(path) as writer:
        for stream in range(streams):
            writer.stream(stream)
        stack = writer.stack(frames)
        writer.append(
            {
                "action": array("B", [event[0] for event in events]),
                "stream": array("I", [number % streams for number in range(len(events))]),
                "address": array("Q", [event[1] for event in events]),
                "size": array("Q", [event[2] for event in events]),
                "time_us": array("q", range(len(events))),
                "stack": array("I", [stack]) * len(events),
            }
        )
    return path


def read(path: Path) -> Trace:
    return vram.open(path, trusted=True)


# ---- marks ------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["START", "END"]), st.sampled_from("abc"))))
def test_the_innermost_mark_is_the_last_that_is_open(marks: list[tuple[str, str]]) -> None:
    trace = trace_of(
        [(0, 8, 8)], annotations=tuple(Annotation(*mark, time) for time, mark in enumerate(marks))
    )
    phases = Phases(trace)
    still_open: list[str] = []
    for time, (stage, name) in enumerate(marks):
        if stage == "START":
            still_open.append(name)
        elif name in still_open:
            del still_open[len(still_open) - 1 - still_open[::-1].index(name)]
        assert phases.at(time) == (still_open[-1] if still_open else None)


# ---- mappings ---------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 12), st.integers(0, 1))))
def test_mapped_ranges_are_what_was_mapped_last(
    changes: list[tuple[bool, int, int, int]],
) -> None:
    mapped = _Mapped()
    owners: dict[int, int] = {}
    for adds, start, size, owner in changes:
        if adds:
            mapped.add(start, start + size, (owner, "small"))
            owners |= dict.fromkeys(range(start, start + size), owner)
        else:
            mapped.remove(start, start + size)
            for place in range(start, start + size):
                owners.pop(place, None)
    found = list(mapped.merged())
    assert {
        place: each.stream for each in found for place in range(each.address, each.address + each.total_size)
    } == owners
    assert all(_apart(one, two) for one, two in pairwise(found))


def _apart(one: Segment, two: Segment) -> bool:
    end = one.address + one.total_size
    return end < two.address or (end == two.address and one.stream != two.stream)


# ---- sums -------------------------------------------------------------------------------------------------

LARGEST = 1 << 62


def test_what_was_ever_allocated_may_exceed_64_bits(tmp_path: Path) -> None:
    again = [(action, 1 << 40, LARGEST) for action in (ALLOC, REQUESTED, COMPLETED)] * 8
    trace = read(written(tmp_path / "run.vtrace", [*again, (ALLOC, 1 << 40, 1000)]))
    assert sum(trace.size) > 1 << 64
    assert summary(trace)["bytes"].to_pylist() == [LARGEST]
    assert merge([trace]).ranks[0].peak_allocated == LARGEST


@pytest.mark.parametrize(
    "events",
    [
        [(ALLOC, 1 << 40, LARGEST), (ALLOC, 1 << 41, 1)],
        [(COMPLETED, 1 << 40, LARGEST), (COMPLETED, 1 << 41, 1)],
        [(Action.SEGMENT_ALLOC, 1 << 40, LARGEST), (Action.SEGMENT_ALLOC, 1 << 41, 1)],
        [(Action.SEGMENT_MAP, 0, LARGEST), (Action.SEGMENT_MAP, 0, 1)],
        [(Action.SEGMENT_UNMAP, 0, LARGEST), (Action.SEGMENT_MAP, 0, LARGEST), (Action.SEGMENT_MAP, 0, 1)],
    ],
)
def test_more_than_any_device_holds_is_refused(
    events: list[tuple[int, int, int]], tmp_path: Path, vram_command: Command
) -> None:
    path = written(tmp_path / "run.vtrace", events)
    for command in ("summary", "explain"):
        code, out, err = vram_command(command, str(path))
        assert (code, out) == (2, "") and "no device has more" in err and err.count("\n") == 1


def test_streams_may_have_any_handle(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "run.vtrace") as writer:
        writer.stream(2**64 - 1)
        row = {"action": "B", "stream": "I", "address": "Q", "size": "Q", "time_us": "q"}
        writer.append({name: array(code, [8 * (name in ("address", "size"))]) for name, code in row.items()})
    assert summary(read(tmp_path / "run.vtrace"), by="stream")["key"].to_pylist() == [2**64 - 1]


# ---- depths, names and numbers ----------------------------------------------------------------------------


def test_a_stack_of_thousands_of_calls_is_a_tree_of_hundreds(tmp_path: Path) -> None:
    frames = tuple(Frame(f"file{line}.py", line, "call") for line in range(5000))
    trace = read(written(tmp_path / "run.vtrace", [(ALLOC, 1 << 30, MIB)], frames=frames))
    tree = holders(trace, memory_at(trace, 0).blocks()).to_json()
    depth, names = 0, []
    while tree["children"]:
        (tree,) = tree["children"]
        names.append(tree["name"])
        depth += 1
    assert depth == MOST_LEVELS + 1 and tree["bytes"] == MIB
    assert names[0] == "file4999.py:4999 call" and names[-1] == f"({5000 - MOST_LEVELS} more calls)"


def test_a_name_that_is_not_text_is_shown_as_well_as_it_can_be(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff.vtrace"))
    with vram.Pool("host") as pool, vram.record(pool, path):
        pool.free(pool.malloc(1000))
    for trace in (vram.open(path), read(path)):
        assert trace.source.endswith("/bad�.vtrace") and trace.events
        assert merge([trace, trace], names=["a", "b"]).table
    assert merge([read(path)]).ranks[0].name == "bad�.vtrace"


def test_more_streams_than_a_pool_takes_are_refused_in_words(tmp_path: Path) -> None:
    events: list[Any] = [(ALLOC, (number + 1) << 12, 100) for number in range(MOST_STREAMS + 1)]
    trace = read(written(tmp_path / "run.vtrace", events, streams=len(events)))
    with pytest.raises(vram.ConfigError, match=f"{len(events)} streams.*at most {MOST_STREAMS}"):
        replay(trace)
    assert replay(trace, "torch").oom is None
