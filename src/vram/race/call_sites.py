"""Source locations: the stacks that a race report shows, and the program's names for streams.

This module only sorts frames and reads source lines; `checker` knows what happened there.
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
"""Number of frames kept per stack, the user's own first."""
MOST_COUNTED = 0xFFFF
"""Larger handles of streams are addresses."""
MOST_TRIES = 8
"""How often to look for the name of one stream."""


@dataclass(frozen=True, slots=True)
class Site:
    """One operation of the program on the memory: what, on which stream, and from where."""

    what: str
    stream: int
    stream_name: str
    stack: tuple[Frame, ...]

    @property
    def place(self) -> str:
        """The line of the operation, as "file.py:12"."""
        return f"{os.path.basename(self.stack[0].filename)}:{self.stack[0].line}" if self.stack else "unknown"

    def __str__(self) -> str:
        own = [frame for frame in self.stack if is_the_users(frame.filename)]
        return "\n".join([f"  {self.what} on {self.stream_name}", *map(_frame_line, own or self.stack)])


def _frame_line(frame: Frame) -> str:
    source = source_line((frame,))
    return f"    {frame.filename}:{frame.line} in {frame.name}" + (f": {source}" if source else "")


_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")  # also those of other environments
_LIBRARIES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib", "platlib"))


@functools.lru_cache(maxsize=4096)
def _rank(filename: str) -> int | None:
    """Return 0 for the user's code, 1 for a library's, None for ours."""
    if filename.startswith(_PACKAGE):
        return None
    return int(bool(_INSTALLED.search(filename)) or filename.startswith((*_LIBRARIES, "<frozen ")))


def is_the_users(filename: str) -> bool:
    """Return whether code belongs to the program, not to a library or to vram."""
    return _rank(filename) == 0


def stack_here() -> tuple[Frame, ...]:
    """Return the current stack, innermost call first, the user's frames before those of libraries."""
    places: tuple[list[Frame], list[Frame]] = ([], [])
    for frame in _native.stack_here():
        rank = _rank(frame.filename)
        if rank is not None:
            places[rank].append(frame)
    return tuple((places[0] + places[1])[:STACK_DEPTH])


def source_line(stack: tuple[Frame, ...]) -> str:
    """Return the text of the line that made the call; empty if there is none."""
    return linecache.getline(stack[0].filename, stack[0].line).strip() if stack else ""


# How calls name their stream. This is read from the source, because reading the variables of a frame keeps
# them alive (before Python 3.13), and with them the buffers that are being checked.
_MENTIONS = re.compile(
    r"""(?<![\w.\])])([A-Za-z_][\w.]*)\.launch\(
      | \bstream\s*=\s*([A-Za-z_][\w.]*)\s*[,)]
      | \bmalloc\([^,()]+,\s*([A-Za-z_][\w.]*)\s*\)
      | \brecord_stream\((?:[\w.]+,\s*)?([A-Za-z_][\w.]*)\s*\)
      | \buse\([\w.]+,\s*([A-Za-z_][\w.]*)\s*[,)]""",
    re.VERBOSE,
)


class Names:
    """The program's names for streams, as far as source lines show them."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, int], str] = {}
        self._tries: Counter[tuple[Any, int]] = Counter()
        self.defaults: dict[Any, str] = {}
        """Expressions for the default streams of devices, where another library has its own."""

    def notice(
        self, core: Any, handle: int, stack: tuple[Frame, ...], pattern: re.Pattern[str] = _MENTIONS
    ) -> None:
        """Look for the name of the stream in this call, a limited number of times."""
        if (core, handle) in self._found or self._tries[core, handle] >= MOST_TRIES:
            return
        self._tries[core, handle] += 1
        mentions = pattern.findall(source_line(stack))
        name = "".join(mentions[0]) if len(mentions) == 1 else ""
        if name not in ("", "None", *self._found.values()):
            self._found[core, handle] = name

    def code(self, core: Any, handle: int) -> str:
        """Return an expression for a stream."""
        default = self.defaults.get(core, "vram.Stream.default()")
        return self._found.get((core, handle), f"stream_{_number(handle)}" if handle else default)

    def words(self, core: Any, handle: int) -> str:
        """Return a description of a stream."""
        plain = f"stream {_number(handle)}" if handle else "the default stream"
        return f"{self._found[core, handle]} ({plain})" if (core, handle) in self._found else plain


def _number(handle: int) -> str:
    return f"{handle:#x}" if handle > MOST_COUNTED else str(handle)
