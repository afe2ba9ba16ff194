"""PyTorch under the race checker: which memory its operators use on which stream, and what orders them.

Operators come from a dispatch mode, which each thread has. Allocations, frees, events and waits come from the
callbacks that PyTorch has for its own sanitizer, whichever allocator it uses. This module translates; the
rules are those of `checker` and `history`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import os
import re
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from vram import _native
from vram.core.device import Device
from vram.core.stream import Stream
from vram.race.call_sites import Site, stack_here
from vram.race.clocks import StreamKey
from vram.race.operators import Role, roles_of
from vram.race.reach import Found, Owner
from vram.race.regions import Region, array_region

if TYPE_CHECKING:
    from vram.race.checker import Watch

__all__ = ["Follower", "follow"]

LEGACY, PER_THREAD = 1, 2
"""CUDA's names for the default stream and for the default stream of the calling thread."""


def follow(watch: Watch) -> Follower | None:
    """Report to `watch` what PyTorch does, until `stop()`. None if there is no PyTorch built for CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.backends.cuda.is_built():
        return None
    follower = Follower(watch, torch)
    _wait_for_autograd_at_exit()
    try:
        follower.start()
    except BaseException:
        follower.stop()
        raise
    return follower


@functools.cache
def _wait_for_autograd_at_exit() -> None:
    """Give autograd's threads time to drop the check's objects before the interpreter ends.

    They drop them a moment after `backward()` has returned. A thread that does so while the interpreter ends
    aborts the process.
    """
    atexit.register(time.sleep, 0.05)


class _Allocator:
    """Stands for PyTorch's own allocator on one device."""

    closed = False

    def __init__(self, device: Device) -> None:
        self.device = device


class _Mark:
    """Stands for an event of PyTorch between its records."""


class _Thread(threading.local):
    """What this thread does: something that is not the program's."""

    unwatched = False


class _Unseen(NamedTuple):
    """Memory that was allocated, but that no operator has shown yet. PyTorch does not tell its size."""

    key: StreamKey
    site: Site
    pool: Any


