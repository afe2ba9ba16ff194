"""Labels for allocations: `with vram.tag("attention"):` names what this thread or task allocates inside.

Keeps the current name in a context variable that the native core reads. Snapshots and leaks count by tag.
"""

from __future__ import annotations

from contextvars import ContextVar

from vram.arguments import require_label
from vram.core.scope import Scope

__all__ = ["current_tag", "tag"]

_current: ContextVar[str | None] = ContextVar("vram_tag", default=None)
# The outer names. Kept in the context, not in the object, so that several threads can use one object.
_outer: ContextVar[tuple[str | None, ...]] = ContextVar("vram_outer_tags", default=())
_registered = False


class tag(Scope):
    """Label allocations: `with vram.tag("attention"): ...`, or `@vram.tag("attention")` on a function.

    Applies to this thread or asyncio task. Tags nest: the innermost name counts. A `tag=` given to an
    allocation takes precedence. A pool keeps 65 536 names of at most 1 MiB each; later ones count as
    "(other tags)".
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        """Create a label; it can be entered any number of times."""
        self._name = require_label(name, "a tag")

    @property
    def name(self) -> str:
        """The label."""
        return self._name

    def __enter__(self) -> tag:
        _register()
        _outer.set((*_outer.get(), _current.get()))
        _current.set(self.name)
        return self

    def __exit__(self, *exception: object) -> None:
        *outer, before = _outer.get()
        _current.set(before)
        _outer.set(tuple(outer))

    def __repr__(self) -> str:
        return f"vram.tag({self.name!r})"


def current_tag() -> str | None:
    """Return the label that an allocation gets here, or None."""
    return _current.get()


def _register() -> None:
    """Give the native core the context variable, if the native core is built."""
    global _registered
    if _registered:
        return
    try:
        from vram import _native
    except ImportError:
        return
    _native.set_tag_source(_current)
    _registered = True
