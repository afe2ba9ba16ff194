"""Spilling under PyTorch: which tensors go to the host first, and saved activations that go ahead of time.

The pool moves pages when the device is full (`vram.core.spill`); for each move it stops all streams. This
module makes that rare, and chooses better. Parameters go last, because matrix products read them many times,
and states of optimizers go first, because a step reads them once. After memory was short for the first time,
the tensors that autograd saves for the backward pass are copied to pinned memory, the earliest first, while
the device is nearly full. They return before the backward pass needs them, and the copies overlap with
computation. Pages that had moved return when a step begins, if saved tensors can make room for them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from vram.config import KEPT_FREE
from vram.core.spill import SavedTensors, on_shortage, postpone_return
from vram.errors import VramError

__all__ = ["steer_spilling"]

LEAST_BYTES: Final = 1 << 20
"""Smaller tensors stay on the device."""
MOST_OF_STORAGE: Final = 4
"""A view of a storage that is more than so many times as large stays on the device."""
SLACK_STEPS: Final = 16
"""If what recent steps needed is not enough, more is kept free. This surplus decreases by one part in so many
in each step."""
RECENT_STEPS: Final = 8
"""Steps that tell how much the program allocates beyond what autograd saves. Steps may differ in length."""
READ_BYTES: Final = 32 << 20
"""The pool's counters are read after so much was saved, at most."""
MOST_ENTRIES: Final = 4096
AHEAD_BYTES: Final = 256 << 20
"""How much returns before it is needed: 5 ms of copying."""
AHEAD_TENSORS: Final = 16
"""Saved tensors that are used between the begin of a return and its use, at least."""
LOOKS: Final = 32
"""While pages are on the host, the peak is looked at about so many times in a backward pass."""
MOST_PATIENCE: Final = 64
"""Steps after which pages return, at most."""


@functools.cache
def steer_spilling(torch: Any) -> None:
    """Steer spilling in all pools that PyTorch uses, from now on."""
    on_shortage(_Steering(torch).shortage)


