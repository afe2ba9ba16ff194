"""Checked access to values of an untrusted file: each has the expected type, or a TraceError says where not.

Knows plain values only; the readers of each format interpret them.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeAlias

from vram.errors import TraceError

__all__ = [
    "MAX_INT64",
    "MAX_UINT64",
    "Sequence",
    "as_dict",
    "as_list",
    "fitting_text",
    "get",
    "integer",
    "plain_settings",
    "text",
    "wrong",
]

MAX_INT64 = (1 << 63) - 1
MAX_UINT64 = (1 << 64) - 1
MAX_TEXT = 64 << 10  # characters in one name; longer ones do not occur
MAX_SETTINGS = 10_000  # values in the settings, all depths together
MAX_SETTINGS_DEPTH = 8

Sequence: TypeAlias = list[Any] | tuple[Any, ...]


def wrong(place: str, found: object, expected: str) -> NoReturn:
    """Refuse a value."""
    raise TraceError(f"{place} is {_describe(found)}, expected {expected}", place=place)


def _describe(value: object) -> str:
    """A value in a message: numbers and short strings as they are, others by type (they may be huge)."""
    if type(value) is int and value.bit_length() <= 128:
        return str(value)
    if type(value) is str and len(value) <= 80:
        return repr(value)
    return f"a value of type {type(value).__name__}"


def get(record: dict[Any, Any], key: str, place: str) -> Any:
    """`record[key]`, which must be there."""
    try:
        return record[key]
    except KeyError:
        raise TraceError(f"{place} has no {key!r}", place=place) from None


def as_dict(value: Any, place: str) -> dict[Any, Any]:
    """`value`, if it is a dict."""
    return value if type(value) is dict else wrong(place, value, "a dict")


def as_list(value: Any, place: str, length: int | None = None) -> Sequence:
    """`value`, if it is a list or tuple (of `length` values)."""
    if type(value) is not list and type(value) is not tuple:
        wrong(place, value, "a list")
    if length is not None and len(value) != length:
        raise TraceError(f"{place} has {len(value)} values, expected {length}", place=place)
    return value


def integer(value: Any, place: str, high: int = MAX_INT64, low: int = 0) -> int:
    """`value`, if it is a whole number from `low` to `high`."""
    if type(value) is int and low <= value <= high:
        return value
    wrong(place, value, f"an integer from {low} to {high}")


def text(value: Any, place: str) -> str:
    """`value`, if it is a string; characters that UTF-8 cannot encode become question marks."""
    if type(value) is not str or len(value) > MAX_TEXT:
        wrong(place, value, f"text of at most {MAX_TEXT} characters")
    return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")


def fitting_text(value: str) -> str:
    """`value`, shortened with an ellipsis to the length that `text` accepts."""
    return value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 1] + "…"


def plain_settings(value: Any, place: str) -> dict[str, object]:
    """Settings as plain data: strings, numbers, and lists and dicts of them, bounded in depth and number."""
    return _plain_dict(as_dict(value, place), place, 0, [MAX_SETTINGS])


def _plain_dict(value: dict[Any, Any], place: str, depth: int, budget: list[int]) -> dict[str, object]:
    return {text(key, place): _plain(entry, place, depth, budget) for key, entry in value.items()}


def _plain(value: Any, place: str, depth: int, budget: list[int]) -> object:
    budget[0] -= 1
    if budget[0] < 0 or depth > MAX_SETTINGS_DEPTH:
        raise TraceError(f"{place} is nested too deep or holds more than {MAX_SETTINGS} values", place=place)
    if value is None or type(value) in (bool, float) or (type(value) is int and abs(value) <= MAX_UINT64):
        return value
    if type(value) is str:
        return text(value, place)
    if type(value) is dict:
        return _plain_dict(value, place, depth + 1, budget)
    if type(value) in (list, tuple):
        return [_plain(entry, place, depth + 1, budget) for entry in value]
    wrong(place, value, "plain settings")
