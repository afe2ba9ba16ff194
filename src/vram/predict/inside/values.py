"""Follows the values of small tensors of a program on a null GPU, where kernels compute nothing.

`Values` sees every function of PyTorch that the program calls. Where the contents of all tensors involved are
known, it computes the same function on their shadows, so that what the program reads is right, and tells the
null GPU how many elements a selection finds. Everything else is a guess, and is listed. The functions
themselves run on the null GPU as they would without this, so allocations do not change.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from . import creation, reading, sizes
from .collectives import follow_collectives
from .functions import RANDOM, TABLES, UNPREDICTABLE, functions, mutates, transparent
from .guesses import Guess, Guesses
from .plausible import Noise
from .shadows import Shadow, Shadows, device_storage, is_plain, on_the_cpu, version_of
from .tracebacks import hide_ours

__all__ = ["Guess", "Known", "Unknown", "Values", "begin", "end", "guesses", "tensors_in"]

RANDOM_NUMBERS = "random numbers of the same distribution"

_HANDLERS: dict[str, Any] = {**reading.HANDLERS, **creation.HANDLERS, **sizes.HANDLERS}


class Unknown(Exception):
    """A value is not known."""


class Known:
    """What is known of the tensors in the arguments of a call."""

    __slots__ = ("device", "shadows", "tensors", "unknown")

    def __init__(self, *, unknown: bool = False, device: bool = False) -> None:
        """Begin without tensors."""
        self.tensors: list[Any] = []  # on the device, with known contents
        self.shadows: dict[int, Shadow] = {}  # of these, by their identity
        self.unknown = unknown  # there are others, on the device or of a subclass
        self.device = device  # there are some on the device

    @property
    def assumed(self) -> str | None:
        """Why the contents are what they are; None if all are exact."""
        return next((each.assumed for each in self.shadows.values() if each.assumed), None)


_NO_TENSORS = Known()
_ONLY_UNKNOWN = Known(unknown=True, device=True)
_ON_THE_HOST = Known(unknown=True)


class Values(TorchFunctionMode):  # type: ignore[misc]
    """The shadows of a process and what was guessed. One object serves all threads."""

    def __init__(self, _torch: Any = None) -> None:
        """Prepare; `begin` starts."""
        super().__init__()
        self.shadows = Shadows()
        self.noise = Noise()
        self._guesses = Guesses(os.path.dirname(torch.__file__), os.path.dirname(__file__), "<")
        self._undo: list[Callable[[], None]] = []
        self._compiles = False
        self._plans: dict[Any, Any] = dict.fromkeys(transparent())
        for kind, names in TABLES.items():
            for function, name in functions(names):
                self._plans[function] = (_HANDLERS[kind], name)
        self.guess = self._guesses.add

    # ---- beginning and end --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Follow the values of this thread, of threads that start from now on, and of backward passes."""
        torch._C._push_on_torch_function_stack(self)
        self._patch(threading.Thread, "_bootstrap_inner", self._following)
        self._patch(torch.autograd, "_engine_run_backward", self._following_backward)
        follow_collectives(self, self._patch)
        if "torch._dynamo.eval_frame" in sys.modules:
            self._prepare_compiler()
        else:
            self._patch(torch, "compile", self._before_compiler)

    def end(self) -> None:
        """Follow nothing any more."""
        while self._undo:
            self._undo.pop()()
        self._remove()

    def guesses(self) -> list[Guess]:
        """What was guessed so far."""
        return self._guesses.list()

    def _patch(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = getattr(owner, name, None)
        if original is not None:
            setattr(owner, name, functools.wraps(original)(wrap(original)))
            self._undo.append(lambda: setattr(owner, name, original))

    def _following(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Have `function` run with its values followed."""

        def followed(*args: Any, **kwargs: Any) -> Any:
            if self._here():
                return function(*args, **kwargs)
            torch._C._push_on_torch_function_stack(self)
            try:
                return function(*args, **kwargs)
            finally:
                self._remove()

        return followed

    def _following_backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Have a backward pass run with its values followed, unless it is compiled."""
        follow = self._following(function)

        def followed(*args: Any, **kwargs: Any) -> Any:
            compiler = sys.modules.get("torch._dynamo.compiled_autograd")
            if not getattr(compiler, "compiled_autograd_enabled", False):
                return follow(*args, **kwargs)
            with self._unfollowed():
                return function(*args, **kwargs)

        return followed

    def _before_compiler(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Prepare the compiler on its first use; it is not imported before."""

        def compiled(*args: Any, **kwargs: Any) -> Any:
            if not self._compiles:
                self._compiles = True
                self._prepare_compiler()
            return function(*args, **kwargs)

        return compiled

    def _prepare_compiler(self) -> None:
        from torch._dynamo import eval_frame, trace_rules

        trace_rules.add(__package__)  # never compile functions of this folder
        self._patch(eval_frame._TorchDynamoContext, "__call__", self._wrapping_compiled)

    def _wrapping_compiled(self, wrap: Callable[..., Any]) -> Callable[..., Any]:
        """Do not follow what torch.compile compiles: it would try to compile this mode as well."""

        def wrap_compiled(context: Any, function: Any) -> Any:
            compiled = wrap(context, function)
            if not isinstance(compiled, FunctionType):
                return compiled  # a module, whose methods are compiled the same way

            @functools.wraps(compiled)
            def unfollowed(*args: Any, **kwargs: Any) -> Any:
                with self._unfollowed():
                    return compiled(*args, **kwargs)

            unfollowed._torchdynamo_wrapper_id = id(unfollowed)  # type: ignore[attr-defined]
            return unfollowed

        return wrap_compiled

    def _here(self) -> bool:
        """Whether the values of this thread are followed."""
        count = torch._C._len_torch_function_stack()
        return any(torch._C._get_function_stack_at(each) is self for each in range(count))

    @contextlib.contextmanager
    def _unfollowed(self) -> Iterator[None]:
        """Do not follow values here. The modes of this thread keep their order: each is left as the last."""
        if not self._here():
            yield
            return
        above = self._remove()
        try:
            yield
        finally:
            for _mode in above:
                torch._C._pop_torch_function_stack()
            for mode in (self, *reversed(above)):
                torch._C._push_on_torch_function_stack(mode)

    def _remove(self) -> list[Any]:
        """Leave the modes of this thread, wherever this one is among them; returns those above it."""
        above = []
        while torch._C._len_torch_function_stack():
            mode = torch._C._pop_torch_function_stack()
            if mode is self:
                break
            above.append(mode)
        for mode in reversed(above):
            torch._C._push_on_torch_function_stack(mode)
        return above

    # ---- every call ---------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, and mirror what it does."""
        plan = self._plans.get(func, _ANY)
        try:
            if plan is None:
                return func(*args, **kwargs) if kwargs else func(*args)
            handler, name = plan
            if handler is None:
                return self.call(getattr(func, "__name__", ""), func, args, kwargs or {})
            return handler(self, name, func, args, kwargs or {})
        except BaseException as error:
            hide_ours(error)  # our calls would keep their arguments as long as the program keeps the error
            raise

    def call(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, wide: bool = False
    ) -> Any:
        """Call a function on the device; if its arguments are known, also on their shadows."""
        known = self.look(args, kwargs, wide=wide)
        targets = [each for each in tensors_in(kwargs["out"]) if each.is_cuda] if "out" in kwargs else []
        if not known.tensors and not targets:
            return func(*args, **kwargs)
        if name in RANDOM and known.tensors:
            self.noise.seed(known.tensors[0].device, kwargs.get("generator"))
        kept = all(self.shadows.covers(each) or self.shadow(each) is not None for each in targets)
        before = [version_of(tensor) for tensor in known.tensors]
        out = func(*args, **kwargs)
        changed = [
            (tensor, version)
            for tensor, version in zip(known.tensors, before, strict=False)
            if version_of(tensor) != version or (mutates(name) and tensor.is_inference())
        ]
        if not changed and not targets and self._nothing_new(out, known):
            return out
        try:
            if not kept:
                raise Unknown
            values = self.compute(name, func, args, kwargs, known)
            self.keep(out, values, RANDOM_NUMBERS if name in RANDOM else known.assumed, changed)
        except Exception:
            self.drop(targets)
            self.drop([tensor for tensor, _version in changed])
        return out

    def _nothing_new(self, out: Any, known: Known) -> bool:
        """Whether the results of a call that changed nothing are views, or of no interest."""
        if known.unknown:
            return True
        bases = {device_storage(tensor) for tensor in known.tensors}
        return all(each.is_cuda and device_storage(each) in bases for each in tensors_in(out))

    def look(self, args: Any, kwargs: dict[str, Any], *, wide: bool = False) -> Known:
        """What is known of the arguments. With `wide`, also random numbers too many to compute with."""
        found = tensors_in(args)
        for key, value in kwargs.items():
            if key != "out" and isinstance(value, (torch.Tensor, list, tuple)):
                found = found + tensors_in(value)
        known, unknown, device = None, False, False
        for tensor in found:
            if tensor.is_cuda:
                device = True
                shadow = self.shadows.find(tensor) if is_plain(tensor) else None
                if shadow is None or (shadow.wide and not wide):
                    unknown = True
                if shadow is not None:
                    known = known or Known(device=True)
                    known.tensors.append(tensor)
                    known.shadows[id(tensor)] = shadow
            elif not is_plain(tensor):
                unknown = True
        if known is None:
            return (_ONLY_UNKNOWN if device else _ON_THE_HOST) if unknown else _NO_TENSORS
        known.unknown = unknown
        return known

    def shadow(self, tensor: Any) -> Shadow | None:
        """The shadow of a tensor on the device, if it is a plain one and its contents are known."""
        return self.shadows.find(tensor) if is_plain(tensor) else None

    def compute(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: Known
    ) -> Any:
        """Call a function on the shadows of its arguments. Raises Unknown, and what the function raises."""
        custom = isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
        custom = custom or str(getattr(func, "__module__", "")).startswith("torch.distributed")
        if known.unknown or custom or UNPREDICTABLE.search(name) or capturing():
            raise Unknown
        with on_the_cpu():
            args = tuple(_shadowed(each, known) for each in args)
            kwargs = {key: _shadowed(each, known) for key, each in kwargs.items() if key not in _LEFT_OUT}
            if "device" in kwargs:
                kwargs["device"] = "cpu"
            if name in RANDOM:
                kwargs["generator"] = self.noise.generator
            if isinstance(func, FunctionType):  # may draw random numbers
                with _own_random_numbers():
                    return func(*args, **kwargs)
            return func(*args, **kwargs)

    def keep(
        self, out: Any, values: Any, assumed: str | None, changed: Sequence[tuple[Any, int]] = ()
    ) -> None:
        """Mirror the results of a function, and the arguments that it changed."""
        with on_the_cpu():
            for tensor, version in changed:
                self.shadows.written(tensor, version, assumed)
            for device, value in zip(tensors_in(out), tensors_in(values), strict=False):
                if not device.is_cuda:
                    if device is not value:
                        device.data.copy_(value)  # does not count as a write
                elif device.shape == value.shape and is_plain(device):
                    self.shadows.put(device, value, assumed)
                else:
                    self.shadows.drop(device)

    def drop(self, tensors: Sequence[Any]) -> None:
        """The contents of these tensors are no longer known."""
        for tensor in tensors:
            self.shadows.drop(tensor)


_ANY = (None, "")
_LEFT_OUT = frozenset({"out", "pin_memory", "non_blocking"})


def tensors_in(value: Any) -> list[Any]:
    """The tensors in arguments or results, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[Any] = []
    if isinstance(value, (tuple, list)):
        if len(value) > 64 and isinstance(value[0], (int, float)):
            return found  # plain data
        for each in value:
            if isinstance(each, torch.Tensor):
                found.append(each)
            elif isinstance(each, (tuple, list)):
                found += tensors_in(each)
    return found


def capturing() -> bool:
    """Whether a CUDA graph is captured: what it computes happens later, and any number of times."""
    return bool(torch.cuda.is_current_stream_capturing())


def _shadowed(value: Any, known: Known) -> Any:
    """An argument as it is on the CPU."""
    if isinstance(value, torch.Tensor):
        return known.shadows[id(value)].view(value) if value.is_cuda else value
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if type(value) in (tuple, list):
        return type(value)([_shadowed(each, known) for each in value])
    return value


@contextlib.contextmanager
def _own_random_numbers() -> Any:
    """Restore the program's CPU generator afterwards."""
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


_values: Values | None = None


def begin(torch: Any = None) -> None:
    """Follow the values of this process."""
    global _values
    if _values is None:
        _values = Values(torch)
        _values.begin()


def end() -> None:
    """Follow nothing any more."""
    global _values
    if _values is not None:
        _values.end()
        _values = None


def guesses() -> list[Guess]:
    """What was guessed so far."""
    return _values.guesses() if _values is not None else []
