"""Analysis of a recording: why memory ran out, who held it, what grew, and how runs differ.

Pure functions of a `Trace`. Tabular answers are a `Table`: an Arrow table if pyarrow is installed
(`pip install "vram[trace]"`), and otherwise a plain table with `to_pylist()`.
Needs no device, and the native core only to try other allocators. Front ends draw the results.
"""

from __future__ import annotations

from .columns import Table
from .differences import Difference, difference
from .explanation import Explanation, explain
from .groups import GROUPINGS, Group, summary
from .leaks import Leaks, find_leaks
from .memory import Memories, Memory, memory_at
from .moments import Moment, find_moment
from .ranks import Merged, Rank, merge, write_table

__all__ = [
    "GROUPINGS",
    "Difference",
    "Explanation",
    "Group",
    "Leaks",
    "Memories",
    "Memory",
    "Merged",
    "Moment",
    "Rank",
    "Table",
    "difference",
    "explain",
    "find_leaks",
    "find_moment",
    "memory_at",
    "merge",
    "summary",
    "write_table",
]
