"""Arrow tables from columns of plain values; the one place here that needs pyarrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vram.errors import ConfigError

__all__ = ["arrow", "arrow_table"]


def arrow() -> Any:
    """The module pyarrow, or an error that says how to get it."""
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(
            'tables of recordings need pyarrow, which is not installed; pip install "vram[trace]"'
        ) from error
    return pyarrow


def arrow_table(columns: Mapping[str, tuple[str, Sequence[Any]]]) -> Any:
    """A table; each column is the name of its type ("int64", "string", "strings", …) and its values."""
    pyarrow = arrow()
    kinds = {"strings": pyarrow.list_(pyarrow.string())}
    return pyarrow.table(
        {
            name: pyarrow.array(values, kinds.get(kind) or getattr(pyarrow, kind)())
            for name, (kind, values) in columns.items()
        }
    )
