"""`vram convert`: each file says what the trace says, in the words of the tool that will open it."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
from array import array
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from vram.cli import main
from vram.errors import TraceError
from vram.trace import (
    Action,
    Annotation,
    Block,
    BlockState,
    Frame,
    Segment,
    Trace,
    lifetimes,
    open_trace,
    peak_allocated,
)
from vram.trace.convert import FORMATS, convert
from vram.trace.model import COLUMNS

TRACES = Path(__file__).resolve().parents[2] / "traces"
MIB = 1 << 20
HOSTILE = 'evil;name"\n<script>\x1b[31m</script>'

# What PyTorch's viewer (MemoryViz.js) can unpickle.
VIEWER_OPCODES = {
    "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE", "DICT",
    "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK",
    "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP",
    "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip


@cache
def recorded(name: str) -> Trace:
    return open_trace(TRACES / f"{name}.pickle.xz")


def small(*rows: tuple[Action, int, int, int, int], **more: Any) -> Trace:
    """A trace of (action, address, size, time, stack)."""
    actions, addresses, sizes, times, stacks = zip(*rows, strict=True) if rows else ((),) * 5
    none = (0,) * len(rows)
    values = (actions, none, addresses, sizes, times, stacks, none)
    columns: dict[str, Any] = {
        name: array(typecode, value) for (name, typecode), value in zip(COLUMNS.items(), values, strict=True)
    }
    frames = (Frame("train.py", 7, "forward"), Frame("train.py", 30, "main"), Frame(HOSTILE, 1, HOSTILE))
    given: dict[str, Any] = {
        "source": "", "device": 0, "devices": (0,), "start_us": 1000, "timed": True, "streams": (0,),
        "frames": frames, "stacks": ((), (0, 1), (2, 1)), **columns,
    }  # fmt: skip
    return Trace(**{**given, **more})


def written(trace: Trace, to: str) -> bytes:
    file = io.BytesIO()
    FORMATS[to].write(trace, file)
    return file.getvalue()


def perfetto(trace: Trace, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(written(trace, "perfetto"))["traceEvents"] if event["ph"] == phase]


def counter(trace: Trace, name: str) -> list[int]:
    return [event["args"]["bytes"] for event in perfetto(trace, "C") if event["name"] == name]


PEAK = small(
    (Action.ALLOC, 512, 1000, 0, 1),
    (Action.ALLOC, 4096, 3000, 5, 2),
    (Action.FREE_REQUESTED, 512, 1000, 5, 0),
    (Action.FREE_COMPLETED, 512, 1000, 5, 0),
    (Action.OOM, 77, 1 << 40, 9, 1),
)


# --- PyTorch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["multistream_prefetch", "oom_gpt2_train_9000"])
def test_a_snapshot_written_for_torch_is_the_same_snapshot(name: str, tmp_path: Path) -> None:
    trace = recorded(name)
    convert(trace, "torch", tmp_path / "run.pickle")
    assert replace(open_trace(tmp_path / "run.pickle"), source=trace.source) == trace


def test_torchs_viewer_can_unpickle_it() -> None:
    opcodes = {
        opcode.name for opcode, _, _ in pickletools.genops(written(recorded("multistream_prefetch"), "torch"))
    }
    assert opcodes <= VIEWER_OPCODES


def test_the_snapshot_has_what_torchs_viewer_reads() -> None:
    block = Block(512, 512, 100, BlockState.PENDING, 1)
    trace = replace(PEAK, device=1, segments=(Segment(512, 512, 0, "small", blocks=(block,)),))
    snapshot = pickle.loads(written(trace, "torch"))
    (segment,) = snapshot["segments"]
    assert segment["device"] == 1 and len(snapshot["device_traces"]) == 2
    assert (segment["allocated_size"], segment["active_size"], segment["requested_size"]) == (0, 512, 100)
    assert segment["blocks"][0]["state"] == "active_pending_free"
    assert segment["blocks"][0]["frames"][0] == {"filename": "train.py", "line": 7, "name": "forward"}
    first, *_, failed = snapshot["device_traces"][1]
    assert (first["action"], first["addr"], first["time_us"]) == ("alloc", 512, 1000)
    assert failed["device_free"] == 77 and "addr" not in failed


def test_what_was_not_timed_has_no_times() -> None:
    (event, *_) = pickle.loads(written(replace(PEAK, timed=False), "torch"))["device_traces"][0]
    assert "time_us" not in event


# --- Perfetto -----------------------------------------------------------------------------------------------


def test_counters_reach_the_peaks_that_were_measured() -> None:
    trace = recorded("multistream_prefetch")
    assert max(counter(trace, "allocated")) == peak_allocated(lifetimes(trace))
    assert max(counter(trace, "reserved")) == 4278 * MIB


def test_no_value_of_a_microsecond_is_lost() -> None:
    assert counter(PEAK, "allocated") == [1024, 1024 + 3072, 3072]
    times = [event["ts"] for event in perfetto(PEAK, "C")]
    assert times == sorted(set(times)) and times[1] == 5.0


def test_reserved_starts_with_what_was_there_before() -> None:
    segments = (Segment(0, 4 * MIB, 0, "large"),)
    trace = small((Action.SEGMENT_ALLOC, 0, MIB, 3, 0), segments=segments)
    assert counter(trace, "reserved") == [3 * MIB, 4 * MIB]


def test_steps_and_annotations_are_slices() -> None:
    marks = [("START", "step#1", 0), ("START", "forward", 1), ("END", "forward", 4), ("END", "step#1", 5)]
    marks += [("START", "unfinished", 6), ("END", "never begun", 7)]
    trace = replace(PEAK, annotations=tuple(Annotation(*mark) for mark in marks))
    slices = [(event["name"], event["ts"], event["dur"]) for event in perfetto(trace, "X")]
    assert slices == [("step 1", 0, 9), ("forward", 1, 3), ("unfinished", 6, 3)]
    names = [event["name"] for event in perfetto(recorded("gpt2_train"), "X")]
    assert [name for name in names if name.startswith("step")] == [f"step {number}" for number in range(1, 5)]
    assert names.count("Optimizer.step#AdamW.step") == 4


def test_an_out_of_memory_is_an_instant() -> None:
    (event,) = perfetto(PEAK, "i")
    assert (event["ts"], event["s"], event["args"]["size"], event["args"]["device_free"]) == (
        9,
        "g",
        1 << 40,
        77,
    )


# --- who holds memory at the peak ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2_train", "multistream_prefetch"])
def test_the_bytes_of_all_stacks_are_the_peak(name: str) -> None:
    trace = recorded(name)
    lines = written(trace, "folded").decode().splitlines()
    assert sum(int(line.rpartition(" ")[2]) for line in lines) == peak_allocated(lifetimes(trace))
    (profile,) = json.loads(written(trace, "speedscope"))["profiles"]
    assert sum(profile["weights"]) == profile["endValue"] == peak_allocated(lifetimes(trace))


def test_folded_stacks_begin_outermost() -> None:
    trace = small((Action.ALLOC, 512, 1000, 0, 1))
    assert written(trace, "folded") == b"main (train.py:30);forward (train.py:7) 1024\n"


def test_hostile_names_stay_names() -> None:
    lines = written(PEAK, "folded").decode().splitlines()
    assert len(lines) == 2 and lines[0].count(";") == 1 and "\x1b" not in lines[0]
    names = [frame["name"] for frame in json.loads(written(PEAK, "speedscope"))["shared"]["frames"]]
    assert HOSTILE in names


def test_what_was_there_before_the_recording_is_named_so() -> None:
    trace = small((Action.FREE_REQUESTED, 512, 1000, 0, 1), (Action.ALLOC, 4096, 1, 1, 0))
    assert written(trace, "folded") == b"(allocated before the recording) 1024\n"


def test_a_snapshot_without_events_says_who_holds_its_blocks() -> None:
    blocks = (Block(0, 512, 100, BlockState.LIVE, 1), Block(512, 512, 9, BlockState.FREE, 1))
    trace = small(segments=(Segment(0, 1024, 0, "small", blocks=blocks),))
    assert written(trace, "folded").endswith(b"forward (train.py:7) 512\n")


def test_a_stack_nobody_recorded_is_named_so() -> None:
    assert written(small((Action.ALLOC, 512, 1000, 0, 0)), "folded") == b"(no Python stack) 1024\n"


@pytest.mark.parametrize("to", FORMATS)
def test_an_empty_trace_is_written(to: str) -> None:
    assert written(small(), to) is not None


# --- the command --------------------------------------------------------------------------------------------

SNAPSHOT = TRACES / "oom_gpt2_train_9000.pickle.xz"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["convert", *map(str, arguments)])


@pytest.mark.parametrize("to", FORMATS)
def test_the_command_writes_what_it_says(to: str, tmp_path: Path) -> None:
    result = run(SNAPSHOT, "--to", to, "-o", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.output)
    assert (said["format"], said["trace"]["events"]) == (to, 1152)
    assert said["output"] == str(tmp_path / "out")
    assert said["bytes"] == (tmp_path / "out").stat().st_size > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_file_lies_beside_the_recording_by_default(tmp_path: Path) -> None:
    copy = tmp_path / "run.pickle.xz"
    copy.write_bytes(SNAPSHOT.read_bytes())
    assert "run.perfetto.json: 1152 events" in run(copy, "--to", "perfetto").output
    assert (tmp_path / "run.perfetto.json").exists()


def test_a_recording_is_never_overwritten_by_itself(tmp_path: Path) -> None:
    copy = tmp_path / "run.pickle"
    copy.write_bytes(SNAPSHOT.read_bytes())
    result = run(copy, "--to", "torch")
    assert result.exit_code == 2 and "is the input file" in result.output
    assert copy.read_bytes() == SNAPSHOT.read_bytes()


def test_a_bad_file_or_place_is_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"nonsense")
    assert run(tmp_path / "bad", "--to", "torch").exit_code == 2
    result = run(SNAPSHOT, "--to", "folded", "-o", tmp_path / "nowhere" / "out")
    assert result.exit_code == 2 and "cannot write" in result.output


def test_an_unknown_format_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'svg' is not a format; there are folded, parquet, perfetto"):
        convert(PEAK, "svg", tmp_path / "out")
    with pytest.raises(TraceError, match="cannot write"):
        convert(PEAK, "folded", tmp_path / "nowhere" / "out")
