"""The way chunks go on a GPU, with real memory and threads: compute is called ahead, the rest is by streams.

On the host that way is not taken, because NumPy computes at once. Here it is: compute first waits for its
stream, or launches its work there, and streams are held up at random, so that memory that is used again too
early shows.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from ctypes import c_int64
from typing import Any

import numpy as np
import pytest

import vram.pipeline.pipeline
import vram.pipeline.run
from vram import PinnedPool, Pipeline, Pool


class Queued(vram.pipeline.run.Run):
    """A run as on a GPU."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.on_host, self.uploads_ahead = False, min(vram.pipeline.run.MOST_UPLOADS_AHEAD, self.depth)


@pytest.fixture(autouse=True)
def queued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vram.pipeline.pipeline, "Run", Queued)


@pytest.fixture
def pools() -> Iterator[tuple[Pool, PinnedPool]]:
    with Pool("host") as pool, PinnedPool("host", segment_size="2MiB") as pinned:
        yield pool, pinned
        gc.collect()
        assert pool.stats().live == pinned.stats().live == 0
        assert pool.check() is None and pinned.check() is None


def hold_up(pipe: Pipeline, chance: random.Random) -> None:
    """Make some streams late."""
    for lane in ("stage in", "upload", "download", "stage out"):
        if chance.random() < 0.3:
            pipe._streams[lane].launch(time.sleep, chance.random() * 0.003)


def batch_of(number: int, length: int) -> Any:
    return np.random.default_rng(number).integers(0, 1 << 30, length)


@pytest.mark.parametrize("staging", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_batches_of_random_length(pools: tuple[Pool, PinnedPool], depth: int, staging: bool) -> None:
    chance = random.Random(depth)
    lengths = [chance.choice([0, 10, 5000, 60_000]) + chance.randrange(100) for _ in range(60)]

    def compute(x: Any) -> Any:
        pipe.stream.synchronize()  # NumPy does not know of streams
        hold_up(pipe, chance)
        if len(x) % 2:
            x += 5
            return x, x[: len(x) // 2]
        return x + 5, x[: len(x) // 2] + 5

    kept: list[tuple[int, Any]] = []
    with Pipeline(compute, depth=depth, pool=pools[0], pinned=pools[1], staging=staging) as pipe:
        source = (batch_of(number, length) for number, length in enumerate(lengths))
        for number, (whole, half) in enumerate(pipe.map(source)):
            expected = batch_of(number, lengths[number]) + 5
            assert np.array_equal(whole, expected) and np.array_equal(half, expected[: len(half)])
            if number % 4 == 0:
                kept.append((number, whole))
        for number, whole in kept:
            assert np.array_equal(whole, batch_of(number, lengths[number]) + 5)
        assert pools[0].stats().peak_allocated <= depth * (8 * 60_100 + 512)
    del whole, half
    kept.clear()


@pytest.mark.parametrize("staging", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("in_place", [False, True])
def test_an_array_in_chunks(
    pools: tuple[Pool, PinnedPool], depth: int, staging: bool, in_place: bool
) -> None:
    chance = random.Random(depth)

    def compute(x: Any) -> Any:
        pipe.stream.synchronize()
        hold_up(pipe, chance)
        if in_place:
            x *= 3
            return x
        return x * 3

    data = batch_of(1, 300_001)
    with Pipeline(compute, "64KiB", depth, pool=pools[0], pinned=pools[1], staging=staging) as pipe:
        assert np.array_equal(pipe.run(data), data * 3)
        out = data.copy()
        assert pipe.run(out, out=out) is out and np.array_equal(out, data * 3)
        assert pools[0].stats().peak_allocated <= depth * 64 * 1024
        lanes = {span.lane for span in pipe.report().spans}
        assert ("stage in" in lanes, "stage out" in lanes) == (staging, staging)


@pytest.mark.parametrize("staging", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("equal", [False, True])
def test_work_that_is_only_queued(
    pools: tuple[Pool, PinnedPool], staging: bool, in_place: bool, equal: bool
) -> None:
    """As a kernel's launch: the work knows an address and holds nothing."""
    chance = random.Random(1)
    lengths = [30_000 if equal else chance.randrange(1, 30_000) for _ in range(80)]

    def triple(address: int, length: int, to: int) -> None:
        source, target = (np.ctypeslib.as_array((c_int64 * length).from_address(at)) for at in (address, to))
        np.multiply(source, 3, out=target)

    def compute(x: Any) -> Any:
        y = x if in_place else np.empty_like(x)
        pipe.stream.launch(triple, x.ctypes.data, len(x), y.ctypes.data)
        hold_up(pipe, chance)
        return y

    with Pipeline(compute, depth=2, pool=pools[0], pinned=pools[1], staging=staging) as pipe:
        source = (batch_of(number, length) for number, length in enumerate(lengths))
        for number, out in enumerate(pipe.map(source)):
            assert np.array_equal(out, batch_of(number, lengths[number]) * 3), f"chunk {number}"
        assert pools[0].stats().peak_allocated <= 2 * (8 * 30_000 + 512)
    del out


def test_errors_and_early_exits(pools: tuple[Pool, PinnedPool]) -> None:
    chance = random.Random(0)

    def compute(x: Any) -> Any:
        pipe.stream.synchronize()
        hold_up(pipe, chance)
        if x[0] == 7:
            raise ZeroDivisionError
        return x

    with Pipeline(compute, pool=pools[0], pinned=pools[1], staging=True) as pipe:
        for stop in (*range(7), None):
            got: list[int] = []
            try:
                for out in pipe.map(np.full(1000, number) for number in range(20)):
                    got.append(int(out[0]))
                    if len(got) == stop:
                        break
            except ZeroDivisionError:
                assert stop in (None, 0)
            out = None
            assert got == list(range(stop or 7))
            assert pools[0].stats().live == pools[1].stats().live == 0
        calls = 0
        with pytest.raises(KeyboardInterrupt):

            def interrupted(x: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == 3:
                    raise KeyboardInterrupt
                return compute(x)

            pipe.compute = interrupted
            list(pipe.map(np.full(1000, 1) for _ in range(20)))
        assert pools[0].stats().live == 0
