"""Our own files and RMM's logs: what is written is read, whole or as far as it was written."""

from __future__ import annotations

import gzip
import json
import pickle
import subprocess
import sys
from array import array
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from vram.errors import TraceError
from vram.trace import Action, Annotation, Block, BlockState, Frame, Segment, Trace, TraceWriter, open_trace
from vram.trace.arrow import KEY
from vram.trace.convert import convert
from vram.trace.model import COLUMNS

TRACES = Path(__file__).resolve().parents[2] / "traces"
STACK = (Frame("train.py", 7, "forward"), Frame("train.py", 30, "main"))


def columns(first: int, count: int, **constant: int) -> dict[str, array[int]]:
    """`count` allocations, one a microsecond, the first at time `first`."""
    rows: dict[str, Iterable[int]] = {
        "action": [Action.ALLOC] * count,
        "stream": [0] * count,
        "address": range(512 * first, 512 * (first + count), 512),
        "size": [100] * count,
        "time_us": range(first, first + count),
    }
    rows |= {name: [value] * count for name, value in constant.items()}
    return {name: array(COLUMNS[name], values) for name, values in rows.items()}


def begin(path: Path, **options: Any) -> TraceWriter:
    writer = TraceWriter(path, start_us=1_000_000, **options)
    assert writer.stream(7) == 0
    return writer


def times(trace: Trace) -> list[int]:
    return [trace.start_us + time for time in trace.time_us]


# --- a recording --------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    writer = begin(tmp_path / "run.vtrace", device=3)
    writer.append(columns(0, 2))
    late = columns(2, 1, stack=writer.stack(STACK), tag=writer.tag("weights"))
    writer.annotate("START", "step#1", 2)
    writer.append(late, dropped=5)
    block = Block(512, 512, 100, BlockState.LIVE, 1)
    segment = Segment(0, 2048, 0, "large", True, (0, 1), 1, (block,))
    writer.close([segment], {"limit": "2GiB"})
    trace = open_trace(tmp_path / "run.vtrace")
    assert (trace.device, trace.devices, trace.streams, trace.events) == (3, (3,), (7,), 3)
    assert (trace.truncated, trace.dropped, trace.settings) == (False, 5, {"limit": "2GiB"})
    assert list(trace.address) == [0, 512, 1024] and times(trace) == [1_000_000, 1_000_001, 1_000_002]
    assert [trace.frames_of(stack) for stack in trace.stack] == [(), (), STACK]
    assert [trace.tags[tag] for tag in trace.tag] == ["", "", "weights"]
    assert (trace.segments, trace.annotations) == ((segment,), (Annotation("START", "step#1", 2),))


def test_numbers_stand_for_equal_things(tmp_path: Path) -> None:
    with begin(tmp_path / "run.vtrace") as writer:
        assert [writer.tag(None), writer.tag("a"), writer.tag(""), writer.tag("a")] == [0, 1, 0, 1]
        assert [writer.stack(()), writer.stack(STACK), writer.stack(STACK[1:]), writer.stack(STACK)] == [
            0,
            1,
            2,
            1,
        ]


def test_a_recording_reads_while_it_is_written_and_after_a_crash(tmp_path: Path) -> None:
    writer = begin(tmp_path / "run.vtrace")
    writer.append(columns(0, 10))
    trace = open_trace(tmp_path / "run.vtrace")
    assert (trace.events, trace.truncated) == (10, True)
    writer.close()
    assert not open_trace(tmp_path / "run.vtrace").truncated


def test_a_file_cut_anywhere_gives_every_batch_that_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.vtrace"
    writer = begin(path)
    ends = []
    for batch in range(4):
        writer.append(columns(10 * batch, 10, stack=writer.stack(STACK[batch % 2 :])))
        ends.append(path.stat().st_size)
    writer.close()
    whole = path.read_bytes()
    for cut in {*range(ends[0], len(whole), 97), *ends}:
        path.write_bytes(whole[:cut])
        trace = open_trace(path, trusted=True)
        assert trace.events == 10 * sum(end <= cut for end in ends)
        assert trace.truncated
    path.write_bytes(whole[:100])
    with pytest.raises(TraceError, match="not a readable Arrow"):
        open_trace(path)


def test_a_file_cut_in_its_first_batch_is_a_recording_without_events(tmp_path: Path) -> None:
    path = tmp_path / "run.vtrace"
    writer = begin(path)
    writer.append(columns(0, 10, stack=writer.stack(STACK)))
    whole = path.read_bytes()
    file = pyarrow.BufferReader(whole)
    pyarrow.ipc.open_stream(file)
    header = file.tell()
    for cut in range(header, len(whole), 97):
        path.write_bytes(whole[:cut])
        trace = open_trace(path, trusted=True)
        assert (trace.events, trace.truncated) == (0, True)
    writer.close()


