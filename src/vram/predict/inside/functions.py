"""Which functions of PyTorch do what with the values of tensors. Tables only; `values` acts on them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["CONSTANTS", "FLOATS", "LOGIC", "RANDOM", "TABLES", "UNPREDICTABLE", "functions", "mutates", "transparent"]

# Answered from the shadow: what these return, decides what the program does next.
READS = (
    "item tolist __bool__ __int__ __float__ __index__ __complex__ __contains__ __format__ __repr__ __str__ "
    "is_nonzero equal allclose"
)
# Move or copy the values of their first argument, maybe to another device or type.
TRANSFERS = "to cuda cpu type __deepcopy__"
# Make a tensor of data.
CONVERSIONS = "tensor as_tensor asarray new_tensor"
# Their results have the same contents whatever the contents of their arguments. By the contents:
CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), 0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1),
    **dict.fromkeys(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"), None),
}
# Computed on the CPU from their arguments alone.
FACTORIES = (
    "arange range linspace logspace eye tril_indices triu_indices full full_like new_full scalar_tensor "
    "rand rand_like randn randn_like randint randint_like randperm "
    "hann_window hamming_window bartlett_window blackman_window kaiser_window vander"
)
# Write without reading what was there.
OVERWRITES = (
    "copy_ fill_ zero_ random_ uniform_ normal_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ "
    "fill_diagonal_"
)
# Return as many elements as a condition selects.
SELECTIONS = "nonzero argwhere where masked_select"
# Read from the device in order to find the size of their result.
COUNTED = "unique unique_consecutive repeat_interleave bincount one_hot combinations _unique2 unique_dim"
# Read from the device whether their arguments are valid.
CHECKED = "normal"
# Indices and truth values that are plausible where the arguments are not known.
PLAUSIBLE = (
    "argmax argmin topk sort argsort max min median nanmedian mode kthvalue multinomial "
    "isfinite isnan isinf isposinf isneginf all _is_all_true"
)
# Use random numbers too many to compute with.
COMPARISONS = (
    "lt le gt ge eq ne less less_equal greater greater_equal __lt__ __le__ __gt__ __ge__ __eq__ __ne__ bool argsort sort"
)
# Of two truth values, one may decide: this one.
LOGIC = {
    **dict.fromkeys(("__and__", "__rand__", "bitwise_and", "logical_and"), False),
    **dict.fromkeys(("__or__", "__ror__", "bitwise_or", "logical_or"), True),
}
# Numbers given as tensors are read by PyTorch itself.
SIZED = (
    "view reshape expand repeat narrow narrow_copy split split_with_sizes tile unfold pad unflatten roll select "
    "index_select chunk tensor_split resize_ cumsum"
)

# Functions with a `generator`.
RANDOM = frozenset(
    "rand rand_like randn randn_like randint randint_like randperm multinomial bernoulli normal poisson "
    "random_ uniform_ normal_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_".split()
)

# Floating-point numbers that programs compare with a threshold.
FLOATS = frozenset({"rand", "rand_like"})
# Draw random numbers without a generator that could be given.
UNPREDICTABLE = re.compile("dropout|gumbel|rrelu|fractional|lowrank")

TABLES: dict[str, str] = {
    "read": READS,
    "transfer": TRANSFERS,
    "convert": CONVERSIONS,
    "constant": " ".join(CONSTANTS),
    "factory": FACTORIES,
    "overwrite": OVERWRITES,
    "selection": SELECTIONS,
    "checked": CHECKED,
    "counted": COUNTED,
    "plausible": PLAUSIBLE,
    "comparison": COMPARISONS,
    "logic": " ".join(LOGIC),
    "sized": SIZED,
    "get": "__getitem__",
    "set": "__setitem__ index_put_",
    "finite": "_amp_foreach_non_finite_check_and_unscale_",
}

# Neither read nor write contents, or return views, which share the shadow of their storage.
TRANSPARENT = (
    "size stride dim ndimension numel nelement element_size storage_offset data_ptr untyped_storage storage "
    "_typed_storage is_contiguous is_floating_point is_complex is_signed is_conj is_neg is_inference is_tensor "
    "is_same_size is_set_to is_pinned is_shared get_device has_names result_type can_cast promote_types "
    "record_stream backward register_hook register_post_accumulate_grad_hook retain_grad requires_grad_ pin_memory "
    "share_memory_ __hash__ __len__ __iter__ __dir__ __reduce_ex__ __setstate__ __array__ __array_wrap__ numpy "
    "__dlpack__ __dlpack_device__ _is_view set_ apply_ map_ map2_ _backward_hooks as_subclass "
    "detach detach_ transpose permute movedim moveaxis swapaxes swapdims t adjoint expand_as view_as "
    "unsqueeze squeeze unbind diagonal as_strided broadcast_to squeeze_ unsqueeze_ transpose_ t_ swapaxes_ "
    "swapdims_ as_strided_ hsplit vsplit dsplit view_as_real view_as_complex grad _make_subclass"
)


def _owners() -> tuple[Any, ...]:
    return torch, torch.Tensor, torch.nn.functional, torch._C._VariableFunctions, torch._C._nn


def functions(names: str) -> Iterator[tuple[Any, str]]:
    """Every function of PyTorch with one of these names, and its name."""
    for name in names.split():
        for owner in _owners():
            found = getattr(owner, name, None)
            if callable(found):
                yield found, name


def transparent() -> Iterable[Any]:
    """Functions that are called without a look at their arguments."""
    yield from (found for found, _name in functions(TRANSPARENT))
    for name in dir(torch.Tensor):
        found = getattr(torch.Tensor, name, None)
        for accessor in ("__get__", "__set__", "__delete__"):
            if not callable(found) and hasattr(found, accessor):
                yield getattr(found, accessor)


def mutates(name: str) -> bool:
    """Whether a function writes to its first argument, by its name."""
    return name == "__setitem__" or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


_IN_PLACE = frozenset(
    f"__i{operator}__"
    for operator in "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul".split()
)
