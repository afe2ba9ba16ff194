"""Tracebacks of the program: the calls of this package in between are left out when Python prints one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import TracebackType

__all__ = ["begin", "hide_ours"]

HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def begin() -> None:
    """Leave our calls out of the traceback of an exception that ends the program."""
    show = sys.excepthook

    def shown(kind: type[BaseException], error: BaseException, found: TracebackType | None) -> None:
        hide_ours(error)
        show(kind, error, error.__traceback__ or found)

    sys.excepthook = shown


def hide_ours(error: BaseException) -> None:
    """Leave our calls out of the tracebacks of an exception and of those it came from."""
    pending: list[BaseException | None] = [error]
    seen = set()
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = _without_ours(each.__traceback__)
        pending += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            pending += each.exceptions


def _without_ours(found: TracebackType | None) -> TracebackType | None:
    others = [each for each in _calls(found) if not each.tb_frame.f_code.co_filename.startswith(HERE)]
    following: TracebackType | None = None
    for each in reversed(others):
        each.tb_next = following
        following = each
    return following


def _calls(found: TracebackType | None) -> Iterator[TracebackType]:
    while found is not None:
        yield found
        found = found.tb_next
