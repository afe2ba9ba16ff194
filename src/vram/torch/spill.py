"""Spilling under PyTorch: which tensors go to the host first, and saved activations that go ahead of time.

The pool moves pages when the device is full (`vram.core.spill`); for each move it stops all streams. This
module makes that rare, and chooses better. Parameters go last, because matrix products read them many times,
and states of optimizers go first, because a step reads them a few times. After memory was short for the first
time, the tensors that autograd saves for the backward pass are copied to pinned memory, the earliest first,
while the device is nearly full. They return before the backward pass needs them, and the copies overlap with
computation. Pages that had moved return when a step begins, if saved tensors can make room for them. After
some steps in which nothing leaves, autograd saves its tensors as usual until memory is short again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

from vram.core.saved import LEAST_BYTES, Look, SavedPolicy
from vram.core.spill import SavedTensors, on_shortage, postpone_return
from vram.errors import VramError

__all__ = ["steer_spilling"]

MOST_OF_STORAGE: Final = 4
"""A view of a storage that is more than so many times as large stays on the device."""
MOST_ENTRIES: Final = 4096
MOST_STREAMS: Final = 64
LEAST_FOR_PAGES: Final = 128 << 20
"""If less host memory than this is left beside what is needed, saved tensors keep none that they do not use.
More pages than necessary move at a time, and each has up to 32 MiB."""


@functools.cache
def steer_spilling(torch: Any) -> None:
    """Steer spilling in all pools that PyTorch uses, from now on."""
    on_shortage(_Steering(torch).shortage)


class _Steering:
    """What PyTorch knows about memory when a pool is short of it."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        # By id: tensors compare by contents, and tied weights are registered more than once.
        self._parameters: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._optimizers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._activations: dict[int, _Activations] = {}
        self._scope: _Scope | None = None
        modules = torch.nn.modules.module
        modules.register_module_parameter_registration_hook(self._on_parameter)
        optimizers = importlib.import_module("torch.optim.optimizer")
        optimizers.register_optimizer_step_post_hook(self._on_step)

    def _on_parameter(self, _module: Any, _name: str, parameter: Any) -> None:
        if parameter is not None:
            self._parameters[id(parameter)] = parameter

    def _on_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._optimizers[id(optimizer)] = optimizer

    def shortage(self, pool: Any, needed: int) -> None:
        """Tell the pool which memory goes first and last; called before it chooses pages."""
        index = _index_of(pool)
        if index is None:
            return
        last = self.addresses(index)
        first = {_address(tensor) for tensor in self._states() if _on_device(tensor, index)}
        pool.steer_spill_allocations(list(first - last), list(last))
        activations = self._activations.get(index)
        if activations is not None:
            activations.shortage(needed)
            return
        self._activations[index] = _Activations(self._torch, index, pool, self.addresses)
        if self._scope is None:
            self._scope = _Scope(self._torch, self._activations)

    def _states(self) -> Iterator[Any]:
        """Return the first state of each parameter.

        A step reads and writes the momentum, which comes first, less often than the others (in AdamW 3 and 5
        times), unless the optimizer is fused. The others go next, because they are old.
        """
        for optimizer in _alive(self._optimizers):
            for parameter, state in tuple(optimizer.state.items()):
                values = tuple(state.values()) if isinstance(state, dict) else ()
                first = next((value for value in values if self._is_state(value, parameter)), None)
                if first is not None:
                    yield first

    def _is_state(self, value: Any, parameter: Any) -> bool:
        """Return whether it belongs to the values of a parameter. A count of steps does not."""
        tensors = isinstance(value, self._torch.Tensor) and isinstance(parameter, self._torch.Tensor)
        return tensors and bool(value.numel() == parameter.numel())

    def addresses(self, index: int) -> set[int]:
        """Return the addresses of all parameters on a device."""
        return {_address(tensor) for tensor in _alive(self._parameters) if _on_device(tensor, index)}


def _alive(values: weakref.WeakValueDictionary[int, Any]) -> list[Any]:
    """Return the values that exist. Other threads may add some meanwhile; `values()` would notice that."""
    return [value for reference in values.valuerefs() if (value := reference()) is not None]


