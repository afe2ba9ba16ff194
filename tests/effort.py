"""How much of what can be tried is tried: a sample in `make test`, everything in `make test-all`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

THOROUGH = "VRAM_THOROUGH" in os.environ


def sample(cases: Sequence[T]) -> Sequence[T]:
    """Every case of a long series, or one in four."""
    return cases if THOROUGH else cases[::4]
