"""Choosing the chunk size of a pipeline from measurements. Pure functions: sizes and times in, a size out.

The rule: each lane takes `fixed + slope × bytes` for a chunk. Both are measured with small and larger chunks
at the beginning of the run; the fastest ones count, because the first chunks run cold. A run of n equal
chunks then takes the time of all lanes once, to fill and drain, and n - 1 times that of the slowest lane. The
host, which queues the work, counts as a lane. Among the sizes SMALL × 2^k within the bounds, the rule finds
the smallest predicted time and chooses the largest size within CLOSE of it, which leaves the most room for
what was not measured. Small chunks lose to fixed costs, large ones to filling and draining. If fixed costs
make one lane slower than the others, the size grows until copying and computing take the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = ["LARGE", "MOST", "SMALL", "ChunkSizes", "best_size"]

SMALL = 1 << 20
"""Bytes of the first chunks, which measure the fixed cost of a chunk."""
LARGE = 8 << 20
"""Bytes of the next chunks, which measure the cost of a byte."""
MOST = 256 << 20
"""Maximum chunk size."""
FEW = 128 << 20
"""Smaller inputs are not measured but split into eight chunks."""
CLOSE = 1.01
_WARM = 2  # chunks of each size that reuse memory of earlier ones

Times = Mapping[str, float]
"""Milliseconds in each lane."""


def predicted_ms(size: int, total: int, lanes: Mapping[str, tuple[float, float]]) -> float:
    """Predict the time of `total` bytes in chunks of `size`; lanes are (fixed ms, ms per byte)."""
    times = [fixed + slope * size for fixed, slope in lanes.values()]
    chunks = max(1, -(-total // size))
    return sum(times) + (chunks - 1) * max(times, default=0.0)


def best_size(total: int, most: int, lanes: Mapping[str, tuple[float, float]]) -> int:
    """Return the size that the rule chooses."""
    sizes = [SMALL]
    while sizes[-1] * 2 <= min(most, MOST, total):
        sizes.append(sizes[-1] * 2)
    times = {size: predicted_ms(size, total, lanes) for size in sizes}
    least = min(times.values())
    return max(size for size in sizes if times[size] <= least * CLOSE)


class ChunkSizes:
    """The sizes of successive chunks of a run; `add` reports the times of completed chunks."""

    def __init__(self, total: int, depth: int, most: Callable[[], int], chosen: int | None = None) -> None:
        """Split `total` bytes; `depth` chunks of at most `most()` are in flight. `chosen` is a known size."""
        self._needed = depth + _WARM
        self._left = total
        self._most = most
        self._given = 0
        self._samples: dict[int, list[dict[str, float]]] = {SMALL: [], LARGE: []}
        self.lanes: dict[str, tuple[float, float]] = {}
        if chosen is None and total <= FEW:
            chosen = max(SMALL // 4, -(-total // 8))
        self.chosen = chosen

    def next(self) -> int:
        """Return the size of the next chunk in bytes, if enough data is left."""
        measuring = SMALL if self._given < self._needed else LARGE
        self._given += 1
        size = max(1, min(measuring if self.chosen is None else self.chosen, self._most()))
        self._left = max(0, self._left - size)
        return size

    def add(self, size: int, times: Times) -> None:
        """Add the times of a chunk of about `size` bytes in each lane."""
        if self.chosen is not None:
            return
        # Chunks consist of whole rows, so assign each to the nearest size.
        near = SMALL if size * size < SMALL * LARGE else LARGE
        self._samples[near].append({"": float(size), **times})
        if all(len(samples) >= self._needed for samples in self._samples.values()):
            self._choose()

    def _choose(self) -> None:
        small, large = (_quickest(self._samples[size]) for size in (SMALL, LARGE))
        apart = large[""] - small[""]
        for lane in large.keys() - {""}:
            at_small, at_large = small.get(lane, 0.0), large[lane]
            slope = max(0.0, (at_large - at_small) / apart) if apart > 0 else 0.0
            self.lanes[lane] = (max(0.0, at_large - slope * large[""]), slope)
        self.chosen = best_size(max(1, self._left), self._most(), self.lanes)


def _quickest(samples: list[dict[str, float]]) -> dict[str, float]:
    """Return the minimum time for each lane; sizes are nearly equal."""
    return {lane: min(sample.get(lane, 0.0) for sample in samples) for lane in samples[0]}
