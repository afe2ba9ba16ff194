"""What would have helped a job that ran out of memory: advice by verdict, and allocators tried by replay.

An allocator is tried on devices of many sizes, because the limit of the job is often known only as a range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from vram.core.verdict import Account, Possible
from vram.sizes import format_size
from vram.trace import Lifetimes, Trace, find_moves, peak_allocated
from vram.trace.lifetimes import with_served
from vram.trace.model import COLUMNS
from vram.trace.series import pages_move

from .capacity import Capacity, Request, describe_limit, of_torch
from .memory import Memory

__all__ = ["Remedy", "find_remedies", "with_request"]

TRIED = {
    "torch-expandable": "PyTorch's expandable segments, which map free pages where they are needed",
    "cuda-async": "the CUDA driver's own pool",
    "vram": "vram's allocator",
}
"""Allocators a failed job is tried with, in words."""
SPILL_SECONDS = 5.0
"""The replay with spilling is abandoned after this time."""
EXPECTED_REPLAYS = 14
"""About how many replays find the smallest limit of one allocator, for the progress bar."""
SPILLED = "would complete with spill"
SPILLED_MORE = "would complete with a larger spill"
GIB = 1 << 30

Progress = Callable[[int, int], None] | None


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something to do. `setting` is what to set or run.

    If the job was replayed with it, `needs` is the smallest limit at which the job completes, with the failed
    request (None: with none that was tried), and `evidence` compares it with the limit that the job had.
    `fits` is True if the job completes under that limit, False if it does not, and None if that depends on
    where in its range an unknown limit was, or if nothing was replayed.
    """

    what: str
    setting: str = ""
    fits: bool | None = None
    needs: int | None = None
    evidence: str = ""


def find_remedies(
    trace: Trace,
    memory: Memory,
    verdicts: Sequence[Possible],
    account: Account,
    request: Request | None,
    capacity: Capacity,
    progress: Progress = None,
) -> Iterator[Remedy]:
    """What would help, what is shown to fit first; where nothing failed, what would lower the memory."""
    if request is None:
        for each in verdicts:
            yield from _where_nothing_failed(trace, each.verdict, account)
        return
    by_torch = of_torch(trace, request)
    program = with_request(trace, memory)
    tried = _replayed(program, capacity, progress) if by_torch else []
    name = SPILLED_MORE if find_moves(trace) else SPILLED
    spilled = _spilled(program, capacity, request, name, by_torch=by_torch)
    tried += [] if spilled is None else [spilled]
    yield from sorted((each for each in tried if each.fits is not False), key=lambda each: not each.fits)
    for possible in verdicts:
        plain = _plain(possible.verdict, account, request, "torch.cuda.empty_cache()" if by_torch else "")
        yield from plain if len(verdicts) == 1 else (_for_limits(possible, each) for each in plain)
    yield _larger(account, request, capacity)
    yield from (each for each in tried if each.fits is False)


def _for_limits(possible: Possible, remedy: Remedy) -> Remedy:
    """Advice that depends on the limit."""
    least, below = (format_size(bound or 0) for bound in (possible.least, possible.below))
    return replace(remedy, what=f"if the limit was between {least} and {below}, {remedy.what}")


def _plain(verdict: str, account: Account, request: Request, empty_cache: str) -> Iterator[Remedy]:
    missing = request.needed - account.unused
    if verdict == "cached":
        yield Remedy(
            "release unused segments earlier: empty the cache, or delete the private pools that hold them",
            empty_cache,
        )
    if verdict == "pending":
        yield Remedy(
            "wait for the streams that still use freed memory before the request, or free memory later "
            "on its own stream instead of calling record_stream"
        )
    if verdict == "fragmentation":
        yield Remedy("reduce fragmentation: allocate long-lived memory first, and vary batch sizes less")
    if verdict == "rounding":
        yield Remedy("round up less: unset roundup_power2_divisions and max_split_size_mb")
    if verdict == "foreign":
        yield Remedy(
            f"release {format_size(missing)} elsewhere: other processes (see nvidia-smi) or libraries "
            "with their own pools"
        )
    if verdict == "true-demand":
        spare = account.pending + account.fragmentation + account.cached
        yield Remedy(
            f"use less memory: free {format_size(max(0, missing - spare))}, reduce the batch size, "
            "checkpoint activations, or offload"
        )


def _where_nothing_failed(trace: Trace, verdict: str, account: Account) -> Iterator[Remedy]:
    """How to need less at a moment, starting with the verdict."""
    of_torch = bool(trace.segments) and not pages_move(trace)
    held = format_size(account.parts()[verdict]) if account.reserved else ""
    if not held:
        return
    if verdict == "true-demand":
        yield Remedy(
            f"use less memory: the program requested {held} of the {format_size(account.reserved)} reserved; "
            "start with the largest holder, reduce the batch size, checkpoint activations, or offload"
        )
        return
    advice = {
        "cached": "release unused segments before other programs need them: empty the cache",
        "pending": "wait for the streams that still use freed memory, or free memory on its own stream",
        "fragmentation": "reduce fragmentation: allocate long-lived memory first, and vary batch sizes less",
        "rounding": "round up less: unset roundup_power2_divisions and max_split_size_mb",
    }
    empty_cache = "torch.cuda.empty_cache()" if of_torch and verdict == "cached" else ""
    yield Remedy(f"{advice[verdict]}; this affects {held}", empty_cache)
    if of_torch and verdict in ("cached", "fragmentation"):
        from vram.replay import Setting  # here, so that reading a recording needs no more than itself

        yield Remedy(TRIED["torch-expandable"], Setting("torch-expandable", {}).environment)
        yield Remedy(TRIED["vram"], Setting("vram", {}).environment)


