"""Every call to the device made to fail while a pipeline runs: a typed error in place, nothing is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from effort import sample
from vram import Buffer, Device, DeviceError, OutOfMemory, PinnedPool, Pipeline, Pool, VramError

NATIVE = 700
SIZES = (4096, 70_000, 0, 8192, 4096)
WHOLE = 30_000


class Run:
    """One pipeline on a model of its own: some batches, then an array in chunks."""

    def __init__(self, kind: str) -> None:
        self.staging = kind != "direct"
        self.device = Device.model("1GiB", manual=kind == "manual")
        self.backend: Any = self.device.backend
        self.pool = Pool(self.device, limit="8MiB" if kind == "limit" else None)
        self.pinned = PinnedPool(self.device, segment_size="2MiB")
        self.errors: list[VramError] = []
        self.results: list[int] = []
        self.whole: Any = None

    def compute(self, buffer: Buffer) -> Any:
        buffer.fill(1, stream=self.pipe.stream)
        if buffer.size > 4096:
            return buffer, buffer.size
        return self.pool.allocate(buffer.size, stream=self.pipe.stream), buffer.size

    def program(self) -> None:
        try:
            options: dict[str, Any] = {"pool": self.pool, "pinned": self.pinned, "staging": self.staging}
            with Pipeline(self.compute, "8KiB", 2, **options) as self.pipe:
                for out, size in self.pipe.map(np.ones(size, np.uint8) for size in SIZES):
                    assert out.shape == (size,) == (SIZES[len(self.results)],)
                    self.results.append(size)
                    del out
            with Pipeline(lambda buffer: buffer, "8KiB", 2, **options) as self.pipe:
                self.whole = self.pipe.run(np.ones(WHOLE, np.uint8))
        except (DeviceError, OutOfMemory) as error:
            self.errors.append(error.with_traceback(None))  # whose frames would hold events

    def end(self, lost_events: int = 0) -> None:
        self.backend.clear_failures()
        self.pipe = None
        assert self.pool.stats().live == self.pinned.stats().live == 0
        assert self.pool.check() is None and self.pinned.check() is None
        self.pool.close()
        self.pinned.close()
        counts = self.backend.counts()
        allowed = {"streams": counts["streams"], "queued": counts["queued"], "events": lost_events}
        left = {name: count for name, count in counts.items() if count > allowed.get(name, 0)}
        assert left == {}, f"lost: {left} ({self.errors})"
        assert self.backend.check() is None


KINDS = ["staged", "direct", "manual", "limit"]


CALLS = [
    *("reserve", "release", "space_reserve", "space_release", "page_create", "page_release", "map"),
    *("set_access", "unmap", "memory_info", "stream_create", "stream_destroy", "stream_synchronize"),
    *("stream_query", "stream_wait", "event_create", "event_destroy", "event_record", "event_query"),
    *("event_synchronize", "timing_event_create", "elapsed_ms", "copy", "fill", "launch"),
]


def calls_of_a_whole_run(kind: str) -> dict[str, int]:
    run = Run(kind)
    run.program()
    assert run.errors == [] and run.results == list(SIZES) and run.whole.shape == (WHOLE,)
    calls = {call: run.backend.calls(call) for call in CALLS}
    assert sum(calls.values()) == run.backend.total_calls()
    run.end()
    assert run.backend.counts()["streams"] == 1
    return calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", ["failed", "out_of_memory"])
def test_each_call_fails_in_turn(kind: str, code: str) -> None:
    for call, count in calls_of_a_whole_run(kind).items():
        told = 0
        tried = sample(range(1, count + 1))
        for nth in tried:
            run = Run(kind)
            run.backend.fail(call, nth, code, NATIVE)
            run.program()
            told += len(run.errors)
            assert run.results == list(SIZES)[: len(run.results)]
            if not run.errors:
                assert run.results == list(SIZES) and run.whole.shape == (WHOLE,)
            run.end(lost_events=call == "event_destroy")  # what the driver keeps cannot be given back
            assert {error.facts.get("native", NATIVE) for error in run.errors} <= {NATIVE, 0}
        if call in ("copy", "launch", "stream_wait", "elapsed_ms", "stream_create", "timing_event_create"):
            assert told == len(tried), f"{call} failed in silence"
