"""Questions to recordings: what was held when, the verdict on an out-of-memory, who holds, what grows."""

from __future__ import annotations

import importlib
import random
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_jobs import GIB, MIB, Job, trace_of

from vram.analysis import (
    Explanation,
    difference,
    explain,
    find_leaks,
    find_moment,
    memory_at,
    merge,
    summary,
    write_table,
)
from vram.analysis.explanation import Remedy
from vram.analysis.groups import holders, stack_labels
from vram.analysis.idle import _segment_of
from vram.analysis.places import place_of
from vram.core.verdict import VERDICTS, Account, judge_limits, judge_moment, judge_request
from vram.errors import ConfigError
from vram.sizes import format_size, parse_size
from vram.trace import (
    Action,
    Block,
    BlockState,
    Frame,
    Segment,
    Trace,
    lifetimes,
    open_trace,
    peak_allocated,
)
from vram.trace.lifetimes import intended

TRACES = Path(__file__).resolve().parents[2] / "traces"


@cache
def recorded(name: str) -> Trace:
    return open_trace(TRACES / f"{name}.pickle.xz", trusted=True)


def random_job(seed: int, events: int = 120) -> Job:
    """A program that allocates and frees without pattern, some of it pending, some of it given back."""
    choose = random.Random(seed)
    job, live, pending = Job(), [], []
    while len(job.events) < events:
        what = choose.random()
        if what < 0.5:
            size = choose.choice([700, 90_000, 3 * MIB, 11 * MIB + 300, 12 * MIB, 40 * MIB])
            live.append(job.alloc(size, line=choose.randrange(5), stream=choose.choice([0, 0, 7])))
        elif what < 0.85 and live:
            address = live.pop(choose.randrange(len(live)))
            job.free(address, pending=what > 0.78)
            if what > 0.78:
                pending.append(address)
        elif what < 0.97 and pending:
            job.complete(pending.pop(0))
        elif what >= 0.97:
            job.empty_cache()
    return job


def in_use(trace: Trace, event: int) -> set[tuple[int, ...]]:
    blocks = memory_at(trace, event).blocks(pending=None)
    return {(block.address, block.size, block.requested_size, block.pending) for block in blocks}


def segments(trace: Trace, event: int) -> set[tuple[int, int]]:
    return {(segment.address, segment.total_size) for segment in memory_at(trace, event).segments}


# --- what was held ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_the_memory_at_every_event_is_what_was_there(seed: int) -> None:
    job = random_job(seed)
    trace = job.trace()
    for event, (blocks, held) in enumerate(job.truth):
        assert in_use(trace, event) == blocks
        assert segments(trace, event) == held


@pytest.mark.parametrize("seed", range(4))
def test_a_recording_without_its_beginning_tells_the_same(seed: int) -> None:
    job = random_job(seed)
    lost = 50
    trace = job.trace(since=lost)
    for event in range(trace.events):
        blocks, held = job.truth[lost + event]
        assert {(at, asked, wait) for at, _, asked, wait in in_use(trace, event)} == {
            (at, asked, wait) for at, _, asked, wait in blocks
        }
        assert segments(trace, event) == held


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("gpt2_train", 12984),
        ("llama_varlen_ckpt", 12116),
        ("resnet_multiscale", 6550),
        ("multistream_prefetch", 2001),
    ],
)
def test_the_peak_is_the_one_measured_in_the_real_run(name: str, mib: int) -> None:
    trace = recorded(name)
    memory = memory_at(trace, find_moment(trace, "peak").event)
    assert memory.allocated / MIB == pytest.approx(mib, abs=0.6)


def test_the_parts_of_a_recording_that_lost_its_beginning_still_sum() -> None:
    found = explain(recorded("llm_serve"))
    assert (found.moment.kind, found.account.reserved) == ("peak", 2100 * MIB)
    assert found.account.allocated / MIB == pytest.approx(1534, abs=1)


def expandable_job() -> Trace:
    """40 MiB mapped, of which the first 20 are unmapped before the end; the last event maps 20 more."""
    base, page = 0x7F00_0000_0000, 20 * MIB
    rows = [
        (Action.SEGMENT_MAP, base, 2 * page),
        (Action.ALLOC, base + page, page),
        (Action.SEGMENT_UNMAP, base, page),
        (Action.SEGMENT_MAP, base + 2 * page, page),
    ]
    block = Block(base + page, page, page, BlockState.LIVE)
    final = Segment(base + page, 2 * page, 0, "large", is_expandable=True, blocks=(block,))
    return trace_of(rows, segments=(final,))


