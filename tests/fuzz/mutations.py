"""Bad input for the readers of traces: good files of every format, and ways to damage or inflate them.

`FAMILIES` has one maker a family: it takes a random source and a command that must never run, and returns the
bytes of a file.
"""

from __future__ import annotations

import bz2
import copy
import gzip
import io
import json
import lzma
import pickle
import pickletools
import random
import struct
import tempfile
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow
import pyarrow.parquet
import zstandard

from vram.trace import Annotation, Block, BlockState, Frame, Segment, Trace, TraceWriter
from vram.trace.arrow import KEY, write_parquet
from vram.trace.model import COLUMNS

__all__ = ["FAMILIES", "good_snapshot", "mutate_bytes", "mutate_value"]

Maker: TypeAlias = Callable[[random.Random, bytes], bytes]

EXTREMES = [b"\xff" * 8, b"\x00" * 8, b"\x7f" * 8, struct.pack("<Q", 1 << 63), b"\x00\x00\x00\x80"]

STRANGE: list[Any] = [
    None, True, -1, 0, 1 << 63, (1 << 63) - 1, 1 << 64, 1 << 70, 1.5, float("nan"), float("inf"), "", "x",
    "alloc", "\ud800", b"x", [], {}, (), [[]], {"a": 1}, ["alloc"], (1, 2), {1: 2}, {(): ()},
]  # fmt: skip


# --- good files ---------------------------------------------------------------------------------------------


def good_snapshot() -> dict[str, Any]:
    """A small PyTorch snapshot with every field."""
    frames = [{"filename": f"file{i}.py", "line": i, "name": f"f{i}"} for i in range(4)]
    events = [
        {"action": action, "addr": 512 * i, "size": 100 + i, "stream": i % 2, "time_us": 10**15 + i,
         "frames": frames[i % 4 :], "user_metadata": "weights" if i % 5 else ""}
        for i in range(30)
        for action in ("alloc", "free_requested", "free_completed")
    ]  # fmt: skip
    blocks = [{"address": 512 * i, "size": 512, "requested_size": 9, "state": "inactive"} for i in range(4)]
    segment = {
        "device": 0, "address": 0, "total_size": 2048, "stream": 0, "segment_type": "small",
        "is_expandable": False, "segment_pool_id": (0, 0), "frames": frames[:1], "blocks": blocks,
    }  # fmt: skip
    marks = [{"device": 0, "time_us": 10**15 + 5, "stage": "START", "name": "Optimizer.step#SGD.step"}]
    return {
        "segments": [segment],
        "device_traces": [events],
        "allocator_settings": {"a": {"b": 1}},
        "external_annotations": marks,
    }


