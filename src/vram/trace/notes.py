"""Everything of a Trace except its columns, as plain data that JSON can hold: the notes.

`pack` makes them. `unpack` joins them with columns and checks every value and index, so it may be used with
untrusted data. The child that reads a file (`sandbox`) sends them, and vram's own files (`arrow`) have them.

    texts        names, each once                     frames    [text, line, text]: file, line, function
    streams      handles                              stacks    [frame, ...], innermost first; the first is []
    tags         names; the first is ""               annotations  [stage, name, time_us]
    segments     [address, total_size, stream, kind, is_expandable, [pool, id], stack,
                  [[address, size, requested_size, state, stack], ...]]
    and device, devices, start_us, timed, settings, truncated, dropped as in Trace
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from vram.errors import TraceError

from .checked import (
    MAX_INT64,
    MAX_UINT64,
    Sequence,
    as_list,
    get,
    integer,
    plain_settings,
    text,
    wrong,
)
from .model import COLUMNS, Action, Annotation, Block, BlockState, Frame, Segment, Trace

__all__ = ["GROWING", "HIGHEST", "pack", "pack_segment", "unpack"]

GROWING = ("texts", "frames", "streams", "stacks", "tags", "annotations")
"""The notes that only grow while a recording is written."""
HIGHEST = {"action": max(Action), "size": MAX_INT64}
"""The highest entry of a column; columns that index a note are bounded by its length."""
MAX_DEVICE = 0xFFFF
MAX_HELD = 1 << 62
_PLAIN = ("device", "devices", "start_us", "timed", "streams", "tags", "settings", "truncated", "dropped")


def pack(trace: Trace) -> dict[str, Any]:
    """Return the notes of `trace`."""
    texts: dict[str, int] = {}
    frames = [
        (texts.setdefault(frame.filename, len(texts)), frame.line, texts.setdefault(frame.name, len(texts)))
        for frame in trace.frames
    ]
    return {
        **{name: getattr(trace, name) for name in _PLAIN},
        "texts": list(texts),
        "frames": frames,
        "stacks": trace.stacks,
        "segments": [pack_segment(segment) for segment in trace.segments],
        "annotations": [(mark.stage, mark.name, mark.time_us) for mark in trace.annotations],
    }


def pack_segment(segment: Segment) -> list[Any]:
    """Return a segment and its blocks as lists."""
    *values, blocks = (getattr(segment, each.name) for each in fields(Segment))
    packed = [(each.address, each.size, each.requested_size, int(each.state), each.stack) for each in blocks]
    return [*values, packed]


def unpack(notes: dict[str, Any], columns: Mapping[str, array[int]], source: str) -> Trace:
    """Return the trace of checked notes and columns."""
    frames = _frames(_listed(notes, "frames"), _all(notes, "texts", text))
    stacks = _stacks(_listed(notes, "stacks"), len(frames))
    streams = _all(notes, "streams", lambda value, place: integer(value, place, MAX_UINT64))
    tags = _all(notes, "tags", text)
    if tags[:1] != ("",):
        raise TraceError("tags does not begin with the empty one", place="tags")
    _check_columns(columns, {"stream": len(streams), "stack": len(stacks), "tag": len(tags)})
    _check_sums(columns)
    return Trace(
        source=source,
        device=integer(get(notes, "device", "notes"), "device", MAX_DEVICE),
        devices=_all(notes, "devices", lambda value, place: integer(value, place, MAX_DEVICE)),
        start_us=integer(get(notes, "start_us", "notes"), "start_us"),
        timed=_flag(notes, "timed"),
        streams=streams,
        frames=frames,
        stacks=stacks,
        tags=tags,
        segments=_segments(notes, len(streams), len(stacks)),
        annotations=_all(notes, "annotations", _annotation),
        settings=plain_settings(get(notes, "settings", "notes"), "settings"),
        truncated=_flag(notes, "truncated"),
        dropped=integer(get(notes, "dropped", "notes"), "dropped"),
        **columns,
    )


# --- the notes ----------------------------------------------------------------------------------------------


def _listed(notes: dict[str, Any], name: str) -> Sequence:
    return as_list(get(notes, name, "notes"), name)


def _all(notes: dict[str, Any], name: str, check: Callable[[Any, str], Any]) -> tuple[Any, ...]:
    return tuple(check(value, f"{name}[{index}]") for index, value in enumerate(_listed(notes, name)))


def _flag(notes: dict[str, Any], name: str) -> bool:
    value = get(notes, name, "notes")
    return value if type(value) is bool else wrong(name, value, "true or false")


def _frames(values: Sequence, texts: tuple[str, ...]) -> tuple[Frame, ...]:
    return tuple(_frame(value, f"frames[{index}]", texts) for index, value in enumerate(values))


def _frame(value: Any, place: str, texts: tuple[str, ...]) -> Frame:
    filename, line, name = as_list(value, place, 3)
    last = len(texts) - 1
    return Frame(
        texts[integer(filename, place, last)], integer(line, place), texts[integer(name, place, last)]
    )


def _stacks(values: Sequence, frames: int) -> tuple[tuple[int, ...], ...]:
    stacks = tuple(tuple(as_list(value, f"stacks[{index}]")) for index, value in enumerate(values))
    if stacks[:1] != ((),):
        raise TraceError("stacks does not begin with the empty one", place="stacks")
    for index, stack in enumerate(stacks):
        if set(map(type, stack)) - {int} or (stack and not 0 <= min(stack) <= max(stack) < frames):
            raise TraceError(f"stacks[{index}] names a frame that is not there", place=f"stacks[{index}]")
    return stacks


def _annotation(value: Any, place: str) -> Annotation:
    stage, name, time_us = as_list(value, place, 3)
    return Annotation(text(stage, place), text(name, place), integer(time_us, place, MAX_INT64, -MAX_INT64))


def _segments(notes: dict[str, Any], streams: int, stacks: int) -> tuple[Segment, ...]:
    found = tuple(
        _segment(segment, f"segments[{index}]", streams, stacks)
        for index, segment in enumerate(_listed(notes, "segments"))
    )
    blocks = sum(block.size for segment in found for block in segment.blocks)
    if max(blocks, sum(segment.total_size for segment in found)) > MAX_HELD:
        raise TraceError(
            f"the segments sum to more than {MAX_HELD} bytes, which no device has", place="segments"
        )
    return found


def _segment(value: Any, place: str, streams: int, stacks: int) -> Segment:
    address, total_size, stream, kind, expandable, pool_id, stack, blocks = as_list(value, place, 8)
    if type(expandable) is not bool:
        wrong(f"{place}.is_expandable", expandable, "true or false")
    first, second = (integer(part, place, MAX_UINT64) for part in as_list(pool_id, place, 2))
    return Segment(
        address=integer(address, place, MAX_UINT64),
        total_size=integer(total_size, place),
        stream=integer(stream, place, streams - 1),
        kind=text(kind, place),
        is_expandable=expandable,
        pool_id=(first, second),
        stack=integer(stack, place, stacks - 1),
        blocks=tuple(
            _block(block, f"{place}.blocks[{index}]", stacks, stream)
            for index, block in enumerate(as_list(blocks, f"{place}.blocks"))
        ),
    )


def _block(value: Any, place: str, stacks: int, stream: int) -> Block:
    address, size, requested, state, stack = as_list(value, place, 5)
    return Block(
        integer(address, place, MAX_UINT64),
        integer(size, place),
        integer(requested, place),
        BlockState(integer(state, place, max(BlockState))),
        integer(stack, place, stacks - 1),
        stream,
    )


# --- the columns --------------------------------------------------------------------------------------------


def _check_columns(columns: Mapping[str, array[int]], counts: Mapping[str, int]) -> None:
    """All columns have the same length, and every index refers to an existing entry."""
    lengths = {name: len(_column(columns, name)) for name in COLUMNS}
    if len(set(lengths.values())) > 1:
        raise TraceError(f"the columns differ in length: {lengths}", place="events")
    highest = HIGHEST | {name: count - 1 for name, count in counts.items()}
    for name, high in highest.items():
        found = max(columns[name], default=0)
        if columns[name] and found > high:
            raise TraceError(f"events.{name} is {found}, expected at most {high}", place=f"events.{name}")


def _check_sums(columns: Mapping[str, array[int]]) -> None:
    """What is held at one time sums to at most MAX_HELD, so that 64 bits are enough for any sum."""
    if sum(columns["size"]) <= MAX_HELD:
        return
    for taken, given in ((Action.ALLOC, Action.FREE_COMPLETED), (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE)):
        _check_held(columns, taken, given)
    _check_mapped(columns)


def _check_held(columns: Mapping[str, array[int]], taken: Action, given: Action) -> None:
    held: dict[int, int] = {}
    total = before = 0
    for event, (action, address, size) in enumerate(
        zip(columns["action"], columns["address"], columns["size"], strict=True)
    ):
        if action == taken:
            total += size - held.get(address, 0)
            held[address] = size
        elif action == given:
            known = held.pop(address, None)
            total -= known or 0
            before += size if known is None else 0
        _check_sum(total + before, event)


def _check_mapped(columns: Mapping[str, array[int]]) -> None:
    signs = {int(Action.SEGMENT_MAP): 1, int(Action.SEGMENT_UNMAP): -1}
    total = least = 0
    for event, (action, size) in enumerate(zip(columns["action"], columns["size"], strict=True)):
        total += signs.get(action, 0) * size
        least = min(least, total)
        _check_sum(total - least, event)


def _check_sum(held: int, event: int) -> None:
    if held > MAX_HELD:
        raise TraceError(
            f"{held} bytes are held at event {event}, and no device has more than {MAX_HELD}",
            place=f"events.size[{event}]",
        )


def _column(columns: Mapping[str, array[int]], name: str) -> array[int]:
    column = columns.get(name)
    if column is None or column.typecode != COLUMNS[name]:
        raise TraceError(f"events.{name} is missing or of another type", place=f"events.{name}")
    return column
