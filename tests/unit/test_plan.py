"""`vram.plan`: no two live buffers share a byte, no plan is below the bound, and what can be met is met."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vram
from vram.lifetimes.plan import Row
from vram.trace import Action, find_steps, lifetimes, open_trace, peak_allocated

TRACES = Path(__file__).resolve().parents[2] / "traces"
TRAINING = ["gpt2_train", "llama_varlen_ckpt", "resnet_multiscale", "multistream_prefetch"]


@st.composite
def rows(draw: st.DrawFn, most: int, sizes: int) -> list[Row]:
    spans = draw(st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 8)), max_size=most))
    return [
        (index, lower, lower + length, draw(st.integers(0, sizes)))
        for index, (lower, length) in enumerate(spans)
    ]


def meet(a: Row, b: Row) -> bool:
    return a[1] < b[2] and b[1] < a[2]


def overlaps(buffers: list[Row], offsets: dict[object, int]) -> list[tuple[Row, Row]]:
    """Pairs that share a byte at some time, found without any of the planner's cleverness."""
    return [
        (a, b)
        for i, a in enumerate(buffers)
        for b in buffers[:i]
        if meet(a, b) and max(offsets[a[0]], offsets[b[0]]) < min(offsets[a[0]] + a[3], offsets[b[0]] + b[3])
    ]


