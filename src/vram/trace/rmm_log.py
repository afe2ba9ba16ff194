"""RMM's log of allocations (CSV)."""

from __future__ import annotations

from .files import BoundedReader
from .model import Trace

__all__ = ["looks_like_log", "read_log"]


def looks_like_log(head: bytes) -> bool:
    """Whether a file that begins so is such a log."""
    return False


def read_log(reader: BoundedReader, source: str) -> Trace:
    """Return the trace."""
    raise NotImplementedError
