"""Plausible contents where the real ones are not known: random numbers that repeat when the program's would.

They are drawn from a generator of their own, seeded with the state of the GPU's, which the program's
functions advance. So a layer that is computed twice gets the same numbers: activation checkpointing restores
that state.
"""

from __future__ import annotations

from typing import Any

import torch

from .shadows import MOST_INTEGERS

__all__ = ["TRUTHS", "Noise", "results"]

OFFSET_STEP = 4
"""The smallest step of a CUDA generator's offset."""


class Noise:
    """Random numbers for the shadows, independent of the program's CPU generator."""

    def __init__(self) -> None:
        """Begin with any state; `seed` sets it."""
        self.generator = torch.Generator()

    def seed(self, device: Any, generator: Any = None, *, advance: bool = False) -> None:
        """Take the state of a GPU's generator as seed; `advance` it if the device itself draws no numbers."""
        index = torch.cuda.current_device() if device is None else device.index
        try:
            source = generator or torch.cuda.default_generators[index]
            offset = source.get_offset()
            self.generator.manual_seed((source.initial_seed() * 1_000_003 + offset) % (1 << 63))
            if advance:
                source.set_offset(offset + OFFSET_STEP)
        except (RuntimeError, IndexError):  # while a CUDA graph is captured
            self.generator.manual_seed(0)

    def draw(self, name: str, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Contents for `out`, which the random factory `name` made."""
        if name.startswith("randn"):
            return torch.randn(out.shape, generator=self.generator)
        if name in ("rand", "rand_like"):
            return torch.rand(out.shape, generator=self.generator)
        if name == "randperm":
            return torch.randperm(out.numel(), generator=self.generator)
        bounds = [each for each in args if isinstance(each, int)]  # high, or low and high
        low = kwargs.get("low", bounds[0] if len(bounds) > 1 else 0)
        high = kwargs.get("high", bounds[-1] if bounds else 1)
        return torch.randint(low, high, out.shape, generator=self.generator)

    def like(self, tensor: Any) -> Any:
        """Uniform random numbers of the shape of a tensor."""
        return torch.rand(tensor.shape, generator=self.generator)


# Of each function: which result is indices, which argument is the dimension, and its default.
_INDICES: dict[str, tuple[int, int, int | None]] = {
    **dict.fromkeys(("argmax", "argmin"), (0, 1, None)),
    **dict.fromkeys(("max", "min", "median", "nanmedian"), (1, 1, None)),
    "mode": (1, 1, -1),
    "kthvalue": (1, 2, -1),
    "topk": (1, 2, -1),
    "sort": (1, 1, -1),
    "argsort": (0, 1, -1),
    "multinomial": (0, 3, -1),
}
_DISTINCT = frozenset({"topk", "sort", "argsort", "multinomial"})
TRUTHS = {
    **dict.fromkeys(("isfinite", "all", "_is_all_true"), True),
    **dict.fromkeys(("isnan", "isinf", "isposinf", "isneginf"), False),
}
"""What these functions return of numbers that are not known, everywhere."""


def results(
    name: str, noise: Noise, out: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """Contents for the tensors `out` that the function `name` returned, None for each that stays unknown."""
    if name in TRUTHS:
        return [
            torch.full(each.shape, TRUTHS[name]) if each.numel() <= MOST_INTEGERS else None for each in out
        ]
    source = args[0] if args else kwargs.get("input")
    position, argument, default = _INDICES[name]
    dim = kwargs.get("dim", args[argument] if len(args) > argument else default)
    if len(out) <= position or out[position].numel() > MOST_INTEGERS or isinstance(dim, torch.Tensor):
        return []
    return [None] * position + [_indices(name in _DISTINCT, noise, out[position], source, dim)]


def _indices(distinct: bool, noise: Noise, out: Any, source: Any, dim: int | None) -> Any:
    """Indices into dimension `dim` of `source`, or into all of it."""
    if dim is None or source.dim() == 0:
        most = source.numel()
    else:
        most = source.shape[dim]
        if distinct and out.shape[dim] <= most and source.numel() <= MOST_INTEGERS:
            return noise.like(source).argsort(dim).narrow(dim, 0, out.shape[dim])
    return torch.randint(0, max(most, 1), out.shape, generator=noise.generator)
