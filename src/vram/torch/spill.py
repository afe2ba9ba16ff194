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
MOST_STREAMS: Final = 64
PARTS: Final = 16
"""The saved tensors of a step are divided into so many parts, to follow the backward pass."""
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
        self._streams: dict[int, Any] = {}  # by handle: to look one up is slow
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
        self._step: _Step | None = None  # that was begun last
        self._due = 0  # bytes that leave as soon as they are saved
        self._capacity = 0  # bytes that the pool could have when the step began
        self._host_bytes = 0  # … and that tensors may have on the host
        self._slack = 0  # bytes that were lacking in spite of what recent steps needed
        self._was_short = False  # in this step
        self._seen = 0  # bytes in use when the pool's counters were read last
        self._lacking = 0  # … and how much was lacking; negative: there was room
        self._unread = 0  # bytes saved since
        self._next_read = 0

    @property
    def _usable(self) -> int:
        """Bytes that a step may use."""
        return self._capacity - self._slack - int(self._capacity * KEPT_FREE)

    def shortage(self, needed: int) -> None:
        """Keep more memory free from now on: pages had to move."""
        self._pages.moved = True
        if self.saved and self._step is not None and not self._step.over:
            self._slack += needed
            self._was_short = True

    def count(self, bytes: int, *, out: int = 0, back: int = 0) -> None:
        """Count what is in host memory, and what was copied."""
        self._copied.bytes += bytes
        self._copied.out_bytes += out
        self._copied.back_bytes += back

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
            elif self._step is not None and self._step.left < self._due:
                self._unread -= self._let_leave(self._step, 0)
        return saved

    def _begin_step(self) -> None:
        """Learn from the last step, and watch this one."""
        pool = self._pool()
        if pool is None:
            return
        config = pool.config()
        self._host_bytes = config["spill"]
        self._capacity = config["limit"] or pool.raw_stats()["reserved"]["current"] + pool.device.free_memory
        if self._step is not None and self._step.end(pool):
            if not self._was_short:
                self._slack -= self._slack // SLACK_STEPS
            whole = self._steps.known  # the first one began when memory was short
            if not whole:
                self._slack = 0  # it stood for what steps need
            self._step.learn(self._usable, whole=whole)
            self._steps.add(self._step)
        self._due = self._steps.least_due
        self._pages.begin_step(pool, self._usable, self._steps.least)
        self._step = _Step(pool)
        self._was_short = False
        self._seen = self._step.begin
        self._unread = self._next_read = 0

    def _forget(self) -> None:
        """Forget what no saved tensor uses anymore."""
        self._here = deque(each for each in self._here if each() is not None)
        self._away = [each for each in self._away if each() is not None]
        self._known = {at: each for at, each in self._known.items() if each() is not None}
        if not self._known:  # several threads may have counted at once
            self.saved = self.ahead = self._copied.bytes = 0

    def _entry(self, storage: Any, version: int) -> _Entry:
        """Return the entry of a storage. One that has left stands for it while the contents are the same."""
        stream = self.stream()
        if self._moment is None or self._moment.stream is not stream:
            self._moment = _Moment(stream)
        reference = self._known.get(storage.data_ptr())
        known = None if reference is None else reference()
        if known is not None and known.holds(version):
            known.save(version, self._moment)
            return known
        made = _Entry(self, storage, version, self._moment)
        self._known[storage.data_ptr()] = made.reference
        self._here.append(made.reference)
        self._unread += made.bytes
        if self._step is not None:
            made.before = self._step.saved
            self._step.saved += made.bytes
        return made

    def _make_room(self) -> None:
        """Let tensors leave while less than the margin is free."""
        pool, step = self._pool(), self._step
        if pool is None or step is None:
            return
        if self._moment is not None:
            self._moment.event()
            self._moment = None
        raw = pool.raw_stats()
        grown = raw["live"] + step.left - step.begin
        free = self._usable - (raw["live"] - raw["spilled_live"]) - self._steps.expected(grown)
        left = self._let_leave(step, -free)
        self._seen = raw["live"] - left
        self._lacking = -free - left
        self._unread = 0
        self._next_read = max(READ_BYTES, -self._lacking // 4)

    def _let_leave(self, step: _Step, lacking: int) -> int:
        """Let the earliest tensors leave: those that are due, and more while bytes are lacking.

        Returns the bytes that left.
        """
        left = 0
        while self._here:
            entry = self._here.popleft()()
            if entry is None or entry.storage is None or entry.resized:
                continue
            wanted = left < lacking or step.left + entry.bytes <= self._due
            if not wanted or self._copied.bytes + entry.bytes > self._host_bytes or not entry.leave():
                self._here.appendleft(entry.reference)
                break
            left += entry.bytes
            step.left += entry.bytes
            self._away.append(entry.reference)
        return left

    # -- using

    def used(self, used: _Entry, *, away: bool) -> None:
        """Begin the next returns: the backward pass uses an entry."""
        with self._lock:
            pool, step = self._pool(), self._step
            if pool is None or step is None:
                return
            if not step.backward:
                step.begin_backward(
                    last=self._seen + self._unread,
                    due=max(0, step.left + self._lacking + self._unread),
                    expected=self._steps.growth(step.saved),
                )
            step.over |= away
            step.reach(pool, used.before, self.ahead)
            if self._away and step.predicted and not self.torch.cuda.is_current_stream_capturing():
                self._fetch(pool, step, used)

    def _fetch(self, pool: Any, step: _Step, used: _Entry) -> None:
        """Let tensors return as long as there is room for them now, and until they are used."""
        raw = step.look(pool, self.ahead)
        live = raw["live"]
        found = []
        while self._away:
            entry = self._away[-1]()
            if entry is not None and entry.fetched is None:
                most = max(live, step.most_until(used.before, entry.before) + self.ahead) + entry.bytes
                if most - raw["spilled_live"] > self._capacity or not entry.get_room():
                    break
                found.append(entry)
                live += entry.bytes
            self._away.pop()
        if found:
            self.to_device.wait_stream(self.stream())  # with what was queued to get the memory
            for entry in found:
                entry.fetch()


class _Step:
    """What one step saves, and what it has in use while its backward pass uses that.

    The saved tensors are divided into parts of equal size, and the backward pass begins with the last part.
    What returned ahead of need does not count as in use.
    """

    def __init__(self, pool: Any) -> None:
        raw, self._watch = pool._peaks.begin(pool)
        self.begin: int = raw["live"]
        self.saved = 0  # bytes of tensors that can leave
        self.left = 0  # … of those that have left
        self.backward = False  # it has begun
        self.over = False  # it has used a tensor that had left; so all that stayed have been used
        self.last = 0  # bytes in use when the last tensor was saved
        self.grown = 0  # … or had left by then, beyond the begin
        self.due = 0  # bytes that had to leave
        self.whole = False
        self.needed = 0  # bytes beyond what was in use when the last tensor was saved
        self.least = 0  # bytes that it needs if all tensors leave and return when they are used
        self._growth = [0] * PARTS  # peak in each part, beyond the begin
        self._rest = 0  # peak after the last look
        self._part = PARTS  # that the backward pass is in
        self._expected: list[int] = []  # growth, judging by recent steps

    # -- while it runs

    def begin_backward(self, *, last: int, due: int, expected: list[int]) -> None:
        """The backward pass uses the first tensor."""
        self.backward, self.last, self.due, self._expected = True, last, due, expected

    @property
    def predicted(self) -> bool:
        """Whether recent steps tell how the backward pass goes on."""
        return bool(self._expected)

    def reach(self, pool: Any, before: int, ahead: int) -> None:
        """The backward pass uses a tensor before which so many bytes were saved."""
        part = self._part_of(before)
        if part < self._part:
            if self._part == PARTS:
                self._part = part  # what the forward pass had in use counts here
            self.look(pool, ahead)
            self._part = part

    def look(self, pool: Any, ahead: int) -> Any:
        """Note the peak since the last look, `ahead` bytes of which have returned and are not used yet.

        Called before more returns: until then, this becomes less.
        """
        raw = pool._peaks.restart(pool, self._watch)
        growth = raw["peak_live"] - ahead - self.begin
        self._growth[self._part] = max(self._growth[self._part], growth)
        return raw

    def end(self, pool: Any) -> bool:
        """End the step. False: it has no backward pass."""
        self._rest = pool._peaks.end(pool, self._watch)["peak_live"]
        return self.backward

    def most_until(self, here: int, there: int) -> int:
        """Return what is in use, at most, until the tensor at `there` is used, judging by recent steps."""
        parts = self._expected[self._part_of(there) : self._part_of(here) + 1]
        return self.begin + max(parts, default=0)

    def _part_of(self, before: int) -> int:
        return min(PARTS - 1, before * PARTS // max(1, self.saved))

    # -- what it teaches

    def growth(self, part: int, saved: int) -> int:
        """Return the growth of a step that saves so much, in proportion."""
        return self._growth[part] * min(saved, self.saved) // max(1, self.saved)

    def learn(self, capacity: int, *, whole: bool) -> None:
        """Find out what is needed, of `capacity` bytes. Unless it is whole, it saved tensors before."""
        self.whole = whole
        self.grown = max(self.last + self.left - self.begin, LEAST_BYTES)
        most, self.least = 0, self._rest if whole else 0
        for part in range(PARTS - 1, -1, -1):
            before = part * self.saved // PARTS
            used = self.begin + self._growth[part]
            if whole:
                self.least = max(self.least, used - max(0, before - self.left))
            # Tensors that leave because of a peak must not be used before it.
            if before >= most - capacity:
                most = max(most, used + min(self.left, before))
        self.needed = max(0, most - self.left - self.last)


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

    @property
    def least(self) -> int:
        """Bytes that the largest of them needs if all tensors leave."""
        return max((step.least for step in self._steps), default=0)

    def add(self, step: _Step) -> None:
        """Note a step that has ended."""
        self._steps.append(step)

    def expected(self, grown: int) -> int:
        """Return what a step needs whose memory has grown so much: shorter ones less, in proportion."""
        grown = max(0, grown)
        return max((step.needed * min(grown, step.grown) // step.grown for step in self._steps), default=0)

    def growth(self, saved: int) -> list[int]:
        """Return by part how much memory grows in a step that saves so much. Empty: that is not known."""
        whole = [step for step in self._steps if step.whole]
        return [max(step.growth(part, saved) for step in whole) for part in range(PARTS)] if whole else []


class _Pages:
    """Brings pages back when a step begins, if recent steps would have had room for them.

    Saved tensors are cheaper to have on the host than pages: their copies overlap with computation, while
    kernels wait for each access to a page there, and an optimizer reads its states several times. So pages
    return if a step can do without them, by letting more tensors leave.
    """

    def __init__(self) -> None:
        self.moved = False  # to the host, since the step began
        self._waited = 0  # steps since the last return that was too early
        self._patience = 1  # … after which pages may return
        self._returned = False  # pages, since they moved last

    def begin_step(self, pool: Any, capacity: int, least: int) -> None:
        """Let pages return if steps need at least `least` bytes and may use `capacity`."""
        postpone_return(pool)
        if self.moved and self._returned:
            self._put_off()
        self.moved = False
        self._waited += 1
        there = pool.raw_stats()["spilled_live"]
        most = there - max(0, least - capacity)
        if there == 0 or most <= 0 or least == 0 or self._waited <= self._patience:
            return
        returned = 0
        with contextlib.suppress(VramError):  # another thread moves memory, or captures a graph
            returned = pool.bring_back(most, True)
        self._returned = returned > 0
        if not returned:
            self._put_off()

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

    def __init__(self, owner: _Activations, storage: Any, version: int, moment: _Moment) -> None:
        self.reference: weakref.ref[_Entry] = weakref.ref(self)
        self.storage = storage  # None: it has left
        self.bytes: int = storage.nbytes()
        self.before = 0  # bytes that the step had saved before it
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
        self.owner.copy(self._host, flat, stream)
        self.left = stream.record_event()
        flat.record_stream(stream)
        self._alive = self.owner.weak_reference(self.storage)
        self.storage = None
        return True

    def get_room(self, *, needed: bool = False) -> bool:
        """Get memory of the current stream to return to. False: there is none, and it is not needed yet."""
        torch = self.owner.torch
        try:
            flat = torch.empty(self.bytes, dtype=torch.uint8, device=self.owner.device)
        except torch.OutOfMemoryError:
            if needed:
                raise
            return False
        self._home = self.owner.stream()
        self.owner.ahead += self.bytes
        self.fetched = flat.untyped_storage()
        return True

    def fetch(self) -> None:
        """Begin to copy it back. pre: there is room, and the stream of the copies waits for it."""
        stream, flat = self.owner.to_device, _flat(self.owner.torch, self.fetched)
        stream.wait_event(self.left)
        self.owner.copy(flat, self._host, stream)
        flat.record_stream(stream)
        self._arrived = stream.record_event()
        self.owner.count(0, back=self.bytes)

    def use(self) -> Any:
        """Return the storage, usable on the current stream."""
        self.owner.used(self, away=self.storage is None)
        if self.storage is not None:
            return self.storage
        stream = self.owner.stream()
        if self.fetched is None:
            self.get_room(needed=True)
        if self._arrived is None:
            self.owner.to_device.wait_stream(stream)
            self.fetch()
        stream.wait_event(self._arrived)
        if stream is not self._home:
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


def _index_of(pool: Any) -> int | None:
    kind, _, index = pool.device.name.partition(":")
    return int(index) if kind == "cuda" else None
