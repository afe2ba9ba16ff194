"""Where a program requested memory: the line in the user's own code, its module, the phase; and redaction.

Works with file names as recorded, which may come from another machine.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from vram.trace import STEP_PREFIX, Annotation, Frame, Trace

__all__ = ["Phases", "frame_text", "is_framework", "module_of", "place_of", "redacted"]

_LIBRARY = re.compile(r"(^|[/\\])(site-packages|dist-packages|lib[/\\]python\d[^/\\]*)[/\\]|^<frozen ")
_NATIVE = re.compile(r"\.(c|cc|cpp|cu|h|hpp|so)(\.\d+)*$|^\??\??$")
_PLUMBING = re.compile(r"(^|[/\\])(torch(inductor[^/\\]*)?|vram[/\\]predict[/\\]inside)[/\\]")
"""PyTorch, the code that torch.compile generates (/tmp/torchinductor_USER), and vram's own."""
_ROOT = re.compile(
    r"^.*?(?:(?:site|dist)-packages|lib[/\\]python\d[^/\\]*(?:[/\\](?:site|dist)-packages)?)[/\\]"
)


def place_of(frames: Iterable[Frame]) -> Frame | None:
    """The innermost line of the user's own code; else of a library other than the framework; else any."""
    best: Frame | None = None
    rank = 3
    for frame in frames:
        found = _rank(frame.filename)
        if found < rank:
            best, rank = frame, found
        if rank == 0:
            break
    return best


def _rank(filename: str) -> int:
    if _NATIVE.search(filename) or _PLUMBING.search(filename):
        return 2
    return 1 if _LIBRARY.search(filename) else 0


def is_framework(frame: Frame) -> bool:
    """Whether a call is inside PyTorch, native code or vram."""
    return _rank(frame.filename) == 2


def frame_text(frame: Frame) -> str:
    """`train.py:12 forward`; the recorded file without the folder of installed libraries."""
    return f"{_ROOT.sub('', frame.filename)}:{frame.line} {frame.name}"


def short_name(filename: str) -> str:
    """For an installed library the path from its name on; for any other file only its name."""
    if _LIBRARY.search(filename):
        return _ROOT.sub("", filename)
    return re.split(r"[/\\]", filename)[-1]


def module_of(frames: Iterable[Frame]) -> str | None:
    """The Python module of the innermost line that is not the framework's, such as `model.attention`."""
    held = tuple(frames)
    chosen = next((frame for frame in held if _rank(frame.filename) < 2), held[0] if held else None)
    if chosen is None:
        return None
    name = _ROOT.sub("", chosen.filename)
    parts = [part for part in re.split(r"[/\\]", name.removesuffix(".py")) if part not in ("", ".", "..")]
    if _LIBRARY.search(chosen.filename) or not name.startswith(("/", "\\")):
        return ".".join(parts).removesuffix(".__init__") or name
    return parts[-1] if parts else name  # the root of the program's own packages is not recorded


class Phases:
    """Which mark was open at a time: a name given to `vram.annotate`, or a mark of the framework."""

    def __init__(self, trace: Trace) -> None:
        """Follow the marks of `trace`, except those of steps."""
        self.times: list[int] = []
        self.names: list[str | None] = []
        begun: list[str | None] = []  # marks, outermost first; None for one that ended before those inside it
        places: defaultdict[str, list[int]] = defaultdict(list)  # of each name in `begun`
        for mark in sorted(trace.annotations, key=lambda each: each.time_us):
            if mark.name.startswith(STEP_PREFIX):
                continue
            if mark.stage == "START":
                places[mark.name].append(len(begun))
                begun.append(mark.name)
            elif places[mark.name]:
                begun[places[mark.name].pop()] = None
                while begun and begun[-1] is None:
                    begun.pop()
            self.times.append(mark.time_us)
            self.names.append(begun[-1] if begun else None)

    def at(self, time_us: int) -> str | None:
        """The innermost mark open at a time."""
        index = bisect_right(self.times, time_us) - 1
        return self.names[index] if index >= 0 else None


# ---- recordings to show to others --------------------------------------------------------------------------

_PATH = re.compile(r"(?:\b[A-Za-z]:|~[\w.-]*)?(?:[\\/][^\\/\s:;,'\"<>|]+)+[\\/]([^\\/\s:;,'\"<>|]+)")
"""At least a folder and a name, from the root or a home directory; only the name is kept."""


def redacted(trace: Trace) -> Trace:
    """`trace` with file names in place of paths: in its stacks, its own name, its tags and its marks.

    Files of installed libraries keep their path from the library's name on; names of functions stay.
    """
    return replace(
        trace,
        source=re.split(r"[/\\]", trace.source)[-1],
        frames=tuple(frame._replace(filename=short_name(frame.filename)) for frame in trace.frames),
        tags=tuple(map(_without_paths, trace.tags)),
        annotations=tuple(
            Annotation(mark.stage, _without_paths(mark.name), mark.time_us) for mark in trace.annotations
        ),
    )


def _without_paths(text: str) -> str:
    return _PATH.sub(r"\1", text)
