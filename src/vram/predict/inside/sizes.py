"""Functions whose results have a size that depends on values: the null GPU is told what they will read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from .announce import announcing, remember_mask
from .creation import plausible
from .reading import UNKNOWN, numbers
from .shadows import is_wrapped, on_the_cpu

if TYPE_CHECKING:
    from .values import Values

__all__ = ["HANDLERS"]

SELECTED = "not known: every element is selected"
DISTINCT = "not known: all elements are distinct"
SPREAD = "not known: indices are spread at random"
SAME = {**dict.fromkeys(("eq", "__eq__"), True), **dict.fromkeys(("ne", "__ne__"), False)}
"""Comparisons of a tensor with itself: a search for elements that are not numbers."""
MASKS = (torch.bool, torch.uint8)
ASSIGNED = ("input", "indices", "values")
"""The names of the arguments of an assignment."""


def selection(values: Values, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The elements that a condition selects."""
    given = [*args, *(kwargs[key] for key in ("input", "self", "condition", "mask") if key in kwargs)]
    if name == "where" and (len(given) != 1 or kwargs.keys() & {"other", "x", "y"}):
        return values.call(name, func, args, kwargs)
    condition = given[1] if name == "masked_select" else given[0]
    if name == "masked_select" and condition.shape != given[0].shape:
        condition = condition.expand(torch.broadcast_shapes(given[0].shape, condition.shape))
    return _select(values, [condition], None, name, func, args, kwargs)


