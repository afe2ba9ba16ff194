"""A Trace as trace-event JSON for Perfetto: memory as counters, steps and marks as slices, failures.

Times are microseconds. Events within one microsecond are a nanosecond apart, so that no peak is lost; without
times, each event takes a microsecond.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, TypeAlias

from .lifetimes import held_series, lifetimes
from .model import BEFORE, Action, Trace
from .series import reserved_before, reserved_series
from .steps import STEP_PREFIX, find_steps

__all__ = ["trace_events", "write_perfetto"]

STEPS, ANNOTATIONS = 1, 2
NANOSECOND = 0.001
MAX_NANOSECONDS = 999

Event: TypeAlias = dict[str, Any]


def write_perfetto(trace: Trace, file: BinaryIO) -> None:
    """Write `trace` as trace-event JSON, one event a line."""
    file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
    separator = b""
    for event in trace_events(trace):
        file.write(separator + json.dumps(event).encode())
        separator = b",\n"
    file.write(b"\n]}\n")


def trace_events(trace: Trace) -> Iterator[Event]:
    """Yield the events, track by track."""
    times = _clock(trace)
    yield from _names(trace)
    yield from _counter("allocated", trace, _allocated(trace, times))
    yield from _counter("reserved", trace, _reserved(trace, times))
    yield from _steps(trace, times)
    yield from _annotations(trace)
    yield from _failures(trace, times)


def _clock(trace: Trace) -> list[float]:
    """The time of each event, no two the same unless a thousand share a microsecond."""
    if not trace.timed:
        return [float(index) for index in range(trace.events)]
    times = []
    last, repeats = None, 0
    for time in trace.time_us:
        repeats = repeats + 1 if time == last else 0
        last = time
        times.append(time + NANOSECOND * min(repeats, MAX_NANOSECONDS))
    return times


def _names(trace: Trace) -> Iterator[Event]:
    yield _metadata("process_name", trace.device, 0, f"device {trace.device}")
    yield _metadata("thread_name", trace.device, STEPS, "steps")
    yield _metadata("thread_name", trace.device, ANNOTATIONS, "annotations")


def _metadata(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": {"name": name}}


def _counter(name: str, trace: Trace, values: Iterable[tuple[float, int]]) -> Iterator[Event]:
    for time, value in values:
        yield {"ph": "C", "name": name, "pid": trace.device, "ts": time, "args": {"bytes": value}}


def _allocated(trace: Trace, times: list[float]) -> Iterator[tuple[float, int]]:
    """What the program holds, as `peak_allocated` counts it."""
    program = lifetimes(trace)
    for held, event in zip(held_series(program), program.event, strict=True):
        if event != BEFORE:
            yield times[event], held
        elif not trace.events:
            yield 0.0, held


def _reserved(trace: Trace, times: list[float]) -> Iterator[tuple[float, int]]:
    """What the allocator holds, wherever it changes."""
    held = reserved_before(trace)
    if held or trace.segments:
        yield 0.0, held
    for time, reserved in zip(times, reserved_series(trace), strict=True):
        if reserved != held:
            held = reserved
            yield time, held


def _slice(name: str, trace: Trace, thread: int, begin: float, end: float) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": "vram",
        "pid": trace.device,
        "tid": thread,
        "ts": begin,
        "dur": max(0.0, end - begin),
    }


def _steps(trace: Trace, times: list[float]) -> Iterator[Event]:
    for number, events in find_steps(trace).stretches():
        if events:
            last = events.stop if events.stop < trace.events else trace.events - 1
            yield _slice(f"step {number}", trace, STEPS, times[events.start], times[last])


def _annotations(trace: Trace) -> Iterator[Event]:
    begun: dict[str, list[int]] = {}
    for mark in trace.annotations:
        if mark.name.startswith(STEP_PREFIX):
            continue
        if mark.stage == "START":
            begun.setdefault(mark.name, []).append(mark.time_us)
        elif begun.get(mark.name):
            yield _slice(mark.name, trace, ANNOTATIONS, begun[mark.name].pop(), mark.time_us)
    for name, starts in begun.items():
        for start in starts:
            yield _slice(name, trace, ANNOTATIONS, start, trace.span_us)


def _failures(trace: Trace, times: list[float]) -> Iterator[Event]:
    for index, action in enumerate(trace.action):
        if action == Action.OOM:
            yield {
                "ph": "i",
                "s": "g",
                "name": "out of memory",
                "cat": "vram",
                "pid": trace.device,
                "tid": STEPS,
                "ts": times[index],
                "args": {"size": trace.size[index], "device_free": trace.address[index], "event": index},
            }
