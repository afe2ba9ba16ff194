"""A PyTorch memory snapshot (the pickle of `torch.cuda.memory._snapshot()`, torch 2.1 and later) as a Trace.

No class of the pickle is ever loaded, and every value is checked before it is used. Bounds on memory and time
are for `sandbox`, which runs this in a process of its own; decompression is for `files`.

Events are read a column at a time, in C loops over the whole list. Only when a column does not convert are
they walked one by one, to name the one that is wrong.
"""

from __future__ import annotations

import gc
import io
import pickle
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NoReturn

from vram.errors import TraceError

from .files import CHUNK_BYTES, BoundedReader
from .model import Action, Annotation, Block, BlockState, Frame, Segment, Trace

__all__ = ["read_snapshot"]

MAX_INT64 = (1 << 63) - 1
MAX_UINT64 = (1 << 64) - 1
MAX_TEXT = 64 << 10  # characters in one name; longer ones do not occur
MAX_SETTINGS = 10_000  # values in allocator_settings, all depths together
MAX_SETTINGS_DEPTH = 8

_ACTION_CODES = {action.name.lower(): int(action) for action in Action}
_BLOCK_STATES = {
    "active_allocated": BlockState.LIVE,
    "active_pending_free": BlockState.PENDING,
    "active_awaiting_free": BlockState.PENDING,
    "inactive": BlockState.FREE,
}
# What a column raises that does not convert.
_NOT_A_COLUMN = (KeyError, TypeError, ValueError, OverflowError)


def read_snapshot(reader: BoundedReader, source: str, device: int | None = None) -> Trace:
    """The events of `device` (default: the one with most events) and its segments."""
    with _collector_paused():
        return _decode(_unpickle(reader), source, device)


# --- the pickle ---------------------------------------------------------------------------------------------