def get(values: Values, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Indexing: a view, or a selection by masks and indices."""
    tensor, index = args
    if type(index) is int:
        return func(tensor, index)
    index = numbers(values, index, masks=True)
    return _select(values, _masks(index), None, name, func, (tensor, index), kwargs)


def put(values: Values, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Assignment to a view, or to a selection by masks and indices."""
    named = [kwargs[key] for key in ASSIGNED if key in kwargs]
    if len(args) + len(named) < len(ASSIGNED):
        return func(*args, **kwargs)  # raises
    tensor, *given = (*args, *named)
    kwargs = {key: each for key, each in kwargs.items() if key not in ASSIGNED}
    index, value = numbers(values, given[0], masks=True), given[1]
    one = not isinstance(value, torch.Tensor) or value.dim() == 0  # fills without counting
    return _select(
        values, [] if one else _masks(index), value, name, func, (tensor, index, *given[1:]), kwargs
    )


def sized(values: Values, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Functions that read numbers which are given as tensors."""
    return values.call(name, func, (*args[:1], *numbers(values, args[1:])), kwargs)


def counted(values: Values, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Functions that read from the device how large their result is."""
    known = values.look(args, kwargs)
    if not known.device:
        return func(*args, **kwargs)
    try:
        contents = values.compute(name, func, args, kwargs, known)
        reads, assumed = _reads(name, args, kwargs, contents), known.assumed
    except Exception:
        contents, reads = None, _default_reads(name, args, kwargs)
        assumed = DISTINCT if "unique" in name else UNKNOWN
    out = announcing(reads or (), func, args, kwargs)
    if contents is not None:
        values.keep(out, contents, assumed)
    if assumed and reads is not None:
        first = out if isinstance(out, torch.Tensor) else out[0]
        values.guess("shape", list(first.shape), assumed)
    return out


def merged(values: Values, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sparse tensors whose elements with the same index are added up."""
    source = args[0]
    if not source.is_cuda or source.is_coalesced():
        return func(*args, **kwargs)
    indices = source._indices()
    shadow = values.shadow(indices)
    if shadow is not None:
        with on_the_cpu():
            count = int(shadow.view(indices).unique(dim=1).shape[1])
        assumed = shadow.assumed
    else:
        places = math.prod(source.shape[: source.sparse_dim()])
        count, assumed = _hit(places, int(source._nnz())), SPREAD
    if assumed:
        values.guess("shape", count, assumed)
    return announcing([count], func, args, kwargs)


def _hit(places: int, draws: int) -> int:
    """How many of `places` are hit by so many draws at random, on average."""
    if places <= 1 or draws == 0:
        return min(places, draws)
    return round(-places * math.expm1(draws * math.log1p(-1 / places)))


def checked(values: Values, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Functions that read from the device whether their arguments are valid: they are."""
    return announcing((1, 1), values.call, (name, func, args, kwargs), {})


def compare(values: Values, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Comparisons, which may use random numbers too many to compute with."""
    if name in SAME and len(args) == 2 and args[0] is args[1] and values.look(args, {}).unknown:
        return plausible(values, "isfinite" if SAME[name] else "isnan", func, args, kwargs)
    return values.call(name, func, args, kwargs, wide=True)


def _select(
    values: Values, masks: list[Any], value: Any, name: str, func: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Call a function that finds out how many elements each of the masks selects."""
    counts = [_count(values, mask, value if len(masks) == 1 else None) for mask in masks if mask.is_cuda]
    return announcing(counts, values.call, (name, func, args, kwargs), {})


def _count(values: Values, mask: Any, value: Any) -> int:
    """How many elements a mask selects; as many as `value` has, if it is only known what they are set to."""
    shadow = values.shadow(mask)
    if shadow is not None:
        with on_the_cpu():
            count = int(shadow.view(mask).count_nonzero())
        if shadow.assumed:
            values.guess("shape", count, shadow.assumed)
    elif isinstance(value, torch.Tensor) and value.dim() and value.shape[0] != 1:
        count = int(value.shape[0])
    else:
        count = int(mask.numel())
        values.guess("shape", count, SELECTED)
    while is_wrapped(mask):  # by torch.func.grad, whose backward pass asks as well
        mask = torch._C._functorch.get_unwrapped(mask)
    remember_mask(mask, count)
    return count


def _masks(index: Any) -> list[Any]:
    parts = index if isinstance(index, (tuple, list)) else (index,)
    return [each for each in parts if isinstance(each, torch.Tensor) and each.dtype in MASKS and each.is_cuda]


def _reads(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], contents: Any) -> list[int] | None:
    """What a function reads from the device on its way to these contents. None: nothing that matters."""
    first = contents if isinstance(contents, torch.Tensor) else contents[0]
    source = args[0] if args else next(iter(kwargs.values()))
    if name == "repeat_interleave":
        if kwargs.get("output_size") is not None or _repeats(args, kwargs) is None:
            return None
        dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
        return [first.shape[dim or 0], 1]
    if name == "bincount":
        return [0, first.shape[0] - 1]
    if name == "one_hot":
        classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
        return [first.shape[-1] - 1] if classes == -1 else None
    if name == "combinations":
        return [first.shape[0]] * 8
    dim = _unique_dim(name, args, kwargs)
    if source.dtype == torch.bool and dim is None and "consecutive" not in name:
        return [int(shadow_count(first, source))]
    return [first.shape[dim or 0]]


def shadow_count(distinct: Any, source: Any) -> int:
    """How many elements of `source` are true, as far as it matters for the `distinct` ones."""
    trues = int(distinct.count_nonzero())
    return trues if distinct.numel() != 1 else trues * int(source.numel())


def _default_reads(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int] | None:
    """What a function of unknown arguments reads: all elements are distinct, and each is repeated once."""
    source = args[0] if args else next(iter(kwargs.values()))
    if "unique" in name:
        dim = _unique_dim(name, args, kwargs)
        return [source.numel() if dim is None else source.shape[dim]]
    if name == "repeat_interleave":
        repeats = _repeats(args, kwargs)
        return [repeats.numel(), 1] if repeats is not None and kwargs.get("output_size") is None else None
    if name == "one_hot":
        return [0] if kwargs.get("num_classes", args[1] if len(args) > 1 else -1) == -1 else None
    return []


def _repeats(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """How often each element is repeated, if that is a tensor."""
    given = kwargs.get("repeats", args[1] if len(args) > 1 else args[0] if args else None)
    return given if isinstance(given, torch.Tensor) else None


def _unique_dim(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    position = {"unique": 4, "unique_consecutive": 3, "unique_dim": 1}.get(name)
    if position is None:
        return None
    dim: int | None = kwargs.get("dim", args[position] if len(args) > position else None)
    return dim


HANDLERS: dict[str, Any] = {
    "checked": checked,
    "comparison": compare,
    "counted": counted,
    "get": get,
    "merged": merged,
    "selection": selection,
    "set": put,
    "sized": sized,
}