def _larger(account: Account, request: Request, capacity: Capacity) -> Remedy:
    larger = format_size(account.reserved + request.needed)
    if capacity.bound == "limit":
        return Remedy(f"a limit of {larger}: the same run would have continued past this point")
    return Remedy(
        f"a device with {larger} for this program: the same run would have continued past this point"
    )


# ---- trying it out -----------------------------------------------------------------------------------------


def _replayed(program: Lifetimes, capacity: Capacity, progress: Progress) -> list[Remedy]:
    """Each of TRIED on the job up to the failed request, and that request; none without the native core."""
    from vram.replay.executors import FAILURES, run_all  # here, so that reading needs no more than itself
    from vram.replay.run import can_replay

    if capacity.bytes is None or not can_replay():
        return []
    lowest, highest = capacity.bytes, capacity.bytes if capacity.below is None else capacity.below - 1
    replays = count(1)

    def tell() -> None:
        if progress is not None:
            progress(next(replays), EXPECTED_REPLAYS * len(TRIED))

    def work(program: Lifetimes, policy: str) -> Remedy:
        try:
            return _try(program, policy, lowest, highest, capacity, tell)
        except FAILURES as error:
            return _not_tried(policy, error)

    return run_all(work, [program], [(0, policy) for policy in TRIED], jobs=len(TRIED))


def _not_tried(policy: str, error: Exception) -> Remedy:
    """An allocator whose replay failed: the explanation does not depend on it."""
    from vram.replay import Setting

    what = f"{TRIED[policy]} (not tried, because the replay failed: {str(error) or type(error).__name__})"
    return Remedy(what, Setting(policy, {}).environment)


def _try(
    program: Lifetimes,
    policy: str,
    lowest: int,
    highest: int,
    capacity: Capacity,
    tell: Callable[[], None],
) -> Remedy:
    """One allocator under a limit that was anything from `lowest` to `highest`."""
    from vram.replay import ReplayResult, Setting, replay
    from vram.replay.sweep import find_smallest

    def run(size: int | None) -> ReplayResult:
        result = replay(program, policy, capacity=size)
        tell()
        return result

    _, needs, _ = find_smallest(run, peak_allocated(program))
    ends = [run(size).oom is None for size in sorted({lowest, highest})]
    fits = _fits(ends, needs, highest)
    return Remedy(TRIED[policy], Setting(policy, {}).environment, fits, needs, _evidence(needs, capacity))


def _spilled(
    program: Lifetimes, capacity: Capacity, request: Request, name: str, *, by_torch: bool
) -> Remedy | None:
    """Spilling to host memory under the lowest limit that the job can have had; None if it was not tried."""
    from vram.replay import Setting, replay
    from vram.replay.executors import FAILURES, run_within

    if not capacity.bytes or request.size > capacity.bytes:
        return None
    held = peak_allocated(program)
    work = partial(replay, program, "vram", capacity=capacity.bytes, spill=held)
    try:
        result = run_within(SPILL_SECONDS, work)
    except FAILURES:  # or the native core is not built here
        return None
    if result is None or result.spill is None or (result.oom is None and not result.spill.moved_out):
        return None  # too slow to try; or the job completes without
    if result.oom is not None:
        return Remedy("spilling to host memory", fits=False, evidence="does not complete either")
    spill = result.spill
    times = "" if spill.slowdown is None else f", about {spill.slowdown:.1f}x the time"
    host = f"{-(-spill.peak // GIB)}GiB"
    return Remedy(
        name,
        f"{Setting('vram', {}).environment} --spill {host}" if by_torch else f"VRAM_CONF=spill:{host}",
        fits=True,
        evidence=f"{format_size(spill.moved_in_step)} moved a step{times}",
    )


def _fits(ends: list[bool], needs: int | None, highest: int) -> bool | None:
    """The answer for the whole range, from replays at its ends: more memory does not always help."""
    if all(ends):
        return True
    if len(ends) == 1 or needs is None or (needs > highest and not any(ends)):
        return False
    return None


def _evidence(needs: int | None, capacity: Capacity) -> str:
    """What the replays found, beside what is known of the limit."""
    had = describe_limit(capacity)
    limit = f"your limit was {had}" if capacity.bound == "limit" else f"{had} of the device were available"
    if needs is None:
        return f"does not complete with any limit that was tried; {limit}"
    return f"fits from {format_size(needs)}; {limit}"


def with_request(trace: Trace, memory: Memory) -> Lifetimes:
    """The job up to the request that failed, as if it had been served."""
    end = memory.event
    columns: dict[str, Any] = {name: getattr(trace, name)[: end + 1] for name in COLUMNS}
    return with_served(replace(trace, **columns, segments=memory.segments), end)
