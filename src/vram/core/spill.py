"""What Python adds to spilling: wishes of tags, the line in the log, and bringing memory back once a second.

The native pool decides what moves, and moves it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from vram.core.locks import new_lock
from vram.core.observer import End
from vram.core.tags import spill_wishes
from vram.core.ticker import every_second
from vram.errors import VramError
from vram.sizes import format_size

__all__ = [
    "SavedTensors",
    "Spilled",
    "before_spill",
    "on_shortage",
    "postpone_return",
    "spillable",
    "spilled_of",
    "steer",
]

MOST_RETURNED: Final = 1 << 30
"""Bytes that return at a time: about 20 ms during which streams are held."""
MOST_PATIENCE: Final = 64
"""Seconds without a spill after which memory returns, at most."""
BUS_SPEED: Final = "about 50 GB/s on a PCIe 5 bus"

_log = logging.getLogger("vram")
_spilling: dict[int, _Following] = {}
"""The pools that have spilled."""
_shortage: list[Callable[[Any, int], None]] = []
_lock = new_lock()
_end: End | None = None  # guarded by the lock; None: no pool has spilled


@dataclass(slots=True)
class _Following:
    """Brings the memory of one pool back when it was not short of memory for a while."""

    pool: weakref.ref[Any]
    spills: int = -1  # when it was looked at last
    calm: int = 0  # seconds without a spill; negative: postponed
    patience: int = 1  # seconds without a spill after which memory returns
    returned: bool = False  # since the last spill

    def look(self, pool: Any) -> None:
        """Called once a second. What returned too early, and had to move again, returns later next time."""
        spills = pool.raw_stats()["spill"]["spills"]
        if spills != self.spills:
            if self.returned:
                self.patience = min(2 * self.patience, MOST_PATIENCE)
            self.spills, self.calm, self.returned = spills, min(self.calm, 0), False
            return
        self.calm += 1
        if self.calm >= self.patience:
            self.returned |= pool.bring_back(MOST_RETURNED) > 0


@dataclass(frozen=True, slots=True)
class Spilled:
    """An allocation of which `bytes` are in host memory now."""

    address: int
    size: int
    bytes: int
    stream: int
    tag: str | None


@dataclass(slots=True)
class SavedTensors:
    """What a framework copied to host memory ahead of need, which the native pool does not know about."""

    bytes: int = 0
    """In host memory now."""
    out_bytes: int = 0
    """Copied to host memory so far."""
    back_bytes: int = 0

    def added_to(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The native counts of a pool, with these."""
        raw["spill"] |= {
            "saved": self.bytes,
            "saved_out_bytes": self.out_bytes,
            "saved_back_bytes": self.back_bytes,
        }
        return raw


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


def on_shortage(callback: Callable[[Any, int], None]) -> None:
    """Call `callback(pool, needed)` whenever a pool is about to choose what moves to the host."""
    _shortage.append(callback)


def postpone_return(pool: Any) -> None:
    """Bring nothing back for a while: a framework does so itself, when it knows that there is room."""
    following = _spilling.get(id(pool))
    if following is not None:
        following.calm = -MOST_PATIENCE


def steer(pool: Any) -> None:
    """Tell the pool the wishes of tags, before it moves memory to the host."""
    first, never = spill_wishes()
    if first or never:
        pool.steer_spill(first, never)


def before_spill(pool: Any, needed: int) -> None:
    """The pool is about to move memory to the host because it needs `needed` bytes more than it has."""
    for callback in tuple(_shortage):
        callback(pool, needed)
    steer(pool)
    if not _follow(pool):
        return
    raw = pool.raw_stats()
    _log.warning(
        "%s is full (%s reserved, %s more needed): cold memory moves to host memory from now on, up to %s. "
        "Addresses stay the same. Kernels read it there over the bus (%s), so they become slower; "
        "stats() and spilled() show how much there is.",
        pool.device.name,
        format_size(raw["reserved"]["current"]),
        format_size(needed),
        format_size(pool.config()["spill"]),
        BUS_SPEED,
    )


def _follow(pool: Any) -> bool:
    """Bring the pool's memory back from now on. False: it was followed already."""
    global _end
    number = id(pool)
    if number in _spilling:
        return False
    _spilling[number] = _Following(weakref.ref(pool, lambda _: _spilling.pop(number, None)))
    with _lock:
        if _end is None:
            _end = every_second(_tick)
    return True


def _tick() -> None:
    for following in tuple(_spilling.values()):
        pool = following.pool()
        if pool is None or pool.closed:
            continue
        # It may be closed meanwhile. If the device has failed, the program's own calls report it.
        with contextlib.suppress(VramError):
            following.look(pool)


def _after_fork_in_child() -> None:
    global _end
    _spilling.clear()
    _end = None


os.register_at_fork(after_in_child=_after_fork_in_child)
