"""Locks and events for objects that the child of a fork inherits.

Another thread of the parent may hold a lock at the moment of a fork. In the child nobody would ever release
it, so every one made here is free again there. Hooks of forks run in the order in which they were registered,
and those who register others import this module first.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

__all__ = ["new_event", "new_lock"]

_made: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> threading.RLock:
    """A lock that its holder may take again: a finalizer may come in anywhere and want it, too."""
    made = threading.RLock()
    _made.add(made)
    return made


def new_event() -> threading.Event:
    """An event; what it was at the fork it is in the child."""
    made = threading.Event()
    _made.add(made)
    return made


def _after_fork_in_child() -> None:
    for each in _made:
        if not getattr(each, "_is_owned", bool)():  # the thread that forks may hold it, and goes on here
            each._at_fork_reinit()  # as the standard library does with its own


os.register_at_fork(after_in_child=_after_fork_in_child)
