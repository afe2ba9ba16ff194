"""Why a recorded job ran out of memory, or what its peak consists of: one verdict and the evidence.

Gathers what the other modules find. `remedies` has what would have helped; the rule of the verdict is in
`vram.core.verdict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from vram.arguments import require, whole_number
from vram.core.verdict import MEANINGS, Account, Possible, verdict_text
from vram.sizes import format_count, format_size, parse_size
from vram.trace import Action, Trace
from vram.trace.moves import spilled_at
from vram.trace.series import events_of

from .capacity import Capacity, Request, find_capacity, find_request, judge, open_account
from .columns import Table
from .groups import Group, group_blocks
from .memory import Memories, Memory
from .moments import Moment, find_moment
from .places import frame_text, place_of
from .remedies import Remedy, find_remedies

__all__ = ["HOLDERS", "Explanation", "Remedy", "explain"]

HOLDERS = ("stack", "module", "tag", "stream", "step")
"""The ways in which an explanation names who holds memory."""


@dataclass(frozen=True)
class Explanation:
    """What was so at a moment, and what follows. Sizes are bytes.

    `verdicts` has one verdict, or several if the limit is known only as a range and decides. `holders` has
    the live blocks in groups for each of HOLDERS, `largest_free` the largest free piece anywhere,
    `largest_on_stream` that of the request's stream; `spilled` is what was in host memory, which the account
    does not have.
    """

    trace: Trace
    moment: Moment
    verdicts: tuple[Possible, ...]
    account: Account
    request: Request | None
    capacity: Capacity
    largest_free: int
    largest_on_stream: int | None
    spilled: int
    holders: dict[str, list[Group]]
    remedies: tuple[Remedy, ...]

    @property
    def verdict(self) -> str:
        """One of `vram.core.verdict.VERDICTS`, or several of them joined by "or"; see `verdicts`."""
        return verdict_text(self.verdicts)

    @property
    def headline(self) -> str:
        """What happened."""
        return _what(self)

    @property
    def reason(self) -> str:
        """Why, in one sentence."""
        return _reason(self)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What the recording does not contain, and what that means for the numbers."""
        return (*_missing(self.trace), *filter(None, (self.capacity.note, _assumed(self))))

    @property
    def text(self) -> str:
        """One paragraph for a person."""
        return " ".join(_sentences(self))

    def _repr_html_(self) -> str:
        from .html import explanation_html

        return explanation_html(self)

    def __repr__(self) -> str:
        what = "peak" if self.request is None else "out of memory"
        return f"<Explanation of {self.trace.source!r}: {what} at event {self.moment.event}, {self.verdict}>"

    def table(self) -> Table:
        """The account as a `Table`: `kind`, `bytes`, `share` of what the job could use, and `meaning`.

        Memory of the device that the job could not use has no share.
        """
        parts = self.account.parts()
        return Table(
            {
                "kind": ("string", list(parts)),
                "bytes": ("int64", list(parts.values())),
                "share": ("float64", list(self.account.shares().values())),
                "meaning": ("string", [MEANINGS[name] for name in parts]),
            }
        )

    def to_json(self, most: int | None = None) -> dict[str, Any]:
        """Plain data; of each kind of holder at most `most`."""
        most = None if most is None else whole_number(most, "most")
        return {
            "trace": self.trace.heading(),
            "at": asdict(self.moment),
            "verdict": self.verdict,
            "verdicts": [asdict(each) for each in self.verdicts],
            "headline": self.headline,
            "reason": self.reason,
            "request": _request_json(self),
            "allocated": self.account.allocated,
            "reserved": self.account.reserved,
            "spilled": self.spilled,
            "largest_free": self.largest_free,
            "largest_free_on_stream": self.largest_on_stream,
            "bytes": self.account.parts(),
            "shares": self.account.shares(),
            "device": self.account.device,
            "capacity": self.capacity.bytes,
            "capacity_known": self.capacity.known,
            "capacity_below": self.capacity.below,
            "bound": self.capacity.bound,
            "holders": {
                by: [group.to_json() for group in found[:most]] for by, found in self.holders.items()
            },
            "remedies": [asdict(remedy) for remedy in self.remedies],
            "note": self.capacity.note,
            "text": self.text,
        }


