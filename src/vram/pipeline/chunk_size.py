"""How large the chunks of a pipeline should be, found by measuring. Pure: sizes and times in, a size out.

The rule. Each lane takes `fixed + slope × bytes` for a chunk; both are measured, from small and larger chunks
at the beginning of the run, of which the quickest count: the first meet everything cold. A run of n equal
chunks then takes all lanes once, to fill and drain, and the slowest lane n - 1 times more; the host, which
queues the work, counts as a lane, too. Of the sizes SMALL × 2^k inside the bounds the one with the least
predicted time is looked for; of those within CLOSE of it the largest is taken, for it leaves most room for
what was not measured. Small chunks lose to fixed costs, large ones to filling and draining; where fixed costs
make one lane slower than the others, the size grows until copying and computing take the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = ["LARGE", "MOST", "SMALL", "ChunkSizes", "best_size"]

SMALL = 1 << 20
"""Bytes of the first chunks, which measure what a chunk costs whatever its size."""
LARGE = 8 << 20
"""Bytes of the chunks after them, which measure what a byte costs."""
MOST = 256 << 20
"""No chunk is chosen larger than this."""
FEW = 128 << 20
"""Less than this is not worth measuring: it is cut into eight."""
CLOSE = 1.01
_WARM = 2  # chunks of each size that find memory which others have used before

Times = Mapping[str, float]
"""Milliseconds of each lane."""


def predicted_ms(size: int, total: int, lanes: Mapping[str, tuple[float, float]]) -> float:
    """How long `total` bytes take in chunks of `size`; lanes are (fixed ms, ms for a byte)."""
    times = [fixed + slope * size for fixed, slope in lanes.values()]
    chunks = max(1, -(-total // size))
    return sum(times) + (chunks - 1) * max(times, default=0.0)


def best_size(total: int, most: int, lanes: Mapping[str, tuple[float, float]]) -> int:
    """The size that the rule chooses."""
    sizes = [SMALL]
    while sizes[-1] * 2 <= min(most, MOST, total):
        sizes.append(sizes[-1] * 2)
    times = {size: predicted_ms(size, total, lanes) for size in sizes}
    least = min(times.values())
    return max(size for size in sizes if times[size] <= least * CLOSE)


class ChunkSizes:
    """The sizes of a run's chunks, one after the other; `add` tells what finished chunks took."""

    def __init__(self, total: int, depth: int, most: Callable[[], int], chosen: int | None = None) -> None:
        """Of `total` bytes, `depth` chunks of at most `most()` at a time; `chosen` is known from before."""
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
        """Bytes of the next chunk, if it can be as large as that."""
        measuring = SMALL if self._given < self._needed else LARGE
        self._given += 1
        size = max(1, min(measuring if self.chosen is None else self.chosen, self._most()))
        self._left = max(0, self._left - size)
        return size

    def add(self, size: int, times: Times) -> None:
        """A chunk of about `size` bytes took so long in each lane."""
        if self.chosen is not None:
            return
        # Rows are whole: what is nearer to one size counts as that.
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
    """For each lane the least time seen; sizes are all but equal."""
    return {lane: min(sample.get(lane, 0.0) for sample in samples) for lane in samples[0]}
