"""What would have let a failed request fit: what replays of the same job show, and what the numbers say.

Replays need the native core; without it only the numbers speak.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from vram.core.verdict import Account
from vram.errors import VramError
from vram.sizes import format_size
from vram.trace import Action, Trace, lifetimes
from vram.trace.model import COLUMNS
from vram.trace.series import pages_move

from .capacity import Capacity, Request
from .memory import Memory

__all__ = ["Remedy", "find_remedies"]

TRIED = {
    "torch-expandable": "expandable segments, which move free pages under any address",
    "cuda-async": "the driver's own pool",
    "vram": "vram under the program",
}
"""Allocators a failed job is tried with, in words."""
ELSEWHERE = 1 << 62
"""An address that no recording has."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something to do. `setting` is what to set or run; `reserved` what a replay with it reserved at most.

    `fits` is True where a replay of the job, with the failed request, fitted; False where it did not; None
    where it was not replayed.
    """

    what: str
    setting: str = ""
    fits: bool | None = None
    reserved: int | None = None


def find_remedies(
    trace: Trace,
    memory: Memory,
    verdict: str,
    account: Account,
    request: Request | None,
    capacity: Capacity,
) -> Iterator[Remedy]:
    """What would help, those shown to fit first. Nothing where nothing failed."""
    if request is None:
        return
    # TRIED are for programs on PyTorch, whose recordings have segments with addresses.
    of_torch = request.device_free is not None and not pages_move(trace)
    tried = list(_replayed(trace, memory, request, capacity)) if of_torch else []
    yield from (remedy for remedy in tried if remedy.fits)
    yield from _plain(verdict, account, request, "torch.cuda.empty_cache()" if of_torch else "")
    yield _larger(account, request, capacity)
    yield from (remedy for remedy in tried if not remedy.fits)


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


def _larger(account: Account, request: Request, capacity: Capacity) -> Remedy:
    larger = format_size(account.reserved + request.needed)
    if capacity.bound == "limit":
        return Remedy(f"a limit of {larger}: the same run would have continued past this point")
    return Remedy(
        f"a device with {larger} for this program: the same run would have continued past this point"
    )


# ---- trying it out -----------------------------------------------------------------------------------------


def _replayed(trace: Trace, memory: Memory, request: Request, capacity: Capacity) -> Iterator[Remedy]:
    """Each of TRIED on the job up to the failed request, and that request."""
    from vram.replay import Setting, replay  # here, so that reading a recording needs no more than itself

    if capacity.bytes is None:
        return
    program = lifetimes(_with_request(trace, memory, request))
    for policy, what in TRIED.items():
        try:
            result = replay(program, policy, capacity=capacity.bytes)
        except VramError:  # the native core is not built here
            return
        yield Remedy(what, Setting(policy, {}).environment, result.oom is None, result.peak_reserved)


def _with_request(trace: Trace, memory: Memory, request: Request) -> Trace:
    """The recording up to the request that failed, as if it had been served."""
    end = memory.event
    columns: dict[str, Any] = {name: getattr(trace, name)[: end + 1] for name in COLUMNS}
    columns["action"][end] = Action.ALLOC
    columns["address"][end] = ELSEWHERE
    columns["size"][end] = request.size
    return replace(trace, **columns, segments=memory.segments)
