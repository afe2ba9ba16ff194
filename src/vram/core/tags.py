"""Labels for allocations: `with vram.tag("attention"):` names what this thread or task allocates inside.

Keeps the current name in a context variable that the native core reads. Snapshots and leaks count by tag.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Literal

from vram.arguments import require_label, shown
from vram.core.scope import Scope, is_compiling
from vram.errors import ConfigError

__all__ = ["current_tag", "spill_wishes", "tag"]

_current: ContextVar[str | None] = ContextVar("vram_tag", default=None)
# The outer names. Kept in the context, not in the object, so that several threads can use one object.
_outer: ContextVar[tuple[str | None, ...]] = ContextVar("vram_outer_tags", default=())
_registered = False

SPILL_WISHES = ("first", "never")
NO_WISH = "default"
_wishes: dict[str, str] = {}


class tag(Scope):
    """Label allocations: `with vram.tag("attention"): ...`, or `@vram.tag("attention")` on a function.

    Applies to this thread or asyncio task. Tags nest: the innermost name counts. A `tag=` given to an
    allocation takes precedence. A pool keeps 65 536 names of at most 1 MiB each; later ones count as
    "(other tags)".
    """

    __slots__ = ("_name",)

    def __init__(self, name: str, *, spill: Literal["first", "never", "default"] | None = None) -> None:
        """Create a label; it can be entered any number of times.

        `spill` is for pools with the option of this name: memory of the tag moves to the host "first", or
        "never". It applies to the name, in all pools, until another tag of this name changes it; "default"
        removes it.
        """
        self._name = require_label(name, "a tag")
        if spill is not None:
            if spill not in (*SPILL_WISHES, NO_WISH):
                raise ConfigError(
                    f"spill={shown(spill)} is not 'first', 'never' or 'default'", option="spill", value=spill
                )
            if spill == NO_WISH:
                _wishes.pop(self._name, None)
            else:
                _wishes[self._name] = spill

    @property
    def name(self) -> str:
        """The label."""
        return self._name

    def __enter__(self) -> tag:
        if is_compiling():
            return self
        _register()
        _outer.set((*_outer.get(), _current.get()))
        _current.set(self.name)
        return self

    def __exit__(self, *exception: object) -> None:
        if is_compiling():
            return
        *outer, before = _outer.get()
        _current.set(before)
        _outer.set(tuple(outer))

    def __repr__(self) -> str:
        return f"vram.tag({self.name!r})"


def current_tag() -> str | None:
    """Return the label that an allocation gets here, or None."""
    return _current.get()


def spill_wishes() -> tuple[list[str], list[str]]:
    """Return the names whose memory spills first, and those whose memory never does."""
    named = dict(_wishes)
    first, never = ([name for name, wish in named.items() if wish == which] for which in SPILL_WISHES)
    return first, never


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
