"""A second user, for tests of what acts on processes and files of others, or listens where they connect."""

from __future__ import annotations

import contextlib
import os
import pwd
import sys
import traceback
from collections.abc import Callable, Iterator

import pytest

__all__ = ["NOBODY", "as_nobody", "needs_root", "running_as_nobody", "start_as_nobody"]

NEEDS_ROOT = "a second user needs root, who can become any user"
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason=NEEDS_ROOT)
DONE, FAILED, REFUSED = 0, 1, 2
NOBODY = pwd.getpwnam("nobody") if sys.platform != "win32" else None


def _become_nobody() -> None:
    assert NOBODY is not None
    os.setgroups([])
    os.setgid(NOBODY.pw_gid)
    os.setuid(NOBODY.pw_uid)


def start_as_nobody(function: Callable[[], object]) -> int:
    """Call the function in a child of the user nobody, and return its number."""
    child = os.fork()
    if child == 0:
        status = FAILED
        try:
            _become_nobody()
            function()
            status = DONE
        except PermissionError:
            status = REFUSED
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def as_nobody(function: Callable[[], object]) -> bool:
    """Call the function in a child of the user nobody. Returns whether the system permitted what it did."""
    status = os.waitstatus_to_exitcode(os.waitpid(start_as_nobody(function), 0)[1])
    assert status in (DONE, REFUSED), "it failed for another reason, which is on stderr"
    return status == DONE


@contextlib.contextmanager
def running_as_nobody(function: Callable[[], object]) -> Iterator[int]:
    """A child of the user nobody that calls the function meanwhile; it is killed at the end."""
    child = start_as_nobody(function)
    try:
        yield child
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
