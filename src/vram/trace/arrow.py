"""vram's own files: Arrow record batches while a job runs, or Parquet (docs/reference/trace-format.md).

`TraceWriter` writes a stream of record batches. Each batch has the columns of events and, as metadata, the
notes that are new since the last batch: stacks, names, annotations. So everything up to the last complete
batch can be read. A complete trace is one Parquet file with the same columns and all notes in its metadata.

    stream     schema {"vram": {version, device, devices, start_us, timed, first_event}}
               batch  {"vram": {notes that grew, dropped}}      ...and again, for every `append`
               batch  {"vram": {segments, settings, closed}}    by `close`
    Parquet    schema {"vram": {version, notes}}

`notes.unpack` checks what is read. Everything written passes that check: long strings are shortened, and
columns that a reader would refuse are refused here. `child` limits memory and time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeAlias

from vram.arguments import require, require_path, whole_number
from vram.errors import TraceError

from .checked import MAX_INT64, as_dict, as_list, fitting_text, get, integer, plain_settings
from .claim import Claim
from .files import CHUNK_BYTES, BoundedReader
from .model import COLUMNS, Segment, Trace
from .notes import GROWING, HIGHEST, pack, pack_segment
from .pieces import list_pieces, piece_path
from .tables import Tables

__all__ = [
    "PARQUET_MAGIC",
    "STREAM_MAGIC",
    "TraceWriter",
    "read_parquet",
    "read_stream",
    "write_parquet",
]

VERSION = 1
KEY = b"vram"
STREAM_MAGIC = b"\xff\xff\xff\xff"
PARQUET_MAGIC = b"PAR1"
ROW_GROUP_EVENTS = 1 << 20
EVENT_BYTES = sum(array(typecode).itemsize for typecode in COLUMNS.values())
DEFAULT_PIECES = 8

Column: TypeAlias = "bytes | bytearray | memoryview | array[int]"
Columns: TypeAlias = "Mapping[str, array[int]]"

_ARROW_TYPES = {"B": "uint8", "I": "uint32", "Q": "uint64", "q": "int64"}


@cache
def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise TraceError(
            'our own trace files are Arrow, and pyarrow is not installed; pip install "vram[trace]"',
            place="file",
        ) from error
    return pyarrow


def require_pyarrow() -> None:
    """Raise a TraceError that says what to install, where recordings can be neither read nor written."""
    _pyarrow()


@cache
def _schema() -> Any:
    arrow = _pyarrow()
    fields = [
        arrow.field(name, getattr(arrow, _ARROW_TYPES[typecode])(), nullable=False)
        for name, typecode in COLUMNS.items()
    ]
    return arrow.schema(fields)


def _record_batch(columns: Mapping[str, Column], events: int) -> Any:
    arrow = _pyarrow()
    arrays = [
        arrow.Array.from_buffers(field.type, events, [None, arrow.py_buffer(columns[field.name])])
        for field in _schema()
    ]
    return arrow.RecordBatch.from_arrays(arrays, schema=_schema())


def _no_events() -> Any:
    return _record_batch(dict.fromkeys(COLUMNS, b""), 0)


# --- writing while a job runs -------------------------------------------------------------------------------


class TraceWriter(Tables):
    """Writes a recording to `path` as it happens; `vram.open(path)` reads it at any time, even after a crash.

    `stack`, `tag` and `stream` return the numbers for the columns. With `piece_bytes`, a file of that size is
    renamed (`path.000001`) and a new one started; beyond `max_pieces` files the oldest is removed. Until
    `close`, another writer to the same path, in this or another process, is refused with a TraceError. One
    thread at a time.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device: int = 0,
        start_us: int = 0,
        timed: bool = True,
        piece_bytes: int | None = None,
        max_pieces: int = DEFAULT_PIECES,
    ) -> None:
        """Begin a recording that started at `start_us`; times of events count from there."""
        super().__init__()
        max_pieces = whole_number(max_pieces, "max_pieces", least=1)
        if piece_bytes is not None:
            piece_bytes = whole_number(piece_bytes, "piece_bytes", least=1)
        device = whole_number(device, "device", least=-1)
        start_us = whole_number(start_us, "start_us", least=-MAX_INT64)
        self.path = Path(require_path(path))
        self.events = 0
        self.dropped = 0
        self._head = {"device": device, "devices": [device], "start_us": start_us, "timed": bool(timed)}
        self._piece_bytes = piece_bytes
        self._max_pieces = max_pieces
        self._pieces = 0
        _pyarrow()
        self._claim = Claim(self.path)
        for _, left_over in list_pieces(self.path):
            left_over.unlink()
        self._open_piece()

    def annotate(self, stage: str, name: str, time_us: int) -> None:
        """Add a mark, with `stage` START or END; written with the next events, or by `flush`."""
        when = whole_number(time_us, "time_us", least=-MAX_INT64)
        self._new["annotations"].append((fitting_text(stage), fitting_text(name), when))

    def append(self, columns: Mapping[str, Column], *, dropped: int = 0) -> None:
        """Write events: a buffer for each column of `Trace`, of its type; `stack` and `tag` may be omitted.

        `dropped` events were lost since the last call. When this returns, the operating system has the
        events, so they survive a crash of the process. ValueError if a reader would refuse an entry.
        """
        named = require(columns, Mapping, "columns")  # type: ignore[type-abstract]
        if absent_names := COLUMNS.keys() - named.keys() - {"stack", "tag"}:
            raise ValueError(f"columns lack {', '.join(sorted(absent_names))}")
        events = len(memoryview(named["action"]).cast("B"))
        absent = bytes(4 * events)
        batch = _record_batch({"stack": absent, "tag": absent, **columns}, events)
        self._check(batch)
        self.dropped += dropped
        self._write(batch, {})
        self.events += events
        if self._piece_bytes is not None and self._sink.tell() >= self._piece_bytes:
            self.rotate()

    def flush(self) -> None:
        """Write what was interned or annotated since the last events."""
        self._write(_no_events(), {})

    def rotate(self) -> None:
        """Close this file, rename it to the next piece and start a new one."""
        self._write(_no_events(), {"closed": True})
        self._close_file()
        self._pieces += 1
        self._claim.put_aside(piece_path(self.path, self._pieces))
        for number, oldest in list_pieces(self.path):
            if number <= self._pieces - self._max_pieces + 1:
                oldest.unlink()
        self._open_piece()

    def close(self, segments: Iterable[Segment] = (), settings: Mapping[str, object] | None = None) -> None:
        """End the recording, with the current segments and settings of the allocator."""
        if self._stream is None:
            return
        ending = {
            "segments": [
                pack_segment(require(segment, Segment, "each of the segments")) for segment in segments
            ],
            "settings": plain_settings(dict(settings or {}), "settings"),
            "closed": True,
        }
        self._write(_no_events(), ending)
        self._close_file()
        self._claim.release()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self, batch: Any) -> None:
        import pyarrow.compute  # takes 70 ms, and reading does not need it

        counts = {"stream": "streams", "stack": "stacks", "tag": "tags"}
        highest = HIGHEST | {column: self._count(table) - 1 for column, table in counts.items()}
        for name, high in highest.items():
            found = pyarrow.compute.max(batch.column(name)).as_py()
            if found is not None and found > high:
                raise ValueError(f"events.{name} is {found}, expected at most {high}")

    def _open_piece(self) -> None:
        """Start a file with everything interned so far, so that each piece can be read alone."""
        arrow = _pyarrow()
        head = {"version": VERSION, **self._head, "first_event": self.events}
        schema = _schema().with_metadata({KEY: json.dumps(head)})
        self._new = self._all()
        self._sink = arrow.OSFile(os.fsencode(self.path), "wb")
        self._stream: Any = arrow.ipc.new_stream(self._sink, schema)

    def _write(self, batch: Any, more: Mapping[str, Any]) -> None:
        if self._stream is None:
            raise TraceError(f"the recording to {self.path} is closed", place="file")
        notes = {name: values for name, values in self._new.items() if values}
        self._stream.write_batch(
            batch, custom_metadata={KEY: json.dumps({**notes, "dropped": self.dropped, **more})}
        )
        self._new = {name: [] for name in GROWING}

    def _close_file(self) -> None:
        self._stream.close()
        self._sink.close()
        self._stream = None


