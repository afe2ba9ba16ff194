"""CPU copies of the contents of small CUDA tensors: one shadow for each storage, so that views share it.

A shadow lives as long as the storage on the device, which it does not keep alive. PyTorch counts the writes
to a tensor (`_version`); a write that was not mirrored is noticed by that count, and the shadow is dropped.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

__all__ = [
    "MOST_FLOATS",
    "MOST_INTEGERS",
    "Shadow",
    "Shadows",
    "device_storage",
    "is_plain",
    "is_wrapped",
    "most_elements",
    "on_the_cpu",
    "version_of",
]

MOST_INTEGERS = 1 << 20
"""Elements of an integer or boolean tensor that is mirrored."""
MOST_FLOATS = 1 << 12
"""Elements of any other tensor: floating-point numbers rarely decide what a program does."""
MOST_BYTES = 512 << 20
"""Bytes of all shadows together."""
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""Subclasses of tensors, such as fake and distributed ones, are not followed."""

_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def most_elements(dtype: Any) -> int:
    """Elements of a tensor of that type that is mirrored."""
    return MOST_INTEGERS if dtype in _INTEGERS else MOST_FLOATS


class Shadow:
    """The contents of one storage. `assumed` is None if they are exact, else why they are what they are.

    `wide` shadows are random numbers too many to compute with; they only serve comparisons.
    """

    __slots__ = ("assumed", "base", "nbytes", "storage", "versions", "wide")

    def __init__(self, base: Any, nbytes: int, storage: Any, assumed: str | None, wide: bool) -> None:
        """Keep `base`, a CPU storage of `nbytes`, for the device storage that `storage` refers to weakly."""
        self.base = base
        self.nbytes = nbytes
        self.storage = storage
        self.assumed = assumed
        self.wide = wide
        self.versions: set[int] = set()

    def view(self, tensor: Any) -> Any:
        """The CPU tensor that is to this shadow what `tensor` is to its storage."""
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(self.base, tensor.storage_offset(), tensor.size(), tensor.stride())


class Shadows:
    """All shadows of a process, by the address of the device's storage."""

    def __init__(self) -> None:
        """Begin without any."""
        self.bytes = 0
        self._by_address: dict[int, Shadow] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._by_address)

    def find(self, tensor: Any) -> Shadow | None:
        """The shadow of a CUDA tensor, if its contents are known. Cheap where they are not."""
        if not self._by_address or tensor.numel() > MOST_INTEGERS:
            return None
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse, or a wrapper of torch.func
            return None
        shadow = self._by_address.get(storage._cdata)
        if shadow is None:
            return None
        version = version_of(tensor)
        if shadow.nbytes == storage.nbytes() and (version == 0 or version in shadow.versions):
            return shadow
        self._forget(storage._cdata)
        return None

    def put(self, tensor: Any, values: Any, assumed: str | None, *, wide: bool = False) -> None:
        """The contents of the CUDA `tensor` are now `values`, a CPU tensor of its shape. May drop them."""
        if not device_storage(tensor):
            return
        storage = tensor.untyped_storage()
        shadow = self._by_address.get(storage._cdata)
        if shadow is not None and shadow.nbytes == storage.nbytes():
            self._write(shadow, tensor, values, assumed)
            return
        self._forget(storage._cdata)
        if tensor.numel() > (MOST_INTEGERS if wide else most_elements(tensor.dtype)) or tensor.is_conj():
            return
        shadow = self._new(tensor, storage, values, assumed, wide)
        if shadow is not None:
            shadow.versions.add(version_of(tensor))

    def written(self, tensor: Any, before: int, assumed: str | None) -> None:
        """A write to `tensor` that made its version differ from `before` was mirrored."""
        shadow = self._by_address.get(tensor.untyped_storage()._cdata)
        if shadow is not None:
            shadow.versions.discard(before)
            shadow.versions.add(version_of(tensor))
            shadow.assumed = shadow.assumed or assumed

    def drop(self, tensor: Any) -> None:
        """The contents of `tensor` are no longer known."""
        self._forget(device_storage(tensor))

    @staticmethod
    def covers(tensor: Any) -> bool:
        """Whether all of a storage is known once this tensor is."""
        if not device_storage(tensor):
            return False
        nbytes: int = tensor.untyped_storage().nbytes()
        return tensor.numel() * tensor.itemsize == nbytes and not tensor.is_conj()

    def confirm(self, tensor: Any) -> None:
        """A write to `tensor` left its contents as they were."""
        shadow = self._by_address.get(device_storage(tensor))
        if shadow is not None:
            shadow.versions.add(version_of(tensor))

    def _write(self, shadow: Shadow, tensor: Any, values: Any, assumed: str | None) -> None:
        whole = tensor.numel() * tensor.itemsize == shadow.nbytes
        if values.untyped_storage()._cdata != shadow.base._cdata:
            shadow.view(tensor).copy_(values)
            shadow.assumed = assumed if whole else shadow.assumed or assumed
        else:
            shadow.assumed = shadow.assumed or assumed
        shadow.versions.add(version_of(tensor))

    def _new(self, tensor: Any, storage: Any, values: Any, assumed: str | None, wide: bool) -> Shadow | None:
        address, nbytes = storage._cdata, storage.nbytes()
        if self.bytes + nbytes > MOST_BYTES or nbytes > 16 * MOST_INTEGERS:
            return None
        base = torch.zeros(nbytes, dtype=torch.uint8).untyped_storage()
        gone = weakref.ref(storage, lambda _storage: self._forget(address, gone))
        shadow = Shadow(base, nbytes, gone, assumed, wide)
        shadow.view(tensor).copy_(values)
        self._by_address[address] = shadow
        self.bytes += nbytes
        return shadow

    def _forget(self, address: int, storage: Any = None) -> None:
        """Drop a shadow; with `storage`, only if it is still that of this storage."""
        shadow = self._by_address.get(address)
        if shadow is not None and (storage is None or shadow.storage is storage):
            del self._by_address[address]
            self.bytes -= shadow.nbytes


def version_of(tensor: Any) -> int:
    """How often a tensor was written to; 0 for tensors of inference mode, which do not count."""
    try:
        version: int = tensor._version
    except RuntimeError:
        return 0
    return version


def device_storage(tensor: Any) -> int:
    """The address of a tensor's storage, 0 if it has none."""
    try:
        address: int = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return 0
    return address


def is_plain(tensor: Any) -> bool:
    """Whether a tensor is neither of a subclass nor wrapped by a transform such as torch.vmap."""
    return type(tensor) in PLAIN and not is_wrapped(tensor)


def is_wrapped(tensor: Any) -> bool:
    """Whether a tensor stands for another one in a transform."""
    wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return wrapped


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Compute with shadows: without gradients, unseen by modes, subclasses, transforms and tracers."""
    with contextlib.ExitStack() as ends:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            ends.enter_context(temporarily_clear_interpreter_stack())
        if torch._C._is_tracing():
            ends.callback(torch._C._set_tracing_state, torch._C._get_tracing_state())
            torch._C._set_tracing_state(None)
        ends.enter_context(torch._C._DisableTorchDispatch())
        ends.enter_context(torch._C._InferenceMode(True))
        ends.enter_context(torch._C.DisableTorchFunction())
        yield
