"""Exceptions that handlers of signals raise: nobody but the program may catch them."""

from __future__ import annotations

import functools
import signal
import threading
from types import CodeType, FrameType
from typing import Any

__all__ = ["raised_by_handler"]


def raised_by_handler(error: BaseException) -> bool:
    """Return whether the handler of a signal raised it, such as one that ends a call after some time.

    Python runs handlers in the main thread between two instructions, so also in functions of vram, and of the
    program, whose errors are logged.
    """
    traceback = error.__traceback__
    if traceback is None or threading.current_thread() is not threading.main_thread():
        return False
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code in handlers or _was_called_for_signal(frame):
            return True
        traceback = traceback.tb_next
    return False


def _was_called_for_signal(frame: FrameType) -> bool:
    """Whether a function was called with a signal and a frame. It may have replaced itself as the handler."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount][-2:]
    given = [frame.f_locals.get(name) for name in names]
    return len(given) == 2 and isinstance(given[0], int) and isinstance(given[1], FrameType)


def _code(handler: Any) -> CodeType | None:
    if handler is None or isinstance(handler, int):  # SIG_DFL and SIG_IGN are enums, which have a __call__
        return None
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None
