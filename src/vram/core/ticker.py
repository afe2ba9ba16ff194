"""One background thread for all upkeep: calls functions once a second while there are any."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from typing import Final

from vram.core.locks import new_lock
from vram.core.observer import End, Listeners

__all__ = ["every_second"]

SECOND: Final = 1.0

_log = logging.getLogger("vram")


class _Ticker:
    def __init__(self) -> None:
        self._lock = new_lock()
        self._work = Listeners()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, work: Callable[[], object]) -> End:
        end = self._work.add(work)
        with self._lock:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="vram-ticker", daemon=True)
                self._thread.start()
        return end

    def _run(self) -> None:
        while not self._stop.wait(SECOND):
            for work in self._work:
                try:
                    work()
                except Exception:
                    _log.exception("upkeep in the background failed")
            with self._lock:
                if not self._work:
                    self._thread = None
                    return

    def stop(self) -> None:
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()


_ticker = _Ticker()


def every_second(work: Callable[[], object]) -> End:
    """Call `work` once a second, on another thread, until the returned function is called."""
    return _ticker.add(work)


def _after_fork_in_child() -> None:
    global _ticker
    _ticker = _Ticker()


os.register_at_fork(after_in_child=_after_fork_in_child)
# Python's threads may not outlive it: one that comes back from native code then would end the process.
atexit.register(lambda: _ticker.stop())
