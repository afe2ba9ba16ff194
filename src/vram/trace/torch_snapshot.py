"""A PyTorch memory snapshot (the pickle of `torch.cuda.memory._snapshot()`, torch 2.1 and later) as a Trace.

No class of the pickle is ever loaded, and every value is checked before it is used. `child` runs this in a
separate process and limits memory and time; `files` decompresses.

Events are read one column at a time, with C loops over the whole list. Only if a column does not convert are
they examined one by one, to find the wrong one.
"""

from __future__ import annotations

import gc
import io
import pickle
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import compress
from operator import itemgetter
from typing import Any, NoReturn

from vram.errors import TraceError

from .checked import (
    MAX_INT64,
    MAX_UINT64,
    Sequence,
    as_dict,
    as_list,
    get,
    integer,
    plain_settings,
    text,
    wrong,
)
from .files import CHUNK_BYTES, BoundedReader
from .model import EMPTY_STACK, Action, Annotation, Block, BlockState, Frame, Segment, Trace

__all__ = ["decode_snapshot", "is_used", "read_snapshot"]

_ACTION_CODES = {action.name.lower(): int(action) for action in Action}
_BLOCK_STATES = {
    "active_allocated": BlockState.LIVE,
    "active_pending_free": BlockState.PENDING,
    "active_awaiting_free": BlockState.PENDING,
    "inactive": BlockState.FREE,
}
NO_RECORDING = (
    "this is not a PyTorch memory snapshot, an RMM log or a vram recording; "
    "torch.cuda.memory._dump_snapshot writes a snapshot"
)

# The errors of a column that does not convert.
_NOT_A_COLUMN = (KeyError, TypeError, ValueError, OverflowError)


def read_snapshot(reader: BoundedReader, device: int | None = None) -> Trace:
    """The events of `device` (default: the one with most events) and its segments."""
    with _collector_paused():
        trace = decode_snapshot(_unpickle(reader), device)
    return replace(trace, dropped=_lost(trace))


def _lost(trace: Trace) -> int:
    """How many allocations PyTorch had recorded whose events are gone: its history keeps the last ones.

    A block that was allocated while the history was on has a stack.
    """
    made = set(compress(trace.address, map(int(Action.ALLOC).__eq__, trace.action))) if trace.events else None
    return sum(
        made is not None and block.stack != EMPTY_STACK and block.address not in made
        for segment in trace.segments
        for block in segment.blocks
        if block.state != BlockState.FREE
    )


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
        # A pickle of something else, such as a checkpoint; or no pickle: images and archives read like this.
        raise TraceError(NO_RECORDING, place="pickle")


def _unpickle(reader: BoundedReader) -> Any:
    head = reader.peek(1)
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
    except Exception as error:  # a damaged pickle can raise any error
        raise TraceError(_unreadable(head, error), place=f"pickle, before byte {reader.count}") from error


def _unreadable(head: bytes, error: Exception) -> str:
    detail = f"({type(error).__name__}: {str(error)[:200].rstrip('.')})"
    if head == pickle.PROTO and (isinstance(error, EOFError) or "truncated" in str(error)):
        return f"the snapshot is truncated {detail}; copy the file or write the snapshot again"
    return f"{NO_RECORDING} {detail}" if head == pickle.PROTO else NO_RECORDING


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Millions of new containers without garbage: the collector would visit them again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# --- from the plain data to a Trace -------------------------------------------------------------------------


def decode_snapshot(snapshot: Any, device: int | None) -> Trace:
    """The events and segments of one device of `torch.cuda.memory._snapshot()`."""
    if type(snapshot) is list:  # torch.cuda.memory_snapshot(): segments and no events
        snapshot = {"segments": snapshot}
    if "segments" not in as_dict(snapshot, "snapshot"):
        raise TraceError("this is not a PyTorch memory snapshot: it has no 'segments'", place="snapshot")
    traces = as_list(snapshot.get("device_traces", []), "device_traces")
    segments = as_list(snapshot["segments"], "segments")
    devices = _devices(traces, segments)
    chosen = _choose_device(device, devices, traces)
    events = traces[chosen] if chosen < len(traces) else []
    stacks = _Stacks()
    streams = _Numbers()
    tags = _Numbers([""])
    place = f"device_traces[{chosen}]"
    try:
        columns = _columns(events, stacks, streams, tags, place)
    except TraceError:
        raise
    except _NOT_A_COLUMN as error:
        _blame_event(events, place)
        raise TraceError(f"{place} cannot be read: {type(error).__name__}", place=place) from error
    start_us = columns["time_us"][0] if events else 0
    columns["time_us"] = array("q", [time - start_us for time in columns["time_us"]])
    return Trace(
        source="",
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
        tags=tuple(tags.index),
    )


