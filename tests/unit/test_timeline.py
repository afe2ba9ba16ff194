"""Memory over time: columns of allocations say what `memory_at` says, levels lose no peak, bands stack."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_jobs import KIB, MIB, Job, trace_of

from vram.analysis import Memories, memory_at
from vram.analysis.allocations import find_allocations, split_allocations
from vram.analysis.groups import compare_holders, holders
from vram.analysis.idle import _Held
from vram.analysis.timeline import OTHERS, Timeline
from vram.errors import ConfigError
from vram.trace import Action, Annotation, Frame, Trace, allocations

ALLOC, FREE, DONE = Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED
GROW, GIVE = Action.SEGMENT_ALLOC, Action.SEGMENT_FREE


def made_job(seed: int, events: int = 120) -> Job:
    """A job that allocates, frees, leaves frees pending, and empties its cache, at random."""
    chance = random.Random(seed)
    job = Job()
    live: list[int] = []
    pending: list[int] = []
    while len(job.events) < events:
        what = chance.random()
        if what < 0.5 or not live:
            size = chance.choice([300, 5 * KIB, 700 * KIB, 3 * MIB, 12 * MIB])
            live.append(job.alloc(size, line=chance.randint(1, 4), stream=chance.choice([0, 7])))
        elif what < 0.75:
            job.free(live.pop(chance.randrange(len(live))))
        elif what < 0.9:
            pending.append(live.pop(chance.randrange(len(live))))
            job.free(pending[-1], pending=True)
        elif pending:
            job.complete(pending.pop(0))
        else:
            job.empty_cache()
    return job


seeds = st.integers(0, 10_000)


@settings(max_examples=40)
@given(seeds, st.integers(0, 60))
def test_the_columns_say_of_every_event_what_its_memory_says(seed: int, since: int) -> None:
    trace = made_job(seed).trace(since)
    found = find_allocations(trace)
    allocations.find_allocations(trace).check()
    memories = Memories(trace)
    for event in range(-1, trace.events):
        held = {
            (block.address, block.requested_size, block.stream, block.stack, block.event, block.pending)
            for block in memories.at(event).blocks(pending=None)
        }
        there = (found.start <= event) & (found.completed > event)
        columns = (found.address, found.size, found.stream, found.stack, found.start, found.freed <= event)
        rows = zip(*(values[there].tolist() for values in columns), strict=True)
        assert set(rows) == held


def _completes_next(trace: Trace, block: Any, event: int) -> bool:
    """Nothing delayed its free: the very next event completes it, and it counts as free already."""
    mentions = [
        (trace.action[each], trace.address[each]) for each in range(event, min(event + 2, trace.events))
    ]
    return mentions == [(FREE, block.address), (DONE, block.address)]


@example(1430)  # ends with a free that is not completed
@settings(max_examples=40)
@given(seeds)
def test_series_are_sums_over_the_memory_of_each_event(seed: int) -> None:
    trace = made_job(seed).trace()
    timeline, memories = Timeline(trace), Memories(trace)
    for event in range(trace.events):
        at = {name: series.at(event) for name, series in timeline.series.items()}
        memory = memories.at(event)
        assert at["reserved"] == memory.reserved
        assert at["free"] == at["reserved"] - at["allocated"] - at["pending"]
        completing = {
            block.address for block in memory.blocks(pending=True) if _completes_next(trace, block, event)
        }
        idle = sum(
            segment.total_size
            for segment in memory.segments
            if all(block.address in completing for block in segment.blocks)
        )
        assert at["cached"] == idle
        assert at["pending"] == sum(
            max(512, -(-block.requested_size // 512) * 512)
            for block in memory.blocks(pending=True)
            if block.address not in completing
        )
        rounded = sum(max(512, -(-block.requested_size // 512) * 512) for block in memory.blocks())
        assert at["allocated"] == rounded
        assert sum(series.at(event) for series in timeline.split("stream").values()) == rounded
        assert sum(series.at(event) for series in timeline.split("line").values()) == rounded


@given(seeds, st.integers(1, 40), st.floats(0, 1), st.floats(0, 1), st.sampled_from(["time", "event"]))
def test_a_level_loses_no_peak(seed: int, columns: int, one: float, other: float, axis: str) -> None:
    timeline = Timeline(made_job(seed).trace())
    last = timeline.span(axis)[1]
    low, high = sorted((one * last, other * last))
    level = timeline.level(axis, low, high, columns)
    if low >= high:
        low, high = 0, last
    for name, series in timeline.series.items():
        seen = level.values[name].tolist()
        assert len(seen) == len(level.x)
        inside = [
            event
            for event in range(timeline.trace.events)
            if low <= (event if axis == "event" else timeline.trace.time_us[event]) < high
        ]
        first = inside[0] if inside else timeline.event_at(axis, low) + 1
        known = [series.at(first - 1), *(series.at(event) for event in inside)]
        assert (min(seen), max(seen)) == (min(known), max(known))
    assert (level.x[1:] >= level.x[:-1]).all()
    assert len(level.x) <= max(2 * columns, 2) + 2


def test_few_changes_are_drawn_as_they_are() -> None:
    trace = trace_of([(GROW, 0, 4096), (ALLOC, 0, 512), (ALLOC, 512, 1024), (FREE, 0, 512), (DONE, 0, 512)])
    level = Timeline(trace).level("event", 0, 5, 100)
    assert level.exact
    assert level.x.tolist() == [0, 0, 1, 2, 3, 5]
    assert level.values["allocated"].tolist() == [0, 0, 512, 1536, 1024, 1024]
    assert level.values["reserved"].tolist() == [0, 4096, 4096, 4096, 4096, 4096]
    assert set(level.values["pending"].tolist()) == {0}, "nothing delayed the free"


def test_a_free_that_was_delayed_is_pending() -> None:
    trace = trace_of([(ALLOC, 0, 512), (FREE, 0, 512), (ALLOC, 512, 512), (DONE, 0, 512)])
    pending = Timeline(trace).series["pending"]
    assert [pending.at(event) for event in range(4)] == [0, 512, 512, 0]


def test_an_address_given_out_again_ends_what_was_there() -> None:
    found = find_allocations(trace_of([(ALLOC, 0, 512), (ALLOC, 0, 1024), (FREE, 0, 1024), (FREE, 0, 1024)]))
    assert found.freed.tolist() == [1, 2]
    assert found.completed.tolist() == [1, 4]


def test_a_recording_without_events_has_what_is_left() -> None:
    job = Job()
    job.alloc(3 * MIB)
    timeline = Timeline(job.trace(since=len(job.events)))
    assert timeline.series["allocated"].before == 3 * MIB
    assert timeline.series["reserved"].before == 20 * MIB
    for axis in ("time", "event"):
        assert timeline.level(axis, 0, 1, 10).values["allocated"].tolist() == [3 * MIB] * 2
        assert len(timeline.bands(axis, 0, 1)) <= 1


def test_unknown_axis_is_refused() -> None:
    with pytest.raises(ConfigError, match="time and event"):
        Timeline(trace_of([(ALLOC, 0, 1)])).level("colour", 0, 1, 10)


# ---- bands -------------------------------------------------------------------------------------------------


def heights(timeline: Timeline, bands: list[Any], x: float) -> list[tuple[int, int]]:
    """(bottom, top) of each band at x."""
    found = []
    for band in bands:
        xs, ys = band.path[0::2], band.path[1::2]
        if xs and xs[0] <= x < band.end:
            place = max(index for index, start in enumerate(xs) if start <= x)
            found.append((ys[place], ys[place] + int(timeline.allocations.held[band.number])))
    return sorted(found)


@settings(max_examples=40)
@given(seeds)
def test_bands_stack_without_gap_up_to_what_is_allocated(seed: int) -> None:
    timeline = Timeline(made_job(seed).trace())
    last = timeline.trace.events
    bands = timeline.bands("event", 0, last, most=10_000, columns=10**9, vertices=10**9)
    for event in range(last):
        edges = heights(timeline, bands, event + 0.5)
        assert [low for low, _ in edges] == [0, *(high for _, high in edges[:-1])][: len(edges)]
        assert (edges[-1][1] if edges else 0) == timeline.series["allocated"].at(event)


def test_bands_are_the_ones_that_matter_and_no_more_than_asked() -> None:
    trace = made_job(3, 2000).trace()
    timeline = Timeline(trace)
    few = timeline.bands("event", 0, trace.events, most=5)
    assert len(few) == 5
    assert min(int(timeline.allocations.held[band.number]) for band in few) >= 3 * MIB
    bounded = timeline.bands("event", 0, trace.events, most=1000, vertices=200)
    assert 0 < sum(len(band.path) // 2 for band in bounded) <= 200


# ---- groups ------------------------------------------------------------------------------------------------


def test_tags_come_before_phases_and_others_are_one() -> None:
    events = [(ALLOC, 512 * number, 512) for number in range(16)]
    marks = (Annotation("START", "warm-up", 0), Annotation("END", "warm-up", 2))
    trace = trace_of(events, annotations=marks, tags=("", "weights"))
    trace.tag[0] = 1
    split = split_allocations(trace, find_allocations(trace), "tag")
    labels = [split.labels[group] for group in split.group]
    assert labels[:3] == ["weights", "warm-up", "(no tag)"]
    lines = tuple(Frame("a.py", number, "f") for number in range(16))
    many = replace(trace, frames=lines, stacks=((), *((number,) for number in range(16))))
    many.stack[:] = type(many.stack)("I", range(1, 17))
    found = Timeline(many).split("line")
    assert list(found)[-1] == OTHERS
    assert sum(series.most for series in found.values()) == 16 * 512


def stacked(*sizes: int) -> Trace:
    frames = (Frame("main.py", 1, "main"), Frame("a.py", 2, "a"), Frame("b.py", 3, "b"))
    events = [(ALLOC, 4096 * number, size, number % 2 + 1) for number, size in enumerate(sizes)]
    return trace_of(events, frames=frames, stacks=((), (1, 0), (2, 0)))


def test_a_tree_has_the_bytes_of_all_below() -> None:
    trace = stacked(512, 1024, 2048)
    root = holders(trace, memory_at(trace, 2).blocks())
    assert root.bytes == 3584
    main = root.children["main.py:1 main"]
    assert main.bytes == 3584 and main.blocks == 3
    assert {name: (node.bytes, node.stacks) for name, node in main.children.items()} == {
        "a.py:2 a": (2560, {1}),
        "b.py:3 b": (1024, {2}),
    }
    by_module = holders(trace, memory_at(trace, 2).blocks(), "module")
    assert {name: node.bytes for name, node in by_module.children.items()} == {"a": 2560, "b": 1024}
    pruned = root.to_json(least=2000)
    assert [child["name"] for child in pruned["children"][0]["children"]] == ["a.py:2 a", "(smaller ones)"]
    with pytest.raises(ConfigError, match="stack, module"):
        holders(trace, [], "weekday")


def test_two_trees_differ_by_what_each_holds() -> None:
    trace = stacked(512, 1024, 2048)
    early, late = (holders(trace, memory_at(trace, event).blocks()) for event in (1, 2))
    both = compare_holders(early, late)
    assert (both.before, both.bytes) == (1536, 3584)
    inner = both.children["main.py:1 main"].children
    assert {name: (node.before, node.bytes) for name, node in inner.items()} == {
        "a.py:2 a": (512, 2560),
        "b.py:3 b": (1024, 1024),
    }
    gone = compare_holders(late, holders(trace, []))
    assert (gone.before, gone.bytes) == (3584, 0)
    assert gone.children["main.py:1 main"].before == 3584


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(0, 3))), st.integers(0, 40))
def test_the_last_place_that_is_held_is_found(changes: list[tuple[bool, int, int]], wanted: int) -> None:
    class Small(_Held):
        STRIDE = 4

    held, truth = Small(41), set[tuple[int, int]]()
    for number, (adds, place, back) in enumerate(changes):
        if adds:
            held.add(place, number)
            truth.add((place, number))
        elif truth:
            gone = sorted(truth)[-1 - back % len(truth)]
            held.remove(*gone)
            truth.remove(gone)
        assert held.last(wanted) == max((each for each in truth if each[0] <= wanted), default=(0, -1))[1]
