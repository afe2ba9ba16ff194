"""A recording that can be shown to others: the same events, with no folder of the machine it was made on."""

from __future__ import annotations

import re
from dataclasses import replace

from vram.trace import Annotation, Trace

from .places import short_name

__all__ = ["redacted"]

_PATH = re.compile(r"(?:\b[A-Za-z]:|~[\w.-]*)?(?:[\\/][^\\/\s:;,'\"<>|]+)+[\\/]([^\\/\s:;,'\"<>|]+)")
"""At least a folder and a name, from the root or a home; the name is what is kept."""


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
