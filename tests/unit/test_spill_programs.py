"""Random programs on full devices that spill: everything that moves or gives back memory, in any order.

After each step the accounts add up; at the end nothing is left. What a single call promises is in
test_spill.py; contents are compared in native/tests/spill_test.cpp and spill_stress_test.cpp.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import vram
from vram import Arena, Device, GrowableBuffer, OutOfMemory, Pool
from vram.core import spill
from vram.errors import Suspended

MIB = 1 << 20
PLENTY = 16 << 30
"""Host memory that no program here uses up."""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "vram")  # each pool logs its first spill


def accounts_add_up(pool: Pool, most: int, host: int) -> None:
    assert pool.check() is None
    assert pool.device.backend.check() is None
    stats, snapshot = pool.stats(), pool.snapshot()
    assert stats.reserved <= most
    assert stats["spill.parked_bytes"] <= stats.spilled <= stats["spill.host_bytes"] <= host
    assert stats["waste.bytes"] >= 0
    assert snapshot.spilled == stats.spilled
    assert sum(snapshot.spilled_by_tag().values()) == sum(block.bytes for block in pool.spilled())
    in_use = [block for segment in snapshot.segments for block in segment.blocks if block.state != "free"]
    live, _, spilled = pool.usage(False)
    assert (live, spilled) == (stats.allocated, sum(block.spilled for block in in_use))
    assert sum(snapshot.spilled_by_tag().values()) <= spilled <= stats.spilled


def nothing_is_left(pool: Pool, capacity: int) -> None:
    gc.collect()
    pool.device.synchronize()
    assert pool.stats().allocated == 0
    assert pool.snapshot().spilled_by_tag() == {}
    pool.trim(wait=True)
    stats = pool.stats()
    assert (stats.reserved, stats.spilled, stats["spill.host_bytes"], stats["spill.parked_bytes"]) == (0,) * 4
    assert pool.check() is None
    pool.close()
    assert pool.device.backend.check() is None
    assert pool.device.free_memory == capacity


# ---- one thread --------------------------------------------------------------------------------------------


class Program:
    """One thread that makes random calls."""

    def __init__(self, seed: int) -> None:
        dice = self.dice = random.Random(seed)
        self.capacity = dice.choice([32, 64, 128, 256]) * MIB
        self.host = dice.choice([PLENTY, PLENTY, self.capacity, self.capacity // 4, 8 * MIB, 3 * MIB + 1])
        self.limit = dice.choice([0, 0, self.capacity // 2, self.capacity * 3 // 4 + 12345])
        self.most = self.limit or self.capacity
        self.largest = self.most // dice.choice([1, 2, 4, 8, 16, 32])
        self.total = self.most * dice.choice([0.9, 1.1, 1.5, 3])
        self.wishes = dice.random() < 0.3
        options: dict[str, Any] = {
            "max_page": ["2MiB", "8MiB"],
            "release_threshold": [0, "4MiB"],
            "cross_stream": ["wait", "never"],
            "zero_on_free": [True],
            "zero_on_allocate": [True],
            "stacks": ["python"],
            "journal": [50],
        }
        chosen = {name: dice.choice(values) for name, values in options.items() if dice.random() < 0.25}
        self.pool = Pool(Device.model(self.capacity), spill=self.host, limit=self.limit or None, **chosen)
        device = self.pool.device
        self.streams = [None, *(vram.Stream(device) for _ in range(dice.choice([0, 1, 3])))]
        self.held: list[vram.Buffer] = []
        self.growable: list[GrowableBuffer] = []
        self.arenas: list[Arena] = []
        self.suspended = False

    def run(self, steps: int) -> None:
        calls: dict[Callable[[], object], int] = {
            self.allocate: 45,
            self.free: 17,
            self.move: 10,
            self.record: 4,
            self.suspend: 4,
            self.resume: 4,
            self.give_back: 4,
            self.pass_time: 6,
            self.reserve: 2,
            self.grow: 3,
            self.use_arena: 2,
        }
        for call in self.dice.choices(list(calls), list(calls.values()), k=steps):
            with contextlib.suppress(OutOfMemory):
                call()
            accounts_add_up(self.pool, self.most, self.host)

    def end(self) -> None:
        for each in (*self.growable, *self.arenas):
            each.close()
        for buffer in self.held:
            buffer.free()
        nothing_is_left(self.pool, self.capacity)

    def size(self) -> int:
        usual = [int(self.largest * self.dice.random() ** power) + 1 for power in (1, 1, 3)]
        return self.dice.choice([0, 1, 511, 512, 513, MIB, 2 * MIB, 2 * MIB + 1, *usual])

    def allocate(self) -> None:
        size, dice = self.size(), self.dice
        while self.held and sum(buffer.size for buffer in self.held) + size > self.total:
            self.free()
        stream, tag = dice.choice(self.streams), dice.choice([None, "one", "two", "first", "never"])
        if tag in ("first", "never"):
            tag = f"{tag} of programs" if self.wishes else None
        try:
            if (kind := dice.random()) < 0.1:
                sizes = [size // 4, size // 4, 7, size // 3]
                self.held += self.pool.allocate_batch(sizes, stream=stream, tag=tag)
                return
            if kind < 0.2:
                buffer = self.pool.allocate_async(size, stream=stream, tag=tag).result()
            else:
                align = dice.choice([None, 4096, MIB]) if self.wishes else None
                buffer = self.pool.allocate(size, stream=stream, tag=tag, align=align)
        except OutOfMemory:
            others = self.growable or self.arenas or self.suspended or self.wishes
            assert others or size > self.most or self.host < PLENTY
            return
        assert buffer.spilled == 0
        if size:
            buffer.fill(1, stream=stream)
        self.held.append(buffer)

    def free(self) -> None:
        if self.held:
            self.held.pop(self.dice.randrange(len(self.held))).free()

    def move(self) -> None:
        if self.held:
            buffer = self.dice.choice(self.held)
            address = buffer.ptr
            with contextlib.suppress(Suspended):
                self.dice.choice([buffer.spill, buffer.prefetch])()
            assert buffer.ptr == address

    def record(self) -> None:
        if self.held:
            with contextlib.suppress(Suspended):
                self.dice.choice(self.held).record_stream(self.dice.choice(self.streams))

    def suspend(self) -> None:
        self.suspended = True
        tag, keep = self.dice.choice([None, "one", "two"]), self.dice.choice(["host", "discard", "mapped"])
        self.pool.suspend(tag, keep)

    def resume(self) -> None:
        self.pool.resume()
        self.suspended = False

    def give_back(self) -> None:
        pool, dice = self.pool, self.dice
        most = dice.choice([0, MIB, 1 << 40])
        dice.choice(
            [pool.coalesce, lambda: pool.trim(wait=dice.random() < 0.5), lambda: pool.bring_back(most)]
        )()

    def pass_time(self) -> None:
        backend = self.pool.device.backend
        self.dice.choice([backend.synchronize, lambda: backend.advance(self.dice.random() * 20000)])()

    def reserve(self) -> None:
        self.pool.reserve(int(self.most * self.dice.random()))

    def grow(self) -> None:
        if len(self.growable) < 2 and self.wishes:
            self.growable.append(GrowableBuffer(self.capacity, self.pool, size="1MiB"))
        elif self.growable:
            self.dice.choice(self.growable).resize(int(self.largest * self.dice.random()))

    def use_arena(self) -> None:
        if self.arenas:
            self.arenas.pop().close()
        elif self.wishes:
            self.arenas.append(Arena(self.pool))
            self.arenas[-1].allocate(int(4 * MIB * self.dice.random()) + 1)


@pytest.fixture
def wishes() -> None:
    for wish in ("first", "never"):
        vram.tag(f"{wish} of programs", spill=wish)  # type: ignore[arg-type]


@pytest.mark.usefixtures("wishes")
@pytest.mark.parametrize("seed", range(36))
def test_random_programs(seed: int, tmp_path: Path) -> None:
    program = Program(seed)
    with vram.record(program.pool, tmp_path / "run.vtrace") if seed % 4 == 0 else contextlib.nullcontext():
        program.run(100)
    program.end()


@pytest.mark.parametrize("seed", range(24))
def test_a_request_fails_only_if_host_memory_is_used_up(seed: int) -> None:
    dice = random.Random(seed)
    capacity = dice.choice([64, 128, 256]) * MIB
    host = dice.choice([capacity, capacity // 4, 4 * MIB, 34 * MIB])
    with Pool(Device.model(capacity), spill=host, max_page=dice.choice(["2MiB", "8MiB", "32MiB"])) as pool:
        streams = [None, *(vram.Stream(pool.device) for _ in range(dice.choice([0, 2])))]
        largest, held = capacity // dice.choice([1, 2, 4, 8, 16]), list[vram.Buffer]()
        for _ in range(100):
            size = int(largest * dice.random() ** 2) // (2 * MIB) * 2 * MIB + 2 * MIB  # whole pages
            if held and dice.random() < 0.35:
                held.pop(dice.randrange(len(held))).free()
                continue
            try:
                held.append(pool.allocate(size, stream=dice.choice(streams)))
            except OutOfMemory:
                assert size > capacity or host - pool.stats().spilled < size
                for _ in range(min(3, len(held))):
                    held.pop(dice.randrange(len(held))).free()


# ---- many threads ------------------------------------------------------------------------------------------


class Threads:
    """Six threads that use memory and two that move it, all of it at the same time."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.seed = seed
        self.capacity = 48 * MIB
        self.pool = Pool(Device.model(self.capacity), spill=PLENTY, **options)
        # An allocation that is suspended before it is zeroed fails.
        self.tags = [None, "some"] if "zero_on_allocate" in options else [None, "some", "suspended"]
        self.done = threading.Event()
        self.failures: list[BaseException] = []

    def run(self, seconds: float) -> None:
        bodies = [*[self.use] * 6, *[self.move] * 2]
        threads = [
            threading.Thread(target=self.guarded, args=(body, number)) for number, body in enumerate(bodies)
        ]
        for thread in threads:
            thread.start()
        self.done.wait(seconds)
        self.done.set()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]
        with contextlib.suppress(OutOfMemory):
            self.pool.resume()
        stats = self.pool.stats()
        assert stats["spill.count"] and stats["spill.returns"]
        assert stats["spill.late"] == stats["spill.failures"] == 0

    def guarded(self, body: Callable[[random.Random], None], number: int) -> None:
        try:
            body(random.Random(100 * self.seed + number))
        except BaseException as failure:
            self.failures.append(failure)
            self.done.set()

    def use(self, dice: random.Random) -> None:
        """A program that fits the device: none of its requests fails."""
        held: list[vram.Buffer] = []
        own, other = vram.Stream(self.pool.device), vram.Stream(self.pool.device)
        while not self.done.is_set():
            if not held or dice.random() < 0.45:
                while sum(buffer.size for buffer in held) > self.capacity // 6:
                    held.pop(dice.randrange(len(held))).free()
                size = dice.choice([1, 513, 100_000, MIB, 2 * MIB, int(6 * MIB * dice.random()) + 1])
                held.append(self.pool.allocate(size, stream=own, tag=dice.choice(self.tags)))
                continue
            if (action := dice.random()) < 0.5:
                held.pop(dice.randrange(len(held))).free()
                continue
            buffer = dice.choice(held)
            if buffer.tag == "suspended":  # must not be used while it may be suspended
                continue
            with contextlib.suppress(OutOfMemory):  # there is no room to return to
                if action < 0.7:
                    buffer.record_stream(other)
                    buffer.fill(1, stream=other)
                elif action < 0.8:
                    buffer.fill(2, stream=own)
                else:
                    dice.choice([buffer.spill, buffer.prefetch])()
        for buffer in held:
            buffer.free()

    def move(self, dice: random.Random) -> None:
        pool = self.pool
        calls: list[Callable[[], object]] = [
            lambda: pool.bring_back(1 << 30),
            spill._tick,
            lambda: accounts_are_possible(pool, self.capacity),
            pool.snapshot,
            lambda: pool.trim(wait=dice.random() < 0.3),
            lambda: pool.suspend(dice.choice([None, "some"]), keep="mapped"),
            lambda: (pool.suspend("suspended", keep=dice.choice(["host", "discard"])), pool.resume()),
            pool.resume,
            lambda: pool.reconfigure({"cross_stream": dice.choice(["ready", "wait", "never"])}),
            pool.coalesce,
            pool.device.synchronize,
            lambda: pool.allocate(MIB, stream=vram.Stream(pool.device)).free(),
            lambda: grown(pool),
        ]
        while not self.done.is_set():
            with contextlib.suppress(OutOfMemory):  # of resume()
                dice.choice(calls)()