class _Steering:
    """What PyTorch knows about memory when a pool is short of it."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._parameters: weakref.WeakSet[Any] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._activations: dict[int, _Activations] = {}
        self._scope: _Scope | None = None
        modules = torch.nn.modules.module
        modules.register_module_parameter_registration_hook(self._on_parameter)
        optimizers = importlib.import_module("torch.optim.optimizer")
        optimizers.register_optimizer_step_post_hook(self._on_step)

    def _on_parameter(self, _module: Any, _name: str, parameter: Any) -> None:
        if parameter is not None:
            self._parameters.add(parameter)

    def _on_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._optimizers.add(optimizer)

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
        for optimizer in tuple(self._optimizers):
            for state in tuple(optimizer.state.values()):
                values = state.values() if isinstance(state, dict) else ()
                yield from (value for value in tuple(values) if isinstance(value, self._torch.Tensor))

    def addresses(self, index: int) -> set[int]:
        """Return the addresses of all parameters on a device."""
        return {_address(tensor) for tensor in tuple(self._parameters) if _on_device(tensor, index)}


class _Scope:
    """Lets the activations of a model's forward pass come to `_Activations`: from the outermost module on.

    PyTorch's hooks for saved tensors are a stack for each thread, so they are pushed only where no others are
    active, and popped when the module returns. Function transforms refuse to run while there are hooks, so
    these are popped before one begins.
    """

    def __init__(self, torch: Any, activations: dict[int, _Activations]) -> None:
        self._torch = torch
        self._autograd = torch._C._autograd
        self._activations = activations
        self._thread = threading.local()
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
        for activations in tuple(self._activations.values()):
            activations.enter()
        self._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)

    def _leave(self, module: Any) -> None:
        if module is not None and getattr(self._thread, "module", None) is module:
            self._thread.module = None
            self._autograd._pop_saved_tensors_default_hooks()

    def _saves(self) -> bool:
        torch = self._torch
        return bool(
            torch.is_grad_enabled()
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
        # Without detach(), it would lead to the graph that keeps it, and neither would ever be freed.
        return tensor.detach(), tensor._version

    @staticmethod
    def _unpack(saved: Any) -> Any:
        if isinstance(saved, _Saved):
            return saved.unpack()
        tensor, version = saved
        _check_version(tensor, version, tensor.size())
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
        self.ahead = 0  # bytes that have returned and are not used yet
        self.saved = 0  # tensors
        self._parameters = parameters
        self._fixed: set[int] = set()  # addresses of parameters
        self._entered = True  # a module, since these were looked up
        self._moment: _Moment | None = None  # of the tensors saved last
        self._pool = weakref.ref(pool)
        self._copied: SavedTensors = pool._saved
        self._lock = threading.Lock()  # the backward pass runs in threads of its own
        self._here: deque[weakref.ref[_Entry]] = deque()  # on the device, the earliest first
        self._away: list[weakref.ref[_Entry]] = []  # on the host, the earliest first
        self._known: dict[int, weakref.ref[_Entry]] = {}  # by address
        self._steps = _Steps()
        self._pages = _Pages()
        self._watch: Any = None  # of the pool's peak, while more could leave
        self._need: _Step | None = None  # of this step
        self._due = 0  # bytes that leave as soon as they are saved
        self._bytes = 0  # saved in this step
        self._lacking = 0  # bytes, when the pool's counters were read last; negative: there was room
        self._capacity = 0  # bytes that the pool could have when its counters were read last
        self._slack = 0  # bytes that were lacking in spite of what recent steps needed
        self._was_short = False  # in this step
        self._begin = 0  # bytes in use when the step began
        self._seen = 0  # … when the pool's counters were read last
        self._left = 0  # bytes that have left in this step
        self._unread = 0  # bytes saved since the counters were read
        self._next_read = 0

    def shortage(self, needed: int) -> None:
        """Keep more memory free from now on: pages had to move."""
        self._pages.moved = True
        if self._watch is not None and self.saved:
            self._slack += needed
            self._was_short = True

    def count(self, bytes: int, *, out: int = 0, back: int = 0) -> None:
        """Count what is in host memory, and what was copied."""
        self._copied.bytes += bytes
        self._copied.out_bytes += out
        self._copied.back_bytes += back

    # -- saving

    def enter(self) -> None:
        """Note that an outermost module begins."""
        self._entered = True

    def pack(self, tensor: Any) -> _Saved | None:
        """Return what stands for a saved tensor until the backward pass needs it. None: it stays."""
        storage = _storage(self.torch, tensor)
        if storage is None:
            return None
        with self._lock:
            if self._entered and self.saved == 0:
                self._entered, self._fixed = False, self._parameters(self.device.index)
            if storage.data_ptr() in self._fixed:
                return None
            if not LEAST_BYTES <= storage.nbytes() <= MOST_OF_STORAGE * tensor.nbytes:
                self._unread += storage.nbytes()
                return None
            if self.torch.cuda.is_current_stream_capturing():
                return None
            if self.saved == 0:
                self._begin_step()
            if self.saved == 0 or len(self._here) > MOST_ENTRIES:
                self._forget()
            saved = _Saved(self._entry(storage, tensor._version), tensor)
            if self._unread >= self._next_read:
                self._make_room()
        return saved

    def _begin_step(self) -> None:
        """Learn from the last step, and watch the peak of this one."""
        pool = self._pool()
        if pool is None:
            return
        if self._watch is not None:
            pool._peaks.end(pool, self._watch)
        if self._need is not None:
            if not self._steps.known:  # until now the slack stood for them
                self._slack = 0
            elif not self._was_short:
                self._slack -= self._slack // SLACK_STEPS
            self._steps.add(self._need)
        self._due = self._steps.least_due
        kept = self._slack + int(self._capacity * KEPT_FREE)
        self._pages.begin_step(pool, self._capacity - kept)
        raw, self._watch = pool._peaks.begin(pool)
        self._begin = self._seen = raw["live"]
        self._need, self._was_short = None, False
        self._bytes = self._left = self._unread = self._next_read = 0

    def _note_need(self, pool: Any, *, over: bool) -> None:
        """Note how much was needed beyond what was in use when the last tensor was saved.

        It is over when the backward pass uses the first tensor that has left: all others have been used, so
        later peaks cannot be lowered by letting more leave. What returned ahead of need was not needed.
        """
        raw = (pool._peaks.end if over else pool._peaks.of)(pool, self._watch)
        last = self._seen + self._unread
        before = 0 if self._need is None else self._need.needed
        self._need = _Step(
            needed=max(before, raw["peak_live"] - self.ahead - last),
            saved=max(last + self._left - self._begin, LEAST_BYTES),
            due=max(0, self._left + self._lacking + self._unread),
        )
        if over:
            self._watch = None

    def _forget(self) -> None:
        """Forget what no saved tensor uses anymore."""
        self._here = deque(each for each in self._here if each() is not None)
        self._away = [each for each in self._away if each() is not None]
        self._known = {at: each for at, each in self._known.items() if each() is not None}
        if not self._known:  # several threads may have counted at once
            self.saved = self.ahead = self._copied.bytes = 0

    def _entry(self, storage: Any, version: int) -> _Entry:
        """Return the entry of a storage. One that has left stands for it while the contents are the same."""
        stream = self.torch.cuda.current_stream(self.device)
        if self._moment is None or self._moment.stream != stream:
            self._moment = _Moment(stream)
        reference = self._known.get(storage.data_ptr())
        known = None if reference is None else reference()
        if known is not None and known.holds(version):
            known.save(version, self._moment)
            return known
        made = _Entry(self, storage, version, self._moment, self.saved, self._bytes)
        self._known[storage.data_ptr()] = made.reference
        self._here.append(made.reference)
        self._unread += made.bytes
        self._bytes += made.bytes
        return made

    def _make_room(self) -> None:
        """Let the earliest tensors leave: those that are due, and more while less than the margin is free."""
        pool = self._pool()
        if pool is None:
            return
        if self._moment is not None:
            self._moment.event()
            self._moment = None
        raw, config = pool.raw_stats(), pool.config()
        capacity = config["limit"] or raw["reserved"]["current"] + pool.device.free_memory
        grown = raw["live"] + self._left - self._begin
        margin = self._steps.expected(grown) + self._slack + int(capacity * KEPT_FREE)
        lacking = raw["live"] - raw["spilled_live"] + margin - capacity
        due = self._due - self._left
        while self._here:
            entry = self._here.popleft()()
            if entry is None or entry.storage is None or entry.resized:
                continue
            wanted = lacking > 0 or entry.bytes <= due
            if not wanted or self._copied.bytes + entry.bytes > config["spill"] or not entry.leave():
                self._here.appendleft(entry.reference)
                break
            lacking -= entry.bytes
            due -= entry.bytes
            self._left += entry.bytes
            self._away.append(entry.reference)
        self._seen = lacking + capacity - margin + raw["spilled_live"]
        self._lacking = lacking
        self._capacity = capacity
        self._unread = 0
        self._next_read = READ_BYTES if due > 0 else max(READ_BYTES, -lacking // 4)

    # -- using

    def used(self, used: _Entry, *, away: bool) -> None:
        """Begin the next returns: the backward pass uses an entry."""
        with self._lock:
            pool = self._pool()
            if pool is not None and self._watch is not None and (away or self._need is None):
                self._note_need(pool, over=away)
            if pool is not None:
                cover = max(0, used.before - self._left) + self.ahead
                self._pages.note_use(pool, used.before, cover, self._bytes)
            if self._away and self.torch.cuda.is_current_stream_capturing():
                return
            while self._away:
                entry = self._away[-1]()
                if entry is not None and entry.fetched is None:
                    if entry.index < used.index - AHEAD_TENSORS or self.ahead >= AHEAD_BYTES:
                        return
                    if pool is None or not self._fits(pool, entry.bytes):
                        return
                    try:
                        entry.fetch()
                    except self.torch.OutOfMemoryError:
                        return  # it is not needed yet
                self._away.pop()

    def _fits(self, pool: Any, bytes: int) -> bool:
        """Return whether the device has room for so much."""
        raw = pool.raw_stats()
        return bool(raw["live"] - raw["spilled_live"] + bytes <= self._capacity)


@dataclass(frozen=True, slots=True)
class _Step:
    """What one step needed, in bytes."""

    needed: int
    """Beyond what was in use when the last tensor was saved."""
    saved: int
    """Growth of memory until then."""
    due: int
    """Saved tensors that had to leave."""


class _Steps:
    """What recent steps needed."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=RECENT_STEPS)

    @property
    def known(self) -> bool:
        """Whether there was a step."""
        return bool(self._steps)

    @property
    def least_due(self) -> int:
        """Bytes that had to leave in each of them. They may leave at once, while there is time to copy."""
        return min((step.due for step in self._steps), default=0)

    def add(self, step: _Step) -> None:
        """Note a step."""
        self._steps.append(step)

    def expected(self, grown: int) -> int:
        """Return what a step needs whose memory has grown so much: shorter ones less, in proportion."""
        grown = max(0, grown)
        return max((step.needed * min(grown, step.saved) // step.saved for step in self._steps), default=0)


class _Pages:
    """Brings pages back when a step begins, as far as no recent step would have been short of memory.

    Saved tensors are cheaper to have on the host than pages: their copies overlap with computation, while
    kernels wait for each access to a page there, and an optimizer reads its states several times. So while
    pages are on the host, this looks for the least that a step needs on the device: at each moment, what was
    in use less the saved tensors that were not needed yet and could have left.
    """

    def __init__(self) -> None:
        self.moved = False  # to the host, in this step
        self._watch: Any = None  # of the pool's peak since the last look, while pages are on the host
        self._at = 0  # bytes saved before the tensor that was used at the last look
        self._least = 0  # bytes that this step needs on the device
        self._recent: deque[int] = deque(maxlen=RECENT_STEPS)  # … and steps before it
        self._waited = 0  # steps since the last return that was too early
        self._patience = 1  # … after which pages may return
        self._returned = False  # pages, since they moved last

    def begin_step(self, pool: Any, capacity: int) -> None:
        """Learn from the last step, and let pages return. Steps may use `capacity` bytes."""
        postpone_return(pool)
        if self._watch is not None:
            self._look(pool, 0)
            pool._peaks.end(pool, self._watch)
            self._recent.append(self._least)
            self._waited += 1
        if self.moved and self._returned:
            self._put_off()
        there = pool.raw_stats()["spilled_live"]
        if there and self._recent and self._waited >= self._patience:
            there -= self._bring_back(pool, there - max(0, max(self._recent) - capacity))
        self.moved = False
        self._watch = pool._peaks.begin(pool)[1] if there else None
        self._least = self._at = 0

    def note_use(self, pool: Any, before: int, cover: int, saved: int) -> None:
        """The backward pass uses a tensor, and `before` bytes of the step's `saved` were saved before it.

        Of these, `cover` bytes are on the device and could have left.
        """
        if self._watch is not None and (self._at == 0 or before <= self._at - saved // LOOKS):
            self._at = before
            self._look(pool, cover)

    def _look(self, pool: Any, cover: int) -> None:
        """Note what was needed since the last look, at most."""
        raw = pool._peaks.end(pool, self._watch)
        self._least = max(self._least, raw["peak_live"] - cover)
        self._watch = pool._peaks.begin(pool)[1]

    def _bring_back(self, pool: Any, most: int) -> int:
        if most <= 0:
            return 0
        returned = 0
        with contextlib.suppress(VramError):  # another thread moves memory, or captures a graph
            returned = pool.bring_back(most, True)
        if returned:
            self._returned = True
        else:
            self._put_off()
        return int(returned)

    def _put_off(self) -> None:
        self._waited, self._returned = 0, False
        self._patience = min(2 * self._patience, MOST_PATIENCE)


class _Moment:
    """A moment of a stream: all work queued before it is awaited."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._event: Any = None

    def event(self) -> Any:
        """Return its event. The moment is now unless it has passed."""
        if self._event is None:
            self._event = self.stream.record_event()
        return self._event


class _Entry:
    """One storage with saved tensors: on the device, on the host, or returned."""

    def __init__(
        self, owner: _Activations, storage: Any, version: int, moment: _Moment, index: int, before: int
    ) -> None:
        self.reference: weakref.ref[_Entry] = weakref.ref(self)
        self.storage = storage  # None: it has left
        self.bytes: int = storage.nbytes()
        self.index = index
        self.before = before  # bytes that the step had saved before it
        self.left: Any = None  # the event behind the copy to the host
        self.fetched: Any = None  # the storage that it has returned to
        self._home: Any = None  # the stream that this belongs to
        self._arrived: Any = None
        self._used = False
        self._host: Any = None
        self._version = version
        self._alive: Any = None  # refers to the storage that has left, until everybody has dropped it
        self.owner = owner
        self._moment = moment  # when it was saved last

    @property
    def resized(self) -> bool:
        """Whether the storage is empty now, or has another size: its owner fills it before it is used."""
        return bool(self.storage.nbytes() != self.bytes)

    def holds(self, version: int) -> bool:
        """Return whether it has the contents of the storage at its address, which is at this version."""
        if self.storage is not None:
            return True
        return version == self._version and self._alive is not None and not self._alive.expired()

    def save(self, version: int, moment: _Moment) -> None:
        """Note that the same storage was saved again."""
        if self.storage is not None:
            self._version, self._moment = version, moment

    def leave(self) -> bool:
        """Copy it to the host and drop it. False: there is no pinned memory for it."""
        torch, stream = self.owner.torch, self.owner.to_host
        flat = _flat(torch, self.storage)
        try:
            self._host = torch.empty(self.bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:
            return False
        self.owner.count(self.bytes, out=self.bytes)
        stream.wait_event(self._moment.event())  # and not for what was queued since
        with torch.no_grad(), torch.cuda.stream(stream):
            self._host.copy_(flat, non_blocking=True)
        self.left = stream.record_event()
        flat.record_stream(stream)
        self._alive = self.owner.weak_reference(self.storage)
        self.storage = None
        return True

    def fetch(self) -> None:
        """Begin to copy it back, into memory of the current stream."""
        torch, stream = self.owner.torch, self.owner.to_device
        flat = torch.empty(self.bytes, dtype=torch.uint8, device=self.owner.device)
        self._home = torch.cuda.current_stream(self.owner.device)
        stream.wait_stream(self._home)
        stream.wait_event(self.left)
        with torch.no_grad(), torch.cuda.stream(stream):
            flat.copy_(self._host, non_blocking=True)
        flat.record_stream(stream)
        self._arrived = stream.record_event()
        self.owner.ahead += self.bytes
        self.owner.count(0, back=self.bytes)
        self.fetched = flat.untyped_storage()

    def use(self) -> Any:
        """Return the storage, usable on the current stream."""
        self.owner.used(self, away=self.storage is None)
        if self.storage is not None:
            return self.storage
        if self.fetched is None:
            self.fetch()
        stream = self.owner.torch.cuda.current_stream(self.owner.device)
        stream.wait_event(self._arrived)
        if stream != self._home:
            _flat(self.owner.torch, self.fetched).record_stream(stream)
        self._note_use()
        return self.fetched

    def _note_use(self) -> None:
        if self.fetched is not None and not self._used:
            self._used = True
            self.owner.ahead -= self.bytes

    def __del__(self) -> None:
        self._note_use()
        if self._host is not None:
            self.owner.count(-self.bytes)


class _Saved:
    """Stands for one saved tensor: a view of an entry's storage."""

    __slots__ = ("_counter", "_dtype", "_entry", "_version", "_view")

    def __init__(self, entry: _Entry, tensor: Any) -> None:
        self._entry = entry
        entry.owner.saved += 1
        self._dtype = tensor.dtype
        self._view = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self._version = tensor._version
        self._counter = tensor.detach()
        self._counter.data = entry.owner.nothing  # it shares the tensor's version, and not its memory

    def unpack(self) -> Any:
        """Return the tensor."""
        entry = self._entry
        _check_version(self._counter, self._version, self._view[1])
        storage = entry.use()
        empty = entry.owner.torch.empty(0, dtype=self._dtype, device=storage.device)
        return empty.set_(storage, *self._view)

    def __del__(self) -> None:
        self._entry.owner.saved -= 1


def _check_version(counter: Any, version: int, size: Any) -> None:
    """Raise if a tensor was changed after it was saved, as PyTorch does where there are no hooks."""
    if counter._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of size {list(size)} is at version {counter._version}; expected version {version}. "
            "torch.autograd.set_detect_anomaly(True) shows the operation that saved it."
        )


# ---- tensors ----------------------------------------------------------------------------------------------


def _storage(torch: Any, tensor: Any) -> Any:
    """Return the storage that has a tensor's values as they are, or None."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # it has none of its own
        return None


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


def _index_of(pool: Any) -> int | None:
    kind, _, index = pool.device.name.partition(":")
    return int(index) if kind == "cuda" else None
