"""Columns of a recording as NumPy arrays, without a copy, and tables of answers.

This is the one place here that uses NumPy and pyarrow. Without pyarrow, a `Table` has fewer methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from vram.arguments import require
from vram.errors import ConfigError
from vram.trace import Trace

__all__ = ["Column", "Table", "column", "numpy"]

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


class Table:
    """An answer in rows and columns, with all methods of an Arrow table if pyarrow is installed.

    Libraries that read Arrow data take it as it is; `to_arrow` is for functions that need a `pyarrow.Table`.
    Without pyarrow it has `column_names`, `num_rows`, `to_pydict` and `to_pylist`.
    """

    def __init__(self, columns: Mapping[str, tuple[str, Sequence[Any]]]) -> None:
        """Keep the columns; each is the name of its type ("int64", "string", "strings", …) and its values."""
        require(columns, Mapping, "columns")  # type: ignore[type-abstract]
        self._columns = {name: (kind, list(values)) for name, (kind, values) in columns.items()}
        self._built: Any = None

    @property
    def column_names(self) -> list[str]:
        """The names, in order."""
        return list(self._columns)

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self)

    def __len__(self) -> int:
        return max((len(values) for _, values in self._columns.values()), default=0)

    def to_pydict(self) -> dict[str, list[Any]]:
        """The columns as lists."""
        return {name: list(values) for name, (_, values) in self._columns.items()}

    def to_pylist(self) -> list[dict[str, Any]]:
        """The rows as dictionaries."""
        rows = zip(*self.to_pydict().values(), strict=True)
        return [dict(zip(self._columns, row, strict=True)) for row in rows]

    def to_arrow(self) -> Any:
        """The same as a `pyarrow.Table`."""
        return self._arrow("to_arrow")

    def _arrow(self, wanted: str) -> Any:
        """The Arrow table, made on first use; without pyarrow, the object lacks the attribute `wanted`."""
        if self._built is None:
            self._built = self._build(wanted)
        return self._built

    def _build(self, wanted: str) -> Any:
        try:
            import pyarrow
        except ImportError:
            raise AttributeError(
                f"a table without pyarrow has no {wanted!r}, only column_names, num_rows, to_pydict and "
                'to_pylist; pip install "vram[trace]" for Arrow tables'
            ) from None
        kinds = {"strings": pyarrow.list_(pyarrow.string())}
        return pyarrow.table(
            {
                name: pyarrow.array(values, kinds.get(kind) or getattr(pyarrow, kind)())
                for name, (kind, values) in self._columns.items()
            }
        )

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._arrow("__arrow_c_stream__").__arrow_c_stream__(requested_schema)

    def __getitem__(self, key: Any) -> Any:
        return self._arrow("[]")[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._arrow(name), name)

    def __eq__(self, other: object) -> bool:
        return self._columns == other._columns if isinstance(other, Table) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Table of {len(self)} rows: {', '.join(self._columns)}>"

    def _repr_html_(self) -> str:
        from .html import table_html

        return table_html(self)