def accounts_are_possible(pool: Pool, capacity: int) -> None:
    assert pool.check() is None
    stats = pool.stats()
    assert stats.reserved <= capacity
    assert stats.spilled <= stats["spill.host_bytes"]


def grown(pool: Pool) -> None:
    with GrowableBuffer("16MiB", pool, size="3MiB") as growable:
        growable.resize("6MiB")


@pytest.fixture(params=range(4))
def threads(request: pytest.FixtureRequest) -> Iterator[Threads]:
    options = [{}, {"release_threshold": "4MiB"}, {"cross_stream": "never"}, {"zero_on_allocate": True}]
    yield Threads(request.param, **options[request.param % len(options)])


def test_threads_swap_while_others_use_their_memory(threads: Threads, tmp_path: Path) -> None:
    if threads.seed % 2:
        threads.pool.device.backend.set_lag(0)
    with vram.record(threads.pool, tmp_path / "run.vtrace") if threads.seed < 2 else contextlib.nullcontext():
        threads.run(1.0)
    nothing_is_left(threads.pool, threads.capacity)


def test_a_pool_can_be_closed_while_threads_swap(threads: Threads) -> None:
    closing = threading.Timer(0.1, threads.pool.close)
    closing.start()
    with contextlib.suppress(vram.DeviceError):  # closed
        threads.run(10)
    began = time.monotonic()
    closing.join()
    assert time.monotonic() - began < 5
    assert threads.pool.closed
    assert all(isinstance(failure, vram.DeviceError) for failure in threads.failures)
    assert threads.pool.device.backend.check() is None
    assert threads.pool.device.free_memory == threads.capacity
