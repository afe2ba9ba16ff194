"""Happens-before over streams, events and the host, kept in vector clocks.

Knows no memory and finds no races: that is `race`. What orders what is told by `device`.
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
    """A stream for good: handles may come again after a close, `age` tells them apart."""

    core: Any
    handle: int
    age: int


Clock: TypeAlias = dict[StreamKey, int]
"""How much of each stream is known to have finished, or to finish before."""


def join(clock: Clock, other: Clock) -> Clock:
    """Let `clock` know what `other` knows."""
    for key, tick in other.items():
        if clock.get(key, 0) < tick:
            clock[key] = tick
    return clock


class Running(threading.local):
    """What the work that this thread runs for a stream knows; None where it is the program's own thread."""

    clock: Clock | None = None


class Clocks:
    """Happens-before over streams, events and the host. All threads of the program count as one host.

    A point of stream t comes after the use (s, tick) if and only if t's clock[s] >= tick there.
    """

    def __init__(self) -> None:
        self.thread = Running()
        self._host: Clock = {}
        self._streams: dict[StreamKey, Clock] = {}
        self._events: WeakKeyDictionary[Event, Clock] = WeakKeyDictionary()
        self._ages: defaultdict[tuple[Any, int], int] = defaultdict(int)

    def key(self, core: Any, handle: int) -> StreamKey:
        return StreamKey(core, handle, self._ages[core, handle])

    def close(self, key: StreamKey) -> None:
        self._ages[key.core, key.handle] = key.age + 1

    def view(self, key: StreamKey) -> Clock:
        """What comes before anything that the caller would queue on the stream now."""
        return join(join(dict(self._streams.get(key, {})), self._host), self.thread.clock or {})

    def advance(self, key: StreamKey) -> Clock:
        """Queue one piece of work; returns the stream's clock at it."""
        clock = self._streams[key] = self.view(key)
        clock[key] = clock.get(key, 0) + 1
        return clock

    def record(self, event: Event, key: StreamKey) -> None:
        self._streams[key] = self.view(key)
        self._events[event] = self.view(key)

    def wait(self, key: StreamKey, event: Event) -> None:
        self._streams[key] = join(self.view(key), self._events.get(event, {}))

    def follow(self, key: StreamKey, others: Iterable[StreamKey]) -> None:
        """Later work on a stream waits for all that was queued on the others."""
        clock = self._streams[key] = self.view(key)
        for other in others:
            join(clock, self.view(other))

    def marked(self, what: Stream | Event | Device) -> Clock:
        """What has finished once the host has waited for `what` as it is now."""
        if isinstance(what, Event):
            return self._events.get(what, {})
        if isinstance(what, Stream):
            return self.view(self.key(what._core, what._handle))
        together: Clock = {}
        for key, clock in self._streams.items():
            if key.core is what._core:
                join(together, clock)
        return together

    def learn(self, clock: Clock) -> None:
        """The host has waited. What a stream's own thread waited for, only that thread knows."""
        join(self._host if self.thread.clock is None else self.thread.clock, clock)

    def finished(self, key: StreamKey, tick: int) -> bool:
        """Whether the host knows that it has."""
        return self._host.get(key, 0) >= tick


class Work:
    """A launched function that knows, while it runs and lets go of its arguments, what came before it."""

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
