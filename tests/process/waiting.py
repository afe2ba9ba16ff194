"""Waiting for what happens on another thread or in another process, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 120.0  # seconds; only a deadlock or a leak reaches it


def wait_until(met: Callable[[], bool]) -> None:
    """Return as soon as `met()` is true; an AssertionError says that it never became so."""
    given_up = time.monotonic() + PATIENCE
    while not met():
        assert time.monotonic() < given_up, f"it did not happen within {PATIENCE:.0f} seconds"
        time.sleep(0.001)
