"""The scenarios as loops, and how a way to allocate is inserted into them.

A loop is source text, as in `timeit`: the expressions that allocate and free are inserted into it, so that
the timed part has no other calls. Sizes are those of native/bench/bench.hpp, so that Python and C++ do the
same. `peers` has the allocators.
"""

from __future__ import annotations

import itertools
import random
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from vram import _native

__all__ = ["HOTPATH", "PROGRAMS", "Run", "Scenario", "Way", "fragmented", "pressure", "training_step"]

KIB, MIB = 1 << 10, 1 << 20
KEPT, TEMPORARY, LAYERS = _native.bench_layer()

Run: TypeAlias = Callable[[], float]
"""One run of a scenario; returns nanoseconds per pair."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Way:
    """A way to allocate and free, as expressions over `names`.

    `make` is an expression with `{size}`. `drop` is a statement with `block` and, if it needs the size,
    `{size}`. By default, dropping the last reference frees.
    """

    name: str
    make: str
    drop: str = "del block"
    names: Mapping[str, Any] = field(default_factory=dict)
    out_of_memory: type[BaseException] = MemoryError
    trim: Callable[[], object] = _nothing
    """Releases cached memory, so that the next run starts cold."""


@dataclass(frozen=True)
class Scenario:
    """A loop over a way: `body` contains `{make}` and `{drop}` and returns nanoseconds for all pairs."""

    name: str
    pairs: int
    body: str
    names: Mapping[str, Any]
    dropped: str = "size"
    """The expression for the size of `block` where it is dropped."""

    def run(self, way: Way) -> Run:
        """Compile the loop for one way."""
        loop, pairs = self.compile(way), self.pairs
        return lambda: float(loop()) / pairs

    def compile(self, way: Way) -> Callable[[], Any]:
        """Return the loop as a function without arguments."""
        names = {
            "clock": time.perf_counter_ns,
            "out_of_memory": way.out_of_memory,
            **self.names,
            **way.names,
        }
        body = self.body.format(make=way.make.format(size="size"), drop=way.drop.format(size=self.dropped))
        source = f"def loop({', '.join(names)}):\n{textwrap.indent(textwrap.dedent(body), '    ')}"
        space: dict[str, Any] = {}
        exec(compile(source, f"<{self.name}: {way.name}>", "exec"), space)
        loop = space["loop"]
        return lambda: loop(**names)


# ---- the loops --------------------------------------------------------------------------------------------

_ONE_LIVE = """
start = clock()
for _ in rounds:
    block = {make}
    {drop}
return clock() - start
"""

_ALL_THEN_FREE = """
start = clock()
for _ in rounds:
    for i in slots:
        live[i] = {make}
    for i in slots:
        block = live[i]
        live[i] = None
        {drop}
return clock() - start
"""

# Every layer keeps its blocks until the backward pass, except temporaries.
_LAYERS = """
keep, take = live.append, live.pop
start = clock()
for _ in rounds:
    for _ in layers:
        for size in kept:
            keep({make})
        for size in temporary:
            keep({make})
        for size in temporary_back:
            block = take()
            {drop}
    for size in back:
        block = take()
        {drop}
return clock() - start
"""

_SWAPS = """
start = clock()
for i, size in first:
    live[i] = {make}
for i, old, size in swaps:
    block = live[i]
    live[i] = None
    {drop}
    live[i] = {make}
for i, old in last:
    block = live[i]
    live[i] = None
    {drop}
return clock() - start
"""

# A refused request is skipped while filling. Later it frees the oldest block and tries again, as a program
# under memory pressure must.
_PRESSURE = """
live, refused = {{}}, 0
for name, size in fill:
    try:
        live[name] = {make}
    except out_of_memory:
        refused += 1
for name, old in thinned:
    block = live.pop(name, None)
    if block is not None:
        {drop}
start = clock()
for name, size, victims in churn:
    for each, old in victims:
        block = live.pop(each, None)
        if block is not None:
            {drop}
    while True:
        try:
            live[name] = {make}
            break
        except out_of_memory:
            refused += 1
            each = next(iter(live))
            old, block = sizes[each], live.pop(each)
            {drop}
spent = clock() - start
for each in list(live):
    old, block = sizes[each], live.pop(each)
    {drop}
