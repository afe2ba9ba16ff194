"""Locks and events for objects that the child of a fork inherits.

Another thread of the parent may hold a lock when the process forks. No thread of the child would ever release
it, so the child frees every lock that was made here. Fork hooks run in the order of their registration, so
modules with hooks of their own import this module first.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

__all__ = ["new_event", "new_lock"]

_made: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> threading.RLock:
    """A reentrant lock: a finalizer may run anywhere and need it, too."""
    made = threading.RLock()
    _made.add(made)
    return made


def new_event() -> threading.Event:
    """An event; the child of a fork inherits its state."""
    made = threading.Event()
    _made.add(made)
    return made


def _after_fork_in_child() -> None:
    for each in _made:
        if not getattr(each, "_is_owned", bool)():  # the thread that forks may hold it, and continues here
            each._at_fork_reinit()  # as the standard library does


os.register_at_fork(after_in_child=_after_fork_in_child)