class Follower:
    """Translates what PyTorch does for a `Watch`."""

    def __init__(self, watch: Watch, torch: Any) -> None:
        self.active = False
        self._watch = watch
        self._torch = torch
        self._clocks = watch.history.clocks
        self._mode_class = _mode_class(torch)
        self._mode: Any = None
        self._trace = _Trace(torch)
        self._patches: list[tuple[Any, str, Any]] = []
        self._cores: dict[int, Any] = {}
        self._allocators: dict[int, _Allocator] = {}
        self._unseen: dict[int, _Unseen] = {}
        self._live: dict[int, Any] = {}  # the devices of live addresses
        self._gradients: set[int] = set()  # allocated by the backward pass
        self._events: defaultdict[int, _Mark] = defaultdict(_Mark)
        self._own_streams: set[StreamKey] = set()  # default streams of threads
        self._capture: StreamKey | None = None
        self._thread = _Thread()

    # -- start and stop

    def start(self) -> None:
        self.active = True
        self._patch()
        self._trace.start(
            {
                "EventCreation": self._on_event_gone,
                "EventDeletion": self._on_event_gone,
                "EventRecord": self._on_event_record,
                "EventWait": self._on_event_wait,
                "EventSynchronization": self._on_event_synchronize,
                "StreamSynchronization": self._on_stream_synchronize,
                "DeviceSynchronization": self._on_device_synchronize,
                "MemoryAllocation": self._on_allocate,
                "MemoryDeallocation": self._on_free,
            }
        )
        if self._torch.cuda.is_initialized():
            self._take_what_is_there()
        self._mode = self._mode_class(self)
        self._mode.__enter__()
        _move_to_the_bottom(self._mode)

    def stop(self) -> None:
        """Leave PyTorch as it was. A thread that outlives the check keeps a mode that does nothing."""
        self.active = False
        self._trace.stop()
        for owner, name, original in reversed(self._patches):
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._patches.clear()
        _remove(self._mode)

    def _take_what_is_there(self) -> None:
        """Register the memory that PyTorch has allocated so far."""
        with contextlib.suppress(Exception):  # a pluggable allocator has no snapshot
            for segment in self._torch.cuda.memory_snapshot():
                key = self._clocks.key(self._core(segment["device"]), _plain(segment["stream"]))
                for block in segment["blocks"]:
                    if block["state"] == "active_allocated":
                        pool = self._pool(segment["device"], block["address"])
                        size = block.get("requested_size", block["size"])
                        self._live[block["address"]] = key.core
                        self._watch.on_tensor(key, block["address"], size, None, pool)

    # -- devices and streams

    def _core(self, index: int) -> Any:
        core = self._cores.get(index)
        if core is None:
            device = Device(f"cuda:{index}")
            core = self._cores[index] = device._core
            self._allocators[index] = _Allocator(device)
            self._watch.names.defaults[core] = "torch.cuda.default_stream()"
        return core

    def _pool(self, index: int, address: int) -> Any:
        """Return the vram pool that has the address, or what stands for PyTorch's own allocator."""
        self._core(index)
        pool: Any = _native.plug_pool(index)
        if pool is not None:
            with contextlib.suppress(Exception):
                pool.info(address)
                return pool
        return self._allocators[index]

    def _current(self, index: int) -> StreamKey:
        """Return the stream on which work of this thread is queued now."""
        if self._capture is not None and self._torch.cuda.is_current_stream_capturing():
            return self._capture
        return self._key(index, self._torch._C._cuda_getCurrentRawStream(index))

    def _key(self, index: int, handle: int) -> StreamKey:
        core, clocks = self._core(index), self._clocks
        default = clocks.key(core, 0)
        if handle == PER_THREAD:
            # It has the same handle on every thread. It and the default stream wait for each other.
            key = clocks.key(core, -threading.get_ident())
            self._own_streams.add(key)
            self._watch.quietly(clocks.follow, key, [default])
            return key
        if handle <= LEGACY:
            if self._own_streams:
                self._watch.quietly(clocks.follow, default, self._own_streams)
            return default
        return clocks.key(core, handle)

    def _here(self) -> int:
        return int(self._torch._C._cuda_getDevice())

    # -- memory

    def _on_allocate(self, address: int) -> None:
        index = self._here()
        key = self._current(index)
        site = Site("allocated", key.handle, "", stack_here())
        pool = self._pool(index, address)
        self._unseen[address] = _Unseen(key, site, pool)
        self._live[address] = key.core
        if isinstance(pool, _Allocator) and self._in_backward():
            self._gradients.add(address)
        self._watch.on_tensor_allocated(key, address, site)

    def _on_free(self, address: int) -> None:
        core = self._live.pop(address, None)
        self._gradients.discard(address)
        if self._unseen.pop(address, None) is None and core is not None:
            self._watch.on_tensor_freed(core, address)

    def _in_backward(self) -> bool:
        return bool(self._torch._C._current_graph_task_id() != -1)

    def _found(self, tensor: Any, writes: bool) -> tuple[StreamKey, Found] | None:
        """Return what a use of a tensor touches, and on which stream; None if it has no memory on a GPU."""
        storage = tensor.untyped_storage()
        region = _region(tensor) if storage.device.type == "cuda" else None
        if region is None or not region.start:
            return None
        index = storage.device.index
        key, base = self._current(index), storage.data_ptr()
        unseen = self._unseen.pop(base, None)
        if unseen is not None:
            self._watch.on_tensor(unseen.key, base, storage.nbytes(), unseen.site, unseen.pool)
        elif base not in self._live:
            self._adopt(storage, index, key)
        if base in self._gradients and self._in_backward():
            # PyTorch's own allocator does not show that autograd records the streams of gradients.
            self._watch.on_plug_record_stream(self._allocators[index], base, key.handle)
        owner = Owner(self._allocators[index], base, storage.nbytes(), key.handle, gone=False)
        return key, Found(region, writes, named=True, owner=owner)

    def _adopt(self, storage: Any, index: int, key: StreamKey) -> None:
        """Register memory that PyTorch did not allocate, as that of another process, for its lifetime."""
        core, base = self._core(index), storage.data_ptr()
        known = self._watch.history.find(core, base)
        if known is not None and known.freed is None:
            return
        self._live[base] = core
        self._watch.on_tensor(key, base, storage.nbytes(), None, self._pool(index, base))
        weakref.finalize(storage, _call, weakref.WeakMethod(self._on_free), base).atexit = False

    # -- operators

    def operator(self, mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and report what it reads and writes.

        Its uses are reported before it runs, so that a race can be raised. If it waits inside, that wait
        seems to include them, although it may launch a kernel afterwards: then they are reported again.
        """
        roles = roles_of(self._torch, func)
        if self._thread.unwatched:
            return func(*args, **kwargs)
        if roles.composite:
            with mode:
                return func.decompose(*args, **kwargs)
        if roles.records_stream:
            return self._record_stream(func, args, kwargs)
        given = [
            (tensor, role) for value, role in roles.matched(args, kwargs) for tensor in self._tensors(value)
        ]
        shared = {_base(tensor) for tensor, _ in given}
        used = [(tensor, role is Role.WRITES) for tensor, role in given if role is not Role.NOTHING]
        self._report(used, roles.name, self._watch.on_operator)
        waits = self._clocks.thread.waits
        result = func(*args, **kwargs)
        made = [(tensor, True) for tensor in self._tensors(result) if _base(tensor) not in shared]
        queued = made if roles.writes_results else []
        if self._clocks.thread.waits != waits:
            written = [tensor for tensor, writes in (*used, *made) if writes]
            queued = [] if roles.waits_last(args, kwargs, written) else [*used, *queued]
        self._report(queued, roles.name, self._watch.on_result)
        for tensor, _ in made:
            self._found(tensor, False)  # the program may declare its use
        return result

    def _tensors(self, value: Any) -> Iterator[Any]:
        """Yield the tensors with memory on a GPU in an argument or a result."""
        if isinstance(value, self._torch.Tensor):
            if value.is_cuda and not _is_wrapper(self._torch, type(value)):
                yield from self._parts(value)
        elif isinstance(value, (list, tuple)):
            for each in value:
                yield from self._tensors(each)

    def _parts(self, tensor: Any) -> Iterator[Any]:
        torch = self._torch
        if tensor._is_zerotensor():
            return  # autograd's zeros, which have no memory
        if tensor.layout is torch.strided:
            yield tensor
        elif tensor.layout is torch.sparse_coo:
            yield from (tensor._indices(), tensor._values())
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())

    def _report(
        self,
        tensors: list[tuple[Any, bool]],
        what: str,
        report: Callable[[StreamKey, list[Found], str], None],
    ) -> None:
        """Report the uses of one operator, on the current stream of each device."""
        queued: defaultdict[StreamKey, list[Found]] = defaultdict(list)
        for tensor, writes in tensors:
            found = self._found(tensor, writes)
            if found is not None:
                queued[found[0]].append(found[1])
        for key, uses in queued.items():
            report(key, uses, what)

    def _record_stream(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        tensor, stream = args[0], args[1] if len(args) > 1 else kwargs["s"]
        found = self._found(tensor, False)
        if found is not None:
            _, used = found
            assert used.owner is not None
            self._watch.on_plug_record_stream(used.owner.pool, used.owner.block, self._handle(stream))
        return result

    def _handle(self, stream: Any) -> int:
        """Return the handle of a stream; inside operators it is not a torch.cuda.Stream."""
        if not hasattr(stream, "cuda_stream"):
            stream = self._torch.cuda.Stream(
                stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
            )
        return _plain(stream.cuda_stream)

    # -- order

    def _on_event_gone(self, event: int) -> None:
        self._events.pop(event, None)

    def _on_event_record(self, event: int, handle: int) -> None:
        if not self._captured():
            key = self._named(handle, _RECORDED)
            self._watch.quietly(self._clocks.record, self._events[event], key)

    def _on_event_wait(self, event: int, handle: int) -> None:
        if not self._captured():
            key = self._named(handle, _WAITS)
            self._watch.quietly(self._clocks.wait, key, self._events[event])

    def _on_event_synchronize(self, event: int) -> None:
        mark = self._events[event]
        self._watch.quietly(lambda: self._clocks.learn(self._clocks.of(mark)))

    def _on_stream_synchronize(self, handle: int) -> None:
        key = self._named(handle, _WAITED_FOR)
        self._watch.quietly(lambda: self._clocks.learn(self._clocks.view(key)))

    def _on_device_synchronize(self) -> None:
        device = Device._of(self._core(self._here()))
        self._watch.quietly(lambda: self._clocks.learn(self._clocks.marked(device)))

    def _captured(self) -> bool:
        """Return whether what this thread queues becomes part of a graph."""
        return self._capture is not None and bool(self._torch.cuda.is_current_stream_capturing())

    def _named(self, handle: int, pattern: re.Pattern[str]) -> StreamKey:
        """Return a stream of the current device, after looking for its name in the source line."""
        key = self._key(self._device_of(handle), handle)
        self._watch.names.notice(key.core, key.handle, stack_here(), pattern)
        return key

    def _device_of(self, handle: int) -> int:
        """Return the device of a stream: where it is known, or else the current one."""
        for index, core in self._cores.items():
            if handle > PER_THREAD and self._clocks.knows(core, handle):
                return index
        return self._here()

    # -- calls that PyTorch has no callback for

    def _patch(self) -> None:
        cuda = self._torch.cuda
        self._replace(cuda.StreamContext, "__enter__", self._enter_stream)
        self._replace(cuda.Stream, "query", self._query_stream)
        self._replace(cuda.Event, "query", self._query_event)
        self._replace(cuda.CUDAGraph, "capture_begin", self._capture_begin)
        self._replace(cuda.CUDAGraph, "capture_end", self._capture_end)
        self._replace(cuda.CUDAGraph, "replay", self._replay)
        self._replace(threading.Thread, "start", self._start_thread)
        self._replace(self._torch, "compile", self._compile)
        self._run_uncompiled()

    def _replace(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return replacement(functools.partial(original, *args[:1]), *args, **kwargs)

        self._patches.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, call)

    def _enter_stream(self, original: Callable[[], Any], context: Any) -> Any:
        self._join_thread()
        result = original()
        if context.stream is not None:
            key = self._key(context.stream.device_index, context.stream.cuda_stream)
            self._watch.names.notice(key.core, key.handle, stack_here(), _ENTERED)
        return result

    def _query_stream(self, original: Callable[[], bool], stream: Any) -> bool:
        before = self._clocks.view(self._key(stream.device_index, stream.cuda_stream))
        finished = original()
        if finished:
            self._watch.quietly(self._clocks.learn, before)
        return finished

    def _query_event(self, original: Callable[[], bool], event: Any) -> bool:
        before = self._clocks.of(self._events[event.cuda_event])
        finished = original()
        if finished:
            self._watch.quietly(self._clocks.learn, before)
        return finished

    def _capture_begin(self, original: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
        with self._unwatched():
            result = original(*args, **kwargs)
        index = self._here()
        self._capture = self._key(index, self._torch._C._cuda_getCurrentRawStream(index))
        self._watch.on_capture(graph, Stream._view(self._capture.core, self._capture.handle))
        return result

    def _capture_end(self, original: Callable[[], Any], graph: Any) -> Any:
        key, self._capture = self._capture, None
        if key is not None:
            self._watch.on_captured(graph, Stream._view(key.core, key.handle))
        with self._unwatched():
            return original()

    def _replay(self, original: Callable[[], Any], graph: Any) -> Any:
        self._watch.on_replay(self._current(self._here()), graph)
        with self._unwatched():
            return original()

    def _compile(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args[1:], **kwargs)
        self._run_uncompiled()
        return result

    def _run_uncompiled(self) -> None:
        """Let functions for the compiler run as they are written, once the compiler is there.

        It would compile the check itself, or leave no operators to see.
        """
        compiler = sys.modules.get("torch._dynamo.eval_frame")
        known = any(owner is compiler for owner, _, _ in self._patches)
        if self.active and not known and hasattr(compiler, "_callback_from_stance"):
            self._replace(compiler, "_callback_from_stance", self._compiler_callback)

    def _compiler_callback(self, original: Callable[[], Any], callback: Any) -> Any:
        """Let the compiler only trace, for exports and for operators that take functions, as torch.cond."""
        exports = getattr(getattr(callback, "_torchdynamo_orig_backend", None), "_export", False)
        lifts = getattr(sys.modules.get("torch._higher_order_ops.utils"), "_in_hop_compile", bool)
        return original() if exports or lifts() else None

    @contextlib.contextmanager
    def _unwatched(self) -> Iterator[None]:
        """PyTorch writes to memory of its own here: the states of random numbers."""
        self._thread.unwatched = True
        try:
            yield
        finally:
            self._thread.unwatched = False

    # -- threads

    def _start_thread(self, original: Callable[[], Any], thread: Any) -> Any:
        run = thread.run

        def watched() -> None:
            thread.__dict__.pop("run", None)
            mode = self._join_thread()
            try:
                run()
            finally:
                if mode is not None:
                    _remove(mode)

        if self.active and "run" not in thread.__dict__:
            thread.run = watched
        return original()

    def _join_thread(self) -> Any:
        """Have the operators of this thread reported; returns the mode if it is new."""
        if not self.active or any(isinstance(mode, self._mode_class) for mode in _modes()):
            return None
        mode = self._mode_class(self)
        _dispatch()._push_mode(mode)
        _move_to_the_bottom(mode)
        return mode


# ---- the dispatch mode ------------------------------------------------------------------------------------


@functools.cache
def _mode_class(torch: Any) -> Any:
    class OperatorMode(_dispatch().TorchDispatchMode):  # type: ignore[misc]
        """Reports the operators of one thread to a Follower."""

        supports_higher_order_operators = True

        def __init__(self, follower: Follower) -> None:
            super().__init__()
            self.follower = follower

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # which would import it

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True  # otherwise the compiler never again compiles what it meets

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kinds = [kind for kind in types if _is_wrapper(torch, kind)]
            if not self.follower.active or any(kind.__module__.startswith(_TRACING) for kind in kinds):
                return func(*args, **(kwargs or {}))
            if kinds:
                return NotImplemented  # the operators that it consists of come here
            return self.follower.operator(self, func, args, kwargs or {})

    return OperatorMode


_TRACING = "torch._subclasses"
"""Its tensors have no memory."""


def _is_wrapper(torch: Any, kind: type) -> bool:
    """Return whether a class of tensors has operators of its own, which work on other tensors."""
    own = getattr(kind, "__torch_dispatch__", None)
    return own is not torch._C._disabled_torch_dispatch_impl


def _dispatch() -> Any:
    return importlib.import_module("torch.utils._python_dispatch")


def _modes() -> list[Any]:
    """Return the modes of this thread, outermost first."""
    return list(_dispatch()._get_current_dispatch_mode_stack())


def _above(mode: Any) -> list[Any]:
    modes = _modes()
    return modes[modes.index(mode) + 1 :]


def _move_to_the_bottom(mode: Any) -> None:
    """Let the program's own modes see operators first; each is left where the program expects it."""
    others = [each for each in _modes() if each is not mode and not each.is_infra_mode()]
    if not others:
        return
    dispatch = _dispatch()
    for own, theirs in zip(_flags(mode), _flags(others[0]), strict=False):
        own[-1], theirs[-1] = theirs[-1], True
    for _ in (*others, mode):
        dispatch._pop_mode()
    for each in (mode, *others):
        dispatch._push_mode(each)


def _remove(mode: Any) -> None:
    """Take a mode off this thread, if it is there, and leave the others."""
    if not any(each is mode for each in _modes()):
        return
    dispatch = _dispatch()
    above = [dispatch._pop_mode() for _ in _above(mode)]
    if above:
        for own, theirs in zip(_flags(mode), _flags(above[-1]), strict=False):
            theirs[-1] = own.pop()
    if _flags(mode):
        mode.__exit__(None, None, None)
    else:
        dispatch._pop_mode()
    for each in reversed(above):
        dispatch._push_mode(each)


def _flags(mode: Any) -> list[deque[bool]]:
    """Return what a mode restores at its end: whether there was any mode, of several kinds, at its begin."""
    found = (each for name, each in vars(mode).items() if name.startswith("old_") and isinstance(each, deque))
    return [each for each in found if each]


# ---- the callbacks ----------------------------------------------------------------------------------------


class _Trace:
    """The callbacks of PyTorch's sanitizer. PyTorch can only turn them on, so the flag itself is reset."""

    FLAG = "_ZN3c104impl8GPUTrace9haveStateE"

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._callbacks: list[tuple[list[Any], Any]] = []
        self._flag: ctypes.c_bool | None = None
        with contextlib.suppress(OSError, ValueError):  # then they stay on, and call nothing
            library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
            self._flag = ctypes.c_bool.in_dll(library, self.FLAG)

    def start(self, callbacks: dict[str, Callable[..., None]]) -> None:
        trace = importlib.import_module("torch.cuda._gpu_trace")
        for name, callback in callbacks.items():
            listed = getattr(trace, f"{name}Callbacks").callback_list
            listed.append(callback)
            self._callbacks.append((listed, callback))
        self._torch._C._activate_gpu_trace()
        if self._flag is not None:
            self._flag.value = True

    def stop(self) -> None:
        for listed, callback in self._callbacks:
            if callback in listed:
                listed.remove(callback)
        if self._flag is not None and not any(listed for listed, _ in self._callbacks):
            self._flag.value = False
        self._callbacks.clear()


# ---- tensors and names ------------------------------------------------------------------------------------


def _region(tensor: Any) -> Region | None:
    item, address = tensor.element_size(), tensor.data_ptr()
    if tensor.is_contiguous():
        size = tensor.numel() * item
        return Region(address, address + size) if size else None
    return array_region(address, item, tuple(tensor.shape), [stride * item for stride in tensor.stride()])


def _call(method: weakref.WeakMethod[Callable[[int], None]], address: int) -> None:
    found = method()
    if found is not None:
        found(address)


def _base(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _plain(handle: int) -> int:
    return 0 if handle == LEGACY else handle


_NAME = r"([A-Za-z_][\w.]*(?:\[[\w.\"'-]*\])*)"
_ENTERED = re.compile(rf"\b(?:stream|set_stream|StreamContext)\(\s*{_NAME}\s*\)")
_RECORDED = re.compile(rf"\.(?:wait_stream|record)\(\s*{_NAME}\s*\)|(?<![\w.\])]){_NAME}\.record_event\(")
_WAITS = re.compile(rf"\.wait\(\s*{_NAME}\s*\)|(?<![\w.\])]){_NAME}\.wait_(?:stream|event)\(")
_WAITED_FOR = re.compile(rf"(?<![\w.\])]){_NAME}\.synchronize\(")
