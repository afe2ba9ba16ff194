"""What may stand in a `with` statement or before a function: the decorating half of `tag` and its like.

What a scope does at its ends is told by whoever extends it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Scope"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Scope:
    """A context manager that may be entered any number of times, and decorates functions."""

    __slots__ = ()

    def __enter__(self) -> Scope:
        """Begin."""
        raise NotImplementedError

    def __exit__(self, *exception: object) -> None:
        """End."""
        raise NotImplementedError

    def __call__(self, function: _Function) -> _Function:
        """Return `function` inside the scope whenever it is called; coroutine functions while they run."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def inside_task(*arguments: Any, **keywords: Any) -> Any:
                with self:
                    return await function(*arguments, **keywords)

            return inside_task  # type: ignore[return-value]

        @functools.wraps(function)
        def inside(*arguments: Any, **keywords: Any) -> Any:
            with self:
                return function(*arguments, **keywords)

        return inside  # type: ignore[return-value]
