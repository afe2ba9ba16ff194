"""Opening recordings: what real files say, what synthetic ones of other shapes say, and what is refused."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import pickle
import subprocess
import sys
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import zstandard

import vram
from vram.errors import TraceError
from vram.trace import (
    ALLOCATE,
    AT_ONCE,
    BEFORE,
    FREE,
    Action,
    BlockState,
    Frame,
    Lifetimes,
    Trace,
    lifetimes,
    open_trace,
    peak_allocated,
)
from vram.trace.series import events_of

TRACES = Path(__file__).resolve().parents[2] / "traces"
MIB = 1 << 20

# name: events, peak MiB of what the program held, streams
RECORDINGS = {
    "gpt2_train": (18_685, 12_964, 1),
    "llama_varlen_ckpt": (72_478, 12_111, 1),
    "resnet_multiscale": (24_633, 6_528, 1),
    "llm_serve": (400_000, 1_524, 1),
    "multistream_prefetch": (9_080, 1_996, 3),
    "oom_llama_varlen_ckpt_13400": (52_378, 11_786, 1),
    "oom_gpt2_train_9000": (1_152, 8_081, 1),
    "capped_llama_varlen_ckpt_14200": (72_555, 12_111, 1),
}


def recording(name: str) -> Path:
    return TRACES / f"{name}.pickle.xz"


@cache
def recorded(name: str) -> Trace:
    return open_trace(recording(name))


# --- synthetic snapshots ------------------------------------------------------------------------------------

FRAME = {"filename": "train.py", "line": 7, "name": "forward"}


def event(action: str, address: int, size: int = 1000, time: int = 0, **more: Any) -> dict[str, Any]:
    base = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 1_000_000 + time}
    return {**base, "frames": [FRAME], **more}


def block(address: int, size: int, state: str, **more: Any) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": [], **more}


def segment(address: int, size: int, blocks: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    base = {"device": 0, "address": address, "total_size": size, "stream": 0, "segment_type": "large"}
    rest = {"segment_pool_id": (0, 0), "is_expandable": False, "frames": []}
    return {**base, **rest, "blocks": blocks, **more}


def snapshot(*events: dict[str, Any], segments: Any = (), **more: Any) -> dict[str, Any]:
    return {"segments": list(segments), "device_traces": [list(events)], "allocator_settings": {}, **more}


def write(path: Path, content: object, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(content, protocol))
    return path


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    """Write a snapshot and open it."""

    def open_content(content: object, **options: Any) -> Trace:
        return open_trace(write(tmp_path / "snapshot.pickle", content), **{"trusted": True, **options})

    return open_content


def program_of(content: Lifetimes) -> list[tuple[int, int, int]]:
    return list(zip(content.op, content.id, content.size, strict=True))


# --- real recordings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDINGS)
def test_events_are_found_by_action_whether_rare_or_not(name: str) -> None:
    trace = recorded(name)
    for wanted in (*((each,) for each in Action), tuple(Action), ()):
        assert events_of(trace, wanted) == [i for i, each in enumerate(trace.action) if each in wanted]


@pytest.mark.parametrize("name", RECORDINGS)
def test_recording_has_its_events_streams_and_peak(name: str) -> None:
    events, peak, streams = RECORDINGS[name]
    trace = recorded(name)
    assert (trace.events, len(trace.streams), trace.devices) == (events, streams, (0,))
    assert round(peak_allocated(lifetimes(trace)) / MIB) == peak
    columns = (trace.action, trace.stream, trace.address, trace.size, trace.time_us, trace.stack)
    assert {len(column) for column in columns} == {events}


@pytest.mark.parametrize("name", ["multistream_prefetch", "oom_gpt2_train_9000"])
def test_the_child_and_this_process_read_the_same(name: str) -> None:
    assert recorded(name) == open_trace(recording(name), trusted=True)


def test_stacks_and_frames_are_kept_once() -> None:
    trace = recorded("gpt2_train")
    assert len(set(trace.frames)) == len(trace.frames) < 100
    assert len(set(trace.stacks)) == len(trace.stacks) < 100
    assert trace.stacks[0] == ()
    innermost = trace.frames_of(trace.stack[0])[0]
    assert innermost == Frame("site-packages/torch/nn/modules/module.py", 1370, "convert")


def test_only_the_overflowed_ring_is_incomplete() -> None:
    assert [name for name in RECORDINGS if not recorded(name).complete] == ["llm_serve"]


def test_what_was_live_before_an_overflowed_ring_is_allocated_first() -> None:
    program = lifetimes(recorded("llm_serve"))
    assert program.carried == 104
    assert list(program.op[:104]) == [ALLOCATE] * 104
    assert list(program.event[:105]) == [BEFORE] * 104 + [0]


def test_record_stream_delays_frees() -> None:
    trace = recorded("multistream_prefetch")
    program = lifetimes(trace)
    delayed = [time for time in program.completed_us if time != AT_ONCE]
    assert len(delayed) == 481
    assert delayed.count(trace.span_us) >= 25


def test_annotations_mark_the_optimizer_steps() -> None:
    trace = recorded("gpt2_train")
    starts = [mark for mark in trace.annotations if mark.stage == "START" and "Optimizer.step" in mark.name]
    assert len(starts) == 4
    assert all(0 < mark.time_us < trace.span_us for mark in starts)


def test_an_out_of_memory_event_keeps_what_the_device_had_free() -> None:
    trace = recorded("oom_gpt2_train_9000")
    at = list(trace.action).index(Action.OOM)
    assert (trace.size[at], trace.address[at]) == (1_646_821_376, 134_563_299_328)


def test_segments_hold_their_blocks() -> None:
    trace = recorded("multistream_prefetch")
    blocks = [block for segment in trace.segments for block in segment.blocks]
    assert len(trace.segments) == 90
    assert [sum(block.state == state for block in blocks) for state in BlockState] == [91, 3, 25]
    assert all(sum(b.size for b in segment.blocks) == segment.total_size for segment in trace.segments)


def test_opens_without_numpy_and_without_the_native_core() -> None:
    code = (
        "import sys; sys.modules.update({'numpy': None, 'vram._native': None});"
        "from vram.trace import open_trace; print(open_trace(sys.argv[1]).events)"
    )
    path = str(recording("oom_gpt2_train_9000"))
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=600)
    assert (done.stdout.strip(), done.stderr) == ("1152", "")


# --- files and compression ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_compression_is_known_by_content(pack: Any, tmp_path: Path) -> None:
    path = tmp_path / "any.name"
    path.write_bytes(pack(pickle.dumps(snapshot(event("alloc", 512)))))
    assert open_trace(path).events == 1


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol(protocol: int, tmp_path: Path) -> None:
    assert open_trace(write(tmp_path / "p", snapshot(event("alloc", 512)), protocol)).events == 1


def test_zstd_is_read_or_the_missing_module_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "snapshot.pickle.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    monkeypatch.setattr("vram.trace.files.ZSTD_MODULES", ("no_such_module",))
    with pytest.raises(TraceError, match=r"no zstd module is installed.*zstd -d"):
        open_trace(path, trusted=True)


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_more_bytes_than_allowed_are_refused(pack: Any, trusted: bool, tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_bytes(pack(pickle.dumps(snapshot(*[event("alloc", 512 * i) for i in range(100)]))))
    with pytest.raises(TraceError, match=r"1000 (bytes )?allowed") as caught:
        open_trace(path, trusted=trusted, max_bytes=1000)
    assert caught.value.limit == 1000


def test_what_is_not_a_file_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(TraceError, match=r"not a regular file|directory"):
            open_trace(path)
    with pytest.raises(TraceError, match=r"cannot open .*nowhere.*No such file"):
        open_trace(tmp_path / "nowhere")


def test_zstd_is_read(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle.zst"
    packed = zstandard.ZstdCompressor().compress(pickle.dumps(snapshot(event("alloc", 512))))
    path.write_bytes(packed)
    assert open_trace(path).events == 1


# --- shapes of other versions and devices -------------------------------------------------------------------


def test_keys_that_old_versions_lack(opened: Any) -> None:
    events = [{"action": "alloc", "addr": 512, "size": 100, "stream": 0}]
    blocks = [{"size": 512, "state": "active_allocated"}, {"size": 512, "state": "inactive"}]
    old = {"address": 512, "total_size": 1024, "stream": 0, "segment_type": "small", "blocks": blocks}
    trace = opened({"segments": [old], "device_traces": [events]})
    assert (trace.timed, trace.span_us, trace.frames_of(trace.stack[0])) == (False, 0, ())
    assert [(b.address, b.requested_size) for b in trace.segments[0].blocks] == [(512, 512), (1024, 512)]
    assert trace.segments[0].pool_id == (0, 0)


def test_segments_without_events(opened: Any) -> None:
    held = segment(0, 512, [block(0, 512, "active_allocated")])
    for content in ([held], {"segments": [held]}):
        trace = opened(content, trusted=False)
        assert (trace.events, len(trace.segments), peak_allocated(lifetimes(trace))) == (0, 1, 512)


def test_the_history_that_the_oldest_blocks_have(opened: Any) -> None:
    old = {"size": 512, "state": "active_allocated", "history": [{"real_size": 9, "frames": [FRAME]}]}
    trace = opened(snapshot(segments=[segment(0, 512, [old])]))
    (held,) = trace.segments[0].blocks
    assert held.requested_size == 9
    assert trace.frames_of(held.stack) == (Frame("train.py", 7, "forward"),)


def test_user_metadata_is_the_tag(opened: Any) -> None:
    events = [event("alloc", 0, user_metadata=name) for name in ("weights", "", None, "weights")]
    trace = opened(snapshot(*events, event("alloc", 512)), trusted=False)
    assert [trace.tags[tag] for tag in trace.tag] == ["weights", "", "", "weights", ""]


def test_fields_of_later_versions_are_passed_over(opened: Any) -> None:
    frame = {**FRAME, "fx_node_op": "call_function", "fx_original_trace": "x"}
    more = event("alloc", 0, frames=[frame], compile_context="1/0", user_metadata="", pool_id=(0, 1))
    trace = opened({**snapshot(more), "capture_graphs": [1], "version": 9})
    assert trace.frames == (Frame("train.py", 7, "forward"),)


def test_private_pools(opened: Any) -> None:
    trace = opened(snapshot(segments=[segment(0, 512, [], segment_pool_id=(0, 3))]), trusted=False)
    assert trace.segments[0].pool_id == (0, 3)


def test_the_device_with_most_events_is_opened_unless_one_is_chosen(opened: Any) -> None:
    content = snapshot(event("alloc", 512), segments=[segment(0, 512, [], device=3)])
    content["device_traces"] += [[event("alloc", 512), event("alloc", 1024)], []]
    assert (opened(content).device, opened(content).devices) == (1, (0, 1, 3))
    assert opened(content, device=0).events == 1
    assert len(opened(content, device=3).segments) == 1
    with pytest.raises(TraceError, match="device 2 is not in this snapshot; it has devices 0, 1, 3"):
        opened(content, device=2)


def test_expandable_segments(opened: Any) -> None:
    content = snapshot(
        event("segment_map", 2 * MIB, 2 * MIB),
        event("alloc", 2 * MIB),
        event("segment_unmap", 4 * MIB, 2 * MIB),
        event("snapshot", 0, 0),
        segments=[
            segment(2 * MIB, 2 * MIB, [block(2 * MIB, 2 * MIB, "active_allocated")], is_expandable=True)
        ],
        allocator_settings={"expandable_segments": True, "divisions": {"1": 0}},
    )
    trace = opened(content, trusted=False)
    assert [Action(code).name for code in trace.action] == [
        "SEGMENT_MAP",
        "ALLOC",
        "SEGMENT_UNMAP",
        "SNAPSHOT",
    ]
    assert trace.segments[0].is_expandable
    assert trace.settings == content["allocator_settings"]


def test_times_are_relative_to_the_first_event(opened: Any) -> None:
    trace = opened(snapshot(event("alloc", 512, time=5), event("alloc", 1024, time=25)))
    assert (trace.start_us, list(trace.time_us), trace.span_us) == (1_000_005, [0, 20], 20)


def test_no_events_at_all(opened: Any) -> None:
    held = segment(0, 1024, [block(0, 1024, "active_allocated")])
    trace = opened({"segments": [held], "device_traces": []}, trusted=False)
    assert (trace.events, trace.span_us, trace.complete) == (0, 0, False)
    assert peak_allocated(lifetimes(trace)) == 1024


def test_text_that_is_not_utf8_is_replaced(opened: Any) -> None:
    content = snapshot(event("alloc", 0, frames=[{**FRAME, "name": "bad\ud800"}]))
    assert opened(content, trusted=False).frames[0].name == "bad?"


# --- lifetimes ----------------------------------------------------------------------------------------------


def test_a_program_of_allocations_and_frees(opened: Any) -> None:
    trace = opened(
        snapshot(
            event("alloc", 512, 100),
            event("alloc", 1024, 600),
            event("free_requested", 512, 100),
            event("free_completed", 512, 100),
            event("alloc", 512, 7),
        )
    )
    program = lifetimes(trace)
    assert program_of(program) == [(ALLOCATE, 0, 100), (ALLOCATE, 1, 600), (FREE, 0, 100), (ALLOCATE, 2, 7)]
    assert (program.allocations, program.carried, list(program.event)) == (3, 0, [0, 1, 2, 4])
    assert list(program.completed_us) == [AT_ONCE] * 4
    assert peak_allocated(program) == 512 + 1024
    assert trace.complete


def test_a_delayed_free_completes_later_or_at_the_end(opened: Any) -> None:
    program = lifetimes(
        opened(
            snapshot(
                event("alloc", 512),
                event("alloc", 1024),
                event("free_requested", 512, time=10),
                event("free_requested", 1024, time=20),
                event("free_completed", 512, time=30),
                event("snapshot", 0, time=90),
            )
        )
    )
    assert list(program.completed_us) == [AT_ONCE, AT_ONCE, 30, 90]


def test_what_was_live_before_comes_first(opened: Any) -> None:
    blocks = [block(4096, 512, "active_allocated", requested_size=9), block(4608, 512, "inactive")]
    trace = opened(
        snapshot(
            event("free_completed", 9216, 30, time=5),
            event("free_requested", 8192, 20),
            event("free_completed", 8192, 20),
            event("alloc", 8192, 40),
            segments=[segment(4096, 1024, blocks, stream=7)],
        )
    )
    program = lifetimes(trace)
    assert not trace.complete
    assert program.carried == 3
    # The one whose free was requested before the beginning is no longer the program's when the rest is live.
    assert program_of(program) == [
        (ALLOCATE, 0, 30),
        (FREE, 0, 30),
        (ALLOCATE, 1, 9),
        (ALLOCATE, 2, 20),
        (FREE, 2, 20),
        (ALLOCATE, 3, 40),
    ]
    assert program.completed_us[1] == 0
    assert [trace.streams[stream] for stream in program.stream] == [0, 0, 7, 0, 0, 0]


def test_an_address_allocated_twice_was_freed_in_between(opened: Any) -> None:
    program = lifetimes(opened(snapshot(event("alloc", 512, 1), event("alloc", 512, 2))))
    assert program_of(program) == [(ALLOCATE, 0, 1), (FREE, 0, 1), (ALLOCATE, 1, 2)]


def test_a_second_free_of_an_address_is_ignored(opened: Any) -> None:
    frees = [event("free_requested", 512), event("free_requested", 512)]
    assert len(lifetimes(opened(snapshot(event("alloc", 512), *frees)))) == 2


def test_columns_have_the_types_the_native_loop_reads() -> None:
    program = lifetimes(recorded("oom_gpt2_train_9000"))
    columns: list[array[int]] = [program.op, program.id, program.size, program.stream, program.time_us]
    assert [memoryview(column).itemsize for column in [*columns, program.completed_us]] == [1, 4, 8, 4, 8, 8]


# --- schema -------------------------------------------------------------------------------------------------

GOOD = event("alloc", 512)
WITHOUT = {key: {k: v for k, v in GOOD.items() if k != key} for key in GOOD}

BAD_EVENTS = {
    "not a dict": ([1], r"device_traces\[0\]\[1\]", "type list, expected a dict"),
    "unknown action": (
        event("explode", 0),
        r"device_traces\[0\]\[1\].action",
        "'explode', expected one of alloc",
    ),
    "unhashable action": ({**GOOD, "action": []}, r"device_traces\[0\]\[1\].action", "type list"),
    "no action": (WITHOUT["action"], r"device_traces\[0\]\[1\]", "has no 'action'"),
    "no address": (WITHOUT["addr"], r"device_traces\[0\]\[1\]", "has no 'addr'"),
    "no size": (WITHOUT["size"], r"device_traces\[0\]\[1\]", "has no 'size'"),
    "no stream": (WITHOUT["stream"], r"device_traces\[0\]\[1\]", "has no 'stream'"),
    "no time": (WITHOUT["time_us"], r"device_traces\[0\]\[1\]", "has no 'time_us'"),
    "size 2**63": (
        {**GOOD, "size": 1 << 63},
        r"device_traces\[0\]\[1\].size",
        "9223372036854775808, expected",
    ),
    "size 2**64": ({**GOOD, "size": 1 << 64}, r"device_traces\[0\]\[1\].size", "18446744073709551616"),
    "size 2**2000": ({**GOOD, "size": 1 << 2000}, r"device_traces\[0\]\[1\].size", "type int"),
    "negative size": ({**GOOD, "size": -1}, r"device_traces\[0\]\[1\].size", "-1, expected"),
    "negative address": ({**GOOD, "addr": -5}, r"device_traces\[0\]\[1\].addr", "-5"),
    "negative time": ({**GOOD, "time_us": -5}, r"device_traces\[0\]\[1\].time_us", "-5"),
    "size as float": ({**GOOD, "size": 1.5}, r"device_traces\[0\]\[1\].size", "type float"),
    "size as bool": ({**GOOD, "size": True}, r"device_traces\[0\]\[1\].size", "type bool"),
    "stream as text": ({**GOOD, "stream": "0"}, r"device_traces\[0\]\[1\].stream", "'0'"),
    "frames as text": (
        {**GOOD, "frames": "abc"},
        r"device_traces\[0\]\[1\].frames",
        "'abc', expected a list",
    ),
    "frame not a dict": ({**GOOD, "frames": [3]}, r"device_traces\[0\]\[1\].frames", "3, expected a dict"),
    "frame without line": (
        {**GOOD, "frames": [{"filename": "", "name": ""}]},
        r"device_traces\[0\]\[1\].frames",
        "no 'line'",
    ),
    "frame line huge": (
        {**GOOD, "frames": [{**FRAME, "line": 1 << 70}]},
        r"device_traces\[0\]\[1\].frames",
        "expected an int",
    ),
    "frame name as bytes": (
        {**GOOD, "frames": [{**FRAME, "name": b"x"}]},
        r"device_traces\[0\]\[1\].frames",
        "type bytes",
    ),
    "tag as number": ({**GOOD, "user_metadata": 3}, r"device_traces\[0\]\[1\].user_metadata", "3, expected"),
    "frame name too long": (
        {**GOOD, "frames": [{**FRAME, "name": "x" * 70_000}]},
        r"device_traces\[0\]\[1\].frames",
        "type str",
    ),
}


@pytest.mark.parametrize("case", BAD_EVENTS)
def test_a_bad_event_is_named(case: str, opened: Any) -> None:
    bad, place, message = BAD_EVENTS[case]
    with pytest.raises(TraceError, match=place) as caught:
        opened(snapshot(GOOD, bad))
    assert message in str(caught.value)
    assert caught.value.place in str(caught.value)


def one_segment(**changes: Any) -> dict[str, Any]:
    return snapshot(segments=[{**segment(4096, 1024, [block(4096, 1024, "inactive")]), **changes}])


def one_block(**changes: Any) -> dict[str, Any]:
    return one_segment(blocks=[block(4096, 512, "inactive"), {**block(4608, 512, "inactive"), **changes}])


BAD_SHAPES: dict[str, tuple[Any, str]] = {
    "not a dict": (7, "snapshot is 7, expected a dict"),
    "list of numbers": ([1], r"segments\[0\] is 1, expected a dict"),
    "no segments": ({"device_traces": []}, "not a PyTorch memory snapshot: it has no 'segments'"),
    "traces as dict": ({"segments": [], "device_traces": {}}, "device_traces is a value of type dict"),
    "events as text": (
        {"segments": [], "device_traces": ["x"]},
        r"device_traces\[0\] is 'x', expected a list",
    ),
    "segments as text": ({"segments": "x", "device_traces": []}, "segments is 'x'"),
    "segment as list": ({"segments": [[]], "device_traces": []}, r"segments\[0\] is a value of type list"),
    "segment device": (one_segment(device=-1), r"segments\[0\].device is -1"),
    "segment size": (one_segment(total_size=1 << 63), r"segments\[0\].total_size is 9223372036854775808"),
    "segment kind": (
        one_segment(segment_type="medium"),
        r"segment_type is 'medium', expected 'small' or 'large'",
    ),
    "segment expandable": (one_segment(is_expandable=1), "is_expandable is 1, expected True or False"),
    "segment pool": (one_segment(segment_pool_id=(1, 2, 3)), "segment_pool_id"),
    "segment frames": (one_segment(frames=None), r"segments\[0\].frames"),
    "block state": (
        one_block(state="lost"),
        r"blocks\[1\].state is 'lost', expected one of active_allocated",
    ),
    "block size": (one_block(size=-512), r"blocks\[1\].size is -512"),
    "block overlaps": (one_block(address=4097), r"blocks\[1\] \(512 bytes at 4097\) overlaps"),
    "block outside": (one_block(size=513), r"blocks\[1\] .* leaves its segment"),
    "block requested": (one_block(requested_size="9"), "requested_size is '9'"),
    "settings as list": (snapshot(allocator_settings=[]), "allocator_settings"),
    "settings with bytes": (
        snapshot(allocator_settings={"a": b"x"}),
        "allocator_settings is a value of type bytes",
    ),
    "annotation": (snapshot(external_annotations=[{}]), r"external_annotations\[0\] has no 'stage'"),
}


@pytest.mark.parametrize("case", BAD_SHAPES)
def test_a_wrong_shape_is_named(case: str, opened: Any) -> None:
    content, message = BAD_SHAPES[case]
    with pytest.raises(TraceError, match=message):
        opened(content)


def test_an_error_in_the_child_comes_back_whole(opened: Any) -> None:
    with pytest.raises(TraceError, match=r"snapshot.pickle: device_traces\[0\]\[0\].size is -1") as caught:
        opened(snapshot(event("alloc", 0, -1)), trusted=False)
    assert caught.value.place == "device_traces[0][0].size"


@pytest.mark.parametrize("takes_a_trace", [lifetimes, vram.suggest, vram.replay.replay, vram.replay.sweep])
def test_a_path_in_place_of_a_trace_says_what_to_do(takes_a_trace: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=r"str is not a Trace; vram\.open"):
        takes_a_trace("run.pickle")
