"""Descriptors that a forked child inherits and has no use for: sockets that its parent serves.

As long as the child has them open, the port stays taken and clients do not learn that the parent has ended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

__all__ = ["disown"]


def disown(descriptors: Iterable[int]) -> None:
    """Close inherited descriptors, for the child of a fork.

    Each number then leads to /dev/null, so that the objects that own it, whatever they are, may close it
    later without hitting another file.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