@cache
def good_log() -> bytes:
    """A log of RMM."""
    lines = [b"Thread,Time,Action,Pointer,Size,Stream"]
    for i in range(40):
        action = (b"allocate", b"free", b"allocate failure")[i % 3]
        lines.append(
            b"%d,12:00:%02d.%06d,%s,0x%x,%d,0x%x" % (i % 4, i, i, action, 512 * (i // 2), 100 + i, i % 3)
        )
    return b"\n".join(lines) + b"\n"


@cache
def good_stream() -> bytes:
    """A recording of ours, in several batches."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.vtrace"
        writer = TraceWriter(path, start_us=10**15)
        for batch in range(4):
            writer.stream(batch)
            stack = writer.stack([Frame("a.py", batch, "f"), Frame("b.py", 2, "g")])
            rows = (0, batch, 512 * batch, 100, batch, stack, writer.tag(f"tag {batch}"))
            values = zip(COLUMNS.items(), rows, strict=True)
            writer.annotate("START", f"step#{batch}", batch)
            writer.append({name: array(typecode, [value] * 8) for (name, typecode), value in values})
        block = Block(0, 512, 100, BlockState.LIVE, 1)
        writer.close([Segment(0, 512, 0, "small", blocks=(block,))], {"limit": "1GiB"})
        return path.read_bytes()


@cache
def good_parquet() -> bytes:
    """A trace of ours as Parquet."""
    rows = (range(3), [0] * 3, [512] * 3, [100] * 3, range(3), [1] * 3, [1] * 3)
    columns: dict[str, Any] = {
        name: array(typecode, row) for (name, typecode), row in zip(COLUMNS.items(), rows, strict=True)
    }
    trace = Trace(
        source="", device=0, devices=(0,), start_us=5, timed=True, **columns, streams=(7,),
        frames=(Frame("a.py", 1, "f"),), stacks=((), (0,)), tags=("", "x"),
        annotations=(Annotation("START", "step#1", 1),), settings={"a": [1, {"b": None}]},
    )  # fmt: skip
    file = io.BytesIO()
    write_parquet(trace, file)
    return file.getvalue()


# --- damage -------------------------------------------------------------------------------------------------


def flip_bit(data: bytearray, chance: random.Random) -> bytearray:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return data


def cut(data: bytearray, chance: random.Random) -> bytearray:
    return data[: chance.randrange(len(data))]


def splice(data: bytearray, chance: random.Random) -> bytearray:
    source, target = chance.randrange(len(data)), chance.randrange(len(data))
    length = chance.randrange(1, 64)
    data[target : target + length] = data[source : source + length]
    return data


def overwrite(data: bytearray, chance: random.Random) -> bytearray:
    at = chance.randrange(len(data))
    extreme = chance.choice(EXTREMES)
    data[at : at + len(extreme)] = extreme
    return data


def insert(data: bytearray, chance: random.Random) -> bytearray:
    at = chance.randrange(len(data))
    data[at:at] = chance.randbytes(chance.randrange(1, 16))
    return data


def mutate_bytes(good: bytes, chance: random.Random) -> bytes:
    """Damage `good` in one to five places."""
    data = bytearray(good)
    for _ in range(chance.choice([1, 1, 2, 5])):
        data = chance.choice([flip_bit, flip_bit, cut, splice, overwrite, insert])(data, chance) or bytearray(
            b"."
        )
    return bytes(data)


def mutate_value(value: Any, chance: random.Random) -> Any:
    """A copy of plain data with one place, somewhere inside, replaced, removed or doubled."""
    if chance.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return copy.deepcopy(chance.choice(STRANGE))
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = chance.choice(list(keys))
    changed: Any = value.copy()
    if chance.random() < 0.1:
        del changed[key]
    elif isinstance(changed, list) and chance.random() < 0.1:
        changed.insert(chance.randrange(len(changed)), changed[key])
    else:
        changed[key] = mutate_value(value[key], chance)
    return changed


# --- pickles ------------------------------------------------------------------------------------------------


def snapshot_bytes(chance: random.Random, command: bytes) -> bytes:
    return mutate_bytes(pickle.dumps(good_snapshot(), chance.randrange(6)), chance)


def snapshot_values(chance: random.Random, command: bytes) -> bytes:
    content: Any = good_snapshot()
    if chance.random() < 0.1:
        content = content["segments"]
    for _ in range(chance.choice([1, 1, 3])):
        content = mutate_value(content, chance)
    return pickle.dumps(content, chance.randrange(2, 6))


def opcode_program(chance: random.Random, command: bytes) -> bytes:
    """A pickle of random opcodes of every family, with a call of `command` among them."""
    program = [bytes([0x80, chance.randrange(6)])] if chance.random() < 0.8 else []
    for _ in range(chance.randrange(1, 40)):
        opcode = chance.choice(pickletools.opcodes)
        program.append(opcode.code.encode("latin-1") + _argument(opcode.arg, chance))
    calls = [
        b"cos\nsystem\n(V" + command + b"\ntR",
        b"\x8c\x02os\x8c\x06system\x93X" + struct.pack("<I", len(command)) + command + b"\x85R",
        b"(V" + command + b"\nios\nsystem\n",
        b"(cos\nsystem\nV" + command + b"\no",
        b"csubprocess\nPopen\nV" + command + b"\n\x85\x81",
        b"csubprocess\nPopen\nV" + command + b"\n\x85}\x92",
        b"P" + command + b"\n",
    ]
    program.insert(chance.randrange(len(program) + 1), chance.choice(calls))
    if chance.random() < 0.5:  # first what a snapshot begins with, so that the rest is met later
        program.insert(0, b"}(Vsegments\n]Vdevice_traces\n]")
    return b"".join(program) + b"."


def _argument(kind: Any, chance: random.Random) -> bytes:
    if kind is None:
        return b""
    if kind.n > 0:
        return chance.choice(
            [chance.randbytes(kind.n), bytes(kind.n), b"\xff" * kind.n, b"\x01" + bytes(kind.n - 1)]
        )
    if kind.n == pickletools.UP_TO_NEWLINE:
        line = chance.choice([b"0", b"-1", b"9" * 30, b"'x'", b"x", b"1.5", b"nan", b"0L", b"os"])
        return line + b"\n" + (b"system\n" if "pair" in kind.name else b"")
    payload = chance.randbytes(chance.randrange(12))
    length = chance.choice([len(payload), len(payload), 0, (1 << 31) - 1, (1 << 62)])
    form = {
        pickletools.TAKEN_FROM_ARGUMENT1: "<B",
        pickletools.TAKEN_FROM_ARGUMENT4: "<i",
        pickletools.TAKEN_FROM_ARGUMENT4U: "<I",
        pickletools.TAKEN_FROM_ARGUMENT8U: "<Q",
    }[kind.n]
    most = {"<B": 255, "<i": (1 << 31) - 1, "<I": (1 << 32) - 1, "<Q": 1 << 63}[form]
    return struct.pack(form, min(length, most)) + payload


# --- logs ---------------------------------------------------------------------------------------------------

FIELDS = [
    b"", b"-1", b"0", b"(nil)", b"0x", b"0xffffffffffffffff", b"0x10000000000000000", b"9223372036854775808",
    b"9" * 400, b"allocate", b"free", b"nan", b"1e9", b"25:61:61.0", b"24:00:00.0", b"\xff\xfe", b'"a',
    b"\x00", b"Thread", "٣".encode(), b"1_0", b" 7 ",
]  # fmt: skip


def log_bytes(chance: random.Random, command: bytes) -> bytes:
    return mutate_bytes(good_log(), chance)


def log_fields(chance: random.Random, command: bytes) -> bytes:
    rows = [line.split(b",") for line in good_log().splitlines()]
    for _ in range(chance.choice([1, 1, 4])):
        row = chance.choice(rows[1:])
        row[chance.randrange(len(row))] = chance.choice(FIELDS)
        if chance.random() < 0.2:
            row.insert(0, chance.choice(FIELDS))
    return chance.choice([b"\n", b"\r\n", b"\r", b"\n\n"]).join(b",".join(row) for row in rows)


# --- our own files ------------------------------------------------------------------------------------------


def stream_bytes(chance: random.Random, command: bytes) -> bytes:
    return mutate_bytes(good_stream(), chance)


def parquet_bytes(chance: random.Random, command: bytes) -> bytes:
    return mutate_bytes(good_parquet(), chance)


def parquet_notes(chance: random.Random, command: bytes) -> bytes:
    """A Parquet file whose notes, or whose column, are not what they should be."""
    table = pyarrow.parquet.read_table(pyarrow.BufferReader(good_parquet()))
    head = mutate_value(json.loads(table.schema.metadata[KEY]), chance)
    if chance.random() < 0.2:
        table = table.set_column(chance.randrange(7), "x", [chance.choice([["a"], [None], [1.5], [[1]]]) * 3])
    if chance.random() < 0.1:  # a few bytes of runs that stand for many rows
        rows = 10 ** chance.randrange(3, 8)
        column = pyarrow.repeat(pyarrow.scalar(0, pyarrow.uint8()), rows)
        table = pyarrow.table({name: column for name in COLUMNS})
    return _parquet(table.replace_schema_metadata({KEY: _json(head)}))


def stream_notes(chance: random.Random, command: bytes) -> bytes:
    """A recording in which the notes of one batch, or the schema's, are not what they should be."""
    source = pyarrow.ipc.open_stream(pyarrow.BufferReader(good_stream()))
    batches = []
    while True:
        try:
            batches.append(source.read_next_batch_with_custom_metadata())
        except StopIteration:
            break
    notes = [source.schema.metadata[KEY], *(metadata[KEY] for _, metadata in batches)]
    at = chance.randrange(len(notes))
    notes[at] = _json(mutate_value(json.loads(notes[at]), chance))
    sink = io.BytesIO()
    with pyarrow.ipc.new_stream(sink, source.schema.with_metadata({KEY: notes[0]})) as stream:
        for (batch, _), text in zip(batches, notes[1:], strict=True):
            stream.write_batch(batch, custom_metadata={KEY: text})
    return sink.getvalue()


def _parquet(table: Any) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink)
    return sink.getvalue()


def _json(value: Any) -> bytes:
    return json.dumps(_jsonable(value)).encode()


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _jsonable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(entry) for entry in value]
    return value.decode() if isinstance(value, bytes) else value