class _PlainUnpickler(pickle.Unpickler):
    """Builds dicts, lists, tuples, strings and numbers, and refuses everything that names code."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise TraceError(
            f"the pickle asks for {module_name[:80]}.{global_name[:80]}; a memory snapshot holds plain data "
            "only, so nothing was loaded. This file is not a snapshot, or it is hostile",
            place="pickle",
        )

    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise TraceError(
            "the pickle refers to an object outside itself; a memory snapshot holds plain data only, "
            "so nothing was loaded. This file is not a snapshot, or it is hostile",
            place="pickle",
        )


def _unpickle(reader: BoundedReader) -> Any:
    try:
        with io.BufferedReader(reader, CHUNK_BYTES) as buffered:
            return _PlainUnpickler(buffered).load()
    except TraceError:
        raise
    except (MemoryError, RecursionError) as error:
        raise TraceError(
            f"the pickle wants more memory than a snapshot of its size needs ({reader.count} bytes read)",
            place=f"pickle, before byte {reader.count}",
        ) from error
    except Exception as error:  # a damaged pickle raises whatever its opcodes happen to hit
        raise TraceError(
            f"not a readable pickle: {type(error).__name__}: {str(error)[:200].rstrip('.')}. "
            "Expected a file written by torch.cuda.memory._dump_snapshot",
            place=f"pickle, before byte {reader.count}",
        ) from error


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Millions of new containers and no garbage among them: the collector would walk them again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# --- checked access -----------------------------------------------------------------------------------------


def _wrong(place: str, found: object, expected: str) -> NoReturn:
    raise TraceError(f"{place} is {_describe(found)}, expected {expected}", place=place)


def _describe(value: object) -> str:
    """A value in a message: numbers and short text as they are, all else by its type (it may be huge)."""
    if type(value) is int and value.bit_length() <= 128:
        return str(value)
    if type(value) is str and len(value) <= 80:
        return repr(value)
    return f"a value of type {type(value).__name__}"


def _get(record: dict[Any, Any], key: str, place: str) -> Any:
    try:
        return record[key]
    except KeyError:
        raise TraceError(f"{place} has no {key!r}", place=place) from None


def _dict(value: Any, place: str) -> dict[Any, Any]:
    return value if type(value) is dict else _wrong(place, value, "a dict")


def _list(value: Any, place: str) -> list[Any] | tuple[Any, ...]:
    return value if type(value) is list or type(value) is tuple else _wrong(place, value, "a list")


def _integer(value: Any, place: str, high: int = MAX_INT64) -> int:
    if type(value) is int and 0 <= value <= high:
        return value
    _wrong(place, value, f"an integer from 0 to {high}")


def _text(value: Any, place: str) -> str:
    if type(value) is not str or len(value) > MAX_TEXT:
        _wrong(place, value, f"text of at most {MAX_TEXT} characters")
    return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")


# --- from the plain data to a Trace -------------------------------------------------------------------------


def _decode(snapshot: Any, source: str, device: int | None) -> Trace:
    if type(snapshot) is list:
        raise TraceError(
            "the file holds a list, probably torch.cuda.memory_snapshot(), which has no events; "
            "use torch.cuda.memory._record_memory_history() and torch.cuda.memory._dump_snapshot(path)",
            place="snapshot",
        )
    _dict(snapshot, "snapshot")
    traces = _list(_get(snapshot, "device_traces", "snapshot"), "device_traces")
    segments = _list(_get(snapshot, "segments", "snapshot"), "segments")
    devices = _devices(traces, segments)
    chosen = _choose_device(device, devices, traces)
    events = traces[chosen] if chosen < len(traces) else []
    stacks = _Stacks()
    streams = _Streams()
    place = f"device_traces[{chosen}]"
    try:
        columns = _columns(events, stacks, streams, place)
    except TraceError:
        raise
    except _NOT_A_COLUMN as error:
        _blame_event(events, place)
        raise TraceError(f"{place} cannot be read: {type(error).__name__}", place=place) from error
    start_us = columns["time_us"][0] if events else 0
    columns["time_us"] = array("q", [time - start_us for time in columns["time_us"]])
    return Trace(
        source=source,
        device=chosen,
        devices=devices,
        start_us=start_us,
        timed=_is_timed(events),
        **columns,
        segments=_segments(segments, chosen, stacks, streams),
        annotations=_annotations(snapshot.get("external_annotations"), chosen, start_us),
        settings=_settings(snapshot.get("allocator_settings")),
        streams=tuple(streams.index),
        frames=tuple(stacks.frames),
        stacks=tuple(stacks.stacks),
    )


def _devices(traces: list[Any] | tuple[Any, ...], segments: list[Any] | tuple[Any, ...]) -> tuple[int, ...]:
    """The devices that have an event or a segment; device 0 where there is none at all."""
    used = {index for index, events in enumerate(traces) if len(_list(events, f"device_traces[{index}]"))}
    for index, segment in enumerate(segments):
        used.add(_segment_device(_dict(segment, f"segments[{index}]"), f"segments[{index}]"))
    return tuple(sorted(used)) or (0,)


def _choose_device(device: int | None, devices: tuple[int, ...], traces: list[Any] | tuple[Any, ...]) -> int:
    if device is None:
        return max(devices, key=lambda index: (len(traces[index]) if index < len(traces) else 0, -index))
    if device not in devices:
        known = ", ".join(map(str, devices[:16]))
        raise TraceError(f"device {device} is not in this snapshot; it has {known}", place="device_traces")
    return device


# --- events -------------------------------------------------------------------------------------------------


class _Streams:
    """Stream handles numbered in order of appearance."""

    def __init__(self) -> None:
        self.index: dict[int, int] = {}

    def of(self, handle: int) -> int:
        return self.index.setdefault(handle, len(self.index))


class _Stacks:
    """Frames and stacks, each kept once. A stack is the tuple of its frames' numbers; stack 0 is empty.

    Snapshots share the dict of a frame between events, so a known stack is found by the identities of its
    frames, without reading them. That holds while the snapshot is alive.
    """

    def __init__(self) -> None:
        self.frames: dict[Frame, int] = {}
        self.stacks: dict[tuple[int, ...], int] = {(): 0}
        self._by_identity: dict[tuple[int, ...], int] = {}

    def of(self, frames: Any, place: str) -> int:
        identity = tuple(map(id, _list(frames, place)))
        known = self._by_identity.get(identity)
        if known is None:
            known = self._by_identity[identity] = self._intern(frames, place)
        return known

    def column(self, lists: Iterable[Any], place: str) -> array[int]:
        """`of` over all events: the longest loop of opening a file.

        Most stacks equal the last one of the same length and innermost frame, and comparing lists of shared
        dicts is cheaper than hashing identities.
        """
        latest: dict[tuple[int, int], tuple[Any, int]] = {}
        column = array("I")
        for index, frames in enumerate(lists):
            if not frames:
                column.append(0)
                continue
            shape = (len(frames), id(frames[0]))
            seen, number = latest.get(shape, (None, 0))
            if seen is not frames and seen != frames:
                number = self.of(frames, f"{place}[{index}].frames")
                latest[shape] = (frames, number)
            column.append(number)
        return column

    def _intern(self, frames: Iterable[Any], place: str) -> int:
        stack = tuple(self._frame(frame, place) for frame in frames)
        return self.stacks.setdefault(stack, len(self.stacks))

    def _frame(self, frame: Any, place: str) -> int:
        _dict(frame, place)
        key = Frame(
            _text(_get(frame, "filename", place), place),
            _integer(_get(frame, "line", place), place),
            _text(_get(frame, "name", place), place),
        )
        return self.frames.setdefault(key, len(self.frames))


def _columns(events: list[Any], stacks: _Stacks, streams: _Streams, place: str) -> dict[str, Any]:
    """All columns, or one of `_NOT_A_COLUMN`."""
    if set(map(type, events)) - {dict}:
        raise TypeError
    handles = _integers("Q", map(itemgetter("stream"), events), MAX_UINT64)
    for handle in dict.fromkeys(handles):
        streams.of(handle)
    return {
        "action": array("B", map(_ACTION_CODES.__getitem__, map(itemgetter("action"), events))),
        "stream": array("I", map(streams.index.__getitem__, handles)),
        "address": _addresses(events),
        "size": _integers("Q", map(itemgetter("size"), events), MAX_INT64),
        "time_us": _times(events),
        "stack": _stack_column(events, stacks, place),
    }


def _integers(typecode: str, values: Iterable[Any], high: int) -> array[int]:
    held = list(values)
    if set(map(type, held)) - {int}:
        raise TypeError
    column: array[int] = array(typecode, held)
    if column and not (min(column) >= 0 and max(column) <= high):
        raise OverflowError
    return column


def _addresses(events: list[Any]) -> array[int]:
    values = [event["addr"] if "addr" in event else event["device_free"] for event in events]
    return _integers("Q", values, MAX_UINT64)


def _is_timed(events: list[Any]) -> bool:
    return bool(events) and "time_us" in events[0]


def _times(events: list[Any]) -> array[int]:
    if not _is_timed(events):
        return array("q", bytes(8 * len(events)))
    return _integers("q", map(itemgetter("time_us"), events), MAX_INT64)


def _stack_column(events: list[Any], stacks: _Stacks, place: str) -> array[int]:
    lists = [event.get("frames", ()) for event in events]
    if set(map(type, lists)) - {list, tuple}:
        raise TypeError
    return stacks.column(lists, place)


def _blame_event(events: list[Any], place: str) -> None:
    """Name the first event that is wrong, and what is wrong with it."""
    timed = bool(events) and type(events[0]) is dict and _is_timed(events)
    for index, event in enumerate(events):
        here = f"{place}[{index}]"
        _dict(event, here)
        action = _get(event, "action", here)
        if type(action) is not str or action not in _ACTION_CODES:
            _wrong(f"{here}.action", action, "one of " + ", ".join(_ACTION_CODES))
        key = "device_free" if action == "oom" and "addr" not in event else "addr"
        _integer(_get(event, key, here), f"{here}.{key}", MAX_UINT64)
        _integer(_get(event, "size", here), f"{here}.size")
        _integer(_get(event, "stream", here), f"{here}.stream", MAX_UINT64)
        if timed:
            _integer(_get(event, "time_us", here), f"{here}.time_us")
        _list(event.get("frames", ()), f"{here}.frames")


# --- segments, annotations, settings ------------------------------------------------------------------------


def _segment_device(segment: dict[Any, Any], place: str) -> int:
    return _integer(segment.get("device", 0), f"{place}.device", 0xFFFF)


def _segments(
    segments: list[Any] | tuple[Any, ...], device: int, stacks: _Stacks, streams: _Streams
) -> tuple[Segment, ...]:
    return tuple(
        _segment(segment, f"segments[{index}]", stacks, streams)
        for index, segment in enumerate(segments)
        if _segment_device(segment, f"segments[{index}]") == device
    )


def _segment(segment: dict[Any, Any], place: str, stacks: _Stacks, streams: _Streams) -> Segment:
    address = _integer(_get(segment, "address", place), f"{place}.address")
    total_size = _integer(_get(segment, "total_size", place), f"{place}.total_size")
    stream = _integer(_get(segment, "stream", place), f"{place}.stream", MAX_UINT64)
    kind = _get(segment, "segment_type", place)
    if kind not in ("small", "large"):
        _wrong(f"{place}.segment_type", kind, "'small' or 'large'")
    expandable = segment.get("is_expandable", False)
    if type(expandable) is not bool:
        _wrong(f"{place}.is_expandable", expandable, "True or False")
    return Segment(
        address=address,
        total_size=total_size,
        stream=streams.of(stream),
        kind=kind,
        is_expandable=expandable,
        pool_id=_pool_id(segment.get("segment_pool_id", (0, 0)), f"{place}.segment_pool_id"),
        stack=stacks.of(segment.get("frames", ()), f"{place}.frames"),
        blocks=_blocks(_get(segment, "blocks", place), address, total_size, place, stacks),
    )


def _pool_id(value: Any, place: str) -> tuple[int, int]:
    parts = _list(value, place)
    if len(parts) != 2:
        _wrong(place, value, "two integers")
    return (_integer(parts[0], place, MAX_UINT64), _integer(parts[1], place, MAX_UINT64))


def _blocks(value: Any, start: int, total_size: int, place: str, stacks: _Stacks) -> tuple[Block, ...]:
    """The blocks of a segment, in order, without overlap. Old files give no address: they are adjacent."""
    blocks = []
    address = start
    for index, block in enumerate(_list(value, f"{place}.blocks")):
        here = f"{place}.blocks[{index}]"
        block = _block(_dict(block, here), here, address, stacks)
        if block.address < address or block.address + block.size > start + total_size:
            raise TraceError(
                f"{here} ({block.size} bytes at {block.address}) overlaps its neighbour or leaves its "
                f"segment ({total_size} bytes at {start})",
                place=here,
            )
        address = block.address + block.size
        blocks.append(block)
    return tuple(blocks)


def _block(block: dict[Any, Any], place: str, expected_address: int, stacks: _Stacks) -> Block:
    size = _integer(_get(block, "size", place), f"{place}.size")
    state = _get(block, "state", place)
    if type(state) is not str or state not in _BLOCK_STATES:
        _wrong(f"{place}.state", state, "one of " + ", ".join(_BLOCK_STATES))
    return Block(
        address=_integer(block.get("address", expected_address), f"{place}.address"),
        size=size,
        requested_size=_integer(block.get("requested_size", size), f"{place}.requested_size"),
        state=_BLOCK_STATES[state],
        stack=stacks.of(block.get("frames", ()), f"{place}.frames"),
    )


def _annotations(value: Any, device: int, start_us: int) -> tuple[Annotation, ...]:
    found = []
    for index, mark in enumerate(_list([] if value is None else value, "external_annotations")):
        place = f"external_annotations[{index}]"
        if _dict(mark, place).get("device", device) != device:
            continue
        found.append(
            Annotation(
                stage=_text(_get(mark, "stage", place), f"{place}.stage"),
                name=_text(_get(mark, "name", place), f"{place}.name"),
                time_us=_integer(_get(mark, "time_us", place), f"{place}.time_us") - start_us,
            )
        )
    return tuple(found)


def _settings(value: Any) -> dict[str, object]:
    budget = [MAX_SETTINGS]
    return {} if value is None else _plain_dict(_dict(value, "allocator_settings"), 0, budget)


def _plain_dict(value: dict[Any, Any], depth: int, budget: list[int]) -> dict[str, object]:
    return {_text(key, "allocator_settings"): _plain(entry, depth, budget) for key, entry in value.items()}


def _plain(value: Any, depth: int, budget: list[int]) -> object:
    """A setting as plain data: text, numbers, and lists and dicts of them, neither deep nor many."""
    place = "allocator_settings"
    budget[0] -= 1
    if budget[0] < 0 or depth > MAX_SETTINGS_DEPTH:
        raise TraceError(f"{place} is nested too deep or holds more than {MAX_SETTINGS} values", place=place)
    if value is None or type(value) in (bool, float) or (type(value) is int and abs(value) <= MAX_UINT64):
        return value
    if type(value) is str:
        return _text(value, place)
    if type(value) is dict:
        return _plain_dict(value, depth + 1, budget)
    if type(value) in (list, tuple):
        return [_plain(entry, depth + 1, budget) for entry in value]
    _wrong(place, value, "plain settings")
