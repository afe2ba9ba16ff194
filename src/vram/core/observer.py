"""The observer hub: who is told about pools, failures, marks and stream order in this process.

`follow_pools`, `failures` and `marks` have any number of listeners; `active` is the one observer of stream
order. Pools, streams, events and devices are built on this module, so it does not name their types.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

from vram import _native
from vram.core.locks import new_lock

__all__ = [
    "Listeners",
    "Observer",
    "active",
    "asked",
    "closing",
    "failures",
    "follow_pools",
    "host_knows",
    "install",
    "keep_stacks",
    "marks",
    "open_pools",
    "register",
    "resuming",
    "suspending",
]

End: TypeAlias = Callable[[], object]
"""Ends an observation. Calling it again does nothing."""


class Listeners:
    """Functions that are called when something happens. Any thread may add, remove and call them.

    Every change is one atomic operation of a dict, so a finalizer may come in between without a lock. So is
    `copy()`, unlike `tuple(…)`: that may collect garbage once it iterates.
    """

    def __init__(self) -> None:
        """Start without listeners."""
        self._all: dict[int, Callable[..., object]] = {}
        self._numbers = itertools.count()

    def add(self, listener: Callable[..., object]) -> End:
        """Call `listener` from now on. Returns a function that ends it, which does not keep it alive."""
        number = next(self._numbers)
        self._all[number] = listener
        return functools.partial(self._all.pop, number, None)

    def drop(self, is_over: Callable[[Callable[..., object]], bool]) -> None:
        """Remove the listeners of which `is_over(listener)` is true."""
        for number, listener in self._all.copy().items():
            if is_over(listener):
                self._all.pop(number, None)

    def tell(self, *facts: Any) -> None:
        """Call every listener with `facts`."""
        for listener in self:
            listener(*facts)

    def clear(self) -> None:
        """Remove every listener."""
        self._all.clear()

    def __iter__(self) -> Iterator[Callable[..., object]]:
        return iter(self._all.copy().values())

    def __len__(self) -> int:
        return len(self._all)


failures = Listeners()
"""Called as `listener(pool, error)` when a request has failed, before the OutOfMemory is raised."""
marks = Listeners()
"""Called as `listener(stage, name)` at the "START" and the "END" of a step or phase."""


# ---- every pool of the process ----------------------------------------------------------------------------

_pools: weakref.WeakSet[Any] = weakref.WeakSet()
_pools_lock = new_lock()  # a finalizer may create a pool while the pools are listed
_pool_numbers = itertools.count()
_new_pools = Listeners()


def register(pool: Any) -> None:
    """Number a new pool and tell the followers of pools about it."""
    with _pools_lock:
        pool.number = next(_pool_numbers)
        _pools.add(pool)
        followers = tuple(_new_pools)
    for follow in followers:
        follow(pool)


def open_pools() -> list[Any]:
    """Every open pool of this process, regardless of who created it, oldest first."""
    with _pools_lock:
        found = list(_pools)
    return sorted((pool for pool in found if not pool.closed), key=lambda pool: pool.number)


def follow_pools(follow: Callable[[Any], object]) -> End:
    """Call `follow` with every open pool now, and with each new pool before its first use."""
    with _pools_lock:
        end = _new_pools.add(follow)
        found = open_pools()
    for pool in found:
        follow(pool)
    return end


def keep_stacks() -> End:
    """Have every pool, present and future, keep the Python stacks of its allocations."""
    who = object()
    end_following = follow_pools(lambda pool: pool._keep_stacks(True, who))

    def end() -> None:
        end_following()
        for pool in open_pools():
            pool._keep_stacks(False, who)

    return end


def _after_fork_in_child() -> None:
    """Recordings and measurements belong to the parent."""
    _new_pools.clear()
    marks.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


# ---- stream order -----------------------------------------------------------------------------------------


class Observer(Protocol):
    """What an observer of stream order implements. An exception it raises leaves the observed call.

    The native pools call further methods of it; see `watcher` in native/bindings/python_types.hpp.
    """

    def on_record(self, event: Any, stream: Any) -> None:
        """`event` now marks everything queued on `stream` so far."""

    def on_wait(self, stream: Any, event: Any) -> None:
        """Later work on `stream` waits for the mark of `event`."""

    def on_sync(self, what: Any) -> Callable[[], None]:
        """The host asks for all that is queued now on a stream or device, or for what an event marks now.

        The returned function is called once the host knows that it has completed.
        """

    def on_launch(
        self, stream: Any, work: Callable[[], object], arguments: tuple[Any, ...]
    ) -> Callable[[], object]:
        """`work` is about to be queued on `stream`; the returned function is queued instead.

        `arguments` are those of launch as they were given, `Reads` included.
        """

    def on_close(self, stream: Any) -> None:
        """The handle of `stream` is about to become invalid. Must not raise."""

    def on_capture(self, graph: Any, stream: Any) -> None:
        """Work queued on `stream` from now on goes into the graph."""

    def on_captured(self, graph: Any, stream: Any) -> None:
        """Work on `stream` runs again."""

    def on_graph(self, graph: Any, handle: int) -> None:
        """Everything captured is about to be queued on a stream."""

    def on_suspend(self, pool: Any, tag: str | None) -> Callable[[], None]:
        """A pool is about to wait for the work on buffers and release their memory, until `on_resume`.

        The returned function is called when it has done so.
        """

    def on_resume(self, pool: Any) -> None:
        """All or some of a pool's suspended buffers have their memory again."""

    def on_pool_close(self, pool: Any) -> Callable[[], None]:
        """A pool waits for its device and releases everything. The returned function is called then."""


active: Observer | None = None
"""The one observer of stream order in this process, or None. `install` sets it."""


def install(observer: Observer | None) -> None:
    """Make `observer` the one that streams, events, devices and the native pools tell; None for nobody."""
    global active
    active = observer
    _native.set_watcher(observer)


def _nothing() -> None:
    pass


def asked(what: Any) -> Callable[[], None]:
    """Tell the observer that the host asks for `what`; returns the function to call once it knows."""
    return _nothing if active is None else active.on_sync(what)


@contextlib.contextmanager
def host_knows(what: Any) -> Iterator[None]:
    """Tell the observer that the host waits for `what` in this block, by other means than these classes."""
    known = asked(what)
    yield
    known()


@contextlib.contextmanager
def suspending(pool: Any, tag: str | None) -> Iterator[None]:
    """Tell the observer that buffers of a pool are suspended in this block, unless that fails."""
    done = _nothing if active is None else active.on_suspend(pool, tag)
    yield
    done()


@contextlib.contextmanager
def resuming(pool: Any) -> Iterator[None]:
    """Tell the observer that suspended buffers of a pool come back in this block, unless that fails."""
    yield
    if active is not None:
        active.on_resume(pool)


@contextlib.contextmanager
def closing(pool: Any) -> Iterator[None]:
    """Tell the observer that a pool is closed in this block, unless that fails."""
    done = _nothing if active is None or pool.closed else active.on_pool_close(pool)
    yield
    done()
