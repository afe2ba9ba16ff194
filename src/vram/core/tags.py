"""Labels for allocations: `with vram.tag("attention"):` names what this thread or task allocates inside.

Only keeps the current name, in a context variable that the native core reads. Counting by tag is for
snapshots and leaks.
"""

from __future__ import annotations

from contextvars import ContextVar

from vram.arguments import require_label
from vram.core.scope import Scope

__all__ = ["current_tag", "tag"]

_current: ContextVar[str | None] = ContextVar("vram_tag", default=None)
# The names to return to. Kept in the context, not in the object, so that one object serves many threads.
_outer: ContextVar[tuple[str | None, ...]] = ContextVar("vram_outer_tags", default=())
_registered = False


class tag(Scope):
    """Label allocations: `with vram.tag("attention"): ...`, or `@vram.tag("attention")` on a function.

    Holds for this thread or asyncio task. Inside another tag the inner name counts; the outer one returns
    at the end. A `tag=` given to an allocation goes before both. A pool keeps 65 536 names of at most 1 MiB
    each; later ones count as "(other tags)".
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        """Make a label; it may be entered any number of times."""
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
    """Return the label that an allocation made here and now gets, or None."""
    return _current.get()


def _register() -> None:
    """Tell the native core where the name is. Where it is not built, there is nobody to tell."""
    global _registered
    if _registered:
        return
    try:
        from vram import _native
    except ImportError:
        return
    _native.set_tag_source(_current)
    _registered = True