@pytest.mark.parametrize("with_end", [True, False])
def test_expandable_segments_are_their_mapped_pages(with_end: bool) -> None:
    trace = expandable_job()
    if not with_end:
        trace = replace(trace, segments=())
    page = 20 * MIB
    assert [memory_at(trace, event).reserved // page for event in range(4)] == [2, 2, 1, 2]
    memory = memory_at(trace, 1)
    assert (memory.allocated, memory.cached, len(memory.segments)) == (page, page, 1)


# --- the rule -----------------------------------------------------------------------------------------------

FULL = Account(demand=80)


@pytest.mark.parametrize(
    ("account", "verdict"),
    [
        (FULL, "true-demand"),
        (replace(FULL, cached=10), "cached"),
        (replace(FULL, pending=10), "pending"),
        (replace(FULL, fragmentation=10), "fragmentation"),
        (replace(FULL, rounding=10), "rounding"),
        (replace(FULL, foreign=10), "foreign"),
        (replace(FULL, fragmentation=4, unused=6), "fragmentation"),
        (replace(FULL, fragmentation=9), "true-demand"),
        # several suffice: the cheapest to give back
        (replace(FULL, fragmentation=50, cached=10, foreign=99), "cached"),
        # none suffices alone: the largest of those that do together
        (replace(FULL, fragmentation=4, pending=6), "pending"),
        (replace(FULL, fragmentation=4, pending=3, foreign=5), "foreign"),
        # an emptier device does not help beyond the limit
        (replace(FULL, foreign=50, limit=80), "true-demand"),
        (replace(FULL, foreign=50, limit=90), "foreign"),
        (replace(FULL, withheld=50, limit=80), "true-demand"),
    ],
)
def test_the_verdict_is_the_first_memory_that_would_have_served(account: Account, verdict: str) -> None:
    assert judge_request(account, 10) == verdict
    assert verdict in VERDICTS
    assert sum(account.parts().values()) == account.device


def test_rounding_of_the_request_itself_counts() -> None:
    assert judge_request(replace(FULL, unused=10), 10, needed=12) == "rounding"


def test_a_moment_is_what_its_reserved_memory_mostly_is() -> None:
    assert judge_moment(Account(demand=95, fragmentation=5)) == "true-demand"
    assert judge_moment(Account(demand=60, fragmentation=15, cached=25)) == "cached"


# --- verdicts on recordings ---------------------------------------------------------------------------------


def test_the_recorded_fragmentation_is_found_with_its_bytes() -> None:
    found = explain(recorded("oom_llama_varlen_ckpt_13400"))
    assert (found.verdict, found.moment.step) == ("fragmentation", 8)
    assert found.request is not None and found.request.needed == 1994 * MIB
    assert (found.account.allocated // MIB, found.account.reserved // MIB) == (10121, 11602)
    assert found.account.fragmentation // MIB == 1480
    assert found.capacity.bytes is not None and found.capacity.below is not None
    assert found.capacity.bytes <= 13400 * MIB < found.capacity.below
    exact = explain(recorded("oom_llama_varlen_ckpt_13400"), capacity="13400MiB")
    assert (exact.verdict, exact.capacity.known, exact.capacity.bytes) == ("fragmentation", True, 13400 * MIB)


@pytest.mark.parametrize(
    ("capacity", "verdict"), [(None, "true-demand or fragmentation"), ("9000MiB", "true-demand")]
)
def test_the_recorded_true_demand_is_found_with_its_bytes(capacity: str | None, verdict: str) -> None:
    found = explain(recorded("oom_gpt2_train_9000"), capacity=capacity)
    assert found.verdict == verdict
    assert found.request is not None and found.request.needed == 1572 * MIB
    assert found.account.allocated // MIB == 8089
    assert sum(found.account.parts().values()) == found.account.device
    assert found.account.device == found.account.reserved + found.request.device_free  # type: ignore[operator]


def test_a_verdict_that_depends_on_an_unknown_limit_says_from_where_each_holds() -> None:
    trace = recorded("oom_gpt2_train_9000")
    found = explain(trace)
    low, high = found.verdicts
    assert [low.verdict, high.verdict] == ["true-demand", "fragmentation"]
    assert (low.least, high.below) == (found.capacity.bytes, found.capacity.below)
    assert low.below == high.least and format_size(high.least or 0) == "9.43 GiB"
    assert found.reason.endswith("true-demand if it was below 9.43 GiB, fragmentation from 9.43 GiB on.")
    assert "PyTorch's error message has it" in found.text and "--capacity" in found.text
    assert found.to_json()["verdicts"][1]["verdict"] == "fragmentation"
    for possible in found.verdicts:
        assert possible.least is not None and possible.below is not None
        for limit in (possible.least, (possible.least + possible.below) // 2, possible.below - 1):
            assert explain(trace, capacity=limit).verdict == possible.verdict
    advice = [remedy.what for remedy in found.remedies if remedy.what.startswith("if the limit was")]
    assert [each.partition(", ")[2][:9] for each in advice] == ["use less ", "reduce fr"]


@pytest.mark.parametrize("seed", range(40))
def test_verdicts_for_a_range_of_limits_are_those_of_each_limit(seed: int) -> None:
    choose = random.Random(seed)
    parts = [choose.choice([0, choose.randrange(100)]) for _ in range(5)]
    account = Account(*parts, unused=choose.randrange(20), withheld=500, limit=0)
    account = replace(account, limit=account.usable)
    asked = account.unused + 1 + choose.randrange(100)
    needed = asked + choose.choice([0, 3])
    below = account.reserved + needed
    found = judge_limits(account, asked, needed, below)
    assert (found[0].least, found[-1].below) == (account.usable, below)
    for limit in range(account.usable, below):
        (held,) = [each.verdict for each in found if (each.least or 0) <= limit < (each.below or 0)]
        exact = replace(account, unused=limit - account.reserved, limit=limit)
        assert held == judge_request(exact, asked, needed), limit


@pytest.mark.parametrize(
    ("capacity", "why"),
    [
        ("8GiB", "8.09 GiB were reserved"),
        ("8270MiB", "8.09 GiB were reserved"),  # above what was reserved when the request failed
        ("20GiB", "with 9.59 GiB the request would have been served"),
    ],
)
def test_a_capacity_that_cannot_be_right_is_not_used_and_that_is_said(capacity: str, why: str) -> None:
    trace = recorded("oom_gpt2_train_9000")
    found, unknown = explain(trace, capacity=capacity), explain(trace)
    size = format_size(parse_size(capacity))
    objection = f"The capacity of {size} contradicts the recording and is not used: {why}."
    assert found.capacity.note == f"{objection} {unknown.capacity.note}"
    assert (found.account, found.capacity.bytes) == (unknown.account, unknown.capacity.bytes)


def test_a_capacity_larger_than_what_was_visible_is_the_size_of_the_device() -> None:
    found = explain(recorded("oom_gpt2_train_9000"), capacity="141GiB")
    assert found.account.device == 141 * GIB
    assert not any("contradicts" in doubt for doubt in found.doubts)


def test_a_capacity_below_what_was_visible_on_a_full_device_is_not_used() -> None:
    trace = demanding().trace()
    assert "contradicts the recording" in explain(trace, capacity="1MiB").text
    assert explain(trace, capacity="1MiB").account == explain(trace).account


def fragmented() -> Job:
    """Eight blocks of 1 GiB in one segment of 8 GiB, every other one freed."""
    job = Job()
    whole = job.alloc(8 * GIB)
    job.free(whole)
    parts = [job.alloc(GIB, line=3) for _ in range(8)]
    for part in parts[::2]:
        job.free(part)
    job.out_of_memory(3 * GIB, device_free=GIB)
    return job


def pending() -> Job:
    """4 GiB that another stream may still use."""
    job = Job()
    kept, lent = job.alloc(4 * GIB), job.alloc(4 * GIB, line=2)
    job.free(lent, pending=True)
    assert kept
    job.out_of_memory(3 * GIB, device_free=MIB)
    return job


def cached() -> Job:
    """4 GiB idle in a segment of another stream that was not given back."""
    job = Job()
    job.alloc(4 * GIB)
    job.free(job.alloc(4 * GIB, stream=9))
    job.out_of_memory(3 * GIB, device_free=MIB)
    return job


def rounded() -> Job:
    """Five requests of 1.1 GiB, each rounded up to 1.5."""
    divisions = {str(1 << power): 2 for power in range(16)}
    job = Job({"roundup_power2_divisions": divisions})
    for _ in range(5):
        job.alloc(GIB + 100 * MIB, block=GIB + GIB // 2)
    job.out_of_memory(GIB, device_free=MIB)
    return job


def foreign() -> Job:
    """2 GiB in use where the program once had 10."""
    job = Job()
    job.free(job.alloc(10 * GIB))
    job.empty_cache()
    job.alloc(2 * GIB)
    job.out_of_memory(4 * GIB, device_free=GIB)
    return job


def demanding() -> Job:
    """Everything in use."""
    job = Job()
    for line in range(7):
        job.alloc(GIB, line=line)
    job.out_of_memory(2 * GIB, device_free=512 * MIB)
    return job


@pytest.mark.parametrize(
    ("job", "verdict", "size"),
    [
        (fragmented, "fragmentation", 4 * GIB),
        (pending, "pending", 4 * GIB),
        (cached, "cached", 4 * GIB),
        (rounded, "rounding", 5 * (412 * MIB)),
        (foreign, "foreign", 7 * GIB),
        (demanding, "true-demand", 7 * GIB),
    ],
)
def test_each_verdict_has_its_bytes(job: Any, verdict: str, size: int) -> None:
    found = explain(job().trace())
    assert found.verdict == verdict
    assert found.account.parts()[verdict] == size
    assert sum(found.account.parts().values()) == found.account.device
    assert f"Verdict: {verdict}" in found.text


@pytest.mark.parametrize("job", [fragmented, pending, cached, rounded, foreign, demanding])
def test_an_out_of_memory_in_the_middle_is_read_as_well_as_one_at_the_end(job: Any) -> None:
    ended, survived = job(), job()
    for held in survived.held:
        for piece in list(held.pieces):
            if piece.state == "active_allocated":
                survived.free(piece.address)
    survived.empty_cache()
    assert explain(survived.trace()).account == explain(ended.trace()).account


def test_a_capacity_below_what_was_reserved_at_any_time_is_not_used() -> None:
    grown = fragmented()
    grown.empty_cache()
    for held in list(grown.held):
        for piece in list(held.pieces):
            if piece.state == "active_allocated":
                grown.free(piece.address)
    grown.empty_cache()
    grown.alloc(10 * GIB)
    for trace in (grown.trace(), replace(grown.trace(), settings={})):
        assert "10 GiB were reserved" in explain(trace, "oom", capacity="9GiB").text
        assert "10 GiB were reserved" in explain(trace, "peak", capacity="9GiB").text
    assert "contradicts" not in explain(grown.trace(), "peak", capacity="10GiB").text


def test_a_known_device_shows_what_others_hold() -> None:
    trace = demanding().trace()
    assert explain(trace).verdict == "true-demand"
    found = explain(trace, capacity="80GiB")
    assert (found.verdict, found.account.device) == ("foreign", 80 * GIB)
    assert found.account.foreign == 80 * GIB - 7 * GIB - 512 * MIB


def test_a_device_that_no_one_sells_is_shared() -> None:
    job = Job()
    job.alloc(17 * GIB)
    job.out_of_memory(GIB, device_free=MIB)
    found = explain(job.trace())
    assert found.verdict == "foreign"
    assert "so others hold at least" in found.text


def test_a_recording_of_ours_brings_its_limit_and_its_device() -> None:
    trace = replace(fragmented().trace(), settings={"limit": 9 * GIB, "device_total": 16 * GIB})
    event = trace.events - 1
    trace.address[event] = 5 * GIB  # the device has room, the limit forbids it
    found = explain(trace)
    assert (found.verdict, found.capacity.bytes, found.capacity.known) == ("fragmentation", 9 * GIB, True)
    assert (found.account.unused, found.account.withheld, found.account.foreign) == (GIB, 4 * GIB, 3 * GIB)


def test_a_pool_whose_pages_move_is_explained_by_what_it_reserved() -> None:
    """Growth has no address there; half a page beside each block in use is lost, the rest is idle."""
    rows = [
        (Action.SEGMENT_MAP, 0, 64 * MIB),
        (Action.ALLOC, 0x3000_0000_0000, MIB),
        (Action.ALLOC, 0x3000_0100_0000, 17 * MIB),
        (Action.OOM, 5 * MIB, 48 * MIB),
    ]
    trace = trace_of(rows, settings={"device_total": 100 * MIB, "reserved": 64 * MIB})
    found = explain(trace)
    assert (found.account.reserved, found.account.fragmentation, found.account.cached) == (
        64 * MIB, 2 * MIB, 44 * MIB,
    )  # fmt: skip
    assert (found.verdict, found.account.device) == ("cached", 100 * MIB)
    assert memory_at(trace, 0).cached == 64 * MIB
    assert not any("torch" in remedy.setting.lower() for remedy in found.remedies)


def test_a_pool_of_ours_grows_by_pages_and_not_as_pytorch_does() -> None:
    rows = [
        (Action.SEGMENT_MAP, 0, 64 * MIB),
        (Action.ALLOC, 0x3000_0000_0000, 64 * MIB),
        (Action.OOM, GIB, 3 * MIB),
    ]
    trace = trace_of(rows, settings={"limit": 64 * MIB, "device_total": 2 * GIB, "reserved": 64 * MIB})
    request = explain(trace).request
    assert request is not None and request.needed == 4 * MIB


def test_where_nothing_failed_what_lies_beyond_a_limit_is_not_held_by_others() -> None:
    rows = [(Action.SEGMENT_MAP, 0, 64 * MIB), (Action.ALLOC, 0x3000_0000_0000, 64 * MIB)]
    trace = trace_of(rows, settings={"limit": 96 * MIB, "device_total": GIB, "reserved": 64 * MIB})
    account = explain(trace).account
    assert (account.unused, account.withheld, account.foreign) == (32 * MIB, GIB - 96 * MIB, 0)
    assert account.device == GIB


def test_a_log_without_segments_is_explained_by_what_is_allocated() -> None:
    job = demanding()
    job.events = [event for event in job.events if not event["action"].startswith("segment")]
    trace = replace(job.trace(), segments=())
    found = explain(trace)
    assert (found.verdict, found.account.allocated, found.account.reserved) == (
        "true-demand",
        7 * GIB,
        7 * GIB,
    )
    assert found.request is not None and found.request.device_free is None
    known = explain(trace, capacity="80GiB")
    assert (known.verdict, known.account.foreign) == ("foreign", 73 * GIB)
    assert "counts as foreign" in known.text


def test_what_would_have_helped_is_tried_where_the_native_core_is() -> None:
    pytest.importorskip("vram._native")
    found = explain(fragmented().trace())
    tried = {remedy.setting: remedy for remedy in found.remedies if remedy.evidence}
    assert tried["vram run --torch"].fits is True
    hopeless = explain(demanding().trace())
    assert [each.fits for each in hopeless.remedies if each.setting == "vram run --torch"] == [False]


RANGES = [("oom_gpt2_train_9000", "9000MiB"), ("oom_llama_varlen_ckpt_13400", "13400MiB")]


@pytest.mark.parametrize(("name", "limit"), RANGES)
def test_an_answer_for_an_unknown_limit_stays_true_once_the_limit_is_known(name: str, limit: str) -> None:
    pytest.importorskip("vram._native")
    trace = recorded(name)
    unknown = explain(trace)
    least, below = unknown.capacity.bytes, unknown.capacity.below
    assert least is not None and below is not None
    tried = {each.setting: each for each in unknown.remedies if each.evidence and "spill" not in each.what}
    assert len(tried) == 3
    for known in (limit, least, (least + below) // 2, below - 1):
        for each in explain(trace, capacity=known).remedies:
            if each.evidence and "spill" not in each.what:
                assert tried[each.setting].fits in (None, each.fits), (known, each)
                assert each.needs == tried[each.setting].needs


@pytest.mark.parametrize(("name", "limit"), RANGES)
def test_an_allocator_needs_the_smallest_limit_at_which_a_replay_completes(name: str, limit: str) -> None:
    pytest.importorskip("vram._native")
    from vram.analysis.remedies import TRIED, with_request
    from vram.replay import Setting, replay

    trace = recorded(name)
    found = explain(trace)
    assert found.request is not None
    job = with_request(trace, memory_at(trace, found.moment.event))
    needs = {each.setting: each.needs for each in found.remedies if each.evidence}
    for policy in TRIED:
        size = needs[Setting(policy, {}).environment]
        assert size is not None
        assert replay(job, policy, capacity=size).oom is None
        assert replay(job, policy, capacity=size - 2 * MIB).oom is not None


def test_a_job_that_continued_after_a_failure_is_replayed_as_it_was() -> None:
    failed = [
        (Action.ALLOC, 4096, 8 * MIB),
        (Action.OOM, 0, 64 * MIB),
        (Action.FREE_REQUESTED, 4096, 8 * MIB),
    ]
    assert peak_allocated(intended(trace_of(failed))) == 72 * MIB
    continued = trace_of([*failed, (Action.ALLOC, 4096, 16 * MIB)])
    assert intended(continued) == lifetimes(continued)
    completed = trace_of(failed[:1])
    assert intended(completed) == lifetimes(completed)


def test_what_an_allocator_releases_before_it_fails_is_released_by_no_program() -> None:
    """With the request that failed, a replay holds what was measured in runs that completed."""
    pytest.importorskip("vram._native")
    from vram.replay import replay

    trace = recorded("oom_llama_varlen_ckpt_13400")
    assert not intended(trace).emptied
    for policy, measured in {"torch": 17_864, "torch-expandable": 13_850}.items():
        assert replay(trace, policy).peak_reserved == measured * MIB


def test_progress_is_told_for_each_replay() -> None:
    pytest.importorskip("vram._native")
    told: list[tuple[int, int]] = []
    explain(fragmented().trace(), progress=lambda done, count: told.append((done, count)))
    assert len(told) > 3 and sorted(done for done, _ in told) == list(range(1, len(told) + 1))


def test_shares_are_of_the_memory_that_the_job_could_use() -> None:
    account = explain(recorded("oom_gpt2_train_9000")).account
    shares = account.shares()
    assert shares["withheld"] is None and shares["foreign"] is None
    assert sum(share for share in shares.values() if share is not None) == pytest.approx(1)


def test_what_to_set_is_what_a_sweep_would_say() -> None:
    pytest.importorskip("vram._native")
    from vram.replay import Setting

    settings = {remedy.setting for remedy in explain(fragmented().trace()).remedies if remedy.setting}
    assert settings == {Setting(name, {}).environment for name in ("torch-expandable", "cuda-async", "vram")}


def test_without_the_native_core_the_verdict_is_the_same() -> None:
    code = (
        "import sys; sys.modules['vram._native'] = None; sys.path.insert(0, sys.argv[1])\n"
        "from test_analysis import explain, fragmented\n"
        "found = explain(fragmented().trace())\n"
        "print(found.verdict, {remedy.fits for remedy in found.remedies})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)], capture_output=True, text=True, timeout=600
    )
    assert done.stdout == "fragmentation {None}\n", done.stderr


def test_stacks_that_differ_have_labels_that_differ() -> None:
    for name in ("oom_gpt2_train_9000", "oom_llama_varlen_ckpt_13400", "resnet_multiscale"):
        groups = explain(recorded(name)).holders["stack"]
        assert len({group.label for group in groups}) == len(groups)
    apart = stack_labels([[frame(1), frame(2), frame(9)], [frame(1), frame(3), frame(9)], []], "(none)")
    named = [f"a.py:1 f ← a.py:{line} f ← a.py:1 f" for line in (2, 3)]
    assert apart == [*named, "(none)"]


def test_labels_have_calls_of_the_framework_only_where_no_other_differs() -> None:
    call, inner = Frame(f"{MODULE}/module.py", 9, "_call_impl"), Frame(f"{MODULE}/conv.py", 5, "forward")
    model = [Frame("site-packages/model/layers.py", line, "forward") for line in (2, 3)]
    own = frame(1)
    apart = stack_labels([[inner, call, model[0], call, own], [inner, call, call, model[1], own]])
    assert apart == [
        f"a.py:1 f ← model/layers.py:{line} forward ← torch/nn/modules/conv.py:5 forward" for line in (2, 3)
    ]
    alike = stack_labels([[inner, call, own], [inner, call, call, own]])
    calls = [f"torch/nn/modules/module.py:9 _call_impl{times}" for times in ("", " ×2")]
    assert alike == [f"a.py:1 f ← {each} ← torch/nn/modules/conv.py:5 forward" for each in calls]


MODULE = "site-packages/torch/nn/modules"


def frame(line: int) -> Frame:
    return Frame("a.py", line, "f")


# --- moments and holders ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "words"),
    [
        ("oom", "has no out-of-memory error; use --at peak, or name an event"),
        ("noon", "not a moment; write oom, peak"),
        ("99999", "has events 0 to"),
        ("step:3", "it has none; mark them with vram.step"),
    ],
)
def test_a_moment_that_is_not_there_says_which_are(at: str, words: str) -> None:
    job = Job()
    job.alloc(MIB)
    with pytest.raises(ConfigError, match=words):
        find_moment(job.trace(), at)


def test_a_recording_that_is_not_whole_says_so() -> None:
    text = explain(replace(fragmented().trace(), dropped=12, truncated=True)).text
    assert "The recording dropped 12 events" in text and "was truncated" in text
    assert "dropped" not in explain(fragmented().trace()).text


def test_a_ring_that_overflowed_is_not_a_whole_recording() -> None:
    job = Job()
    kept = job.alloc(GIB)
    begun = len(job.events)
    job.free(job.alloc(MIB))
    assert kept
    found = explain(job.trace(since=begun))
    heading = found.to_json()["trace"]
    assert (heading["dropped"], heading["complete"]) == (1, False)
    assert "The recording dropped 1 event or more" in found.text
    whole = explain(job.trace()).to_json()["trace"]
    assert (whole["dropped"], whole["complete"]) == (0, True)
    ring = explain(recorded("llm_serve"))
    assert ring.trace.dropped and "allocated before the first event" in ring.text


def test_memory_from_before_the_recording_is_not_taken_for_a_backward_pass() -> None:
    job = Job()
    early = job.alloc(GIB)
    begun = len(job.events)
    job.alloc(2 * GIB)
    job.alloc(3 * GIB)
    job.events[-1]["frames"] = []  # as in a thread that runs no Python
    event = len(job.events) - begun - 1
    job.free(early)
    trace = job.trace(since=begun)
    earlier, unknown = "(allocated before the recording)", "(no Python stack)"
    for by in ("stack", "line", "module"):
        held = {each["group"]: each["bytes"] for each in summary(trace, by, event).to_pylist()}
        assert held[earlier] == GIB and held[unknown] == 3 * GIB, by
    tree = holders(trace, memory_at(trace, event).blocks(), "stream")
    assert {earlier, unknown} < set(tree.children["stream 0"].children)
    for by in ("step", "tag"):
        held = {each["group"]: each["bytes"] for each in summary(trace, by, event).to_pylist()}
        assert held[earlier] == GIB, by


def test_memory_without_a_stack_may_be_of_a_backward_pass_where_there_was_one() -> None:
    job = Job()
    job.alloc(GIB)
    job.events[-1]["frames"] = [
        {"filename": "site-packages/torch/autograd/__init__.py", "line": 1, "name": "backward"}
    ]
    job.alloc(2 * GIB)
    job.events[-1]["frames"] = []
    assert explain(job.trace()).holders["stack"][0].label == "(no Python stack, as in a backward pass)"


@pytest.mark.parametrize("power", [38, 42, 46, 50])
def test_a_request_of_any_size_is_explained(power: int) -> None:
    pytest.importorskip("vram._native")
    job = demanding()
    job.out_of_memory(1 << power, device_free=512 * MIB)
    found = explain(job.trace())
    assert found.verdict == "true-demand"
    tried = {each.setting: each for each in found.remedies if each.evidence}
    assert all(each.fits is False for each in tried.values())
    needs = tried["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"].needs
    assert needs is not None and 0 <= needs - (1 << power) - 7 * GIB < 64 * MIB  # whole pages


def test_a_replay_that_fails_costs_only_its_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vram._native")
    import vram.replay

    def failing(program: Any, policy: str = "vram", **options: Any) -> Any:
        if policy != "torch-expandable":
            raise MemoryError("no memory for it")
        return replay(program, policy, **options)

    replay = vram.replay.replay
    monkeypatch.setattr(vram.replay, "replay", failing)
    found = explain(fragmented().trace())
    assert found.verdict == "fragmentation"
    assert len([each for each in found.remedies if "no memory for it" in each.what]) == 2
    assert [each.fits for each in found.remedies if "expandable" in each.setting] == [True]


def test_an_empty_recording_has_no_moment() -> None:
    with pytest.raises(ConfigError, match="has no events; record them with"):
        explain(Job().trace())
    with pytest.raises(ConfigError, match="has no events; record them with"):
        find_leaks(Job().trace(), "event:0,event:1")


def test_a_snapshot_without_history_is_explained_by_its_end() -> None:
    job = fragmented()
    found = explain(job.trace(since=len(job.events)))
    assert (found.moment.kind, found.verdict, found.account.fragmentation) == (
        "end",
        "fragmentation",
        4 * GIB,
    )
    assert found.text.startswith("The recording has no events; at its end there are 4 GiB allocated")


def tagged_job(line: int = 2, extra: int = 0) -> Job:
    job = Job()
    job.mark("step#1")
    job.mark("forward")
    job.alloc(64 * MIB, line=1)
    job.mark("forward", "END")
    job.mark("step#2")
    job.alloc(32 * MIB, line=line, stream=5)
    job.alloc(16 * MIB + extra, line=line, stream=5)
    return job


@pytest.mark.parametrize(
    ("by", "groups"),
    [
        ("line", {"train.py:1 step": 64, "train.py:2 step": 48}),
        ("module", {"train": 112}),
        ("stream", {"stream 0": 64, "stream 5": 48}),
        ("tag", {"forward": 64, "(no tag)": 48}),
        ("step", {"step 1": 64, "step 2": 48}),
        ("size", {"up to 64 MiB": 64, "up to 32 MiB": 32, "up to 16 MiB": 16}),
        (
            "stack",
            {
                "train.py:1 step ← torch/nn/linear.py:9 forward": 64,
                "train.py:2 step ← torch/nn/linear.py:9 forward": 48,
            },
        ),
    ],
)
def test_a_summary_groups_what_is_live(by: str, groups: dict[str, int]) -> None:
    table = summary(tagged_job().trace(), by)
    assert dict(zip(table["group"].to_pylist(), table["bytes"].to_pylist(), strict=True)) == {
        group: size * MIB for group, size in groups.items()
    }
    assert sum(table["share"].to_pylist()) == pytest.approx(1)


def test_tags_given_to_allocations_count_before_marks() -> None:
    trace = tagged_job().trace()
    first = trace.action.index(Action.ALLOC)
    trace = replace(trace, tags=("", "weights"))
    trace.tag[first] = 1
    assert "weights" in summary(trace, "tag")["group"].to_pylist()


def test_unknown_groups_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="cannot group by 'colour'; there is stack, line"):
        summary(tagged_job().trace(), "colour")


# --- differences --------------------------------------------------------------------------------------------


def test_a_gap_is_attributed_to_the_lines_that_make_it() -> None:
    found = difference(tagged_job().trace(), tagged_job(extra=100 * MIB).trace())
    assert found.gap == 100 * MIB
    assert found.table["group"].to_pylist() == ["train.py:2 step"]
    assert found.growth == pytest.approx(100 / 112)


def test_a_line_that_moved_within_its_function_is_the_same_line() -> None:
    moved = difference(tagged_job().trace(), tagged_job(line=7).trace())
    assert (moved.gap, moved.table.num_rows) == (0, 0)
    grown = difference(tagged_job().trace(), tagged_job(line=7, extra=2 * MIB).trace())
    assert grown.table.to_pylist() == [
        {
            "group": "train.py:7 step",
            "before": 48 * MIB,
            "after": 50 * MIB,
            "gap": 2 * MIB,
            "blocks_before": 2,
            "blocks_after": 2,
        }
    ]


def test_moved_lines_beside_new_ones_are_told_apart() -> None:
    job = tagged_job(line=8)
    job.alloc(5 * MIB, line=3)
    found = difference(tagged_job().trace(), job.trace())
    assert [(row["group"], row["gap"]) for row in found.table.to_pylist()] == [("train.py:3 step", 5 * MIB)]


def test_lines_that_moved_to_the_places_of_others_are_told_apart() -> None:
    first, second = Job(), Job()
    for number, size in ((1, 64), (2, 2), (3, 32)):
        first.alloc(size * MIB, line=number)
        second.alloc((size + 8 * (number == 3)) * MIB, line=number + 1)
    found = difference(first.trace(), second.trace())
    assert [(row["group"], row["gap"]) for row in found.table.to_pylist()] == [("train.py:4 step", 8 * MIB)]


def test_a_run_does_not_differ_from_itself() -> None:
    found = difference(recorded("gpt2_train"), recorded("gpt2_train"))
    assert (found.gap, found.table.num_rows) == (0, 0)


# --- leaks --------------------------------------------------------------------------------------------------


def leaking_job(steps: int = 8) -> Job:
    """Each step leaves 3 MiB behind on line 5, the third keeps a state on line 6, each replaces line 7's."""
    job = Job()
    job.alloc(MIB, line=1)
    state = None
    for step in range(steps):
        job.mark(f"step#{step}")
        work = job.alloc(30 * MIB, line=4)
        job.alloc(3 * MIB, line=5)
        if step == 2:
            job.alloc(50 * MIB, line=6)
        if state is not None:
            job.free(state)
        state = job.alloc(9 * MIB, line=7)
        job.free(work)
    return job


def test_memory_of_every_step_that_lives_on_is_a_leak() -> None:
    found = find_leaks(leaking_job().trace(), "step:1,step:6")
    rows = {row["group"].split()[0]: row for row in found.table.to_pylist()}
    assert set(rows) == {"train.py:5", "train.py:6", "train.py:7"}
    assert [row["group"].split()[0] for row in found.likely] == ["train.py:5"]
    leak = rows["train.py:5"]
    assert (leak["bytes"], leak["blocks"], leak["growth"], leak["confidence"]) == (18 * MIB, 6, 3 * MIB, 1.0)
    assert (leak["bytes_at_end"], rows["train.py:7"]["bytes_at_end"]) == (18 * MIB, 0)
    assert rows["train.py:6"]["confidence"] == 0.0


def test_without_steps_a_stretch_is_cut_into_slices() -> None:
    job = leaking_job()
    job.marks = []
    trace = job.trace()
    found = find_leaks(trace, f"event:2,event:{trace.events - 1}")
    assert (found.unit, found.steps) == ("slice", 10)
    assert [row["group"].split()[0] for row in found.likely] == ["train.py:5"]


@pytest.mark.parametrize("name", ["llama_varlen_ckpt", "resnet_multiscale"])
def test_a_real_training_loop_does_not_leak(name: str) -> None:
    assert find_leaks(recorded(name), "step:2,step:9").likely == []


@pytest.mark.parametrize(
    ("between", "words"),
    [
        ("step:1", "is not a range; write step:10,step:50"),
        ("step:3,step:1", "before it begins"),
        ("step:1,step:99", "it has steps 0 to 7"),
    ],
)
def test_a_stretch_that_is_not_there_says_why(between: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_leaks(leaking_job().trace(), between)


# --- ranks --------------------------------------------------------------------------------------------------


def ranks(odd: int = 0, count: int = 4) -> list[Trace]:
    """Equal ranks but for number 2, which holds `odd` bytes more in its third step, by a late clock."""
    made = []
    for rank in range(count):
        job = Job()
        job.alloc(100 * MIB)
        for step in range(4):
            job.mark(f"step#{step}")
            more = odd if (rank, step) == (2, 2) else 0
            job.free(job.alloc(64 * MIB + more))
        late = 5_000_000 if rank == 2 else 0
        trace = job.trace()
        made.append(replace(trace, source=f"run/rank{rank}.pickle", start_us=trace.start_us + late))
    return made


def test_the_odd_rank_is_named_first() -> None:
    found = merge(ranks(odd=40 * MIB))
    assert found.ranks[0].name == "rank 2"
    assert [rank.odd for rank in found.ranks] == [True, False, False, False]
    assert found.common_steps == (0, 1, 2, 3)
    rows = [row for row in found.table.to_pylist() if row["rank"] == "rank 2"]
    assert [row["step"] for row in rows if abs(row["deviation"]) > 0.05] == [None, 2]
    assert not any(rank.odd for rank in merge(ranks()).ranks)


def test_steps_that_are_counted_anew_are_one_row_each() -> None:
    job = Job()
    for size in (20, 40, 60, 80):
        job.mark(f"step#{size // 20 % 2}")
        job.free(job.alloc(size * MIB))
    (whole, *rows) = merge([job.trace()]).table.to_pylist()
    assert (whole["step"], whole["peak_allocated"]) == (None, 80 * MIB)
    assert [(row["step"], row["peak_allocated"]) for row in rows] == [(1, 60 * MIB), (0, 80 * MIB)]


def test_a_rank_that_ran_out_alone_is_odd() -> None:
    traces = ranks()
    traces[1].action[-1] = Action.OOM
    assert [(rank.name, rank.odd) for rank in merge(traces).ranks][:2] == [
        ("rank 1", True),
        ("rank 0", False),
    ]


@pytest.mark.parametrize("name", ["run", "run.json"])
def test_a_merged_run_is_written(name: str, tmp_path: Path) -> None:
    import json

    from pyarrow import parquet

    found = merge(ranks())
    write_table(found, tmp_path / name)
    if name.endswith("json"):
        assert json.loads((tmp_path / name).read_text()) == found.to_json()
    else:
        assert parquet.read_table(tmp_path / name).equals(found.table.to_arrow())


def test_nothing_and_ranks_of_one_name_cannot_be_merged() -> None:
    with pytest.raises(ConfigError, match="nothing to merge"):
        merge([])
    with pytest.raises(ConfigError, match="different names"):
        merge(ranks(count=2), ["a", "a"])


def test_an_explanation_is_plain_data() -> None:
    import json

    found: Explanation = explain(fragmented().trace())
    document = json.loads(json.dumps(found.to_json(1)))
    assert document["verdict"] == "fragmentation"
    assert document["request"]["size"] == 3 * GIB and document["request"]["frames"] == ["train.py:99 step"]
    assert sum(document["bytes"].values()) == document["device"]
    assert all(len(groups) <= 1 for groups in document["holders"].values())
    assert found.table().num_rows == len(document["bytes"])


# ---- idle segments ----------------------------------------------------------------------------------------


class Made:
    """As much of the allocations of a recording as says where and when they were made."""

    def __init__(self, address: list[int], start: list[int], events: int) -> None:
        self.address, self.start, self.events = np.array(address, np.uint64), np.array(start), events

    def __len__(self) -> int:
        return len(self.address)


@pytest.mark.parametrize("seed", range(20))
def test_an_allocation_lies_in_the_segment_that_had_its_address_then(seed: int) -> None:
    """Addresses come back in segments of other lengths, which begin elsewhere."""
    choose, held, rows = random.Random(seed), {}, []
    address, start = [], []
    for event in range(400):
        what = choose.random()
        first, size = choose.randrange(100) * 10, choose.randrange(1, 30) * 10
        if what < 0.2:
            if all(first + size <= other or first >= other + long for other, (long, _) in held.items()):
                held[first] = (size, event)
        elif what < 0.35 and held:
            gone = choose.choice(list(held))
            rows.append((gone, *held.pop(gone), event))
        else:
            address.append(choose.randrange(1300))
            start.append(event)
    rows += [(first, size, begun, 400) for first, (size, begun) in held.items()]
    rows.sort(key=lambda row: (row[0], row[2]))
    expected = [
        next((n for n, (first, size, begun, over) in enumerate(rows)
              if first <= at < first + size and begun <= when < over), -1)
        for at, when in zip(address, start, strict=True)
    ]  # fmt: skip
    first, size, begin, end = (np.array(column) for column in zip(*rows, strict=True))
    found = _segment_of(Made(address, start, 400), first.astype(np.uint64), size, begin, end)  # type: ignore[arg-type]
    assert found.tolist() == expected and -1 in expected and max(expected) > 5


def test_code_that_pytorch_compiled_is_not_the_programs_own() -> None:
    generated = Frame("/tmp/torchinductor_me/ab/cabc.py", 9, "call")
    own = Frame("/home/me/train.py", 3, "step")
    assert place_of([generated, own]) == own


def spill_line(found: Explanation) -> Remedy | None:
    return next((each for each in found.remedies if "spill" in each.what), None)


def test_a_job_that_needs_too_much_is_tried_with_spill() -> None:
    """The recorded job: 1.3 GiB more than its limit. What is moved is at least that, out and read."""
    pytest.importorskip("vram._native")
    found = explain(recorded("oom_gpt2_train_9000"))
    line = spill_line(found)
    assert line is not None and line.fits is True
    assert line.what == "would complete with spill"
    assert re.fullmatch(r"[\d.]+ GiB moved a step, about [\d.]+x the time", line.evidence)
    assert line.setting == "vram run --torch --spill 2GiB"
    assert spill_line(explain(recorded("oom_llama_varlen_ckpt_13400"))) is None  # vram needs no spill for it
    assert spill_line(explain(recorded("gpt2_train"))) is None  # nothing failed


def test_spill_is_tried_for_recordings_of_pools() -> None:
    pytest.importorskip("vram._native")
    rows = [
        (Action.SEGMENT_MAP, 0, 64 * MIB),
        (Action.ALLOC, 0x3000_0000_0000, 32 * MIB),
        (Action.ALLOC, 0x3000_1000_0000, 32 * MIB),
        (Action.OOM, 0, 16 * MIB),
    ]
    settings = {"limit": 64 * MIB, "device_total": 64 * MIB, "reserved": 64 * MIB}
    line = spill_line(explain(trace_of(rows, settings=settings)))
    assert line is not None and line.setting == "VRAM_CONF=spill:1GiB"
    rows[-1] = (Action.OOM, 0, 128 * MIB)  # more than the device: nothing that is moved helps
    assert spill_line(explain(trace_of(rows, settings=settings))) is None


def test_a_replay_with_spill_that_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vram._native")
    remedies = importlib.import_module("vram.analysis.remedies")
    monkeypatch.setattr(remedies, "SPILL_SECONDS", 0.0)
    executors = importlib.import_module("vram.replay.executors")

    def wait_for_the_end(*_: object, **__: object) -> None:
        while True:
            executors.check_cancelled()

    monkeypatch.setattr("vram.replay.replay", wait_for_the_end)
    rows = [
        (Action.SEGMENT_MAP, 0, 64 * MIB),
        (Action.ALLOC, 0x3000_0000_0000, 64 * MIB),
        (Action.OOM, 0, MIB),
    ]
    settings = {"limit": 64 * MIB, "device_total": 64 * MIB, "reserved": 64 * MIB}
    assert spill_line(explain(trace_of(rows, settings=settings))) is None