class _Scope:
    """Lets the activations of a model's forward pass come to `_Activations`: from the outermost module on.

    PyTorch's hooks for saved tensors are a stack for each thread, so they are pushed only where no others are
    active, and popped when the module returns. Function transforms refuse to run while there are hooks, so
    these are popped before one begins. PyTorch calls no hook of a module that Ctrl-C ends; they are popped
    when its call is gone, with the traceback.
    """

    def __init__(self, torch: Any, activations: dict[int, _Activations]) -> None:
        self._torch = torch
        self._autograd = torch._C._autograd
        self._activations = activations
        self._thread = threading.local()
        self._call = torch.nn.Module._call_impl.__code__
        modules = torch.nn.modules.module
        is_compiling = torch.compiler.is_compiling

        # The compiler of PyTorch reads these functions and leaves out what follows their first line.
        def enter(module: Any, _args: Any) -> None:
            if not is_compiling():
                self._enter(module)

        def leave(module: Any, _args: Any, _output: Any) -> None:
            if not is_compiling():
                self._leave(module)

        modules.register_module_forward_pre_hook(enter)
        modules.register_module_forward_hook(leave, always_call=True)
        # The compiler knows torch.autograd.graph.disable_saved_tensors_hooks, so that one cannot be replaced.
        disable = self._autograd._saved_tensors_hooks_disable

        @functools.wraps(disable)
        def disable_hooks(*args: Any, **kwargs: Any) -> None:
            self._leave(getattr(self._thread, "module", None))
            disable(*args, **kwargs)

        self._autograd._saved_tensors_hooks_disable = disable_hooks

    def _enter(self, module: Any) -> None:
        if getattr(self._thread, "module", None) is not None or not self._saves():
            return
        self._thread.module = module
        self._thread.call = self._call_of(module)
        for activations in self._activations.copy().values():
            activations.enter()
        self._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)

    def _leave(self, module: Any) -> None:
        if module is None or getattr(self._thread, "module", None) is not module:
            return
        top = self._autograd._top_saved_tensors_default_hooks(False)
        if top is not None:
            if top[0] != self._pack:  # the program's, above ours
                return
            self._autograd._pop_saved_tensors_default_hooks()
        self._thread.module = self._thread.call = None

    def _call_of(self, module: Any) -> weakref.ref[Any] | None:
        """Return a reference that leaves the module when its call, which is in progress, is gone."""

        def gone(call: weakref.ref[Any]) -> None:
            if getattr(self._thread, "call", None) is call:  # it may be another thread's
                self._leave(module)

        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not self._call:
            frame = frame.f_back
        inner = None if frame is None else frame.f_locals.get("inner")  # a function that each call makes
        return None if inner is None else weakref.ref(inner, gone)

    def _saves(self) -> bool:
        torch = self._torch
        return bool(
            any(not activations.policy.idle for activations in self._activations.copy().values())
            and torch.is_grad_enabled()
            and not torch.jit.is_tracing()
            and torch._C._current_graph_task_id() == -1  # not computed again by the backward pass
            and self._autograd._saved_tensors_hooks_is_enabled()
            and self._autograd._top_saved_tensors_default_hooks(False) is None
        )

    def _pack(self, tensor: Any) -> Any:
        if type(tensor) is self._torch.Tensor and tensor.is_cuda:
            activations = self._activations.get(tensor.get_device())
            saved = None if activations is None else activations.pack(tensor)
            if saved is not None:
                return saved
        # Without detach(), a result would lead to the graph that keeps it, and neither would ever be freed.
        return (tensor if tensor.grad_fn is None else tensor.detach()), tensor._version

    @staticmethod
    def _unpack(saved: Any) -> Any:
        if isinstance(saved, _Saved):
            return saved.unpack()
        tensor, version = saved
        if tensor._version != version:
            raise _changed(tensor.size(), tensor._version, version)
        return tensor