# --- reading ------------------------------------------------------------------------------------------------


def read_stream(reader: BoundedReader) -> tuple[dict[str, Any], Columns]:
    """Return the notes and columns of a `TraceWriter`'s file, as far as it is complete; not checked yet."""
    arrow = _pyarrow()
    data = _read_all(reader)
    memory = arrow.BufferReader(data)
    with _arrow_errors(reader):
        stream = arrow.ipc.open_stream(memory)
        head = _head(stream.schema)
    columns = {name: array(typecode) for name, typecode in COLUMNS.items()}
    notes: dict[str, Any] = {name: [] for name in GROWING} | {"segments": [], "settings": {}, "dropped": 0}
    batches = 0
    while True:
        try:
            batch, metadata = stream.read_next_batch_with_custom_metadata()
        except StopIteration:
            break
        except MemoryError:
            raise
        except Exception as error:
            if memory.tell() < len(data):
                raise _damaged(error, memory.tell()) from error
            break  # the last batch is incomplete: the job, or its machine, ended while it was written
        with _arrow_errors(reader):
            _extend(columns, batch)
        _grow(notes, _json(metadata))
        batches += 1
    if batches == 0:  # what a recording begins with is in the first one
        _grow(notes, Tables()._all())
    notes["truncated"] = not notes.pop("closed", False)
    notes["dropped"] += integer(get(head, "first_event", "schema"), "schema.first_event")
    return {**head, **notes}, columns