def _devices(traces: Sequence, segments: Sequence) -> tuple[int, ...]:
    """The devices that were used or have a segment; device 0 if there is none."""
    used = {
        index for index, events in enumerate(traces) if is_used(as_list(events, f"device_traces[{index}]"))
    }
    for index, segment in enumerate(segments):
        used.add(_segment_device(as_dict(segment, f"segments[{index}]"), f"segments[{index}]"))
    return tuple(sorted(used)) or (0,)


def is_used(events: Sequence) -> bool:
    """Whether a device with these events was used: reading the history is an event of every device."""
    return not all(type(event) is dict and event.get("action") == "snapshot" for event in events)


def _choose_device(device: int | None, devices: tuple[int, ...], traces: Sequence) -> int:
    if device is None:
        return max(devices, key=lambda index: (len(traces[index]) if index < len(traces) else 0, -index))
    if device not in devices:
        known = ", ".join(map(str, devices[:16]))
        has = f"device{'s' if len(devices) > 1 else ''} {known}"
        raise TraceError(f"device {device} is not in this snapshot; it has {has}", place="device_traces")
    return device


# --- events -------------------------------------------------------------------------------------------------


class _Numbers:
    """Stream handles or tags, numbered in order of appearance."""

    def __init__(self, first: Iterable[Any] = ()) -> None:
        self.index: dict[Any, int] = {}
        self.column(first)

    def of(self, value: Any) -> int:
        return self.index.setdefault(value, len(self.index))

    def column(self, values: Iterable[Any]) -> array[int]:
        held = list(values)
        for value in dict.fromkeys(held):
            self.of(value)
        return array("I", map(self.index.__getitem__, held))


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
        identity = tuple(map(id, as_list(frames, place)))
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
        as_dict(frame, place)
        key = Frame(
            text(get(frame, "filename", place), place),
            integer(get(frame, "line", place), place),
            text(get(frame, "name", place), place),
        )
        return self.frames.setdefault(key, len(self.frames))