class _Activations:
    """The saved tensors of one device, in the order in which they were saved."""

    def __init__(self, torch: Any, index: int, pool: Any, parameters: Callable[[int], set[int]]) -> None:
        self.torch = torch
        self.device = torch.device("cuda", index)
        self.nothing = torch.empty(0, device=self.device)
        self.to_host = torch.cuda.Stream(self.device)
        self.to_device = torch.cuda.Stream(self.device)
        self.weak_reference = importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef
        self.saved = 0  # tensors
        self._streams: dict[int, Any] = {}  # by handle: to look one up is slow
        self._parameters = parameters
        self._fixed: set[int] = set()  # addresses of parameters
        self._entered = True  # a module, since these were looked up
        self._moment: _Moment | None = None  # of the tensors saved last
        self._pool = weakref.ref(pool)
        self._copied: dict[str | None, SavedTensors] = pool._saved  # by tag
        self.policy: SavedPolicy[_Entry] = SavedPolicy(_PoolMemory(pool), whole=not _in_forward(torch))
        self._lock = threading.Lock()  # of the policy: the backward pass runs in threads of its own
        self._known: dict[int, weakref.ref[_Entry]] = {}  # by address

    def shortage(self, needed: int) -> None:
        """Keep more memory free from now on: pages have to move."""
        self._release_host_bytes(needed)
        if self.policy.idle:
            self.policy.wake(whole=not _in_forward(self.torch))
        self.policy.shortage(needed, saving=self.saved > 0)

    def counts_of(self, storage: Any) -> SavedTensors:
        """Return what counts the saved tensors with the tag of this memory."""
        pool, tag = self._pool(), None
        if pool is not None:
            with contextlib.suppress(VramError):  # it is not the pool's
                tag = pool.info(storage.data_ptr())["tag"]
        return self._copied.setdefault(tag, SavedTensors())

    def take_host_bytes(self, bytes: int) -> bool:
        """Take host memory of what may be used to spill. False: there is not so much."""
        pool = self._pool()
        try:
            return pool is not None and bool(pool.take_host_bytes(bytes))
        except VramError:
            return False

    def give_host_bytes(self, bytes: int) -> None:
        """Give it back. The pinned memory is kept for the next tensors."""
        pool = self._pool()
        if pool is not None:
            pool.give_host_bytes(bytes)

    def _release_host_bytes(self, needed: int) -> None:
        """Release the pinned memory that is kept, if there is not enough host memory for pages."""
        pool = self._pool()
        if pool is None:
            return
        raw = pool.raw_stats()
        taken = raw["spill"]["taken_bytes"]
        if taken and pool.config()["spill"] - taken - raw["spilled"] < needed + LEAST_FOR_PAGES:
            self.torch._C._host_emptyCache()
            pool.release_host_bytes()

    # -- streams

    def stream(self) -> Any:
        """Return the current stream."""
        handle = self.torch._C._cuda_getCurrentRawStream(self.device.index)
        found = self._streams.get(handle)
        if found is None:
            if len(self._streams) >= MOST_STREAMS:
                self._streams.clear()
            found = self._streams[handle] = self.torch.cuda.current_stream(self.device)
        return found

    def copy(self, to: Any, source: Any, stream: Any) -> None:
        """Queue a copy of bytes on a stream. This is what `torch.cuda.stream` does, with fewer calls."""
        torch, index = self.torch, self.device.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.stream(stream):
                to.copy_(source, non_blocking=True)
            return
        before = self.stream()
        _set_stream(torch, stream)
        try:
            to.copy_(source, non_blocking=True)
        finally:
            _set_stream(torch, before)

    # -- saving

    def enter(self) -> None:
        """Note that an outermost module begins."""
        self._entered = True

    def pack(self, tensor: Any) -> _Saved | None:
        """Return what stands for a saved tensor until the backward pass needs it. None: it stays."""
        size = tensor.numel() * tensor.element_size()
        if MOST_OF_STORAGE * size < LEAST_BYTES:  # as most are: weights of norms, statistics, masks
            with self._lock:
                self.policy.pass_over(size)
            return None
        storage = _storage(self.torch, tensor)
        if storage is None:
            return None
        with self._lock:
            if self.policy.idle or self._pool() is None:
                return None
            if self._entered and self.saved == 0:
                self._entered, self._fixed = False, self._parameters(self.device.index)
            if storage.data_ptr() in self._fixed or self._belongs_to_others(tensor, storage):
                return None
            if not LEAST_BYTES <= storage.nbytes() <= MOST_OF_STORAGE * size:
                self.policy.pass_over(storage.nbytes())
                return None
            if self.torch.cuda.is_current_stream_capturing():
                return None
            if self.saved == 0 and not self.policy.begin_step():
                return None
            if self.saved == 0 or self.policy.entries > MOST_ENTRIES:
                self._forget()
            saved = _Saved(self._entry(storage, tensor._version), tensor.detach())
            if self.policy.must_look and self._moment is not None:
                self._moment.event()
            self.policy.let_leave()
        return saved

    def _belongs_to_others(self, tensor: Any, storage: Any) -> bool:
        """Whether its owner may exchange the memory, because it is a parameter's, or it is not PyTorch's.

        The owner of memory that came from elsewhere would not wait for the copy to the host.
        """
        torch = self.torch
        return bool(
            (tensor._is_view() and isinstance(tensor._base, torch.nn.Parameter))
            or not torch._C._has_Standard_Deleter(storage._cdata)
        )

    def _forget(self) -> None:
        """Forget what no saved tensor uses anymore."""
        self.policy.forget()
        self._known = {at: each for at, each in self._known.items() if each() is not None}
        if not self._known:  # several threads may have counted at once
            self.saved = self.policy.ahead = 0
            for counts in self._copied.copy().values():
                counts.bytes = 0

    def _entry(self, storage: Any, version: int) -> _Entry:
        """Return the entry of a storage. One that has left stands for it while the contents are the same.

        That holds on streams that its copy has waited for.
        """
        stream = self.stream()
        if self._moment is None or self._moment.passed or self._moment.stream is not stream:
            self._moment = _Moment(stream)
        reference = self._known.get(storage.data_ptr())
        known = None if reference is None else reference()
        if known is not None and known.holds(storage, version, stream):
            known.save(version, self._moment)
            return known
        made = _Entry(self, storage, version, self._moment)
        self._known[storage.data_ptr()] = made.reference
        self.policy.save(made, made.reference)
        return made

    # -- using

    def use(self, saved: _Saved) -> Any:
        """Return a tensor that the backward pass uses, and begin the next returns."""
        used = saved.entry
        with self._lock:
            if self._pool() is not None:
                found = self.policy.use(used, away=used.storage is None)
                if found:
                    self.to_device.wait_stream(self.stream())  # with what was queued to get the memory
                    for entry in found:
                        entry.fetch()
            if used.storage is not None:
                return saved.tensor.detach()
            used.return_now()
        return saved.in_storage(used.arrive())