def test_a_killed_job_leaves_what_it_appended(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from array import array; from vram.trace import TraceWriter;"
        "writer = TraceWriter(sys.argv[1]); writer.stream(0);"
        "writer.append({'action': array('B', [0]), 'stream': array('I', [0]), 'address': array('Q', [512]),"
        " 'size': array('Q', [9]), 'time_us': array('q', [0])}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = tmp_path / "run.vtrace"
    subprocess.run([sys.executable, "-c", code, str(path)], timeout=600)
    trace = open_trace(path)
    assert (list(trace.size), trace.truncated) == ([9], True)


def test_appending_to_a_closed_recording_is_refused(tmp_path: Path) -> None:
    writer = begin(tmp_path / "run.vtrace")
    writer.close()
    writer.close()
    with pytest.raises(TraceError, match="is closed"):
        writer.append(columns(0, 1))


# --- rotation -----------------------------------------------------------------------------------------------


def rotated(path: Path, batches: int, **options: Any) -> None:
    with begin(path, piece_bytes=1, **options) as writer:
        for batch in range(batches):
            writer.annotate("START", f"step#{batch}", 10 * batch)
            writer.append(columns(10 * batch, 10, stack=writer.stack(STACK), tag=writer.tag(f"tag {batch}")))


def test_pieces_open_as_one(tmp_path: Path) -> None:
    path = tmp_path / "run.vtrace"
    rotated(path, 4)
    assert sorted(piece.name for piece in tmp_path.iterdir()) == [
        "run.vtrace", "run.vtrace.000001", "run.vtrace.000002", "run.vtrace.000003", "run.vtrace.000004",
    ]  # fmt: skip
    trace = open_trace(path)
    assert times(trace) == list(range(1_000_000, 1_000_040))
    assert (trace.dropped, trace.truncated) == (0, False)
    assert [trace.tags[trace.tag[event]] for event in (0, 39)] == ["tag 0", "tag 3"]
    assert [mark.name for mark in trace.annotations] == [f"step#{batch}" for batch in range(4)]


def test_the_oldest_pieces_are_removed_and_their_events_counted(tmp_path: Path) -> None:
    path = tmp_path / "run.vtrace"
    rotated(path, 6, max_pieces=3)
    assert len(list(tmp_path.iterdir())) == 3
    trace = open_trace(path)
    assert (trace.events, trace.dropped) == (20, 40)
    assert (trace.start_us, trace.time_us[0]) == (1_000_040, 0)
    assert trace.annotations[0] == Annotation("START", "step#4", 0)


def test_a_piece_opens_alone(tmp_path: Path) -> None:
    rotated(tmp_path / "run.vtrace", 3)
    trace = open_trace(tmp_path / "run.vtrace.000002")
    assert (times(trace), trace.dropped, trace.truncated) == (list(range(1_000_010, 1_000_020)), 10, False)
    assert trace.frames_of(trace.stack[0]) == STACK


def test_a_new_recording_is_not_joined_with_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "run.vtrace"
    rotated(path, 2)
    (tmp_path / "kept").write_bytes((tmp_path / "run.vtrace.000001").read_bytes())
    with TraceWriter(path, start_us=5) as writer:
        writer.stream(0)
        writer.append(columns(0, 1))
    (tmp_path / "kept").rename(tmp_path / "run.vtrace.000001")
    assert open_trace(path).events == 1


def test_a_piece_with_names_of_its_own_is_not_joined(tmp_path: Path) -> None:
    path = tmp_path / "run.vtrace"
    for target in (tmp_path / "run.vtrace.000001", path):
        with begin(tmp_path / "other") as writer:
            writer.append(columns(0, 1, tag=writer.tag(target.name)))
        (tmp_path / "other").rename(target)
    assert open_trace(path).events == 1


# --- Parquet and Arrow, as others see them ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["multistream_prefetch", "oom_gpt2_train_9000"])
def test_a_trace_in_parquet_is_the_same_trace(name: str, tmp_path: Path) -> None:
    trace = open_trace(TRACES / f"{name}.pickle.xz")
    convert(trace, "parquet", tmp_path / "run.parquet")
    again = open_trace(tmp_path / "run.parquet")
    assert replace(again, source=trace.source) == trace


def test_other_readers_see_the_events_as_a_table(tmp_path: Path) -> None:
    path = tmp_path / "run.vtrace"
    with begin(path) as writer:
        writer.append(columns(0, 3))
    convert(open_trace(path), "parquet", tmp_path / "run.parquet")
    for table in (
        pyarrow.ipc.open_stream(path).read_all(),
        pyarrow.parquet.read_table(tmp_path / "run.parquet"),
    ):
        assert table.column_names == list(COLUMNS)
        assert table.column("address").to_pylist() == [0, 512, 1024]


def test_the_missing_library_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None; from vram.errors import TraceError;"
        "from vram.trace import TraceWriter\n"
        "try: TraceWriter(sys.argv[1])\nexcept TraceError as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run.vtrace")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert 'pip install "vram[trace]"' in done.stdout, done.stderr


