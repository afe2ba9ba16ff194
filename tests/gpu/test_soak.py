"""The soak: threads × streams close to a limit, for as long as VRAM_SOAK_SECONDS says; every byte is checked.

Buffers are filled and checked by kernels on their own and on recorded streams, freed here and by other
threads, while memory is trimmed and merged. Each thread launches its own work; the pool is what they share.
"""

from __future__ import annotations

import os
import queue
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import pytest
from work import Marked, Work

from vram import Device, OutOfMemory, Pool, Stream, format_size

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SECONDS = float(os.environ.get("VRAM_SOAK_SECONDS", "5"))
THREADS, STREAMS = 8, 8
LIMIT = 8 * GIB
SHARE = 0.95  # of the limit, kept allocated
SMALLEST, LARGEST = 512, 64 * MIB
GRACE = 120.0  # seconds for the threads to end in


@dataclass
class Counts:
    allocations: int = 0
    frees: int = 0
    frees_elsewhere: int = 0
    recorded: int = 0
    trims: int = 0
    merges: int = 0
    out_of_memory: int = 0
    checked: int = 0

    def add(self, other: Counts) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class Worker:
    """One thread: its streams, its buffers, and the inbox into which others put theirs for it to free."""

    def __init__(self, number: int, pool: Pool, work: Work) -> None:
        self.pool, self.work = pool, work
        self.dice = random.Random(number)
        self.streams = [Stream(pool.device) for _ in range(STREAMS)]
        self.inbox: queue.SimpleQueue[Marked] = queue.SimpleQueue()
        self.others: list[Worker] = []
        self.held: list[Marked] = []
        self.bytes = 0
        self.counts = Counts()

    def run(self, until: float) -> None:
        try:
            while time.monotonic() < until:
                self.step()
        finally:
            self.finish()

    def step(self) -> None:
        self.empty_inbox()
        roll = self.dice.random()
        if roll < 0.0005:
            self.pool.trim(wait=self.dice.random() < 0.2)
            self.counts.trims += 1
        elif roll < 0.001:
            self.pool.coalesce()
            self.counts.merges += 1
        elif roll < 0.01:
            self.dice.choice(self.streams).synchronize()  # or the device would fall ever further behind
        elif roll < 0.3 or self.bytes > SHARE * LIMIT / THREADS:
            self.let_one_go()
        else:
            self.take_one()

    def take_one(self) -> None:
        size = int(SMALLEST * (LARGEST / SMALLEST) ** self.dice.random()) // 4 * 4
        try:
            each = Marked(self.pool, self.work, size, self.dice.choice(self.streams))
        except OutOfMemory:
            self.counts.out_of_memory += 1
            self.let_one_go()
            return
        self.counts.allocations += 1
        self.held.append(each)
        self.bytes += size

    def let_one_go(self) -> None:
        """Check a buffer, on its own stream or as a recorded use of another, and have it freed by anyone."""
        if not self.held:
            return
        place = self.dice.randrange(len(self.held))
        self.held[place], each = self.held[-1], self.held[place]
        self.held.pop()
        self.bytes -= each.size
        if self.dice.random() < 0.2:
            self.check_elsewhere(each)
        else:
            each.check()
        self.counts.checked += each.size
        if self.dice.random() < 0.3:
            self.dice.choice(self.others).inbox.put(each)
        else:
            each.buffer.free()
            self.counts.frees += 1

    def check_elsewhere(self, each: Marked) -> None:
        reader = self.dice.choice(self.streams)
        owner = next(stream for stream in self.streams if stream.handle == each.buffer.stream)
        reader.wait_stream(owner)
        each.check_on(reader)
        self.counts.recorded += 1

    def empty_inbox(self) -> None:
        while True:
            try:
                each = self.inbox.get_nowait()
            except queue.Empty:
                return
            each.buffer.free()
            self.counts.frees_elsewhere += 1

    def finish(self) -> None:
        while self.held:
            self.let_one_go()
        for stream in self.streams:
            stream.synchronize()


def watch(pool: Pool, until: float) -> int:
    """The accounts must be right at any moment; returns the most bytes seen allocated."""
    most = 0
    while time.monotonic() < until:
        stats = pool.stats()
        most = max(most, stats.allocated)
        assert stats.allocated + stats.pending + stats.cached + stats.free == stats.reserved <= LIMIT
        time.sleep(0.5)
    return most


def summary(pool: Pool, counts: Counts, most: int, seconds: float) -> str:
    stats = pool.stats()
    rungs = ", ".join(f"{name} {number}" for name, number in stats.rungs.items() if number)
    return (
        f"\nsoak: {THREADS} threads × {STREAMS} streams, {seconds:.0f} s, limit {format_size(LIMIT)}\n"
        f"  {counts}\n"
        f"  checked {counts.checked / GIB:.1f} GiB; most seen allocated {format_size(most)}, "
        f"peak reserved {format_size(stats.peak_reserved)}\n"
        f"  rungs: {rungs}"
    )


def test_threads_and_streams_close_to_the_limit(
    make_pool: Callable[..., Pool], work: Work, device: Device, capsys: Any
) -> None:
    pool = make_pool(limit=LIMIT)
    workers = [Worker(number, pool, work) for number in range(THREADS)]
    for worker in workers:
        worker.others = [other for other in workers if other is not worker]
    begin = time.monotonic()
    until = begin + SECONDS
    with ThreadPoolExecutor(THREADS) as executor:
        futures = [executor.submit(worker.run, until) for worker in workers]
        most = watch(pool, until)
        for future in futures:
            future.result(GRACE)
    counts = Counts()
    for worker in workers:
        worker.empty_inbox()
        counts.add(worker.counts)
    wrong, checked = work.take_counts()
    with capsys.disabled():
        print(summary(pool, counts, most, time.monotonic() - begin))

    assert (wrong, checked) == (0, counts.checked)
    assert pool.check() is None
    assert counts.frees + counts.frees_elsewhere == counts.allocations > 0 and pool.stats().live == 0
    assert most > 0.5 * LIMIT, "the soak never came close to its limit"
    assert pool.stats().peak_reserved <= LIMIT
    for worker in workers:
        for stream in worker.streams:
            stream.close()
    assert pool.check() is None
    pool.trim(wait=True)
    assert pool.stats().reserved == 0
