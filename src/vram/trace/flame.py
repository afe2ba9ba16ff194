"""The holders of memory at the peak of a Trace, by stack: folded lines for flame graphs, or for speedscope.

Bytes are counted as in `peak_allocated`, so their sum is the peak.
"""

from __future__ import annotations

import json
from typing import Any, BinaryIO

from .lifetimes import ALLOCATE, Lifetimes, held_series, lifetimes, rounded
from .model import BEFORE, EARLIER, BlockState, Frame, Trace

__all__ = ["holders_at_peak", "write_folded", "write_speedscope"]

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def holders_at_peak(trace: Trace) -> dict[tuple[Frame, ...], int]:
    """Return the bytes that each stack, outermost frame first, held when the program held most."""
    program = lifetimes(trace)
    held: dict[tuple[Frame, ...], int] = {}
    for stack, size in _live_at_peak(trace, program):
        frames = () if stack is None else trace.frames_of(stack)[::-1]
        frames = frames or (Frame("", 0, EARLIER if stack is None else trace.no_stack),)
        held[frames] = held.get(frames, 0) + rounded(size)
    return dict(sorted(held.items(), key=lambda item: -item[1]))


def _live_at_peak(trace: Trace, program: Lifetimes) -> list[tuple[int | None, int]]:
    """(stack, size) of each allocation; None where it was made before the first event."""
    if not trace.events:
        blocks = [block for segment in trace.segments for block in segment.blocks]
        return [(block.stack, block.requested_size) for block in blocks if block.state == BlockState.LIVE]
    held = list(held_series(program))
    peak = held.index(max(held)) if held else -1
    live: dict[int, int] = {}  # the row that made each allocation
    for row in range(peak + 1):
        if program.op[row] == ALLOCATE:
            live[program.id[row]] = row
        else:
            del live[program.id[row]]
    return [
        (None if program.event[row] == BEFORE else trace.stack[program.event[row]], program.size[row])
        for row in live.values()
    ]


def write_folded(trace: Trace, file: BinaryIO) -> None:
    """Write a line for each stack: frames joined by semicolons, outermost first, then the bytes."""
    for frames, size in holders_at_peak(trace).items():
        line = ";".join(_folded_name(frame) for frame in frames)
        file.write(f"{line} {size}\n".encode())


def _folded_name(frame: Frame) -> str:
    """A frame in a folded line, without characters that would end the frame or the line."""
    name = f"{frame.name} ({frame.filename}:{frame.line})" if frame.filename else frame.name
    return "".join(letter if letter.isprintable() else "?" for letter in name.replace(";", ":"))


def write_speedscope(trace: Trace, file: BinaryIO) -> None:
    """Write a profile for speedscope, weighted by bytes."""
    held = holders_at_peak(trace)
    numbers: dict[Frame, int] = {}
    samples = [[numbers.setdefault(frame, len(numbers)) for frame in frames] for frames in held]
    profile = {
        "type": "sampled",
        "name": "held at the peak",
        "unit": "bytes",
        "startValue": 0,
        "endValue": sum(held.values()),
        "samples": samples,
        "weights": list(held.values()),
    }
    document = {
        "$schema": SCHEMA,
        "exporter": "vram",
        "name": f"device {trace.device}",
        "shared": {"frames": [_speedscope_frame(frame) for frame in numbers]},
        "profiles": [profile],
    }
    file.write(json.dumps(document).encode())


def _speedscope_frame(frame: Frame) -> dict[str, Any]:
    place = {"file": frame.filename, "line": frame.line} if frame.filename else {}
    return {"name": frame.name, **place}