# --- our own files, damaged or forged -----------------------------------------------------------------------


def forged(path: Path, change: Any, schema: Any = None, rows: int = 1) -> Path:
    """A Parquet file of one event whose notes `change` has changed."""
    with begin(path.with_suffix(".vtrace")) as writer:
        writer.append(columns(0, 1, stack=writer.stack(STACK), tag=writer.tag("x")))
    convert(open_trace(writer.path, trusted=True), "parquet", path)
    table = pyarrow.parquet.read_table(path)
    head = json.loads(table.schema.metadata[KEY])
    change(head)
    if schema is not None:
        table = schema(table)
    pyarrow.parquet.write_table(table.replace_schema_metadata({KEY: json.dumps(head)}), path)
    return path


FORGERIES: dict[str, tuple[Any, str]] = {
    "version": (lambda head: head.update(version=2), "version 2 of the trace format"),
    "no notes": (lambda head: head.pop("notes"), "schema has no 'notes'"),
    "stack of no frame": (lambda head: head["notes"].update(stacks=[[], [9]]), r"stacks\[1\] names a frame"),
    "stack of text": (lambda head: head["notes"].update(stacks=[[], ["x"]]), r"stacks\[1\] names a frame"),
    "event of no stack": (
        lambda head: head["notes"].update(stacks=[[]]),
        "events.stack is 1, expected at most 0",
    ),
    "event of no stream": (lambda head: head["notes"].update(streams=[]), "events.stream is 0, expected"),
    "event of no tag": (lambda head: head["notes"].update(tags=[""]), "events.tag is 1, expected at most 0"),
    "first tag": (lambda head: head["notes"].update(tags=["a", "b"]), "tags does not begin with the empty"),
    "frame of no text": (lambda head: head["notes"].update(texts=[]), r"frames\[0\] is 0, expected"),
    "negative line": (lambda head: head["notes"]["frames"][0].__setitem__(1, -1), r"frames\[0\] is -1"),
    "segment": (lambda head: head["notes"].update(segments=[[1]]), r"segments\[0\] has 1 values, expected 8"),
    "annotation": (lambda head: head["notes"].update(annotations=[["a", 1, 1]]), r"annotations\[0\] is 1"),
    "start": (lambda head: head["notes"].update(start_us=1 << 63), "start_us is 9223372036854775808"),
    "settings": (lambda head: head["notes"].update(settings=[]), "settings is a value of type list"),
    "truncated": (lambda head: head["notes"].update(truncated=1), "truncated is 1, expected true or false"),
}


@pytest.mark.parametrize("case", FORGERIES)
def test_forged_notes_are_refused(case: str, tmp_path: Path) -> None:
    change, message = FORGERIES[case]
    with pytest.raises(TraceError, match=message):
        open_trace(forged(tmp_path / "run.parquet", change), trusted=True)


def with_nulls(table: Any) -> Any:
    fields = [pyarrow.field(field.name, field.type, nullable=False) for field in table.schema]
    return pyarrow.table([pyarrow.nulls(1, field.type) for field in fields], names=table.column_names)


TABLES: dict[str, Any] = {
    "column missing": lambda table: table.drop_columns(["tag"]),
    "column of another type": lambda table: table.set_column(0, "action", [["alloc"]]),
    "nulls": with_nulls,
}


@pytest.mark.parametrize("case", TABLES)
def test_other_columns_are_refused(case: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="the columns are not those of a trace"):
        open_trace(forged(tmp_path / "run.parquet", lambda head: None, TABLES[case]))


def test_foreign_parquet_is_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "x.parquet")
    with pytest.raises(TraceError, match="is not a trace: its schema has no metadata 'vram'"):
        open_trace(tmp_path / "x.parquet")


def test_a_column_name_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = forged(tmp_path / "run.parquet", lambda head: None)
    path.write_bytes(path.read_bytes().replace(b"address", b"addr\xe9ss"))
    with pytest.raises(TraceError, match="not a readable Arrow or Parquet file"):
        open_trace(path, trusted=True)