def explain(
    trace: Trace,
    at: str | int | None = None,
    *,
    capacity: int | str | None = None,
    memories: Memories | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Explanation:
    """Explain the out-of-memory of `trace`, its peak, or another moment; see `find_moment` for `at`.

    `capacity` is the memory of the device, or the limit set for the process, where the recording lacks it;
    `memories` those of `trace`, where it is asked about often. `progress` is called with the number of
    replays done and expected.
    """
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function, not {type(progress).__name__}")
    moment = find_moment(trace, at)
    known = Memories(trace) if memories is None else require(memories, Memories, "memories")
    memory = known.at(moment.event)
    request = find_request(trace, moment.event)
    found = find_capacity(trace, memory, request, None if capacity is None else parse_size(capacity))
    account = open_account(memory, request, found)
    verdicts = judge(account, request, found)
    return Explanation(
        trace=trace,
        moment=moment,
        verdicts=verdicts,
        account=account,
        request=request,
        capacity=found,
        largest_free=memory.largest_free(),
        largest_on_stream=memory.largest_free(request.stream) if request else None,
        spilled=spilled_at(trace, moment.event),
        holders=_holders(trace, memory),
        remedies=tuple(find_remedies(trace, memory, verdicts, account, request, found, progress)),
    )


def _holders(trace: Trace, memory: Memory) -> dict[str, list[Group]]:
    blocks = list(memory.blocks())
    return {by: group_blocks(trace, blocks, by) for by in HOLDERS}


def _request_json(found: Explanation) -> dict[str, Any] | None:
    request = found.request
    if request is None:
        return None
    frames = found.trace.frames_of(request.stack)
    return {
        "size": request.size,
        "needed": request.needed,
        "stream": found.trace.streams[request.stream],
        "device_free": request.device_free,
        "frames": [frame_text(frame) for frame in frames],
    }


# ---- words -------------------------------------------------------------------------------------------------

_BECAUSE = {
    "cached": "{bytes} were cached in unused segments; releasing them would have made the request fit",
    "pending": "{bytes} were freed but still pending, because work on another stream might use them; "
    "with them, the request would have fit",
    "fragmentation": "there was enough free memory in total, but {bytes} of it were split up by blocks "
    "in use; the largest free block has {largest}",
    "rounding": "{bytes} were added by rounding requests up; without them, the request would have fit",
    "foreign": "other libraries or processes hold at least {bytes} of the device; without them, the request "
    "would have fit",
    "true-demand": "the program needs more memory than is available; what the allocator could have avoided "
    "({spare}) would not have been enough",
}


def _sentences(found: Explanation) -> Iterator[str]:
    yield found.headline
    yield f"Verdict: {found.verdict}: {found.reason}"
    yield from found.doubts
    for group in [group for group in found.holders["stack"] if group.frames][:1]:
        held = f"{format_size(group.bytes)} in {format_count(group.blocks, 'block')}"
        yield f"The largest holder is {group.label} ({held})."


def _reason(found: Explanation) -> str:
    account = found.account
    if len(found.verdicts) > 1:
        return f"it depends on the limit, which is not in the recording: {_by_limit(found)}."
    if found.request is None:
        share = account.parts()[found.verdict] / max(1, account.reserved)
        return f"{share:.0%} of the reserved memory is {MEANINGS[found.verdict]}."
    return f"{_because(found, found.verdict)}."


def _by_limit(found: Explanation) -> str:
    """Which verdict holds for which limits."""
    first, *others = found.verdicts
    parts = [f"{first.verdict} if it was below {format_size(first.below or 0)}"]
    parts += [f"{each.verdict} from {format_size(each.least or 0)} on" for each in others]
    return ", ".join(parts)


def _because(found: Explanation, verdict: str) -> str:
    account = found.account
    return _BECAUSE[verdict].format(
        bytes=format_size(account.parts()[verdict]),
        largest=format_size(found.largest_free),
        spare=format_size(account.reserved - account.demand),
    )


def _missing(trace: Trace) -> Iterator[str]:
    """What a reader of a recording that is not whole must know."""
    if trace.dropped:
        lost = format_count(trace.dropped, "event")
        yield f"The recording dropped {lost} or more; what happened in between is unknown."
    if not trace.complete:
        yield (
            "Some memory was allocated before the first event: the recording began after the program, or its "
            "first events were dropped."
        )
    if trace.truncated:
        yield "The recording was truncated and may end before the job did."


def _assumed(found: Explanation) -> str:
    """Which of the possible limits the evidence is for."""
    if len(found.verdicts) < 2 or found.capacity.bytes is None:
        return ""
    return f"The evidence is for the lowest possible limit, {format_size(found.capacity.bytes)}."


def _what(found: Explanation) -> str:
    moment, account, request = found.moment, found.account, found.request
    step = f" in step {moment.step}" if moment.step is not None else ""
    held = f"{format_size(account.allocated)} allocated and {format_size(account.reserved)} reserved"
    if found.spilled:
        held = (
            f"{format_size(found.spilled)} spilled to host memory, "
            f"{format_size(account.allocated)} allocated on the device "
            f"and {format_size(account.reserved)} reserved"
        )
    if request is None:
        if moment.kind == "end":
            return f"The recording has no events; at its end there are {held}."
        name = "The peak" if moment.kind == "peak" else "The moment"
        if moment.kind == "peak" and not events_of(found.trace, [Action.OOM]):
            name = "No request failed in this recording. Its peak"
        return f"{name} is at event {moment.event}{step}: {held}."
    place = place_of(found.trace.frames_of(request.stack))
    where = f" at {frame_text(place)}" if place else ""
    return (
        f"Out of memory at event {moment.event}{step}: failed to allocate {format_size(request.size)} "
        f"on stream {found.trace.streams[request.stream]}{where}, with {held}{_of(found)}."
    )


def _of(found: Explanation) -> str:
    capacity = found.capacity
    if capacity.bytes is None or not capacity.known:
        return ""
    bound = "a limit of" if capacity.bound == "limit" else "the visible"
    return f" of {bound} {format_size(capacity.bytes)}"
