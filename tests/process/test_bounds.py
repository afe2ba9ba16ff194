"""What a long run may hold, from Python: nothing grows with the number of operations.

Neither on the device nor in the process nor on its heap. `c_bounds_test.cpp` has the same for the core, the C
interface and PyTorch's plug.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

import vram
from vram.integrations.adaptors import DevicePools

pytestmark = pytest.mark.slow

MIB = 1 << 20


class World:
    """A model of a device, a pool on it, and another stream that is alive."""

    def __init__(self, **options: Any) -> None:
        self.device = vram.Device.model("16GiB")
        self.backend: Any = self.device._core.backend
        self.pool = vram.Pool(self.device, **options)
        self.side = vram.Stream(self.device)
        self.dice = random.Random(7)

    def rest(self) -> None:
        self.device.synchronize()
        self.pool.trim(wait=True)
        self.backend.clear_executed()
        gc.collect()


def held(world: World) -> dict[str, int]:
    counts: dict[str, int] = dict(world.backend.counts())
    return {
        **{
            name: counts[name]
            for name in ("events", "streams", "mappings", "pages", "spaces", "plain_ranges")
        },
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pairs(world: World, number: int) -> None:
    """As a training step allocates, with another stream alive."""
    world.pool.allocate(world.dice.randrange(2, 61) * MIB, stream=world.side)


def small(world: World, number: int) -> None:
    world.pool.allocate(4096)
    world.pool.free(world.pool.malloc(1 + number % 100_000))


def tags(world: World, number: int) -> None:
    with vram.tag(f"step {number}"):
        world.pool.allocate(4096)
    world.pool.allocate(4096, tag=f"other {number}")


def streams(world: World, number: int) -> None:
    with vram.Stream(world.device) as stream:
        buffer = world.pool.allocate(3 * MIB, stream=stream)
        buffer.record_stream(world.side)
        buffer.fill(1)
        stream.launch(int)
        stream.record_event()
        world.side.wait_stream(stream)


def events(world: World, number: int) -> None:
    event = world.side.record_event()
    event.query()
    world.side.wait_event(event)


def holders(world: World, number: int) -> None:
    with vram.Arena(world.pool) as arena:
        arena.allocate(1000)
        arena.record_stream(world.side)
        arena.reset()
    with vram.GrowableBuffer("16MiB", world.pool, size="2MiB") as growable:
        growable.resize("6MiB")
    world.pool.allocate_async(4096).result()
    world.pool.allocate_batch([100, 5000, MIB])


def failures(world: World, number: int) -> None:
    with pytest.raises(vram.OutOfMemory):
        world.pool.allocate("32GiB")
    with pytest.raises(vram.VramError):
        world.pool.free(12345)


class ModelPools(DevicePools):
    """What the adaptors of CuPy, Numba and cuda.core share, over the pool of the test."""

    def __init__(self, world: World) -> None:
        super().__init__("library")
        self._world = world

    def pool(self, device: int) -> vram.Pool:
        pool = self._pools[device] = self._world.pool
        return pool


WORKLOADS: dict[str, tuple[Callable[[World, int], None], int, dict[str, Any]]] = {
    "pairs": (pairs, 100_000, {}),
    "small": (small, 500_000, {}),
    "tags": (tags, 100_000, {}),
    "stacks": (small, 100_000, {"stacks": "python"}),
    "journal": (small, 100_000, {"journal": 256}),
    "streams": (streams, 6_000, {}),
    "events": (events, 30_000, {}),
    "holders": (holders, 500, {}),
    "failures": (failures, 100, {}),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_long_run_holds_no_more_than_a_short_one(name: str) -> None:
    step, count, options = WORKLOADS[name]
    world = World(**options)

    def run(first: int, past: int) -> None:
        for number in range(first, past):
            step(world, number)
            if number % 50 == 0:
                world.backend.advance(1e4)  # work finishes, now and then
        world.rest()

    run(0, count)  # tables take their size meanwhile
    before, blocks, resident = held(world), sys.getallocatedblocks(), resident_bytes()
    run(count, 2 * count)
    after = held(world)
    for kind, number in after.items():
        assert number <= before[kind] + 64, (name, kind, before, after)
    # What each operation left behind would be counted so many times.
    if name != "tags":  # the pool keeps the first 65 536 names, and counts the others
        assert sys.getallocatedblocks() - blocks < 500
    assert resident_bytes() - resident < 24 * MIB
    stats = world.pool.stats()
    assert stats["tags"] <= 65_536
    assert world.pool.check() is None
    world.pool.close()


def test_what_adaptors_keep_ends_with_the_memory() -> None:
    world = World()
    pools = ModelPools(world)

    def run(count: int) -> None:
        for number in range(count):
            buffer = pools.allocate(1 + number % 100_000, 0, world.side.handle)
            buffer.record_stream(None)
            if number % 50 == 0:
                world.backend.advance(1e4)
        world.rest()

    run(10_000)
    before, blocks = held(world), sys.getallocatedblocks()
    run(30_000)
    assert all(number <= before[kind] + 64 for kind, number in held(world).items()), (before, held(world))
    assert sys.getallocatedblocks() - blocks < 500
    world.pool.close()
