"""The words of a pool's OutOfMemory: what was asked, where the memory is, the verdict, and what would help.

Turns the native report and a pool's state into an error, with the vocabulary and the rule of `verdict`. The
decision that memory is out was the ladder's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from vram.core.spill import SpilledTag
from vram.core.verdict import MEANINGS, Account, judge_request
from vram.errors import OutOfMemory
from vram.sizes import format_size

__all__ = ["explain_out_of_memory"]

PAGE = 2 << 20
"""The least memory a device gives."""
MOST_NAMED = 3
"""So many of the largest holders are named."""
STAYS: Final = (
    "letting more memory spill: what is left is in use by a capture, has a tag with spill='never' or is used "
    "on streams that vram does not know"
)
SPILL_REMEDIES: Final = {
    "host": "freeing host memory, because the host has no memory left for more pages",
    "late": "finding the stream whose work does not end: it did not arrive in time for a swap to host memory",
    "busy": "trying again later, because another thread was moving or suspending memory for too long",
    "deadlock": "making the request from another thread, because it came from work on a stream and a swap "
    "to host memory would wait for that work",
    "capture": "allocating before the capture or after it, because nothing moves while a stream is captured",
    "failed": "finding out why the device refused to move memory to the host",
}
"""What would let more memory spill, by why none could move."""


def explain_out_of_memory(
    device: str,
    size: int,
    stream: int,
    report: Mapping[str, int],
    *,
    tags: Mapping[str | None, int],
    pending_streams: Mapping[int, int],
    places: Mapping[str, int] | None = None,
    spilled_tags: Sequence[SpilledTag] = (),
    cross_stream: str,
    rounding: int = 0,
    callback_errors: tuple[str, ...] = (),
    limit_name: str = "limit",
    can_spill: bool = False,
) -> OutOfMemory:
    """Build the error of a request for `size` bytes on `stream`.

    `tags` has the live bytes under each tag, `places` those allocated by each line where stacks are kept,
    `spilled_tags` what was moved of each tag, `pending_streams` the bytes pending on each stream,
    `rounding` what of the live bytes was not asked for; `limit_name` is the option that bounds the pool;
    `can_spill` says whether its memory could spill.
    """
    account = _account(report, rounding)
    verdict = "addresses" if report.get("addresses") else judge_request(account, size)
    facts: dict[str, Any] = {
        "align": 0,
        "addresses": 0,
        "suspended": 0,
        "spill": 0,
        "host": 0,
        "spilled": 0,
        "spill_left": 0,
        "saved": 0,
        "moved_out": 0,
        "moved_back": 0,
        "held_seconds": 0.0,
        "spill_refused": "",
        **report,
        "can_spill": can_spill,
        "verdict": verdict,
        "bytes": account.parts(),
        "outside": account.foreign,
        "tags": dict(tags),
        "spilled_tags": _most_first({each.tag: each.bytes for each in spilled_tags}),
        "moved_tags": _most_first({each.tag: each.moved_out_bytes for each in spilled_tags}),
        "pending_streams": dict(pending_streams),
        "places": dict(places or {}),
        "callback_errors": callback_errors,
        "limit_name": limit_name,
    }
    lines = [
        f"out of memory: failed to allocate {format_size(size)}{_aligned(facts)} on stream {stream} of "
        f"{device}; "
        f"{_room(facts)}.",
        f"Verdict: {verdict}. {format_size(account.allocated)} are allocated and "
        f"{format_size(account.reserved)} reserved. The device's {format_size(account.device)} are "
        f"used as follows:",
        *_parts(account, facts),
        *_suspended(facts),
        *_spilled(facts),
        f"What would help: {'; '.join(_remedies(size, facts, cross_stream))}.",
    ]
    return OutOfMemory(
        "\n".join(lines),
        requested=size,
        stream=stream,
        device=device,
        allocated=report["allocated"],
        reserved=report["reserved"],
        limit=report["limit"] or None,
        report=facts,
    )


def _account(report: Mapping[str, int], rounding: int) -> Account:
    """The report in the words of `verdict`; what caches and free pages hold is cached."""
    rounding = min(rounding, report["allocated"])
    unused = min(report["device_free"], _room_in_limit(report))
    return Account(
        demand=report["allocated"] - rounding,
        rounding=rounding,
        pending=report["pending"],
        fragmentation=report["stranded"],
        cached=report["cached"] + report["free_pages"] + report["free_elsewhere"],
        unused=unused,
        withheld=report["device_free"] - unused,
        foreign=max(0, report["device_total"] - report["device_free"] - report["reserved"]),
        limit=report["limit"] or None,
    )


def _capacity(facts: Mapping[str, int]) -> int:
    return min(facts["limit"] or facts["device_total"], facts["device_total"])


def _is_limited(facts: Mapping[str, int]) -> bool:
    return 0 < facts["limit"] < facts["device_total"]


def _room_in_limit(facts: Mapping[str, int]) -> int:
    return max(0, _capacity(facts) - facts["reserved"])


def _aligned(facts: Mapping[str, Any]) -> str:
    return f" with an alignment of {format_size(facts['align'])}" if facts["align"] else ""


def _room(facts: Mapping[str, Any]) -> str:
    """How much is available immediately, and what limits it."""
    if facts["addresses"]:
        return f"the pool's {format_size(facts['addresses'])} of addresses have no free place for it"
    room = format_size(facts["bytes"]["unused"] + facts["free_pages"])
    if _is_limited(facts):
        bound = f"{facts['limit_name']} of {format_size(facts['limit'])}"
        return f"only {room} are available within the pool's {bound}"
    return f"only {room} of the device's {format_size(facts['device_total'])} are available"


def _parts(account: Account, facts: Mapping[str, Any]) -> Iterator[str]:
    """A line for each kind of memory that there is."""
    details = {"true-demand": _named(facts["tags"]), "pending": _streams(facts), "cached": _caches(facts)}
    for name, size in account.parts().items():
        if size or name == "true-demand":
            yield f"  {name} {format_size(size)}: {MEANINGS[name]}{details.get(name, '')}"
        if name == "true-demand":
            for place, held in list(facts["places"].items())[:MOST_NAMED]:
                yield f"    {format_size(held)} allocated at {place}"


def _suspended(facts: Mapping[str, Any]) -> Iterator[str]:
    """What is allocated and has no memory now; no part of the device's bytes."""
    if facts["suspended"]:
        yield f"In addition, {format_size(facts['suspended'])} are suspended and not in device memory."


