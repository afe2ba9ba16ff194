"""Children of a fork, for programs that `run_program` runs (programs.py, FORK)."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable

from vram import DeviceError


def child(body: Callable[[], object]) -> None:
    """Run `body` in the child of a fork, and fail if it fails."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            gc.collect()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status


def refused(use: Callable[[], object]) -> None:
    """What is the parent's is closed in the child, and a GPU that the parent opened is missing there."""
    try:
        use()
    except DeviceError as error:
        closed = error.code == "closed" and ("fork" in str(error) or "parent" in str(error))
        missing = error.code == "missing" and "cannot be used after a fork" in str(error)
        assert closed or missing, error
    else:
        raise AssertionError("not refused")
