"""What Python adds to spilling: wishes of tags, the line in the log, and what is done once a second.

Once a second, memory returns that has room on the device again, and host memory is created ahead of need.

The native pool decides what moves, and moves it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from vram.config import free_host_memory
from vram.core.locks import new_lock
from vram.core.observer import End
from vram.core.tags import spill_wishes
from vram.core.ticker import every_second
from vram.errors import OutOfMemory, VramError
from vram.sizes import format_size

__all__ = [
    "SavedTensors",
    "Spilled",
    "SpilledTag",
    "after_spill",
    "before_spill",
    "look_after",
    "on_shortage",
    "postpone_return",
    "promised_host_bytes",
    "spill_facts",
    "spillable",
    "spilled_of",
    "spilled_tags_of",
    "steer",
    "with_saved",
]

MOST_RETURNED: Final = 1 << 30
"""Bytes that return at a time: about 20 ms during which streams are held."""
MOST_PATIENCE: Final = 64
"""Seconds without a spill after which memory returns, at most."""
AHEAD_FROM: Final = 2
"""Host memory is created ahead of need when one in this many bytes that the pool may have is reserved: a step
rarely needs more than twice as much as the steps before it."""
AHEAD_SHARE: Final = 3
"""… one in this many bytes of the option, of the device memory it may have, and of free host memory. A job
that may have three quarters of the memory it needs lacks one third of what it has."""
MOST_AHEAD: Final = 2 << 30
"""Bytes created at a time: about 0.4 s, during which other calls that map memory wait longer."""
BUS_SPEED: Final = "about 50 GB/s on a PCIe 5 bus"

_log = logging.getLogger("vram")
_followed: dict[int, _Following] = {}
"""The pools that may spill."""
_shortage: list[Callable[[Any, int], None]] = []
_lock = new_lock()
_end: End | None = None  # guarded by the lock; None: there was no such pool


@dataclass(slots=True)
class _Following:
    """Creates host memory for one pool ahead of need, and brings its memory back when there is room."""

    pool: weakref.ref[Any]
    short: bool = False  # memory had to move; the log says so
    ahead: int = 0  # bytes of host memory created since the last spill
    spills: int = 0  # when it was looked at last
    calm: int = 0  # seconds without a spill; negative: postponed
    patience: int = 1  # seconds without a spill after which memory returns
    returned: bool = False  # since the last spill

    def look(self, pool: Any) -> None:
        """Called once a second."""
        raw = pool.raw_stats()
        spilled_since = raw["spill"]["spills"] != self.spills
        self.spills = raw["spill"]["spills"]
        if self.short:
            self._bring_back(pool, spilled_since)
        if spilled_since:
            self.ahead = 0
        self._create_ahead(pool, raw)

    def _bring_back(self, pool: Any, spilled_since: bool) -> None:
        """What returned too early, and had to move again, returns later next time."""
        if spilled_since:
            if self.returned:
                self.patience = min(2 * self.patience, MOST_PATIENCE)
            self.calm, self.returned = min(self.calm, 0), False
            return
        self.calm += 1
        if self.calm >= self.patience:
            self.returned |= pool.bring_back(MOST_RETURNED) > 0

    def _create_ahead(self, pool: Any, raw: dict[str, Any]) -> None:
        """What is in use counts: it will be spare again.

        What was created and released again, for example by `trim()`, is created only after a spill.
        """
        config = pool.config()
        reserved = raw["reserved"]["current"]
        total = pool.device.total_memory
        limit = min(config["limit"] or total, total)
        if not config["spill"] or AHEAD_FROM * reserved < limit:
            return
        usable = min(limit, reserved + pool.device.free_memory)
        if AHEAD_FROM * reserved < usable:
            return
        spare = min(config["spill"], usable, free_host_memory() + raw["host"] - raw["spilled"]) // AHEAD_SHARE
        spare = max(0, spare - raw["spilled"])
        most = min(MOST_AHEAD, spare - self.ahead)
        if most <= 0:
            return
        try:
            self.ahead += pool.create_ahead(spare, most)
        except OutOfMemory:
            self.ahead = spare


@dataclass(frozen=True, slots=True)
class Spilled:
    """An allocation of which `bytes` are in host memory now."""

    address: int
    size: int
    bytes: int
    stream: int
    tag: str | None


@dataclass(frozen=True, slots=True)
class SpilledTag:
    """What was moved to host memory of the allocations under one tag. The words are those of the statistics.

    Bytes are those of allocations. Free space on the pages, and memory that was freed while it moved, are
    under no tag.
    """

    tag: str | None
    bytes: int = 0
    """In host memory now."""
    moved_out_bytes: int = 0
    moved_back_bytes: int = 0
    seconds: float = 0.0
    """That streams were held: the share of this tag."""
    saved_bytes: int = 0
    """Of PyTorch's saved tensors, in pinned memory now."""
    saved_out_bytes: int = 0
    saved_back_bytes: int = 0


