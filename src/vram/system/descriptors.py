"""File descriptors that a forked child inherits and does not need: sockets that its parent serves.

While the child keeps them open, the port stays in use and clients do not notice that the parent has ended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

__all__ = ["disown"]


def disown(descriptors: Iterable[int]) -> None:
    """Close inherited descriptors in the child of a fork.

    Each number is redirected to /dev/null, so that the objects that own it can close it later without closing
    another file.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
