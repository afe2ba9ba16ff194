"""Happens-before between streams, events and the host, with vector clocks.

This module knows no memory and finds no races: `history` does. `core.observer` reports what orders what.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from vram.core.device import Device
from vram.core.stream import Event, Stream

__all__ = ["Clock", "Clocks", "Running", "StreamKey", "Work", "join"]


class StreamKey(NamedTuple):
    """Identifies a stream permanently: handles may be reused after a close, `age` distinguishes them."""

    core: Any
    handle: int
    age: int


Clock: TypeAlias = dict[StreamKey, int]
"""How much of each stream is known to have completed, or to complete before."""


def join(clock: Clock, other: Clock) -> Clock:
    """Merge the knowledge of `other` into `clock`."""
    for key, tick in other.items():
        if clock.get(key, 0) < tick:
            clock[key] = tick
    return clock


class Running(threading.local):
    """What is known of this thread."""

    clock: Clock | None = None
    """What is known to the work that it runs for a stream; None on the program's own threads."""
    waits = 0
    """How often it has waited for a stream."""


class Clocks:
    """Happens-before between streams, events and the host. All threads of the program count as one host.

    A point of stream t comes after the use (s, tick) if and only if t's clock[s] >= tick at that point.
    """

    def __init__(self) -> None:
        self.thread = Running()
        self._host: Clock = {}
        self._streams: dict[StreamKey, Clock] = {}
        self._events: WeakKeyDictionary[Any, Clock] = WeakKeyDictionary()
        self._ages: defaultdict[tuple[Any, int], int] = defaultdict(int)

    def key(self, core: Any, handle: int) -> StreamKey:
        return StreamKey(core, handle, self._ages[core, handle])

    def knows(self, core: Any, handle: int) -> bool:
        return (core, handle) in self._ages

    def close(self, key: StreamKey) -> None:
        self._ages[key.core, key.handle] = key.age + 1

    def view(self, key: StreamKey) -> Clock:
        """Return what comes before anything that the caller would queue on the stream now."""
        return join(join(dict(self._streams.get(key, {})), self._host), self.thread.clock or {})

    def advance(self, key: StreamKey) -> Clock:
        """Queue one piece of work and return the stream's clock at that point."""
        clock = self._streams[key] = self.view(key)
        clock[key] = clock.get(key, 0) + 1
        return clock

    def record(self, event: Any, key: StreamKey) -> None:
        self._streams[key] = self.view(key)
        self._events[event] = self.view(key)

    def wait(self, key: StreamKey, event: Any) -> None:
        self._streams[key] = join(self.view(key), self.of(event))

    def follow(self, key: StreamKey, others: Iterable[StreamKey]) -> None:
        """Make later work on a stream wait for everything queued on the others."""
        clock = self._streams[key] = self.view(key)
        for other in others:
            join(clock, self.view(other))

    def marked(self, what: Stream | Event | Device) -> Clock:
        """Return what has completed after the host waited for `what` in its current state."""
        if isinstance(what, Event):
            return self.of(what)
        if isinstance(what, Stream):
            return self.view(self.key(what._core, what._handle))
        together: Clock = {}
        for key, clock in self._streams.items():
            if key.core is what._core:
                join(together, clock)
        return together

    def of(self, event: Any) -> Clock:
        """Return what an event marks."""
        return self._events.get(event, {})

    def learn(self, clock: Clock) -> None:
        """The host has waited. What a stream's own thread waited for is known only to that thread."""
        self.thread.waits += 1
        join(self._host if self.thread.clock is None else self.thread.clock, clock)

    def finished(self, key: StreamKey, tick: int) -> bool:
        """Return whether the host knows that this tick has completed."""
        return self._host.get(key, 0) >= tick


class Work:
    """A launched function that knows what came before it, while it runs and releases its arguments."""

    __slots__ = ("_clock", "_thread", "_work")

    def __init__(self, work: Callable[[], object], thread: Running, clock: Clock) -> None:
        self._work: Callable[[], object] | None = work
        self._thread = thread
        self._clock = clock

    def __call__(self) -> None:
        work, self._work = self._work, None
        outer, self._thread.clock = self._thread.clock, self._clock
        try:
            if work is not None:
                work()
        finally:
            del work
            self._thread.clock = outer
