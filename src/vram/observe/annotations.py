"""Marks in recordings: `with vram.step(7):` is an iteration, `with vram.annotate("forward"):` a phase.

Every recording of the process that is open gets them; without one they cost next to nothing. Reading steps
back out of a trace is for `vram.trace`.
"""

from __future__ import annotations

import operator
import os
from typing import Protocol, SupportsIndex

from vram.arguments import require_label, shown
from vram.core.locks import new_lock
from vram.core.scope import Scope
from vram.trace.steps import LAST_STEP, STEP_PREFIX

__all__ = ["Markable", "annotate", "join", "leave", "step"]


class Markable(Protocol):
    """A recording that takes marks."""

    def mark(self, stage: str, name: str) -> None:
        """Note the "START" or "END" of what is called `name`, between the events before and after."""


# Replaced as a whole and never changed, so that no lock is needed to read it.
_recordings: tuple[Markable, ...] = ()
_changing = new_lock()  # a finalizer may close a recording while another is opened


def join(recording: Markable) -> None:
    """Have a recording get marks from now on."""
    global _recordings
    with _changing:
        _recordings = (*_recordings, recording)


def leave(recording: Markable) -> None:
    """Have it get no more; once more does nothing."""
    global _recordings
    with _changing:
        _recordings = tuple(each for each in _recordings if each is not recording)


def _after_fork_in_child() -> None:
    """Recordings are the parent's."""
    global _recordings
    _recordings = ()


os.register_at_fork(after_in_child=_after_fork_in_child)


class annotate(Scope):
    """Mark a phase of the program: `with vram.annotate("forward"): ...`, or `@vram.annotate("forward")`."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        """Make a mark; it may be entered any number of times."""
        self._name = require_label(name, "the name of a phase")

    @property
    def name(self) -> str:
        """What the recordings call it."""
        return self._name

    def __enter__(self) -> annotate:
        for recording in _recordings:
            recording.mark("START", self.name)
        return self

    def __exit__(self, *exception: object) -> None:
        for recording in _recordings:
            recording.mark("END", self.name)

    def __repr__(self) -> str:
        return f"vram.{type(self).__name__}({self.name!r})"


class step(annotate):
    """Mark an iteration: `for i in range(n): with vram.step(i): ...`. Analysis speaks of steps by number."""

    __slots__ = ()

    def __init__(self, number: SupportsIndex) -> None:
        """Make the mark of iteration `number`."""
        index = operator.index(number)
        if not 0 <= index <= LAST_STEP:
            raise ValueError(f"steps are numbered from 0 to {LAST_STEP}; {shown(index)} is none")
        super().__init__(f"{STEP_PREFIX}{index}")