# --- compression and bombs ----------------------------------------------------------------------------------

PACKERS: list[Callable[[bytes], bytes]] = [
    gzip.compress,
    bz2.compress,
    lzma.compress,
    zstandard.ZstdCompressor().compress,
]


def compressed(chance: random.Random, command: bytes) -> bytes:
    good = chance.choice([pickle.dumps(good_snapshot()), good_log(), good_stream(), good_parquet()])
    pack = chance.choice(PACKERS)
    return mutate_bytes(pack(good), chance) if chance.random() < 0.7 else pack(mutate_bytes(good, chance))


def bomb(chance: random.Random, command: bytes) -> bytes:
    """Few bytes that want to be many: nested, repeated or compressed."""
    size = 1 << chance.randrange(16, 24)
    content = chance.choice([
        bytes(size),
        b")" * size,
        b"]" * (size // 8) + b"a" * (size // 8) + b".",
        b")" + b"\x85" * (size // 8) + b".",
        b"})" + b"2\x86" * 200 + b"Ns.",
        b"\x80\x04\x8e" + struct.pack("<Q", size) + bytes(size),
        good_log() + b"1" * size,
        good_log()[:39] + b"1,00:00:00.0,allocate,0x1,1,0x1\n" * (size // 64),
        pickle.dumps({"segments": [], "device_traces": [[[]] * (size // 64)]}),
        b"\xff\xff\xff\xff" + struct.pack("<i", size) + bytes(size),
    ])  # fmt: skip
    return chance.choice([bytes, *PACKERS[:2], PACKERS[3]])(content)


FAMILIES: dict[str, Maker] = {
    "snapshot bytes": snapshot_bytes,
    "snapshot values": snapshot_values,
    "pickle opcodes": opcode_program,
    "log bytes": log_bytes,
    "log fields": log_fields,
    "stream bytes": stream_bytes,
    "stream notes": stream_notes,
    "Parquet bytes": parquet_bytes,
    "Parquet notes": parquet_notes,
    "compressed": compressed,
    "bombs": bomb,
}
