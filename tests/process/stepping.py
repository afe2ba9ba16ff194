"""A pool on a model device that moves only when the test steps it, so that "still running" and "finished" are
exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import vram
from vram import Device, Stream

HELD = ("page_bytes", "plain_bytes", "mappings", "events", "pools")
"""What the device counts and a closed pool must not leave behind."""


class Bench:
    """The pool that `build` makes on a stepped model device, and three streams."""

    def __init__(self, build: Callable[..., Any] = vram.Pool, *, pages: bool = True, **options: Any) -> None:
        self.device = Device.model("1GiB", pages=pages, manual=True)
        self.backend: Any = self.device.backend
        self.pool = build(self.device, **options)
        self.one, self.two, self.three = (Stream(self.device) for _ in range(3))

    def work(self, number: int, buffer: Any, stream: Stream) -> None:
        """Queue work on the stream that uses the buffer."""
        self.backend.work(stream.handle, number, buffer.ptr, buffer.size)

    def run_first(self, stream: Stream) -> None:
        """Give `stream` every chance to run before the others."""
        while self.backend.step(stream.handle):
            pass

    def finish(self) -> None:
        """Run all the work that is queued."""
        assert self.backend.run_all()

    @property
    def reserved(self) -> int:
        return self.pool.stats().reserved

    def rung(self, name: str) -> int:
        """How many requests the rung served."""
        return self.pool.stats().rungs[name]

    def close(self) -> None:
        """Close the pool, which must be intact and leave nothing on the device."""
        assert self.pool.check() is None
        assert self.backend.refused_in_capture() == 0, "a call that a capture forbids was made"
        self.finish()
        self.pool.close()
        counts = self.backend.counts()
        assert {name: counts[name] for name in HELD} == dict.fromkeys(HELD, 0)


@contextmanager
def benches(*arguments: Any, **defaults: Any) -> Iterator[Callable[..., Bench]]:
    """Makes benches with these arguments, or with options given at the call, and closes them at the end."""
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(*arguments, **{**defaults, **options}))
        return made[-1]

    yield make
    for bench in made:
        bench.close()
