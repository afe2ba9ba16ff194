"""Functions that make new contents: factories, writes that replace everything, and plausible indices."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from .functions import CONSTANTS, FLOATS, LOGIC, RANDOM
from .plausible import TRUTHS, results
from .reading import copied, numbers
from .shadows import MOST_FLOATS, device_storage, is_plain, most_elements, on_the_cpu

if TYPE_CHECKING:
    from .values import Values

__all__ = ["HANDLERS"]

RANDOM_NUMBERS = "random numbers of the same distribution"
UNINITIALIZED = "memory that was not initialized"
PLAUSIBLE = "not known: plausible indices, drawn at random"
UNDECIDED = "not known in part: taken not to decide"
WIDE = 1 << 18
"""Elements of a tensor of random numbers that is kept for comparisons."""


def constant(values: Values, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A new tensor with the same number everywhere, whatever the arguments contain."""
    out = func(*_numbered_after_tensor(values, name, args), **_numbered(values, kwargs))
    if _is_followed(out):
        fill = CONSTANTS[name]
        with on_the_cpu():
            contents = torch.full((), fill or 0, dtype=out.dtype).expand(out.shape)
            _put(values, out, contents, UNINITIALIZED if fill is None else None)
    return out


def factory(values: Values, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A new tensor that is computed from the arguments."""
    args, kwargs = _numbered_after_tensor(values, name, args), _numbered(values, kwargs)
    if name in RANDOM and torch.cuda.is_initialized():
        values.noise.seed(None, kwargs.get("generator"))
    out = func(*args, **kwargs)
    wide = name in FLOATS and isinstance(out, torch.Tensor) and MOST_FLOATS < out.numel() <= WIDE
    if not _is_followed(out) and not (wide and out.is_cuda):
        return out
    with contextlib.suppress(Exception):
        if name in RANDOM:
            with on_the_cpu():
                contents = values.noise.draw(name, out, args, kwargs)
                _put(values, out, contents, RANDOM_NUMBERS, wide=wide)
        else:
            like = _is_like(name)
            known = values.look(args[1:] if like else args, kwargs)
            source = (torch.zeros((), dtype=args[0].dtype).expand(args[0].shape),) if like else ()
            contents = values.compute(name, func, source + args[like:], {**kwargs, "device": "cpu"}, known)
            values.keep(out, contents, known.assumed)
    return out


def _is_like(name: str) -> bool:
    """Whether a function makes a tensor that is like its first argument."""
    return name.endswith("_like") or name.startswith("new_")


def _numbered_after_tensor(values: Values, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with numbers in the place of integers on the device, except for a first tensor."""
    if args and _is_like(name):
        return (args[0], *numbers(values, args[1:]))
    numbered: tuple[Any, ...] = numbers(values, args)
    return numbered


def _numbered(values: Values, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: numbers(values, each) for key, each in kwargs.items()} if kwargs else kwargs


def convert(values: Values, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor made from data, which may itself be a tensor."""
    if args and isinstance(args[0], torch.Tensor) and name != "new_tensor":
        out = func(*args, **kwargs)
        if out is not args[0]:
            copied(values, out, args[0])
        return out
    out = func(*args, **kwargs)
    if _is_followed(out):
        with contextlib.suppress(Exception):
            known = values.look(args[name == "new_tensor" :], {})
            data = args[1] if name == "new_tensor" else args[0] if args else kwargs["data"]
            contents = values.compute("tensor", torch.tensor, (data,), {"dtype": out.dtype}, known)
            values.keep(out, contents, known.assumed)
    return out


def overwrite(values: Values, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A write that does not depend on what was there."""
    to = args[0] if args else None
    if not isinstance(to, torch.Tensor) or not (to.is_cuda or name == "copy_"):
        return func(*args, **kwargs)
    if not device_storage(to):
        return values.call(name, func, args, kwargs)
    whole = not to.is_cuda or to.numel() * to.itemsize == to.untyped_storage().nbytes()
    if name == "copy_" and whole:
        source = args[1] if len(args) > 1 else kwargs["src"]
        out = func(*args, **kwargs)
        copied(values, to, source if source.shape == to.shape else source.expand(to.shape))
        return out
    if whole and to.numel() <= most_elements(to.dtype):
        with on_the_cpu():  # from here on, it is known
            values.drop([to])
            _put(values, to, torch.zeros((), dtype=to.dtype).expand(to.shape), None)
    return values.call(name, func, args, kwargs)


def plausible(values: Values, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Indices and truth values that can be made up where the arguments are not known."""
    known = values.look(args, kwargs, wide=name in ("sort", "argsort"))
    if not known.unknown or not known.device or "out" in kwargs:
        return values.call(name, func, args, kwargs, wide=True)
    drawn = name in RANDOM
    values.noise.seed(None, kwargs.get("generator"), advance=not drawn)
    out = func(*args, **kwargs)
    found = [out] if isinstance(out, torch.Tensor) else list(out)
    assumed = f"not known: {str(TRUTHS[name]).lower()}" if name in TRUTHS else PLAUSIBLE
    if all(is_plain(each) and each.is_cuda for each in found):
        with contextlib.suppress(Exception), on_the_cpu():
            for tensor, contents in zip(
                found, results(name, values.noise, found, args, kwargs), strict=False
            ):
                if contents is not None:
                    _put(values, tensor, contents, assumed)
    return out


def logic(values: Values, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """And, or: what is known of one side may decide; else the unknown side is taken not to."""
    known = values.look(args, kwargs)
    if not known.unknown or len(known.tensors) != 1 or known.tensors[0].dtype != torch.bool or kwargs:
        return values.call(name, func, args, kwargs)
    out = func(*args)
    if _is_followed(out) and out.dtype == torch.bool:
        tensor = known.tensors[0]
        shadow = known.shadows[id(tensor)]
        with on_the_cpu():
            side = shadow.view(tensor).expand(out.shape)
            decided = bool((side == LOGIC[name]).all())
            _put(values, out, side, shadow.assumed if decided else UNDECIDED)
    return out


def finite(values: Values, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A gradient scaler looks for numbers that are not finite in gradients: there are none."""
    out = func(*args, **kwargs)
    values.shadows.confirm(args[1])
    return out


def _is_followed(out: Any) -> bool:
    if type(out) is not torch.Tensor or not out.is_cuda or not is_plain(out):
        return False
    return bool(out.numel() <= most_elements(out.dtype))


def _put(values: Values, out: Any, contents: Any, assumed: str | None, *, wide: bool = False) -> None:
    if not torch.cuda.is_current_stream_capturing():
        values.shadows.put(out, contents, assumed, wide=wide)


HANDLERS: dict[str, Any] = {
    "constant": constant,
    "convert": convert,
    "factory": factory,
    "finite": finite,
    "logic": logic,
    "overwrite": overwrite,
    "plausible": plausible,
}
