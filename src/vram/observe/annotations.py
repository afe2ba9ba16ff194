"""Marks in recordings: `with vram.step(7):` is an iteration, `with vram.annotate("forward"):` a phase.

Every open recording of the process gets them; without a recording they cost almost nothing. `vram.trace`
reads steps back out of a trace.
"""

from __future__ import annotations

import operator
from typing import SupportsIndex

from vram.arguments import require_label, shown
from vram.core.observer import marks
from vram.core.scope import Scope, is_compiling
from vram.trace.steps import LAST_STEP, STEP_PREFIX

__all__ = ["annotate", "step"]


class annotate(Scope):
    """Mark a phase of the program: `with vram.annotate("forward"): ...`, or `@vram.annotate("forward")`."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        """Create a mark; it may be entered any number of times."""
        self._name = require_label(name, "the name of a phase")

    @property
    def name(self) -> str:
        """Its name in recordings."""
        return self._name

    def __enter__(self) -> annotate:
        if not is_compiling():
            marks.tell("START", self.name)
        return self

    def __exit__(self, *exception: object) -> None:
        if not is_compiling():
            marks.tell("END", self.name)

    def __repr__(self) -> str:
        return f"vram.{type(self).__name__}({self.name!r})"


class step(annotate):
    """Mark an iteration: `for i in range(n): with vram.step(i): ...`. Analysis refers to steps by number."""

    __slots__ = ()

    def __init__(self, number: SupportsIndex) -> None:
        """Create the mark of iteration `number`."""
        index = operator.index(number)
        if not 0 <= index <= LAST_STEP:
            raise ValueError(f"steps are numbered from 0 to {LAST_STEP}; not {shown(index)}")
        super().__init__(f"{STEP_PREFIX}{index}")
