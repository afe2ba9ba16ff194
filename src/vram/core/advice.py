"""What a pool's statistics and journal show about a program: sizes, hit rate, churn, and suggestions.

A pure function of numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vram.config import NO_THRESHOLD
from vram.core.stats import fragmentation, ready
from vram.sizes import format_size
from vram.trace.lifetimes import ALLOCATE, Lifetimes, lifetimes
from vram.trace.model import Trace

__all__ = ["Patterns", "SizePattern", "find_patterns"]

LOW_HIT_RATE = 0.5
HIGH_FRAGMENTATION = 0.3
FEW = 100
"""Below this many allocations nothing is suggested: there is no pattern yet."""
MOST_SIZES = 8
"""The most sizes in a suggestion."""


@dataclass(frozen=True, slots=True)
class SizePattern:
    """One requested size in the journal: how often it was allocated, and how many were live at once."""

    size: int
    allocations: int
    most_live: int

    @property
    def bytes(self) -> int:
        """Bytes requested in total."""
        return self.size * self.allocations


@dataclass(frozen=True)
class Patterns:
    """A diagnosis. `source` is "journal", or "statistics" if no journal was kept and sizes are unknown.

    `churn` is the share of allocations that were freed again; `dropped` counts events for which the journal
    had no room. `suggestions` are sentences; `warmup` is what `Pool.warmup` needs to avoid the misses.
    """

    source: str
    allocations: int
    hit_rate: float
    """Share of allocations served without a driver call."""
    stream_cache_hit_rate: float
    churn: float
    fragmentation: float
    dropped: int = 0
    sizes: tuple[SizePattern, ...] = ()
    histogram: Mapping[int, int] = field(default_factory=dict)
    """Allocations by size class: the power of two that is at least the size."""
    warmup: Mapping[int, int] = field(default_factory=dict)
    suggestions: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.allocations} allocations seen ({self.source}), hit rate {self.hit_rate:.1%}, "
            f"churn {self.churn:.1%}, fragmentation {self.fragmentation:.1%}"
        ]
        lines += [f"  up to {format_size(size)}: {count}" for size, count in self.histogram.items()]
        lines += [f"- {suggestion}" for suggestion in self.suggestions]
        return "\n".join(lines)


def find_patterns(raw: Mapping[str, Any], config: Mapping[str, Any], journal: Trace) -> Patterns:
    """Diagnose from `raw_stats()`, the settings, and the journal, which may be empty."""
    total = sum(kind["total"] for kind in raw["allocations"].values())
    live = sum(kind["current"] for kind in raw["allocations"].values())
    sizes = _sizes(lifetimes(journal))
    found = Patterns(
        source="journal" if sizes else "statistics",
        allocations=total,
        hit_rate=ready(dict(raw)) / total if total else 0.0,
        stream_cache_hit_rate=raw["hits"] / total if total else 0.0,
        churn=(total - live) / total if total else 0.0,
        fragmentation=fragmentation(dict(raw)),
        dropped=journal.dropped,
        sizes=tuple(sizes),
        histogram=_histogram(sizes),
        warmup={each.size: each.most_live for each in sizes[:MOST_SIZES] if each.allocations > 1},
    )
    return Patterns(**{**found.__dict__, "suggestions": tuple(_suggest(found, raw, config))})


def _sizes(program: Lifetimes) -> list[SizePattern]:
    """Every size that the journal has allocations of, the most allocated first."""
    allocations: Counter[int] = Counter()
    now: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for op, identity, size in zip(program.op, program.id, program.size, strict=True):
        if identity < program.carried:
            continue  # allocated before the first event
        if op == ALLOCATE:
            allocations[size] += 1
            now[size] += 1
            most[size] = max(most[size], now[size])
        else:
            now[size] -= 1
    return [SizePattern(size, count, most[size]) for size, count in allocations.most_common()]


def _histogram(sizes: Iterable[SizePattern]) -> dict[int, int]:
    classes: Counter[int] = Counter()
    for each in sizes:
        classes[1 << max(0, each.size - 1).bit_length()] += each.allocations
    return dict(sorted(classes.items()))


def _suggest(found: Patterns, raw: Mapping[str, Any], config: Mapping[str, Any]) -> Iterable[str]:
    if found.allocations < FEW:
        yield f"only {found.allocations} allocations so far: too few for a pattern"
        return
    if found.hit_rate < LOW_HIT_RATE:
        yield from _suggest_hits(found, raw, config)
    room, share = config.get("stream_cache", 1), found.stream_cache_hit_rate
    if share < LOW_HIT_RATE and room <= raw["cached_blocks"] // max(1, len(raw["streams"])):
        yield (
            f"the stream caches are full and served only {share:.0%} of the allocations: "
            f"raise stream_cache above {room}"
        )
    if found.fragmentation > HIGH_FRAGMENTATION:
        yield (
            f"{found.fragmentation:.0%} of the reserved memory is free in pieces: "
            + ("call coalesce()" if raw["paged"] else "use pages (pages=True), which any address can share")
            + ", or free long-lived and short-lived allocations in separate pools"
        )
    if raw["retries"]:
        yield (
            f"{raw['retries']} allocations had to flush caches, wait or release memory first: "
            "the limit or the device is close to full"
        )
    if raw["pending"]["peak"] > raw["peak_live"] // 4:
        yield (
            f"up to {format_size(raw['pending']['peak'])} waited for other streams: "
            "free later, or make the streams wait for each other instead of record_stream"
        )


def _suggest_hits(found: Patterns, raw: Mapping[str, Any], config: Mapping[str, Any]) -> Iterable[str]:
    low = f"only {found.hit_rate:.0%} of the allocations were served without calling the driver: "
    if config.get("release_threshold", NO_THRESHOLD) < raw["reserved"]["peak"]:
        yield low + "memory is released with every free; raise release_threshold"
    elif found.churn < LOW_HIT_RATE:
        yield low + "most are kept, so there is little to reuse; warm up what is allocated at the start"
    elif found.warmup:
        sizes = ", ".join(f"{size}: {count}" for size, count in found.warmup.items())
        yield low + f"warm up the common sizes with pool.warmup({{{sizes}}})"
    else:
        yield low + "sizes vary; a journal (journal=65536) would show them"
