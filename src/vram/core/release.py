"""Keeps release thresholds at moments that no free notices: after the host has waited, and once a second."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any

from vram.config import NO_THRESHOLD
from vram.core.locks import new_lock
from vram.core.observer import End
from vram.core.ticker import every_second
from vram.errors import VramError

__all__ = ["after_waiting", "follow_threshold"]

_bounded: dict[int, weakref.ref[Any]] = {}
"""The pools with a threshold. Every change is one atomic operation, so a finalizer may come in between."""
_lock = new_lock()
_end: End | None = None  # guarded by the lock; None: there is no such pool


def follow_threshold(pool: Any) -> None:
    """Note whether the pool has a release threshold now."""
    global _end
    number = id(pool)
    if pool.config().get("release_threshold", NO_THRESHOLD) == NO_THRESHOLD:
        _bounded.pop(number, None)
        return
    _bounded[number] = weakref.ref(pool, lambda _: _bounded.pop(number, None))
    with _lock:
        if _end is None:
            _end = every_second(_tick)


def after_waiting(core: Any, *, everything: bool) -> None:
    """Release what has become free because the host waited for a stream, or for `everything` on a device."""
    if _bounded:
        _release(lambda pool: pool.device._core is core, everything)


def _release(concerns: Any, everything: bool) -> None:
    for reference in _bounded.copy().values():
        pool = reference()
        if pool is not None and not pool.closed and concerns(pool):
            # It may be closed meanwhile. If the device has failed, the program's own calls report it.
            with contextlib.suppress(VramError):
                pool.release_unused(everything)


def _tick() -> None:
    global _end
    _release(lambda pool: True, False)
    with _lock:
        if not _bounded and _end is not None:
            end, _end = _end, None
            end()


def _after_fork_in_child() -> None:
    global _end
    _bounded.clear()
    _end = None


os.register_at_fork(after_in_child=_after_fork_in_child)
