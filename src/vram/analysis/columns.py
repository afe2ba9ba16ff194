"""Columns of a recording as NumPy arrays, without a copy, and Arrow tables of answers.

This is the one place here that uses NumPy and pyarrow. Without pyarrow, tables are plain (`Rows`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from vram.errors import ConfigError
from vram.trace import Trace

__all__ = ["Column", "Rows", "arrow_table", "column", "numpy"]

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


class Rows:
    """A table of plain Python values, with the few methods of an Arrow table that need no pyarrow."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Keep the values of each column."""
        self._columns = {name: list(values) for name, values in columns.items()}

    @property
    def column_names(self) -> list[str]:
        """The names, in order."""
        return list(self._columns)

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self)

    def __len__(self) -> int:
        return max(map(len, self._columns.values()), default=0)

    def to_pydict(self) -> dict[str, list[Any]]:
        """The columns as lists."""
        return {name: list(values) for name, values in self._columns.items()}

    def to_pylist(self) -> list[dict[str, Any]]:
        """The rows as dictionaries."""
        rows = zip(*self._columns.values(), strict=True)
        return [dict(zip(self._columns, row, strict=True)) for row in rows]

    def __repr__(self) -> str:
        return f"<Rows {', '.join(self._columns)}: {len(self)}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"a table without pyarrow has no {name!r}, only column_names, num_rows, to_pydict and to_pylist; "
            'pip install "vram[trace]" for Arrow tables'
        )


def arrow_table(columns: Mapping[str, tuple[str, Sequence[Any]]]) -> Any:
    """A table; each column is the name of its type ("int64", "string", "strings", …) and its values.

    It is an Arrow table if pyarrow is installed, and otherwise `Rows`.
    """
    try:
        import pyarrow
    except ImportError:
        return Rows({name: values for name, (_, values) in columns.items()})
    kinds = {"strings": pyarrow.list_(pyarrow.string())}
    return pyarrow.table(
        {
            name: pyarrow.array(values, kinds.get(kind) or getattr(pyarrow, kind)())
            for name, (kind, values) in columns.items()
        }
    )