def most_live(buffers: list[Row], align: int = 1) -> int:
    return max(
        (
            sum(-(-b[3] // align) * align for b in buffers if b[1] <= moment < b[2])
            for _, moment, _, _ in buffers
        ),
        default=0,
    )


def least_peak(buffers: list[Row]) -> int:
    """The best there is: every plan, pushed down, is some order in which each goes as low as it can."""
    return min(map(_stacked, permutations(b for b in buffers if b[3])))


def _stacked(order: tuple[Row, ...]) -> int:
    offsets: dict[object, int] = {}
    for index, buffer in enumerate(order):
        below = sorted((offsets[b[0]], offsets[b[0]] + b[3]) for b in order[:index] if meet(b, buffer))
        offset = 0
        for start, end in below:
            if start - offset >= buffer[3]:
                break
            offset = max(offset, end)
        offsets[buffer[0]] = offset
    return max((offsets[b[0]] + b[3] for b in order), default=0)


def perfect_packing(count: int, seed: int, capacity: int = 1 << 20) -> list[Row]:
    """A rectangle of capacity × time cut into pieces: they fit into the capacity without a gap."""
    chance = random.Random(seed)
    pieces = [(0, 1 << 20, 0, capacity)]
    while len(pieces) < count:
        index = chance.randrange(len(pieces))
        left, right, low, high = pieces[index]
        if right - left < 4 or high - low < 4:
            continue
        if chance.random() < 0.5:
            cut = chance.randrange(left + 1, right)
            pieces[index : index + 1] = [(left, cut, low, high), (cut, right, low, high)]
        else:
            cut = chance.randrange(low + 1, high)
            pieces[index : index + 1] = [(left, right, low, cut), (left, right, cut, high)]
    chance.shuffle(pieces)
    return [(index, left, right, high - low) for index, (left, right, low, high) in enumerate(pieces)]


# --- what every plan keeps ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(rows(most=30, sizes=3000), st.sampled_from([1, 3, 512]))
def test_live_buffers_share_no_byte_and_the_bound_is_kept(buffers: list[Row], align: int) -> None:
    plan = vram.plan(buffers, align=align, time_limit=0.01)
    assert overlaps(buffers, plan.offsets) == []
    assert all(offset % align == 0 for offset in plan.offsets.values())
    assert plan.lower_bound == most_live(buffers, align) <= plan.peak
    assert all(plan.offsets[b[0]] + b[3] <= plan.peak for b in buffers)
    plan.check()


@settings(deadline=None, max_examples=100)
@given(rows(most=6, sizes=9))
def test_few_buffers_are_planned_as_well_as_can_be(buffers: list[Row]) -> None:
    plan = vram.plan(buffers, align=1, time_limit=5)
    assert plan.peak == least_peak(buffers)
    assert plan.proven


@settings(deadline=None, max_examples=100)
@given(rows(most=6, sizes=9), st.integers(1, 40))
def test_a_capacity_is_met_if_and_only_if_it_can_be(buffers: list[Row], capacity: int) -> None:
    plan = vram.plan(buffers, align=1, capacity=capacity, time_limit=5)
    assert plan.feasible == (least_peak(buffers) <= capacity) == (plan.peak <= capacity)


@pytest.mark.parametrize("count", [2, 60, 120])
@pytest.mark.parametrize("seed", [1, 2])
def test_what_was_cut_from_a_rectangle_fits_into_it_again(count: int, seed: int) -> None:
    plan = vram.plan(perfect_packing(count, seed), align=1, capacity=1 << 20)
    plan.check()
    assert plan.feasible
    assert plan.ratio == 1


def test_many_buffers_are_planned_close_to_the_bound() -> None:
    chance = random.Random(1)
    starts = [chance.randrange(20_000) for _ in range(20_000)]
    buffers = [
        (i, at, at + chance.randrange(1, 50), chance.randrange(1, 1 << 20)) for i, at in enumerate(starts)
    ]
    bound = vram.plan(buffers, time_limit=0).lower_bound
    plan = vram.plan(buffers, time_limit=60, capacity=int(bound * 1.03))
    plan.check()
    assert plan.ratio <= 1.03


def test_the_same_input_gives_the_same_plan() -> None:
    buffers = perfect_packing(80, seed=5)
    first, second = (vram.plan(buffers, align=1, capacity=1 << 20) for _ in range(2))
    assert first.offsets == second.offsets


# --- what it takes ------------------------------------------------------------------------------------------


def test_columns_are_the_same_as_rows() -> None:
    buffers = perfect_packing(20, seed=3)
    names = ("id", "lower", "upper", "size")
    columns = {name: [row[index] for row in buffers] for index, name in enumerate(names)}
    assert vram.plan(columns, align=1).offsets == vram.plan(buffers, align=1).offsets
    del columns["id"]
    assert set(vram.plan(columns).offsets) == set(range(20))


def test_nothing_needs_nothing() -> None:
    plan = vram.plan([])
    assert (plan.peak, plan.lower_bound, plan.ratio, plan.feasible) == (0, 0, 1.0, True)
    plan.check()


@pytest.mark.parametrize(
    ("buffers", "options", "message"),
    [
        ([("a", 3, 3, 1)], {}, "'a' is live from 3 to 3"),
        ([("a", 0, 1)], {}, "is not a buffer"),
        ([("a", 0, 1, -1)], {}, "is not a buffer"),
        ([("a", 0, 1, 1), ("a", 1, 2, 1)], {}, "1 different ids"),
        ([("a", 0, 1, 2**63)], {}, "4 EiB"),
        ([("a", 0, 1, 1)], {"align": 0}, "align is 0"),
        ([("a", 0, 1, 1)], {"time_limit": -1}, "time_limit is -1"),
        ([("a", 0, 1, 1)], {"between": range(3)}, "only for a trace"),
        ({"lower": [1], "upper": [2]}, {}, "column 'size' is missing"),
        ({"lower": [1], "upper": [2, 3], "size": [4]}, {}, "columns differ in length: 1, 1, 2 and 1 entries"),
    ],
)
def test_what_is_no_plan_says_why(buffers: list[Row], options: dict[str, object], message: str) -> None:
    with pytest.raises(vram.ConfigError, match=message):
        vram.plan(buffers, **options)  # type: ignore[arg-type]


# --- traces -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAINING)
def test_a_training_step_needs_what_is_live_and_hardly_more(name: str) -> None:
    trace = open_trace(TRACES / f"{name}.pickle.xz")
    plan = vram.plan(trace, between=find_steps(trace).range(3), time_limit=30)
    plan.check()
    assert plan.ratio <= 1.002


def test_a_whole_trace_needs_what_it_allocates() -> None:
    trace = open_trace(TRACES / "gpt2_train.pickle.xz")
    program = lifetimes(trace)
    plan = vram.plan(program)
    assert plan.lower_bound == peak_allocated(program)
    assert vram.plan(trace).offsets == plan.offsets


def test_memory_that_another_stream_still_uses_is_not_planned_for_others() -> None:
    trace = open_trace(TRACES / "multistream_prefetch.pickle.xz")
    program = lifetimes(trace)
    delayed = {
        identity: completed
        for identity, completed in zip(program.id, program.completed_event, strict=True)
        if completed >= 0
    }
    plan = vram.plan(program)
    ends = dict(zip(plan.ids, plan.upper, strict=True))
    assert delayed
    assert all(
        ends[i] >= len(program) or program.event[ends[i]] >= at for i, at in delayed.items() if i in ends
    )


def test_what_is_carried_into_a_step_is_planned_for_all_of_it() -> None:
    trace = open_trace(TRACES / "gpt2_train.pickle.xz")
    events = find_steps(trace).range(3)
    plan = vram.plan(trace, between=events)
    begin, end = min(plan.lower), max(plan.upper)
    assert end - begin == sum(
        action in (Action.ALLOC, Action.FREE_REQUESTED) for action in trace.action[events.start : events.stop]
    )
    assert any(span == (begin, end) for span in zip(plan.lower, plan.upper, strict=True))


# --- what it says -------------------------------------------------------------------------------------------


@pytest.fixture
def small() -> vram.Plan:
    return vram.plan([("first & last", 0, 4, 512), ("b", 2, 6, 1024), ("c", 4, 6, 512)])


def test_the_picture_has_a_rectangle_for_each_buffer(small: vram.Plan) -> None:
    picture = ElementTree.fromstring(small.picture())
    titles = [each.text or "" for each in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}rect"))) == 3
    assert any(title.startswith("first & last: 512 B") for title in titles)


@pytest.mark.parametrize("offsets", [(0, 0, 0), (0, 256, 1024), (0, 512, 4096), (0, 1024, 512 * 3)])
def test_check_finds_what_is_wrong(small: vram.Plan, offsets: tuple[int, ...]) -> None:
    small.check()
    with pytest.raises(AssertionError, match=r"overlap|outside"):
        replace(small, offset=array("Q", offsets)).check()


def test_a_plan_says_what_it_is(small: vram.Plan) -> None:
    assert small.to_json().keys() >= {"peak", "lower_bound", "ratio", "seconds", "method", "feasible"}
    assert "3 buffers" in repr(small)