class _PoolMemory:
    """A pool as `SavedPolicy` sees it. It is asked only while the pool exists."""

    def __init__(self, pool: Any) -> None:
        self._reference = weakref.ref(pool)

    @property
    def _pool(self) -> Any:
        return self._reference()

    def begin_step(self) -> int:
        pool = self._pool
        postpone_return(pool)
        limit: int = pool.config()["limit"]
        return limit or int(pool.raw_stats()["reserved"]["current"] + pool.device.free_memory)

    def look(self) -> Look:
        return Look(*self._pool.usage(False))

    def look_at_peak(self) -> Look:
        return Look(*self._pool.usage(True))

    def bring_back(self, most: int) -> int:
        try:
            return int(self._pool.bring_back(most, True))
        except VramError:  # another thread moves memory, or captures a graph
            return 0


class _Moment:
    """A moment of a stream: all work queued before it is awaited."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._event: Any = None

    @property
    def passed(self) -> bool:
        """Whether it is before what is queued from now on."""
        return self._event is not None

    def event(self) -> Any:
        """Return its event. The moment is now unless it has passed."""
        if self._event is None:
            self._event = self.stream.record_event()
        return self._event


class _Entry:
    """One storage with saved tensors: on the device, on the host, or returned."""

    before = 0  # bytes that the step had saved before it
    left: Any = None  # the event behind the copy to the host
    fetched: Any = None  # the storage that it has returned to
    _home: Any = None  # the stream that this belongs to
    _arrived: Any = None
    _used = False
    _host: Any = None
    _counts: Any = None  # of its tag, once it has left
    _alive: Any = None  # refers to the storage that has left, until everybody has dropped it

    def __init__(self, owner: _Activations, storage: Any, version: int, moment: _Moment) -> None:
        self.reference: weakref.ref[_Entry] = weakref.ref(self)
        self.owner = owner
        self.storage = storage  # None: it has left
        self.bytes: int = storage.nbytes()
        self.tensors: dict[int, weakref.ref[_Saved]] = {}  # saved, by id
        self._version = version
        self._identity = storage._cdata
        self._moments = {id(moment.stream): moment}  # when it was saved last, by stream

    @property
    def stays(self) -> bool:
        """Whether it has left, or its owner has emptied the storage, to fill it again before it is used."""
        return self.storage is None or bool(self.storage.nbytes() != self.bytes)

    @property
    def returned(self) -> bool:
        """Whether it has memory on the device again."""
        return self.fetched is not None

    def holds(self, storage: Any, version: int, stream: Any) -> bool:
        """Return whether it has the contents of the storage, at this version, for a save on this stream.

        Another storage may have its address. The identity is not used again while it is compared here: the
        entry has the storage, or a weak reference to it.
        """
        if storage._cdata != self._identity:
            return False
        if self.storage is not None:
            return True
        alive = self._alive is not None and not self._alive.expired()
        return alive and version == self._version and id(stream) in self._moments

    def save(self, version: int, moment: _Moment) -> None:
        """Note that the same storage was saved again."""
        if self.storage is not None:
            self._version, self._moments[id(moment.stream)] = version, moment

    def leave(self) -> bool:
        """Copy it to the host and drop it. False: there is no host memory for it."""
        torch, owner = self.owner.torch, self.owner
        if not owner.take_host_bytes(self.bytes):
            return False
        try:
            self._host = torch.empty(self.bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except BaseException as error:
            owner.give_host_bytes(self.bytes)
            if isinstance(error, RuntimeError):
                return False
            raise
        self._counts = owner.counts_of(self.storage)
        self._counts.bytes += self.bytes
        self._counts.out_bytes += self.bytes
        flat, stream = _flat(torch, self.storage), owner.to_host
        for moment in self._moments.values():
            stream.wait_event(moment.event())  # and not for what was queued since
        owner.copy(self._host, flat, stream)
        self.left = stream.record_event()
        for user in (stream, *(moment.stream for moment in self._moments.values())):
            flat.record_stream(user)
        self._alive = owner.weak_reference(self.storage)
        # An exception, such as Ctrl-C, may come between any two of these steps.
        tensors = [saved for each in list(self.tensors.values()) if (saved := each()) is not None]
        for saved in tensors:
            saved.note_view()
        self.storage = None
        for saved in tensors:
            saved.drop()
        return True

    def get_room(self, *, needed: bool = False) -> bool:
        """Get memory of the current stream to return to. False: there is none, and it is not needed yet."""
        torch = self.owner.torch
        if not needed and torch.cuda.is_current_stream_capturing():
            return False
        try:
            flat = torch.empty(self.bytes, dtype=torch.uint8, device=self.owner.device)
        except torch.OutOfMemoryError:
            if needed:
                raise
            return False
        self._home = self.owner.stream()
        self.owner.policy.ahead += self.bytes
        self.fetched = flat.untyped_storage()
        return True

    def fetch(self) -> None:
        """Begin to copy it back. pre: there is room, and the stream of the copies waits for it."""
        stream, flat = self.owner.to_device, _flat(self.owner.torch, self.fetched)
        stream.wait_event(self.left)
        self.owner.copy(flat, self._host, stream)
        flat.record_stream(stream)
        self._arrived = stream.record_event()
        self._counts.back_bytes += self.bytes

    def return_now(self) -> None:
        """Return, if that has not begun. The owner has the lock."""
        if self._arrived is None:
            if self.fetched is None:
                self.get_room(needed=True)
            self.owner.to_device.wait_stream(self._home)
            self.fetch()
        self._note_use()

    def arrive(self) -> Any:
        """Return the storage that it has returned to, usable on the current stream."""
        stream = self.owner.stream()
        stream.wait_event(self._arrived)
        if stream is not self._home:
            _flat(self.owner.torch, self.fetched).record_stream(stream)
        return self.fetched

    def _note_use(self) -> None:
        if self.fetched is not None and not self._used:
            self._used = True
            self.owner.policy.ahead -= self.bytes

    def __del__(self) -> None:
        self._note_use()
        if self._counts is not None:
            self._counts.bytes -= self.bytes
        if self._host is not None:
            self.owner.give_host_bytes(self.bytes)


class _Saved:
    """Stands for one saved tensor: a view of an entry's storage."""

    __slots__ = ("__weakref__", "_version", "_view", "entry", "tensor")

    def __init__(self, entry: _Entry, tensor: Any) -> None:
        """`tensor` is detached, and shares the version of the one that is saved."""
        self.entry = entry
        self.tensor = tensor
        self._version = tensor._version
        self._view: Any = None  # of a storage that has left
        entry.owner.saved += 1
        entry.tensors[id(self)] = weakref.ref(self)
        if entry.storage is None:
            self.note_view()
            self.drop()

    def note_view(self) -> None:
        """Note which part of the storage it is, which may leave then."""
        tensor = self.tensor
        self._view = tensor.dtype, (tensor.storage_offset(), tensor.size(), tensor.stride())

    def drop(self) -> None:
        """Drop the memory, because the entry has left. The tensor keeps the version."""
        self.tensor.data = self.entry.owner.nothing

    def unpack(self) -> Any:
        """Return the tensor."""
        if self.tensor._version != self._version:
            size = self.tensor.size() if self._view is None else self._view[1][1]
            raise _changed(size, self.tensor._version, self._version)
        return self.entry.owner.use(self)

    def in_storage(self, storage: Any) -> Any:
        """Return the tensor, whose memory is this now."""
        dtype, view = self._view
        given = self.tensor.detach()  # it has the same version, which second derivatives check
        given.data = self.entry.owner.torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *view)
        return given

    def __del__(self) -> None:
        del self.entry.tensors[id(self)]
        self.entry.owner.saved -= 1


