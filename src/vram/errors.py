"""All errors that vram raises. They carry numbers as attributes as well as text, and survive pickling.

VramError
├── OutOfMemory      (also MemoryError)   no rung of the ladder could serve a request
├── InvalidFree      (also ValueError)    double free, foreign or interior pointer
├── DeviceError      (also RuntimeError)  a device call failed, or the device does not exist
├── Suspended        (also RuntimeError)  the buffer's memory was released by `Pool.suspend`
├── ConfigError      (also ValueError)    an unknown option or an invalid value
├── TraceError       (also ValueError)    a file cannot be read as a trace
├── RaceError        (also RuntimeError)  memory was reused while another stream may still use it
└── MissingCore      (also ImportError)   this installation has no native core, as on macOS and Windows
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ConfigError",
    "DeviceError",
    "InvalidFree",
    "MissingCore",
    "OutOfMemory",
    "RaceError",
    "Suspended",
    "TraceError",
    "VramError",
]


class VramError(Exception):
    """Base class of all errors in this package. Keyword arguments become attributes."""

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
    """No rung of the ladder could serve the request. `report` says what is free and why it is unusable."""


class MissingCore(VramError, ImportError):
    """This installation has no native core, as on macOS and Windows. Recordings can be read without it."""

    def __init__(self, message: str = "", **facts: Any) -> None:
        super().__init__(
            message
            or "this installation of vram has no native core, which pools, replays, plans and predictions "
            "need. Linux on x86_64 and aarch64 has it: pip install vram. Without it, vram explain, summary, "
            "leaks, diff, merge, convert, serve and report work on recordings of other machines",
            **facts,
        )


class InvalidFree(VramError, ValueError):
    """The pointer is not a live allocation of this pool. The pool is unchanged."""


class DeviceError(VramError, RuntimeError):
    """A device call failed (`call`, `code`, `native`), or the device is missing, closed or a parent's."""


class Suspended(VramError, RuntimeError):
    """The buffer cannot be used because `Pool.suspend` released its memory. `resume()` restores it."""


class ConfigError(VramError, ValueError):
    """An unknown option or an invalid value. The message lists the valid ones."""


class TraceError(VramError, ValueError):
    """The file cannot be read as a trace. `place` is the position of the problem."""


class RaceError(VramError, RuntimeError):
    """Memory was reused while another stream may still use it. `race` has the evidence."""
