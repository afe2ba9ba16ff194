"""Who watches stream order: the one observer of this process, and what the core tells it.

Streams, events, devices and graphs are built on this module, so that they appear here without their types.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

__all__ = ["Observer", "active", "asked", "closing", "host_knows", "resuming", "suspending"]


class Observer(Protocol):
    """What a watcher of stream order implements. What it raises comes out of the call that it watches."""

    def on_record(self, event: Any, stream: Any) -> None:
        """`event` now marks everything queued on `stream` so far."""

    def on_wait(self, stream: Any, event: Any) -> None:
        """Later work on `stream` waits for the mark of `event`."""

    def on_sync(self, what: Any) -> Callable[[], None]:
        """The host asks for all that is queued now on a stream or device, or for what an event marks now.

        What is returned is called once the host knows that it has finished.
        """

    def on_launch(
        self, stream: Any, work: Callable[[], object], arguments: tuple[Any, ...]
    ) -> Callable[[], object]:
        """`work` is about to be queued on `stream`; what is returned is queued in its place.

        `arguments` are those of launch as they were given, `Reads` included.
        """

    def on_close(self, stream: Any) -> None:
        """The handle of `stream` is about to become invalid. Must not raise."""

    def on_capture(self, graph: Any, stream: Any) -> None:
        """What is queued on `stream` from now on goes into the graph."""

    def on_captured(self, graph: Any, stream: Any) -> None:
        """Work on `stream` runs again."""

    def on_graph(self, graph: Any, handle: int) -> None:
        """Everything captured is about to be queued on a stream."""

    def on_suspend(self, pool: Any, tag: str | None) -> Callable[[], None]:
        """A pool is about to wait for the work on buffers and to give their memory up, until `on_resume`.

        What is returned is called once it has.
        """

    def on_resume(self, pool: Any) -> None:
        """Suspended buffers of a pool, or some of them, have their memory again."""

    def on_pool_close(self, pool: Any) -> Callable[[], None]:
        """A pool waits for its device and gives everything back. What is returned is called then."""


active: Observer | None = None
"""The one watcher of stream order in this process, or None. Set it as `vram.core.observer.active = …`."""


def _nothing() -> None:
    pass


def asked(what: Any) -> Callable[[], None]:
    """Tell the observer that the host asks for `what`; returns what to call once it knows."""
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
