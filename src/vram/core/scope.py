"""`Scope`: a base class for context managers that also decorate functions, such as `vram.tag`."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Scope", "is_compiling"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Scope:
    """A context manager that can be entered any number of times and decorates functions.

    Unlike `contextlib.ContextDecorator` it stays entered while a coroutine runs.
    """

    __slots__ = ()

    def __enter__(self) -> Scope:
        """Begin."""
        raise NotImplementedError

    def __exit__(self, *exception: object) -> None:
        """End."""
        raise NotImplementedError

    def __call__(self, function: _Function) -> _Function:
        """Run `function` inside the scope whenever it is called; a coroutine function while it runs."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def inside_task(*arguments: Any, **keywords: Any) -> Any:
                with self:
                    return await function(*arguments, **keywords)

            return inside_task  # type: ignore[return-value]

        @functools.wraps(function)
        def inside(*arguments: Any, **keywords: Any) -> Any:
            if is_compiling():
                return function(*arguments, **keywords)
            with self:
                return function(*arguments, **keywords)

        return inside  # type: ignore[return-value]


def is_compiling() -> bool:
    """Return whether PyTorch's compiler reads this code, which then has no effect.

    It cannot read context variables or clocks. Without this, it would leave out the program's function.
    """
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return compiler is not None and bool(compiler.is_compiling())
