"""Functions through which the program gets to see values, or moves them between the host and the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .announce import announcing
from .shadows import is_plain, most_elements

if TYPE_CHECKING:
    from .values import Values

__all__ = ["HANDLERS", "copied", "numbers"]

UNKNOWN = "not known: what the null GPU returns"
MOST_LISTED = 9


def read(values: Values, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer from the shadows; the device is read as well, for its copies and allocations."""
    known = values.look(args, kwargs, wide=True)
    doubtful = known.unknown and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.bool
    out = announcing(
        (0,) if doubtful else (), func, args, kwargs
    )  # else it might be what `all` has found before
    if not known.tensors and not known.unknown:
        return out
    try:
        answer, assumed = values.compute(name, func, args, kwargs, known), known.assumed
        if name in ("__repr__", "__str__"):
            answer = _with_device(answer, args[0].device)
    except Exception:
        answer, assumed = out, UNKNOWN
    if assumed and any(each.is_cuda for each in args if isinstance(each, torch.Tensor)):
        values.guess("read", answer, assumed)
    return answer


def numbers(values: Values, value: Any, *, masks: bool = False) -> Any:
    """Arguments with numbers in the place of single elements on the device: PyTorch itself reads these.

    With `masks`, true and false are not numbers.
    """
    if isinstance(value, torch.Tensor):
        if (
            value.is_cuda
            and value.dim() == 0
            and is_plain(value)
            and not (masks and value.dtype == torch.bool)
        ):
            return read(values, "item", torch.Tensor.item, (value,), {})
        return value
    if type(value) in (tuple, list):
        found = [numbers(values, each, masks=masks) for each in value] if _has_tensors(value) else value
        return type(value)(found)
    if isinstance(value, slice) and _has_tensors((value.start, value.stop, value.step)):
        return slice(*numbers(values, (value.start, value.stop, value.step)))
    return value


def transfer(values: Values, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A copy of a tensor, possibly on another device."""
    out = func(*args, **kwargs)
    source = args[0] if args else None
    if isinstance(source, torch.Tensor) and isinstance(out, torch.Tensor) and out is not source:
        copied(values, out, source)
    return out


def copied(values: Values, to: Any, source: Any) -> None:
    """`source` was copied to `to`, which has the same shape and held nothing else before."""
    if not to.is_cuda and not source.is_cuda:
        return
    known = values.look((source,), {}, wide=True)
    if to.is_cuda and (known.unknown or to.numel() > most_elements(to.dtype)):
        values.drop([to] if not known.tensors else [])
        return
    try:
        contents = values.compute("copy_", _same, (source,), {}, known)
    except Exception:
        if to.is_cuda:
            values.drop([to])
        elif source.numel() <= most_elements(source.dtype):
            values.guess("read", 0, UNKNOWN)
        return
    values.keep(to, contents, known.assumed)
    if known.assumed and not to.is_cuda:
        flat = to.detach().reshape(-1)[:MOST_LISTED].tolist()
        values.guess("read", flat[0] if to.numel() == 1 else flat, known.assumed)


def _same(tensor: Any) -> Any:
    return tensor


def _has_tensors(value: Any) -> bool:
    return any(isinstance(each, (torch.Tensor, tuple, list, slice)) for each in value)


def _with_device(text: str, device: Any) -> str:
    """What a tensor on the device prints, from what its shadow prints."""
    data, comma, rest = text.rpartition(", dtype=")
    return f"{data}, device='{device}'{comma}{rest}" if comma else f"{text[:-1]}, device='{device}')"


HANDLERS: dict[str, Any] = {"read": read, "transfer": transfer}
