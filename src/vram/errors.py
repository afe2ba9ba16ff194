"""Every error vram raises. They carry numbers as attributes, not only text, and survive pickling.

VramError
├── OutOfMemory      (also MemoryError)   a request that no rung of the ladder could serve
├── InvalidFree      (also ValueError)    double free, foreign or interior pointer
├── DeviceError      (also RuntimeError)  a device call failed, or the device is not there
├── Suspended        (also RuntimeError)  the buffer's memory was given back by `Pool.suspend`
├── ConfigError      (also ValueError)    an unknown option or a bad value
├── TraceError       (also ValueError)    a file that cannot be read as a trace
└── RaceError        (also RuntimeError)  memory reused while another stream may still use it
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ConfigError",
    "DeviceError",
    "InvalidFree",
    "OutOfMemory",
    "RaceError",
    "Suspended",
    "TraceError",
    "VramError",
]


class VramError(Exception):
    """The base of all errors of this package. Keyword arguments become attributes."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.facts))

    def __str__(self) -> str:
        return self.message


def _rebuild(kind: type[VramError], message: str, facts: dict[str, Any]) -> VramError:
    return kind(message, **facts)


class OutOfMemory(VramError, MemoryError):
    """No rung of the ladder could serve the request. `report` says what is free and why it does not serve."""


class InvalidFree(VramError, ValueError):
    """The pointer is not a live allocation of this pool. The pool is unchanged."""


class DeviceError(VramError, RuntimeError):
    """A device call failed (`call`, `code`, `native`), or the device is missing, closed or the parent's."""


class Suspended(VramError, RuntimeError):
    """The buffer cannot be used: `Pool.suspend` has taken its memory. `resume()` brings it back."""


class ConfigError(VramError, ValueError):
    """An unknown option or a value that it does not take; the message names the valid ones."""


class TraceError(VramError, ValueError):
    """The file is not a trace that can be read; `place` says where it went wrong."""


class RaceError(VramError, RuntimeError):
    """Memory was reused while another stream may still use it; `race` holds the evidence."""
