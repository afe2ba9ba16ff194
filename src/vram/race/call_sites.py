"""Places in the program: the stacks that a race report shows, and what the program calls its streams.

Only sorts frames and looks at source lines; what happened there is told by `race`.
"""

from __future__ import annotations

import functools
import linecache
import os
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from typing import Any

from vram import _native
from vram.trace.model import Frame

__all__ = ["Names", "Site", "is_the_users", "source_line", "stack_here"]

STACK_DEPTH = 6
"""Frames kept of each stack, the user's own first."""
MOST_TRIES = 8
"""Times that the name of one stream is looked for."""


@dataclass(frozen=True, slots=True)
class Site:
    """One thing the program did with the memory: what, on which stream, and from where it was called."""

    what: str
    stream: int
    stream_name: str
    stack: tuple[Frame, ...]

    @property
    def place(self) -> str:
        """The line that did it, as "file.py:12"."""
        return f"{os.path.basename(self.stack[0].filename)}:{self.stack[0].line}" if self.stack else "unknown"

    def __str__(self) -> str:
        return "\n".join([f"  {self.what} on {self.stream_name}", *map(_frame_line, self.stack)])


def _frame_line(frame: Frame) -> str:
    source = source_line((frame,))
    return f"    {frame.filename}:{frame.line} in {frame.name}" + (f": {source}" if source else "")


_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARIES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib", "platlib"))


@functools.lru_cache(maxsize=4096)
def _rank(filename: str) -> int | None:
    """0: the user's, 1: a library's, None: ours."""
    if filename.startswith(_PACKAGE):
        return None
    return int(filename.startswith((*_LIBRARIES, "<frozen ")))


def is_the_users(filename: str) -> bool:
    """Whether code is the program's, not a library's or ours."""
    return _rank(filename) == 0


def stack_here() -> tuple[Frame, ...]:
    """The calls that led here, the last one first, the user's before those of libraries."""
    places: tuple[list[Frame], list[Frame]] = ([], [])
    for frame in _native.stack_here():
        rank = _rank(frame.filename)
        if rank is not None:
            places[rank].append(frame)
    return tuple((places[0] + places[1])[:STACK_DEPTH])


def source_line(stack: tuple[Frame, ...]) -> str:
    """The text of the line that made the call; empty where there is none."""
    return linecache.getline(stack[0].filename, stack[0].line).strip() if stack else ""


# How calls name the stream that they are about. Read from the source, because looking into the variables of
# a frame keeps them alive (before Python 3.13), and with them the buffers that are being checked.
_MENTIONS = re.compile(
    r"""(?<![\w.\])])([A-Za-z_][\w.]*)\.launch\(
      | \bstream\s*=\s*([A-Za-z_][\w.]*)\s*[,)]
      | \bmalloc\([^,()]+,\s*([A-Za-z_][\w.]*)\s*\)
      | \brecord_stream\((?:[\w.]+,\s*)?([A-Za-z_][\w.]*)\s*\)
      | \buse\([\w.]+,\s*([A-Za-z_][\w.]*)\s*[,)]""",
    re.VERBOSE,
)


class Names:
    """What the program calls its streams, as far as a line that uses one says so."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, int], str] = {}
        self._tries: Counter[tuple[Any, int]] = Counter()

    def notice(self, core: Any, handle: int, stack: tuple[Frame, ...]) -> None:
        """Look for the name of the stream that this call is about; not for ever."""
        if (core, handle) in self._found or self._tries[core, handle] >= MOST_TRIES:
            return
        self._tries[core, handle] += 1
        mentions = _MENTIONS.findall(source_line(stack))
        name = "".join(mentions[0]) if len(mentions) == 1 else ""
        if name not in ("", "None", *self._found.values()):
            self._found[core, handle] = name

    def code(self, core: Any, handle: int) -> str:
        """An expression for a stream."""
        unnamed = f"stream_{handle}" if handle else "vram.Stream.default()"
        return self._found.get((core, handle), unnamed)

    def words(self, core: Any, handle: int) -> str:
        """A stream in a sentence."""
        plain = f"stream {handle}" if handle else "the default stream"
        return f"{self._found[core, handle]} ({plain})" if (core, handle) in self._found else plain
