"""Answers to the page's queries about recordings, as plain data from `vram.analysis`.

Reports and the processes that answer for the server (`child`) use the same answers.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache, cached_property
from typing import Any, TypeAlias

from vram.analysis import Memories, explain
from vram.analysis.capacity import find_capacity, find_request, judge, open_account
from vram.analysis.differences import difference
from vram.analysis.groups import Holder, compare_holders, holders, label_of
from vram.analysis.layout import Piece, lay_out
from vram.analysis.memory import Memory
from vram.analysis.places import frame_text
from vram.analysis.timeline import AXES, Timeline
from vram.core.verdict import MEANINGS, verdict_text
from vram.errors import ConfigError
from vram.trace import STEP_PREFIX, Action, Annotation, Steps, Trace, find_steps, open_trace
from vram.trace.allocations import Allocations, find_allocations
from vram.trace.series import events_of

__all__ = ["Answer", "Opened", "Parameters", "Recording", "answer", "whole"]

Answer: TypeAlias = dict[str, Any]
Parameters: TypeAlias = Mapping[str, str]

MOST_MARKS = 4000
"""Maximum number of steps, annotations and failures to send; if there are more, a regular sample is sent."""
MOST_COLUMNS = 8000
MOST_STACKS = 2000
"""Maximum number of stacks in one answer."""
MOST_HOLDERS = 50
SMALLEST_SHARE = 0.0005
"""Smaller shares of the total do not get their own box in a flame graph."""
MOST_EVENTS = 500
DIFFERENCES = ("line", "module", "tag", "stream")
"""What two recordings are compared by."""
KEPT_MOMENTS = 4
"""Maximum number of moments whose memory is kept: views ask about the same one, the oldest is dropped."""
KEPT_READ = 2
"""Maximum number of recordings in a process: one, and one that it is compared with."""


class Recording:
    """One recording and cached results. Any thread may use it."""

    def __init__(self, trace: Trace) -> None:
        """Answer queries about `trace`."""
        self.trace = trace
        self._lock = threading.RLock()
        self._kept: dict[int, Memory] = {}

    @cached_property
    def _allocations(self) -> Allocations:
        """Found once, for the timeline and for the memory at any moment."""
        return find_allocations(self.trace)

    @cached_property
    def _timeline_made(self) -> Timeline:
        return Timeline(self.trace, self._allocations)

    @cached_property
    def _memories_made(self) -> Memories:
        return Memories(self.trace, self._allocations)

    @cached_property
    def _found_steps(self) -> Steps:
        return find_steps(self.trace)

    @property
    def timeline(self) -> Timeline:
        """Memory over time; computed once."""
        with self._lock:
            return self._timeline_made

    def memory(self, event: int) -> Memory:
        """Return the memory held after an event."""
        with self._lock:
            memories = self._memories_made
            if event in self._kept:
                return self._kept[event]
        found = memories.at(event)
        with self._lock:
            self._kept[event] = found
            while len(self._kept) > KEPT_MOMENTS:
                self._kept.pop(next(iter(self._kept)))
        return found

    # ---- answers ----

    def about(self) -> Answer:
        """Return the extent, marks, streams, and the moment to show first."""
        trace, timeline = self.trace, self.timeline
        with self._lock:
            series = timeline.series
        return {
            **trace.heading(),
            "devices": list(trace.devices),
            "timed": trace.timed and trace.span_us > 0,
            "span_us": trace.span_us,
            "allocations": len(timeline.allocations),
            "streams": [str(handle) for handle in trace.streams],
            "tags": len(trace.tags) > 1 or any(not _is_step(mark) for mark in trace.annotations),
            "stacks": len(trace.stacks),
            "peak": self._peak(),
            # The timeline rounds requests; blocks at the peak may be larger, and views show those.
            "most": {name: each.most for name, each in series.items()}
            | {"allocated": self.memory(self._peak()).allocated},
            "limit": self._limit(),
            "failures": [
                {"event": event, "x": trace.time_us[event], "size": trace.size[event]}
                for event in _thinned(events_of(trace, [Action.OOM]))
            ],
            "steps": self._steps(),
            "marks": _thinned(_spans(trace.annotations, trace.span_us)),
            "start": self._first_moment(),
        }

    def summary(self) -> Answer:
        """Return one line about the recording, for the index and for comparisons."""
        about = self.about()
        found = explain_briefly(self.trace, self.memory(about["start"]))
        failed = about["failures"][-1]["size"] if about["failures"] else None
        kept = ("events", "span_us", "timed", "peak", "start", "limit", "source")
        return {**{name: about[name] for name in kept}, "most": about["most"], "failed": failed, **found}

    def _limit(self) -> Answer:
        """Return what the allocator could reserve at the end: exact, or from `bytes` to below `below`."""
        event = self._first_moment()
        memory, request = self.memory(event), find_request(self.trace, event)
        found = find_capacity(self.trace, memory, request, None)
        return {"bytes": found.bytes if found.bound else None, "known": found.known, "below": found.below}

    def _peak(self) -> int:
        with self._lock:
            return self.timeline.peak

    def _first_moment(self) -> int:
        """Return the out-of-memory event if there is one, else the peak."""
        failures = events_of(self.trace, [Action.OOM])
        return failures[-1] if failures else self._peak()

    def _steps(self) -> list[list[int]]:
        """Return number, first event and its time of each step."""
        steps = self._found_steps
        found = [
            [number, first, self.trace.time_us[first]]
            for number, first in zip(steps.numbers, steps.first, strict=True)
            if first < self.trace.events
        ]
        return _thinned(found)

    def level(self, axis: str, low: float, high: float, columns: int, by: str | None) -> Answer:
        """Return series over a range; see `Timeline.level`."""
        with self._lock:
            level = self.timeline.level(axis, low, high, columns, by)
        return {
            "exact": level.exact,
            "x": level.x.tolist(),
            "series": [{"name": name, "values": values.tolist()} for name, values in level.values.items()],
        }

    def bands(self, axis: str, low: float, high: float, most: int) -> Answer:
        """Return allocations over a range; see `Timeline.bands`."""
        timeline = self.timeline
        found = timeline.bands(axis, low, high, most)
        rows = list(timeline.rows([band.number for band in found]))
        return {
            "bands": [
                {
                    **{name: row[name] for name in ("start", "freed", "size", "held", "stack")},
                    "stream": str(self.trace.streams[row["stream"]]),
                    "end": band.end,
                    "path": band.path,
                }
                for band, row in zip(found, rows, strict=True)
            ]
        }

    def event_at(self, axis: str, x: float) -> Answer:
        """Return the event at a position of the timeline."""
        return {"event": self.timeline.event_at(axis, x) if self.trace.events else -1}

    def stacks(self, numbers: Iterable[int]) -> Answer:
        """Return the frames of stacks, innermost first, and their labels."""
        trace = self.trace
        chosen = [number for number in numbers if 0 <= number < len(trace.stacks)]
        return {
            "stacks": {
                str(number): {
                    "label": label_of(trace, "stack", number or None),
                    "frames": [frame_text(frame) for frame in trace.frames_of(number)],
                }
                for number in chosen
            }
        }

    def moment(self, event: int) -> Answer:
        """Return the memory map and the account after an event."""
        self._check_event(event)
        memory = self.memory(event)
        request = find_request(self.trace, event)
        account = open_account(memory, request, find_capacity(self.trace, memory, request, None))
        return {
            "event": event,
            "what": self._what(event),
            "allocated": memory.allocated,
            "requested": memory.requested,
            "reserved": memory.reserved,
            **explain_briefly(self.trace, memory),
            "parts": account.parts(),
            "meanings": MEANINGS,
            "largest_free": memory.largest_free(),
            "segments": [
                {
                    "address": f"{laid.segment.address:#x}",
                    "size": laid.segment.total_size,
                    "stream": str(self.trace.streams[laid.segment.stream]),
                    "kind": laid.segment.kind,
                    "expandable": laid.segment.is_expandable,
                    "pieces": [self._piece(piece) for piece in laid.pieces],
                }
                for laid in lay_out(memory)
            ],
        }

    def _piece(self, piece: Piece) -> list[Any]:
        return [
            *(piece.offset, piece.size, piece.held, piece.requested, piece.pending, piece.blocks),
            *(piece.stack, piece.event),
        ]

    def events(self, first: int, count: int) -> Answer:
        """Return events as a list, each with what `moment` says of it and its place in the program."""
        last = min(max(first, 0) + count, self.trace.events)
        rows = []
        named = cache(lambda stack: label_of(self.trace, "stack", stack or None))
        for event in range(max(first, 0), last):
            found = self._what(event) or {}
            rows.append({"event": event, **found, "label": named(found["stack"])})
        return {"events": rows}

    def _what(self, event: int) -> Answer | None:
        """Return the event itself."""
        if event < 0:
            return None
        trace = self.trace
        step = self._found_steps.of(event)
        return {
            "action": Action(trace.action[event]).name.lower(),
            **_place_or_free(trace, event),
            "size": trace.size[event],
            "stream": str(trace.streams[trace.stream[event]]),
            "time_us": trace.time_us[event],
            "stack": trace.stack[event],
            "tag": trace.tags[trace.tag[event]],
            "step": step,
        }

    def holders(self, event: int, by: str) -> Holder:
        """Who holds memory after an event; see `vram.analysis.groups.holders`."""
        self._check_event(event)
        return holders(self.trace, self.memory(event).blocks(), by)

    def why(self, event: int) -> Answer:
        """Return the explanation of `vram explain` for an event."""
        self._check_event(event)
        at: str | int = "peak" if event == self._peak() and not find_request(self.trace, event) else event
        with self._lock:
            memories = self._memories_made
        found = explain(self.trace, at, memories=memories)
        return {**found.to_json(MOST_HOLDERS), "doubts": list(found.doubts), "meanings": MEANINGS}

    def _check_event(self, event: int) -> None:
        """Without events, the end of the recording is -1."""
        last = self.trace.events - 1
        if not min(0, last) <= event <= last:
            valid = f"valid events are 0 to {last}" if last >= 0 else "the recording has none, so ask for -1"
            raise ConfigError(f"event {event} does not exist; {valid}")


def _place_or_free(trace: Trace, event: int) -> Answer:
    """Return where it happened; for a failed request instead what was free on the device."""
    failed = find_request(trace, event)
    if failed is not None:
        return {"address": "", "device_free": failed.device_free}
    return {"address": f"{trace.address[event]:#x}"}


def explain_briefly(trace: Trace, memory: Memory) -> Answer:
    """Return the verdict on a moment and the share that is fragmented, without trying other allocators."""
    request = find_request(trace, memory.event)
    capacity = find_capacity(trace, memory, request, None)
    account = open_account(memory, request, capacity)
    verdict = verdict_text(judge(account, request, capacity))
    share = account.fragmentation / memory.reserved if memory.reserved else 0.0
    return {"verdict": verdict, "fragmentation": share}


Known: TypeAlias = Mapping[int, Recording]
"""The recordings that a query names, by number."""


class Opened:
    """The recordings that a process has read, by number in the table of the page. Any thread may use it."""

    def __init__(self, device: int | None) -> None:
        """Nothing is read yet."""
        self._device = device
        self._read: OrderedDict[int, Recording] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, number: int, path: str, progress: Callable[[int, int], None] | None = None) -> Recording:
        """Return a recording, read if needed; `progress` is that of `vram.open`."""
        with self._lock:
            if number not in self._read:
                self._read[number] = Recording(open_trace(path, device=self._device, progress=progress))
                while len(self._read) > KEPT_READ:
                    self._read.popitem(last=False)
            self._read.move_to_end(number)
            return self._read[number]


def answer(recordings: Known, question: str, given: Parameters) -> Answer:
    """Answer a query of the page by its name; raise ConfigError if it is unknown or invalid."""
    found = _QUESTIONS.get(question)
    if found is None:
        raise ConfigError(f"unknown query {question!r}; valid: {', '.join(_QUESTIONS)}")
    return found(recordings, given)


# ---- queries -----------------------------------------------------------------------------------------------


_INTEGER = re.compile(r"-?[0-9]{1,18}")


def whole(given: Parameters, name: str, otherwise: int | None = None) -> int:
    """Return an integer of a query."""
    text = given.get(name, "" if otherwise is None else str(otherwise))
    if not _INTEGER.fullmatch(text):
        raise ConfigError(f"{name} must be an integer, not {text[:40]!r}")
    return int(text)


def _number(given: Parameters, name: str) -> float:
    try:
        value = float(given.get(name, ""))
    except ValueError:
        value = float("nan")
    if not abs(value) < 1e18:
        raise ConfigError(f"{name} must be a number, not {given.get(name, '')[:40]!r}")
    return value


def _axis(given: Parameters) -> str:
    axis = given.get("axis", "event")
    if axis not in AXES:
        raise ConfigError(f"unknown axis {axis[:40]!r}; valid: {' and '.join(AXES)}")
    return axis


def _recording(recordings: Known, given: Parameters) -> Recording:
    return recordings[whole(given, "file")]


def _level(recordings: Known, given: Parameters) -> Answer:
    columns = min(max(whole(given, "columns", 1000), 1), MOST_COLUMNS)
    stretch = _number(given, "low"), _number(given, "high")
    return _recording(recordings, given).level(_axis(given), *stretch, columns, given.get("by") or None)


def _bands(recordings: Known, given: Parameters) -> Answer:
    stretch = _number(given, "low"), _number(given, "high")
    most = min(max(whole(given, "most", 1000), 1), 5000)
    return _recording(recordings, given).bands(_axis(given), *stretch, most)


def _stacks(recordings: Known, given: Parameters) -> Answer:
    numbers = [part for part in given.get("numbers", "").split(",") if part.isdecimal() and len(part) < 12]
    return _recording(recordings, given).stacks(map(int, numbers[:MOST_STACKS]))


def _holders(recordings: Known, given: Parameters) -> Answer:
    by = given.get("by", "stack")
    found = _recording(recordings, given).holders(whole(given, "event"), by)
    compared = "against" in given
    if compared:
        other = recordings[whole(given, "against_file", whole(given, "file"))]
        found = compare_holders(other.holders(whole(given, "against"), by), found)
    least = int(SMALLEST_SHARE * max(found.bytes, found.before))
    return {"compared": compared, "tree": found.to_json(least)}


def _events(recordings: Known, given: Parameters) -> Answer:
    count = min(max(whole(given, "count", 100), 1), MOST_EVENTS)
    return _recording(recordings, given).events(whole(given, "first"), count)


def _difference(recordings: Known, given: Parameters) -> Answer:
    """Compare two recordings at their peaks; what each of them says of itself comes along."""
    numbers = whole(given, "file"), whole(given, "against_file")
    traces = [recordings[number].trace for number in reversed(numbers)]
    by = given.get("by", "line")
    found = difference(traces[0], traces[1], by if by in DIFFERENCES else "line").to_json()
    return {**found, "groups": found["groups"][:MOST_HOLDERS]}


_QUESTIONS: dict[str, Callable[[Known, Parameters], Answer]] = {
    "about": lambda recordings, given: _recording(recordings, given).about(),
    "level": _level,
    "bands": _bands,
    "event": lambda recordings, given: _recording(recordings, given).event_at(
        _axis(given), _number(given, "x")
    ),
    "stacks": _stacks,
    "moment": lambda recordings, given: _recording(recordings, given).moment(whole(given, "event")),
    "holders": _holders,
    "events": _events,
    "difference": _difference,
    "summary": lambda recordings, given: _recording(recordings, given).summary(),
    "why": lambda recordings, given: _recording(recordings, given).why(whole(given, "event")),
}


# ---- marks -------------------------------------------------------------------------------------------------


def _is_step(mark: Annotation) -> bool:
    return mark.name.startswith(STEP_PREFIX)


def _spans(marks: Iterable[Annotation], end: int) -> list[Answer]:
    """Return annotations from start to end; `depth` counts the enclosing ones."""
    found: list[Answer] = []
    pending: defaultdict[str, list[Answer]] = defaultdict(list)
    depth = 0
    for mark in sorted(marks, key=lambda each: each.time_us):
        if _is_step(mark):
            continue
        if mark.stage == "START":
            found.append({"name": mark.name, "from": mark.time_us, "to": end, "depth": depth})
            pending[mark.name].append(found[-1])
            depth += 1
            continue
        if mark.stage == "END" and pending[mark.name]:
            pending[mark.name].pop()["to"] = mark.time_us
            depth -= 1
        elif mark.stage != "END":
            found.append({"name": mark.name, "from": mark.time_us, "to": mark.time_us, "depth": 0})
    return found


def _thinned(rows: list[Any]) -> list[Any]:
    step = -(-len(rows) // MOST_MARKS)
    return rows[::step] if step > 1 else rows