return spent, refused
"""


def _one_live(name: str, size: int, pairs: int = 10_000) -> Scenario:
    return Scenario(name, pairs, _ONE_LIVE, {"size": size, "rounds": range(pairs)})


def _all_then_free(name: str, size: int, blocks: int = 1000, rounds: int = 5) -> Scenario:
    names = {"size": size, "rounds": range(rounds), "slots": range(blocks), "live": [None] * blocks}
    return Scenario(name, blocks * rounds, _ALL_THEN_FREE, names)


def _layers(
    name: str,
    kept: list[int],
    temporary: list[int],
    layers: int,
    rounds: int,
) -> Scenario:
    names = {
        "live": [],
        "rounds": range(rounds),
        "layers": range(layers),
        "kept": kept,
        "temporary": temporary,
        "temporary_back": temporary[::-1],
        "back": (kept * layers)[::-1],
    }
    return Scenario(name, rounds * layers * (len(kept) + len(temporary)), _LAYERS, names)


def _swaps(name: str) -> Scenario:
    """Slots whose blocks are replaced by blocks of other sizes, in a fixed random order."""
    sizes: dict[int, int] = {}
    first, swaps = [], []
    for slot, size in _native.bench_swaps():
        if slot in sizes:
            swaps.append((slot, sizes[slot], size))
        else:
            first.append((slot, size))
        sizes[slot] = size
    names = {"live": [None] * len(sizes), "first": first, "swaps": swaps, "last": list(sizes.items())}
    return Scenario(name, len(first) + len(swaps), _SWAPS, names, dropped="old")


HOTPATH = (
    _one_live("512 B", 512),
    _one_live("256 KiB", 256 * KIB),
    _one_live("64 MiB", 64 * MIB),
    _all_then_free("1000 x 64 KiB", 64 * KIB),
    _layers("transformer step", KEPT, TEMPORARY, LAYERS, rounds=10),
    _swaps("variable, 64 live"),
)
"""The six scenarios of `vram bench hotpath`; native/bench/bench.hpp has the same ones with the same names."""

PROGRAMS = {
    "same size": _all_then_free("same size", 256 * KIB),
    "large": _layers("large", [2 * MIB, 5 * MIB, 12 * MIB, 30 * MIB, 64 * MIB, 96 * MIB], [], 2, 50),
    "transformer step": HOTPATH[4],
    "variable sizes": _swaps("variable sizes"),
}
"""The programs of `vram bench scenarios` that need no limit."""


def training_step(total: int) -> Scenario:
    """One step with about `total` bytes of activations: the layers of the transformer step, scaled."""
    factor = total / (LAYERS * sum(KEPT))
    kept, temporary = ([max(512, int(size * factor) // 512 * 512) for size in sizes]
                       for sizes in (KEPT, TEMPORARY))  # fmt: skip
    return _layers("training step", kept, temporary, LAYERS, rounds=1)


PRESSURE_SHARE = 95
"""Percent of the limit that a program under memory pressure keeps allocated."""


def pressure(limit: int, rounds: int) -> Scenario:
    """A program that fills 95 % of a limit, frees half of it and goes on; its loop returns (ns, refusals).

    It has the blocks of the transformer step, as many as fit. Every round frees a random half of them and
    requests as many blocks of the same sizes, in another order.
    """
    chance, names = random.Random(0), iter(range(1 << 30))
    live: dict[int, int] = {}
    held = 0
    for size in itertools.cycle(KEPT):
        if (held := held + size) > limit * PRESSURE_SHARE // 100:
            break
        live[next(names)] = size
    fill, sizes, churn = list(live.items()), dict(live), []
    for _ in range(rounds):
        freed = [(name, live.pop(name)) for name in chance.sample(tuple(live), len(live) // 2)]
        wanted = [(next(names), size) for _, size in chance.sample(freed, len(freed))]
        churn += [(name, size, () if i else tuple(freed)) for i, (name, size) in enumerate(wanted)]
        live |= wanted
        sizes |= wanted
    return _under_pressure("memory pressure", fill, (), churn, sizes)


def fragmented(limit: int, requests: int) -> Scenario:
    """A program at 95 % of a limit with fragmented memory; its loop returns (ns, refusals).

    Mixed sizes fill the limit, every other block is freed, then each request frees random blocks until it
    fits.
    """
    most, chance, names = limit * PRESSURE_SHARE // 100, random.Random(0), iter(range(1 << 30))
    live: dict[int, int] = {}
    sizes: dict[int, int] = {}

    def request() -> tuple[int, int]:
        size = int(limit / 4096 * 2 ** chance.uniform(0, 7)) // 512 * 512
        return next(names), size

    fill, churn = [], []
    name, size = request()
    while sum(live.values()) + size <= most:
        fill.append((name, size))
        live[name] = sizes[name] = size
        name, size = request()
    thinned = [(each, live.pop(each)) for each, _ in fill[::2]]
    held = sum(live.values())
    for _ in range(requests):
        name, size = request()
        victims = []
        while held + size > most:
            each = chance.choice(tuple(live))
            held -= live[each]
            victims.append((each, live.pop(each)))
        churn.append((name, size, tuple(victims)))
        live[name] = sizes[name] = size
        held += size
    return _under_pressure("fragmented", fill, thinned, churn, sizes)


def _under_pressure(
    name: str,
    fill: Sequence[tuple[int, int]],
    thinned: Sequence[tuple[int, int]],
    churn: Sequence[tuple[int, int, Sequence[tuple[int, int]]]],
    sizes: Mapping[int, int],
) -> Scenario:
    """Names and sizes: of what fills the limit, of what is freed then, and of what the clock is for.

    Each request of `churn` comes with the blocks that are freed before it.
    """
    names = {"fill": fill, "thinned": thinned, "churn": churn, "sizes": sizes}
    return Scenario(name, len(churn), _PRESSURE, names, dropped="old")
