"""Which functions of PyTorch do what with the values of tensors. Tables only; other files act on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

__all__ = [
    "CONSTANTS",
    "FLOATS",
    "LOGIC",
    "RANDOM",
    "TABLES",
    "UNPREDICTABLE",
    "functions",
    "mutates",
    "transparent",
]

CONSTANTS: dict[str, int | None] = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), 0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1),
    **dict.fromkeys(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"), None),
}
"""New tensors with the same number everywhere, None if they are not initialized."""

LOGIC: dict[str, bool] = {
    **dict.fromkeys(("__and__", "__rand__", "bitwise_and", "logical_and"), False),
    **dict.fromkeys(("__or__", "__ror__", "bitwise_or", "logical_or"), True),
}
"""Of two truth values, one may decide: this one."""

_DRAWN = "rand rand_like randn randn_like randint randint_like randperm multinomial bernoulli normal poisson"
_DRAWN_IN_PLACE = "random_ uniform_ normal_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_"
RANDOM = frozenset([*_DRAWN.split(), *_DRAWN_IN_PLACE.split()])
"""Functions that take a generator of random numbers."""

FLOATS = frozenset({"rand", "rand_like"})
"""Random numbers that programs compare with a threshold."""

UNPREDICTABLE = re.compile("dropout|gumbel|rrelu|fractional|lowrank")
"""Functions that draw random numbers, but not from a generator that could be given."""

TABLES: dict[str, str] = {
    # Answered from the shadows: what these return decides what the program does next.
    "read": """
        item tolist __bool__ __int__ __float__ __index__ __complex__ __contains__ __format__ __repr__ __str__
        is_nonzero equal allclose
    """,
    # Copy a tensor, possibly to another device or type.
    "transfer": "to cuda cpu type __deepcopy__",
    # Make a tensor of data.
    "convert": "tensor as_tensor asarray new_tensor",
    "constant": " ".join(CONSTANTS),
    # Make a tensor from numbers.
    "factory": """
        arange range linspace logspace eye tril_indices triu_indices full full_like new_full scalar_tensor
        vander rand rand_like randn randn_like randint randint_like randperm
        hann_window hamming_window bartlett_window blackman_window kaiser_window
    """,
    # Write without reading what was there.
    "overwrite": f"copy_ fill_ zero_ {_DRAWN_IN_PLACE}",
    # Return as many elements as a condition selects.
    "selection": "nonzero argwhere where masked_select",
    "get": "__getitem__",
    "set": "__setitem__ index_put_",
    # Read from the device how large their result is.
    "counted": """
        unique unique_consecutive unique_dim _unique2 repeat_interleave bincount one_hot combinations
    """,
    # Add up the elements of a sparse tensor that have the same index.
    "merged": "coalesce",
    # Read from the device whether their arguments are valid.
    "checked": "normal",
    # Return indices and truth values that are plausible where the arguments are not known.
    "plausible": """
        argmax argmin topk sort argsort max min median nanmedian mode kthvalue multinomial
        isfinite isnan isinf isposinf isneginf all _is_all_true
    """,
    "comparison": """
        lt le gt ge eq ne less less_equal greater greater_equal __lt__ __le__ __gt__ __ge__ __eq__ __ne__ bool
    """,
    "logic": " ".join(LOGIC),
    # Read numbers that are given as tensors.
    "sized": """
        view reshape expand repeat narrow narrow_copy split split_with_sizes tile unfold pad unflatten roll
        select index_select chunk tensor_split
    """,
    "finite": "_amp_foreach_non_finite_check_and_unscale_",
}
"""What a function does, by its name; each kind has a handler."""

_TRANSPARENT = """
    size stride dim ndimension numel nelement element_size storage_offset data_ptr untyped_storage
    storage _typed_storage is_contiguous is_floating_point is_complex is_signed is_conj is_neg
    is_inference is_tensor is_same_size is_set_to is_pinned is_shared get_device has_names result_type
    can_cast promote_types _is_view record_stream backward register_hook
    register_post_accumulate_grad_hook retain_grad requires_grad_ pin_memory share_memory_ __hash__
    __len__ __iter__ __dir__ __reduce_ex__ __setstate__ __array__ __array_wrap__ numpy __dlpack__
    __dlpack_device__ set_ as_subclass detach detach_ transpose permute movedim moveaxis swapaxes
    swapdims t adjoint expand_as view_as broadcast_to unsqueeze squeeze unbind diagonal as_strided hsplit
    vsplit dsplit view_as_real view_as_complex squeeze_ unsqueeze_ transpose_ t_ swapaxes_ swapdims_
    as_strided_ resize_ resize_as_
"""
"""These neither read nor write contents, or return views, which share the shadow of their storage."""

_IN_PLACE = frozenset(
    f"__i{operator}__"
    for operator in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")
)


def functions(names: str) -> Iterator[tuple[Any, str]]:
    """Every function of PyTorch with one of these names, and its name."""
    owners = (torch, torch.Tensor, torch.nn.functional, torch._C._VariableFunctions, torch._C._nn)
    for name in names.split():
        for owner in owners:
            found = getattr(owner, name, None)
            if callable(found):
                yield found, name


def transparent() -> Iterator[Any]:
    """Functions that are called without a look at their arguments: also getters and setters."""
    for found, _name in functions(_TRANSPARENT):
        yield found
    for name in dir(torch.Tensor):
        attribute = getattr(torch.Tensor, name, None)
        for accessor in ("__get__", "__set__", "__delete__"):
            if not callable(attribute) and hasattr(attribute, accessor):
                yield getattr(attribute, accessor)


def mutates(name: str) -> bool:
    """Whether a function writes to its first argument, by its name."""
    return name == "__setitem__" or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
