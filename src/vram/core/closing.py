"""`Closing`: what everything with a `close()` shares. Imports nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

__all__ = ["Closing"]


class Closing:
    """A context manager: the end of a `with` block calls `close()`, which each class defines."""

    __slots__ = ()

    if TYPE_CHECKING:

        def close(self) -> None:
            """Release what the object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
