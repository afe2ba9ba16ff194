"""Locks that the child of a fork finds free, whoever held them in the parent."""

from __future__ import annotations

import os
import threading

import pytest
from waiting import PATIENCE

from vram.core.locks import new_event, new_lock


def in_a_child(holds: bool) -> int:
    """The exit code of a child that takes a lock which a thread of its parent holds, or the forking one."""
    lock, event = new_lock(), new_event()
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock, event._cond:  # type: ignore[attr-defined]
            held.set()
            over.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    if not holds:
        thread.start()
        held.wait(PATIENCE)
    else:
        lock.acquire()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if not holds:
                event.set()
                assert lock.acquire(timeout=PATIENCE)
            lock.release()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    over.set()
    if not holds:
        thread.join()
    return os.waitstatus_to_exitcode(status)


@pytest.mark.fork
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("holds", [False, True], ids=["another thread", "the thread that forks"])
def test_a_lock_held_at_a_fork_can_be_used_in_the_child(holds: bool) -> None:
    assert in_a_child(holds) == 0