def _changed(size: Any, version: int, expected: int) -> RuntimeError:
    """The error for a tensor that was changed after it was saved, like PyTorch's where there are no hooks."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a tensor of size {list(size)} is at version {version}; expected version {expected}. "
        "torch.autograd.set_detect_anomaly(True) shows the operation that saved it."
    )


# ---- tensors ----------------------------------------------------------------------------------------------


def _storage(torch: Any, tensor: Any) -> Any:
    """Return the storage that has a tensor's values as they are, or None."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # it has none of its own
        return None


def _set_stream(torch: Any, stream: Any) -> None:
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def _flat(torch: Any, storage: Any) -> Any:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _on_device(tensor: Any, index: int) -> bool:
    return bool(
        tensor.is_cuda and tensor.get_device() == index and type(tensor).__module__.startswith("torch")
    )


def _address(tensor: Any) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):  # it has no storage of its own
        return 0


def _in_forward(torch: Any) -> bool:
    """Return whether the calling thread is in the forward pass of a module."""
    if torch._C._current_graph_task_id() != -1:  # a backward pass computes it again
        return False
    call = torch.nn.Module._call_impl.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not call:
        frame = frame.f_back
    return frame is not None


def _index_of(pool: Any) -> int | None:
    kind, _, index = pool.device.name.partition(":")
    return int(index) if kind == "cuda" else None
