"""Moments of a recording: its out-of-memory, its peak, an event or a step; and the bytes held over time.

`memory` has the blocks of a moment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate

from vram.arguments import require, shown, whole_number
from vram.errors import ConfigError
from vram.trace import Action, Steps, Trace, find_steps
from vram.trace.series import events_of

from .torch_rules import Rules

__all__ = ["Moment", "allocated_series", "find_moment", "find_window", "peak_event", "require_contents"]


@dataclass(frozen=True, slots=True)
class Moment:
    """The state after `event`. `kind` is "oom", "peak", "event", or "end" of a recording without events.

    `event` is then -1; `step` is None before the first.
    """

    kind: str
    event: int
    step: int | None


def find_moment(trace: Trace, at: str | int | None = None) -> Moment:
    """What `at` names: "oom" (the last one), "peak", an event's number, "event:N", or "step:N", its end.

    The default is the out-of-memory if there is one, else the peak. A snapshot without a history has no
    events; only its end can be examined.
    """
    if not require(trace, Trace, "trace").events:
        return _end(trace, at)
    steps = find_steps(trace)
    failures = events_of(trace, [Action.OOM])
    if at is None:
        at = "oom" if failures else "peak"
    if at == "oom":
        if not failures:
            raise ConfigError(f"{trace.source} has no out-of-memory error; use --at peak, or name an event")
        return Moment("oom", failures[-1], steps.of(failures[-1]))
    if at == "peak":
        event = peak_event(trace)
        return Moment("peak", event, steps.of(event))
    event = _boundary(trace, steps, _written(at), end=True)
    kind = "oom" if trace.action[event] == Action.OOM else "event"
    return Moment(kind, event, steps.of(event))


def _end(trace: Trace, at: str | int | None) -> Moment:
    require_contents(trace)
    if at not in (None, "peak"):
        raise _no_events(trace)
    return Moment("end", -1, None)


def require_contents(trace: Trace) -> None:
    """Raise a ConfigError if `trace` has neither events nor memory."""
    if not trace.events and not trace.segments:
        raise _no_events(trace)


def _no_events(trace: Trace) -> ConfigError:
    return ConfigError(
        f"{trace.source} has no events; record them with torch.cuda.memory._record_memory_history() "
        "before the job"
    )


def find_window(trace: Trace, between: str | None) -> range:
    """The events of "step:10,step:50" or "event:0,event:900", including both ends. Never empty.

    None means all steps, or all events if there are no steps.
    """
    require(trace, Trace, "trace")
    if between is None:
        return _all_steps(trace)
    ends = [part.strip() for part in require(between, str, "between").split(",")]
    if len(ends) != 2:
        raise ConfigError(f"{shown(between)} is not a range; write step:10,step:50 or event:0,event:900")
    if not trace.events:
        raise _no_events(trace)
    steps = find_steps(trace)
    first = _boundary(trace, steps, ends[0], end=False)
    last = _boundary(trace, steps, ends[1], end=True)
    if last < first:
        raise ConfigError(f"{between!r} ends (event {last}) before it begins (event {first})")
    return range(first, last + 1)


def _all_steps(trace: Trace) -> range:
    if not trace.events:
        raise _no_events(trace)
    steps = find_steps(trace)
    return range(min(steps.first[0], trace.events - 1) if len(steps) else 0, trace.events)


def _written(at: object) -> str:
    return at if isinstance(at, str) else str(whole_number(at, "at"))


def _boundary(trace: Trace, steps: Steps, text: str, *, end: bool) -> int:
    match = re.fullmatch(r"(?:(event|step):)?(\d{1,18})", text)
    if match is None:
        raise ConfigError(f"{shown(text)} is not a moment; write oom, peak, an event such as 1200, or step:7")
    number = int(match[2])
    if match[1] == "step":
        return _step_boundary(trace, steps, number, end=end)
    if number >= trace.events:
        raise ConfigError(f"there is no event {number}; {trace.source} has events 0 to {trace.events - 1}")
    return number


def _step_boundary(trace: Trace, steps: Steps, number: int, *, end: bool) -> int:
    try:
        events = steps.range(number)
    except KeyError:
        known = f"it has steps {min(steps.numbers)} to {max(steps.numbers)}" if len(steps) else "it has none"
        advice = "" if len(steps) else "; mark them with vram.step, or name events: event:1200"
        raise ConfigError(f"there is no step {number} in {trace.source}: {known}{advice}") from None
    return min(max(events.stop - 1 if end else events.start, 0), trace.events - 1)


# ---- how much was held -------------------------------------------------------------------------------------


def allocated_series(trace: Trace) -> list[int]:
    """Bytes the program held after each event, beyond those before the first; requests are rounded."""
    rounded = Rules(trace.settings).rounded
    sizes = {size: rounded(size) for size in set(trace.size)}
    changes = [0] * trace.events
    for event in events_of(trace, [Action.ALLOC]):
        changes[event] = sizes[trace.size[event]]
    for event in events_of(trace, [Action.FREE_REQUESTED]):
        changes[event] = -sizes[trace.size[event]]
    return list(accumulate(changes))


def peak_event(trace: Trace) -> int:
    """The first event after which the program held most."""
    series = allocated_series(trace)
    return series.index(max(series))