def _columns(
    events: list[Any], stacks: _Stacks, streams: _Numbers, tags: _Numbers, place: str
) -> dict[str, Any]:
    """All columns, or one of `_NOT_A_COLUMN`."""
    if set(map(type, events)) - {dict}:
        raise TypeError
    handles = _integers("Q", map(itemgetter("stream"), events), MAX_UINT64)
    return {
        "action": array("B", map(_ACTION_CODES.__getitem__, map(itemgetter("action"), events))),
        "stream": streams.column(handles),
        "address": _addresses(events),
        "size": _integers("Q", map(itemgetter("size"), events), MAX_INT64),
        "time_us": _times(events),
        "stack": _stack_column(events, stacks, place),
        "tag": _tag_column(events, tags, place),
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


def _tag_column(events: list[Any], tags: _Numbers, place: str) -> array[int]:
    names = [event.get("user_metadata") or "" for event in events]
    if set(map(type, names)) - {str}:
        raise TypeError
    known = {name: text(name, f"{place}.user_metadata") for name in dict.fromkeys(names)}
    return tags.column(map(known.__getitem__, names))


def _blame_event(events: list[Any], place: str) -> None:
    """Raise an error for the first wrong event."""
    timed = bool(events) and type(events[0]) is dict and _is_timed(events)
    for index, event in enumerate(events):
        here = f"{place}[{index}]"
        as_dict(event, here)
        action = get(event, "action", here)
        if type(action) is not str or action not in _ACTION_CODES:
            wrong(f"{here}.action", action, "one of " + ", ".join(_ACTION_CODES))
        key = "device_free" if action == "oom" and "addr" not in event else "addr"
        integer(get(event, key, here), f"{here}.{key}", MAX_UINT64)
        integer(get(event, "size", here), f"{here}.size")
        integer(get(event, "stream", here), f"{here}.stream", MAX_UINT64)
        if timed:
            integer(get(event, "time_us", here), f"{here}.time_us")
        as_list(event.get("frames", ()), f"{here}.frames")
        text(event.get("user_metadata") or "", f"{here}.user_metadata")


# --- segments, annotations, settings ------------------------------------------------------------------------


def _segment_device(segment: dict[Any, Any], place: str) -> int:
    return integer(segment.get("device", 0), f"{place}.device", 0xFFFF)


def _segments(segments: Sequence, device: int, stacks: _Stacks, streams: _Numbers) -> tuple[Segment, ...]:
    return tuple(
        _segment(segment, f"segments[{index}]", stacks, streams)
        for index, segment in enumerate(segments)
        if _segment_device(segment, f"segments[{index}]") == device
    )


def _segment(segment: dict[Any, Any], place: str, stacks: _Stacks, streams: _Numbers) -> Segment:
    address = integer(get(segment, "address", place), f"{place}.address")
    total_size = integer(get(segment, "total_size", place), f"{place}.total_size")
    stream = integer(get(segment, "stream", place), f"{place}.stream", MAX_UINT64)
    kind = get(segment, "segment_type", place)
    if kind not in ("small", "large"):
        wrong(f"{place}.segment_type", kind, "'small' or 'large'")
    expandable = segment.get("is_expandable", False)
    if type(expandable) is not bool:
        wrong(f"{place}.is_expandable", expandable, "True or False")
    return Segment(
        address=address,
        total_size=total_size,
        stream=streams.of(stream),
        kind=kind,
        is_expandable=expandable,
        pool_id=_pool_id(segment.get("segment_pool_id", (0, 0)), f"{place}.segment_pool_id"),
        stack=stacks.of(segment.get("frames", ()), f"{place}.frames"),
        blocks=_blocks(get(segment, "blocks", place), address, total_size, place, stacks),
    )


def _pool_id(value: Any, place: str) -> tuple[int, int]:
    parts = as_list(value, place)
    if len(parts) != 2:
        wrong(place, value, "two integers")
    return (integer(parts[0], place, MAX_UINT64), integer(parts[1], place, MAX_UINT64))


def _blocks(value: Any, start: int, total_size: int, place: str, stacks: _Stacks) -> tuple[Block, ...]:
    """The blocks of a segment, in order, without overlap. Old files give no address: they are adjacent."""
    blocks = []
    address = start
    for index, block in enumerate(as_list(value, f"{place}.blocks")):
        here = f"{place}.blocks[{index}]"
        block = _block(as_dict(block, here), here, address, stacks)
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
    size = integer(get(block, "size", place), f"{place}.size")
    recorded = _recorded(block, place)
    state = get(block, "state", place)
    if type(state) is not str or state not in _BLOCK_STATES:
        wrong(f"{place}.state", state, "one of " + ", ".join(_BLOCK_STATES))
    return Block(
        address=integer(block.get("address", expected_address), f"{place}.address"),
        size=size,
        requested_size=integer(recorded.get("requested_size", size), f"{place}.requested_size"),
        state=_BLOCK_STATES[state],
        stack=stacks.of(recorded.get("frames", ()), f"{place}.frames"),
    )


def _recorded(block: dict[Any, Any], place: str) -> dict[Any, Any]:
    """The allocation of a block; the oldest files have it in the first entry of a history."""
    history = as_list(block.get("history", ()), f"{place}.history")
    if not history or "frames" in block:
        return block
    entry = as_dict(history[0], f"{place}.history[0]")
    return {
        "requested_size": entry.get("real_size", block["size"]),
        "frames": entry.get("frames", ()),
        **block,
    }


def _annotations(value: Any, device: int, start_us: int) -> tuple[Annotation, ...]:
    found = []
    for index, mark in enumerate(as_list([] if value is None else value, "external_annotations")):
        place = f"external_annotations[{index}]"
        if as_dict(mark, place).get("device", device) != device:
            continue
        found.append(
            Annotation(
                stage=text(get(mark, "stage", place), f"{place}.stage"),
                name=text(get(mark, "name", place), f"{place}.name"),
                time_us=integer(get(mark, "time_us", place), f"{place}.time_us") - start_us,
            )
        )
    return tuple(found)


def _settings(value: Any) -> dict[str, object]:
    return {} if value is None else plain_settings(value, "allocator_settings")
