"""The columns of a recording as NumPy arrays, without a copy; the one place here that needs NumPy."""

from __future__ import annotations

from typing import Any, TypeAlias

from vram.errors import ConfigError
from vram.trace import Trace

__all__ = ["Column", "column", "numpy"]

Column: TypeAlias = Any
"""A NumPy array of one dimension."""


def numpy() -> Any:
    """The module numpy, or an error that says how to get it."""
    try:
        import numpy as module
    except ImportError as error:
        raise ConfigError(
            'memory over time needs numpy, which is not installed; pip install "vram[web]"'
        ) from error
    return module


def column(trace: Trace, name: str) -> Column:
    """The column `name` of `trace`; see `Trace`."""
    return numpy().asarray(getattr(trace, name))