def test_another_device_is_refused(tmp_path: Path) -> None:
    begin(tmp_path / "run.vtrace", device=2).close()
    with pytest.raises(TraceError, match="device 1 is not in this file; it has device 2"):
        open_trace(tmp_path / "run.vtrace", device=1)


# --- logs of RMM --------------------------------------------------------------------------------------------

HEADER = "Thread,Time,Action,Pointer,Size,Stream\n"
LOG = (
    HEADER + "1,23:59:59.999999,allocate,0x7f0000000000,1000,0x1\n"
    "2,00:00:00.000001,allocate,0x7f0000001000,64,0x55d0\n"
    "1,00:00:00:000005,allocate failure,(nil),1099511627776,0x2\n"
    "2,00:00:01.5,free,0x7f0000000000,1000,0x1\n"
)


def logged(tmp_path: Path, text: str, **options: Any) -> Trace:
    path = tmp_path / "rmm.csv"
    path.write_text(text)
    return open_trace(path, **{"trusted": True, **options})


def test_a_log_keeps_all_streams_and_failures(tmp_path: Path) -> None:
    trace = logged(tmp_path, LOG, trusted=False)
    assert [Action(code).name for code in trace.action] == [
        "ALLOC", "ALLOC", "OOM", "FREE_REQUESTED", "FREE_COMPLETED",
    ]  # fmt: skip
    assert trace.streams == (1, 0x55D0, 2)
    assert list(trace.size) == [1000, 64, 1 << 40, 1000, 1000]
    assert list(trace.address[:2]) == [0x7F0000000000, 0x7F0000001000]


def test_times_of_a_log_go_on_after_midnight(tmp_path: Path) -> None:
    assert list(logged(tmp_path, LOG).time_us) == [0, 2, 6, 1_500_001, 1_500_001]


def test_threads_a_little_out_of_order_do_not_go_back_in_time(tmp_path: Path) -> None:
    lines = "1,00:00:02.0,allocate,0x1,1,0\n2,00:00:01.9,allocate,0x2,1,0\n"
    assert list(logged(tmp_path, HEADER + lines).time_us) == [0, 0]


def test_a_log_cut_in_its_last_line_is_read_up_to_it(tmp_path: Path) -> None:
    trace = logged(tmp_path, LOG[:-9])
    assert (trace.events, trace.truncated) == (3, True)
    assert not logged(tmp_path, LOG).truncated


def test_a_log_without_calls_is_empty(tmp_path: Path) -> None:
    assert logged(tmp_path, HEADER + "\n" + HEADER).events == 0


BAD_LINES = {
    "fields": ("1,2,3", "line 2 has 3 fields, expected 6"),
    "action": ("1,00:00:00.0,grow,0x1,1,0x1", "line 2, Action is 'grow', expected allocate, free or"),
    "negative size": ("1,00:00:00.0,allocate,0x1,-1,0x1", "line 2, Size is '-1'"),
    "size 2**63": (f"1,00:00:00.0,allocate,0x1,{1 << 63},0x1", "line 2, Size is 9223372036854775808"),
    "pointer": ("1,00:00:00.0,allocate,0xg,1,0x1", "line 2, Pointer is '0xg'"),
    "pointer 2**64": (f"1,00:00:00.0,allocate,{1 << 64:#x},1,0x1", "line 2, Pointer is"),
    "stream": ("1,00:00:00.0,allocate,0x1,1,default", "line 2, Stream is 'default'"),
    "time": ("1,yesterday,allocate,0x1,1,0x1", "line 2, Time is 'yesterday', expected HH:MM:SS"),
    "long line": ("1," * 5000, "line 2"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named(case: str, tmp_path: Path) -> None:
    line, message = BAD_LINES[case]
    with pytest.raises(TraceError, match=message):
        logged(tmp_path, f"{HEADER}{line}\n1,00:00:00.0,allocate,0x1,1,0x1\n")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (gzip.compress(b"", mtime=0), "the file is empty"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "not a PyTorch memory snapshot, an RMM log or a vram recording"),
        (b"hello", "not a PyTorch memory snapshot, an RMM log or a vram recording"),
        (b"PK\x03\x04" + bytes(64), "not a PyTorch memory snapshot, an RMM log or a vram recording"),
        (pickle.dumps({"segments": ["x" * 99]})[:-40], "the snapshot is truncated"),
    ],
)
def test_a_file_that_is_no_recording_is_called_so(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "job"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=words):
        open_trace(path)