def _spilled(facts: Mapping[str, Any]) -> Iterator[str]:
    """What is allocated and in host memory now; no part of the device's bytes."""
    if facts["spill"] or facts["spilled"]:
        yield (
            f"In addition, {format_size(facts['spilled'])} are spilled to host memory, where the pool holds "
            f"{format_size(facts['host'])} of at most {format_size(facts['spill'])} (spill)"
            f"{_named(facts['spilled_tags'])}.{_saved(facts['saved'])}{_moves(facts)}"
        )


def _saved(bytes: int) -> str:
    """What a framework has in host memory beside the pages."""
    return f" Saved tensors take {format_size(bytes)} of that limit, too." if bytes else ""


def _moves(facts: Mapping[str, Any]) -> str:
    """What spilling has done so far."""
    if not facts["moved_out"]:
        return ""
    named = _named(facts["moved_tags"])
    return (
        f" So far, {format_size(facts['moved_out'])} moved there{named}{',' if named else ''} and "
        f"{format_size(facts['moved_back'])} back, while streams were held for {facts['held_seconds']:.3f} s."
    )


def _most_first(tags: Mapping[str | None, int]) -> dict[str | None, int]:
    """Those that have any, most bytes first."""
    return dict(sorted(((tag, size) for tag, size in tags.items() if size), key=lambda item: -item[1]))