@dataclass(slots=True)
class SavedTensors:
    """What a framework copied to host memory ahead of need, of the memory under one tag. The native pool does
    not know about it.
    """

    bytes: int = 0
    """In host memory now."""
    out_bytes: int = 0
    """Copied to host memory so far."""
    back_bytes: int = 0


def with_saved(raw: dict[str, Any], saved: Mapping[str | None, SavedTensors]) -> dict[str, Any]:
    """The native counts of a pool, with those of saved tensors, by tag."""
    tags = dict(saved).values()
    raw["spill"] |= {
        "saved": sum(each.bytes for each in tags),
        "saved_out_bytes": sum(each.out_bytes for each in tags),
        "saved_back_bytes": sum(each.back_bytes for each in tags),
    }
    return raw


def spill_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """What spilling has done, for the report of an out-of-memory error; nothing for a driver's pool."""
    spill = raw.get("spill", {})
    return {
        "saved": spill.get("saved", 0),
        "moved_out": spill.get("spilled_bytes", 0),
        "moved_back": spill.get("returned_bytes", 0),
        "held_seconds": spill.get("seconds", 0.0),
    }


def promised_host_bytes(asking: Any) -> int:
    """Return the host memory that other pools with `spill="auto"` may still take."""
    pools = [pool for following in _followed.copy().values() if (pool := following.pool()) is not None]
    promised = 0
    for pool in pools:
        if pool is asking or pool.closed or not pool._auto_spill:
            continue
        raw = pool.raw_stats()
        promised += max(0, pool.config()["spill"] - raw["host"] - raw["spill"]["taken_bytes"])
    return promised


def spillable(memory: Any) -> bool:
    """Whether memory of this backend can spill; the host may read its own at any time, so it stays."""
    return bool(memory.host_pages and not memory.host_accessible)


def spilled_of(pool: Any) -> list[Spilled]:
    """The allocations that are in host memory, wholly or in part, most bytes first."""
    found = [
        Spilled(block.address, block.size, block.spilled, block.stream, block.tag)
        for block in pool.snapshot().allocations()
        if block.spilled
    ]
    return sorted(found, key=lambda block: -block.bytes)


def spilled_tags_of(
    pages: Iterable[tuple[str | None, int, int, int, float]], saved: Mapping[str | None, SavedTensors]
) -> list[SpilledTag]:
    """What was moved of each tag, most bytes first: of its pages, and of its saved tensors."""
    tags = {tag: SpilledTag(tag, now, out, back, held) for tag, now, out, back, held in pages}
    for tag, each in dict(saved).items():
        tags[tag] = replace(
            tags.get(tag, SpilledTag(tag)),
            saved_bytes=each.bytes,
            saved_out_bytes=each.out_bytes,
            saved_back_bytes=each.back_bytes,
        )
    return sorted(tags.values(), key=lambda each: -each.moved_out_bytes - each.saved_out_bytes)


def on_shortage(callback: Callable[[Any, int], None]) -> None:
    """Call `callback(pool, needed)` whenever a pool is about to choose what moves to the host."""
    _shortage.append(callback)


def postpone_return(pool: Any) -> None:
    """Bring nothing back for a while: a framework does so itself, when it knows that there is room."""
    following = _followed.get(id(pool))
    if following is not None:
        following.calm = -MOST_PATIENCE


def steer(pool: Any) -> None:
    """Tell the pool the wishes of tags, before it moves memory to the host."""
    pool.steer_spill(*spill_wishes())


def before_spill(pool: Any, needed: int) -> None:
    """The pool is about to move memory to the host because it needs `needed` bytes more than it has."""
    for callback in tuple(_shortage):
        callback(pool, needed)
    steer(pool)


def after_spill(pool: Any, needed: int, moved: int) -> None:
    """Log that memory moved to the host because the pool needed `needed` bytes more than it had; once."""
    look_after(pool)
    following = _followed[id(pool)]
    if following.short:
        return
    following.short = True
    raw = pool.raw_stats()
    _log.warning(
        "%s is full (%s reserved, %s more needed): %s of cold memory moved to host memory. More will move "
        "when necessary, up to %s. Addresses stay the same. Kernels read this memory over the bus (%s), so "
        "they become slower; stats() and spilled() show how much there is.",
        pool.device.name,
        format_size(raw["reserved"]["current"]),
        format_size(needed),
        format_size(moved),
        format_size(pool.config()["spill"]),
        BUS_SPEED,
    )


def look_after(pool: Any) -> None:
    """Look after a pool that may spill, once a second."""
    global _end
    number = id(pool)
    if number not in _followed:
        _followed[number] = _Following(weakref.ref(pool, lambda _: _followed.pop(number, None)))
    with _lock:
        if _end is None:
            _end = every_second(_tick)


def _tick() -> None:
    for following in _followed.copy().values():
        pool = following.pool()
        if pool is None or pool.closed:
            continue
        # It may be closed meanwhile. If the device has failed, the program's own calls report it.
        with contextlib.suppress(VramError):
            following.look(pool)


def _after_fork_in_child() -> None:
    global _end
    _followed.clear()
    _end = None


os.register_at_fork(after_in_child=_after_fork_in_child)
