"""Columns of a recording as NumPy arrays, without a copy, and Arrow tables of answers.

This is the one place here that needs NumPy and pyarrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from vram.errors import ConfigError
from vram.trace import Trace

__all__ = ["Column", "arrow_table", "column", "numpy"]

Column: TypeAlias = Any
"""A NumPy array of one dimension."""


def numpy() -> Any:
    """The module numpy, or an error that says how to install it."""
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


def arrow_table(columns: Mapping[str, tuple[str, Sequence[Any]]]) -> Any:
    """A table; each column is the name of its type ("int64", "string", "strings", …) and its values."""
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(
            'tables of recordings need pyarrow, which is not installed; pip install "vram[trace]"'
        ) from error
    kinds = {"strings": pyarrow.list_(pyarrow.string())}
    return pyarrow.table(
        {
            name: pyarrow.array(values, kinds.get(kind) or getattr(pyarrow, kind)())
            for name, (kind, values) in columns.items()
        }
    )