def _named(tags: Mapping[str | None, int]) -> str:
    named = [(tag, size) for tag, size in tags.items() if tag is not None and size][:MOST_NAMED]
    if not named:
        return ""
    share = "most" if 2 * sum(size for _, size in named) > sum(tags.values()) else "some"
    listed = ", ".join(f"{tag!r} ({format_size(size)})" for tag, size in named)
    return f", {share} of it with the tag {listed}"


def _streams(facts: Mapping[str, Any]) -> str:
    named = [f"stream {handle} ({format_size(size)})" for handle, size in facts["pending_streams"].items()]
    return f", allocated on {', '.join(named)}" if named else ""


def _caches(facts: Mapping[str, Any]) -> str:
    """Where idle memory is."""
    places = {
        "cached": "in stream caches",
        "free_pages": "in free pages of this stream",
        "free_elsewhere": "in free pages of other streams",
    }
    found = [f"{format_size(facts[name])} {where}" for name, where in places.items() if facts[name]]
    return f" ({', '.join(found)})"


def _remedies(size: int, facts: Mapping[str, Any], cross_stream: str) -> Iterator[str]:
    capacity, demand = _capacity(facts), size + facts["allocated"]
    if facts["addresses"]:
        yield "a smaller alignment" if facts["align"] else "freeing buffers, so that longer ranges are free"
        return
    if size > capacity:
        yield f"a smaller request: this one alone exceeds the available {format_size(capacity)}"
        if size <= facts["device_total"]:
            yield f"or a {facts['limit_name']} of at least {format_size(demand)}"
        return
    yield from _remedies_inside(size, facts, cross_stream)
    if facts["outside"] >= max(1, size - facts["bytes"]["unused"]) and _room_in_limit(facts) >= size:
        yield f"releasing memory that other libraries or processes hold ({format_size(facts['outside'])})"
    if _is_limited(facts):
        # What is unused may be of no use, so the limit must leave room for all of the request.
        larger = demand if demand > facts["limit"] else facts["reserved"] + max(size, PAGE)
        yield f"a {facts['limit_name']} of at least {format_size(-(-larger // PAGE) * PAGE)}"
    lacking = max(demand - capacity, demand + facts["outside"] - facts["device_total"])
    if 0 < lacking <= facts["allocated"]:
        yield f"freeing {format_size(lacking)} of the allocated memory"
    elif lacking <= 0 < facts["allocated"]:
        yield "freeing part of the allocated memory, or requesting less"
    else:
        yield "requesting less"
    if facts["spill"]:
        yield from _remedies_of_spill(size, facts)
    elif facts["can_spill"] and 0 < lacking <= facts["allocated"]:
        host = lacking + facts["host"]
        yield f'spill="{format_size(host)}" or more, which moves cold memory to host memory'


def _remedies_of_spill(size: int, facts: Mapping[str, Any]) -> Iterator[str]:
    """What would let more memory spill."""
    refused = facts["spill_refused"]
    if refused in SPILL_REMEDIES:
        yield SPILL_REMEDIES[refused]
    elif refused == "limit":
        some = f"only {format_size(facts['spill_left'])} of {format_size(facts['spill'])} are left"
        none = "all host memory that it allows is in use"
        yield f"a larger spill, because {some if facts['spill_left'] else none}"
    elif facts["allocated"] + facts["bytes"]["unused"] + facts["free_pages"] >= size:
        yield STAYS


def _remedies_inside(size: int, facts: Mapping[str, Any], cross_stream: str) -> Iterator[str]:
    """What would make memory that the pool already holds serve."""
    if facts["pending"] >= max(size, 1):
        yield "waiting for the streams that still use freed memory"
    if facts["free_elsewhere"] and cross_stream == "never":
        yield 'cross_stream="ready" or "wait", so that streams share free memory'
    if facts["stranded"] and facts["reserved"] - facts["allocated"] >= size:
        yield "freeing blocks next to long-lived ones, or allocating long-lived blocks from a separate pool"
