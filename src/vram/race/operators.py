"""What an operator of PyTorch does with its arguments and results, by its schema.

A schema tells which arguments are written and which results are views. What it does not tell is listed here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

__all__ = ["Role", "Roles", "roles_of"]


class Role(Enum):
    """What happens to the memory of an argument."""

    NOTHING = 0
    READS = 1
    WRITES = 2


class Roles(NamedTuple):
    """The roles of the arguments of one operator."""

    name: str
    arguments: tuple[tuple[str, Role], ...]
    writes_results: bool
    composite: bool = False
    records_stream: bool = False
    statistics: bool = False
    resizes: bool = False

    def matched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Role]]:
        """Yield each argument with its role."""
        if self.resizes:
            yield args[0], Role.READS if _grows(*args[:2]) else Role.NOTHING
            return
        named = dict(self.arguments)
        written = _STATISTICS if self.statistics and _trains(self, args, kwargs) else ()
        for i, value in enumerate(args):
            name, role = self.arguments[i] if i < len(self.arguments) else ("", Role.READS)
            yield value, Role.WRITES if name in written else role
        for name, value in kwargs.items():
            yield value, Role.WRITES if name in written else named.get(name, Role.READS)

    def waits_last(self, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Any]) -> bool:
        """Return whether an operator that waited has queued nothing after its last wait.

        `written`: the tensors on a GPU that it writes or makes. If there are none, it has waited for what it
        tells the host. Others wait first, for a size or a number that the rest depends on, except those named
        here: PyTorch does not tell when it launches kernels.
        """
        if any(_given(self, ("non_blocking",), args, kwargs)):
            return False  # only an allocation has waited
        if not written or self.name in _WAIT_LAST:
            return True
        return self.name in _COPIES and _is_one_transfer(self, args, kwargs, written[0])


_cache: dict[Any, Roles] = {}


def roles_of(torch: Any, func: Any) -> Roles:
    """Return the roles of an operator."""
    found = _cache.get(func)
    if found is None:
        found = _cache[func] = _roles(torch, func)
    return found


def _roles(torch: Any, func: Any) -> Roles:
    schema = getattr(func, "_schema", None)
    if schema is None:  # an operator that takes functions: everything given to it counts as read
        return Roles(str(func), (), writes_results=True)
    space, name = schema.name.split("::")
    view = torch.Tag.inplace_view in func.tags and name not in _RESIZES
    unused = name in _FACTS or _is_factory(name) or view
    arguments = tuple(
        (each.name, Role.NOTHING if unused else _role(each.alias_info)) for each in schema.arguments
    )
    return Roles(
        name if space == "aten" else f"{space}.{name}",
        arguments,
        writes_results=not view and not name.startswith(("empty", "new_empty")),
        composite=_is_composite(torch, func),
        records_stream=name == "record_stream",
        statistics=not name.endswith("backward") and {each.name for each in schema.arguments} >= _STATISTICS,
        resizes=name in _RESIZES,
    )


def _role(alias: Any) -> Role:
    if alias is None:
        return Role.READS
    return Role.WRITES if alias.is_write else Role.NOTHING


def _is_factory(name: str) -> bool:
    """Return whether it takes only the shape and type of its argument."""
    return name.startswith("new_") or name.endswith("_like")


def _is_composite(torch: Any, func: Any) -> bool:
    """Return whether it consists of other operators, which in inference mode are not shown by themselves."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    return has(name, "CompositeImplicitAutograd") and not has(name, "CUDA")


def _given(roles: Roles, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the values of those arguments among `names` that the operator has."""
    return [
        args[i] if i < len(args) else kwargs.get(name)
        for i, (name, _) in enumerate(roles.arguments)
        if name in names
    ]


def _trains(roles: Roles, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a normalization updates its running statistics, which its schema does not tell."""
    return all(_given(roles, ("training", "train", "use_input_stats"), args, kwargs))


def _is_one_transfer(roles: Roles, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> bool:
    """Return whether a copy from the host waits for all of it.

    If the layout of the target differs from that of the source, it waits for a contiguous temporary tensor on
    the GPU, and copies that to the target afterwards.
    """
    if target.is_contiguous():
        return True
    source = _given(roles, ("self", "src"), args, kwargs)[-1]
    dense = 1 + sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
    same = source.dtype == target.dtype and source.stride() == target.stride()
    return bool(same and dense == target.numel())


def _grows(tensor: Any, size: Any) -> bool:
    """Return whether a resize allocates, and then copies what is there."""
    count = math.prod(size) if isinstance(size, (list, tuple)) else size.numel()
    needed = (tensor.storage_offset() + count) * tensor.element_size()
    return bool(needed > tensor.untyped_storage().nbytes() > 0)


_COPIES = frozenset(("copy_", "_to_copy"))
_WAIT_LAST = frozenset(
    [
        *("_unique", "_unique2", "unique_consecutive", "mode"),
        *("_linalg_eigh", "_linalg_svd", "linalg_eig", "linalg_eigvals", "linalg_lstsq", "linalg_inv_ex"),
        *("linalg_lu_factor_ex", "linalg_ldl_factor_ex", "linalg_cholesky_ex", "cholesky_inverse"),
    ]
)
"""They wait for the number of their results, for an error, or for a copy of the results from the host."""
_STATISTICS = frozenset(("running_mean", "running_var"))
_RESIZES = frozenset(("resize_", "resize_as_"))
_FACTS = frozenset(
    [
        *(
            "is_same_size",
            "is_set_to",
            "is_pinned",
            "_has_same_storage_numel",
            "_has_compatible_shallow_copy_type",
        ),
        *("size", "sym_size", "stride", "sym_stride", "numel", "sym_numel", "dim", "storage_offset"),
        *("sym_storage_offset", "is_contiguous", "is_strides_like_format", "is_non_overlapping_and_dense"),
        *("sym_is_contiguous", "_is_zerotensor", "_version", "_nested_tensor_size", "_nested_tensor_strides"),
        *("_nested_tensor_storage_offsets",),
    ]
)
