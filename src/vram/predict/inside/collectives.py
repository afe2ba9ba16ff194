"""What collective operations do to values: every rank is taken to hold what this one holds.

They are calls into C++ that no mode sees, and on the null GPU they complete without moving anything.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .values import Values

__all__ = ["follow_collectives"]

_inside = threading.local()
EVERY_RANK = "the other ranks hold the same"


def follow_collectives(values: Values, patch: Callable[[Any, str, Any], None]) -> None:
    """Mirror the collective operations; `patch(owner, name, wrap)` replaces a function."""
    if not torch.distributed.is_available():
        return
    from torch.distributed import distributed_c10d

    for name, mirror in _MIRRORS.items():
        for owner in (torch.distributed, distributed_c10d):
            patch(owner, name, functools.partial(_mirroring, values, mirror))


def _mirroring(
    values: Values, mirror: Callable[..., None], function: Callable[..., Any]
) -> Callable[..., Any]:
    def mirrored(*args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "collective", False):  # PyTorch calls it again for the mode
            return function(*args, **kwargs)
        _inside.collective = True
        try:
            out = function(*args, **kwargs)
        finally:
            _inside.collective = False
        mirror(values, *args, **kwargs)
        return out

    return mirrored


def _all_reduce(values: Values, tensor: Any, op: Any = None, group: Any = None, **_options: Any) -> None:
    shadow = values.shadow(tensor) if tensor.is_cuda else None
    if shadow is not None:
        ranks = torch.distributed.get_world_size(group)
        adds = op is None or op == torch.distributed.ReduceOp.SUM
        _give(values, [tensor], [tensor], ranks if adds else 1)


def _broadcast(values: Values, tensor: Any, src: Any = None, *_args: Any, **_options: Any) -> None:
    if src != torch.distributed.get_rank():
        _give(values, [tensor], [tensor])


def _all_gather(values: Values, tensor_list: Any, tensor: Any, *_args: Any, **_options: Any) -> None:
    _give(values, tensor_list, [tensor] * len(tensor_list))


def _all_gather_into(
    values: Values, output_tensor: Any, input_tensor: Any, *_args: Any, **_options: Any
) -> None:
    parts = output_tensor.view(-1, *input_tensor.shape).unbind(0) if input_tensor.numel() else ()
    _give(values, parts, [input_tensor] * len(parts))


def _all_to_all_single(values: Values, output: Any, input: Any, *_args: Any, **_options: Any) -> None:
    _give(values, [output], [input])


def _all_to_all(
    values: Values, output_tensor_list: Any, input_tensor_list: Any, *_args: Any, **_options: Any
) -> None:
    _give(values, output_tensor_list, input_tensor_list)


def _unknown(values: Values, *args: Any, **options: Any) -> None:
    output = args[0] if args else options.get("output", options.get("tensor"))
    values.drop([output] if isinstance(output, torch.Tensor) and output.is_cuda else [])


def _give(values: Values, outputs: Any, inputs: Any, factor: int = 1) -> None:
    """The contents of `inputs` were received as `outputs`, times `factor`."""
    for output, source in zip(outputs, inputs, strict=False):
        if not output.is_cuda:
            continue
        known = values.look((source,), {})
        try:
            contents = values.compute("mul", torch.mul, (source, factor), {}, known)
            values.keep(output, contents, EVERY_RANK)
        except Exception:
            values.drop([output])


_MIRRORS: dict[str, Callable[..., None]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into,
    "all_to_all_single": _all_to_all_single,
    "all_to_all": _all_to_all,
    "reduce_scatter": _unknown,
    "reduce_scatter_tensor": _unknown,
    "reduce": _unknown,
    "scatter": _unknown,
    "recv": _unknown,
}