def read_parquet(reader: BoundedReader) -> tuple[dict[str, Any], Columns]:
    """Return notes and columns of a file of `write_parquet`; not checked yet."""
    arrow = _pyarrow()
    import pyarrow.parquet

    with _arrow_errors(reader):
        file = pyarrow.parquet.ParquetFile(arrow.BufferReader(_read_all(reader)))
        head = _head(file.schema_arrow)
        # Parquet compresses runs of equal values to almost nothing, so check the unpacked size first.
        reader.account(EVENT_BYTES * integer(file.metadata.num_rows, "rows"), packed=True)
        columns = {name: array(typecode) for name, typecode in COLUMNS.items()}
        for batch in file.iter_batches(batch_size=ROW_GROUP_EVENTS, use_threads=False):
            _extend(columns, batch)
    return as_dict(get(head, "notes", "schema"), "notes"), columns


def _read_all(reader: BoundedReader) -> bytes:
    with io.BufferedReader(reader, CHUNK_BYTES) as buffered:
        return buffered.read()


@contextlib.contextmanager
def _arrow_errors(reader: BoundedReader) -> Iterator[None]:
    try:
        yield
    except (MemoryError, TraceError):
        raise
    except Exception as error:  # a damaged file can raise any error of the library
        raise _damaged(error, reader.count) from error


def _damaged(error: Exception, byte: int) -> TraceError:
    reason = " ".join(str(error).split())[:200].rstrip(".")
    return TraceError(f"not a readable Arrow or Parquet file: {reason}", place=f"Arrow, before byte {byte}")


def _head(schema: Any) -> dict[str, Any]:
    """The header in the schema, if the file is a trace of a known version."""
    head = _json(schema.metadata)
    if not head:
        raise TraceError("the Arrow file is not a trace: its schema has no metadata 'vram'", place="schema")
    version = integer(get(head, "version", "schema"), "schema.version")
    if version != VERSION:
        raise TraceError(
            f"the file is of version {version} of the trace format, and this vram reads version {VERSION}; "
            "open it with a later vram",
            place="schema.version",
        )
    if not schema.equals(_schema()):
        expected = ", ".join(f"{field.name}: {field.type}" for field in _schema())
        raise TraceError(f"the columns are not those of a trace ({expected}, none nullable)", place="schema")
    return head


def _json(metadata: Any) -> dict[str, Any]:
    """vram's entry in Arrow metadata."""
    if metadata is None or KEY not in metadata:
        return {}
    try:
        return as_dict(json.loads(metadata[KEY]), "metadata")
    except (ValueError, RecursionError) as error:
        raise TraceError(f"the metadata is not readable: {type(error).__name__}", place="metadata") from error


def _grow(notes: dict[str, Any], new: dict[str, Any]) -> None:
    """Add the notes of one batch to those before it."""
    for name, value in new.items():
        if name in GROWING:
            notes[name].extend(as_list(value, name))
        elif name == "dropped":
            notes[name] = integer(value, name)
        elif name in ("segments", "settings", "closed"):
            notes[name] = value


def _extend(columns: Columns, batch: Any) -> None:
    batch.validate()
    for name, column in columns.items():
        values = batch.column(name)
        if values.null_count:
            raise TraceError(f"events.{name} has missing values", place=f"events.{name}")
        if len(values):
            width, start = column.itemsize, values.offset
            held = memoryview(values.buffers()[1])
            column.frombytes(held[width * start : width * (start + len(values))])


# --- a whole trace at once ----------------------------------------------------------------------------------


def write_parquet(trace: Trace, file: BinaryIO) -> None:
    """Write `trace` as one Parquet file, for `vram.open` and any reader of Parquet."""
    arrow = _pyarrow()
    import pyarrow.parquet

    head = {"version": VERSION, "notes": pack(trace)}
    schema = _schema().with_metadata({KEY: json.dumps(head)})
    batch = _record_batch({name: getattr(trace, name) for name in COLUMNS}, trace.events)
    table = arrow.Table.from_batches([batch]).replace_schema_metadata(schema.metadata)
    pyarrow.parquet.write_table(table, file, compression="zstd", row_group_size=ROW_GROUP_EVENTS)
