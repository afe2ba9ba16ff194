"""One stretch of a program over all pools of the process: what was held at most, and what was left behind.

`Pool.measure()` is the same for one pool. The pytest plugin and the notebook's magic are made of this.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable

from vram.core.pool import Pool, follow_pools, open_pools
from vram.core.snapshot import Leak, Mark
from vram.core.stats import Measurement

__all__ = ["Stretch"]


class Stretch:
    """Measures a `with` block over the pools there are and those made inside.

    With `leaks`, pools keep stacks inside, and at the end garbage is collected and `left` has what the block
    left behind.
    """

    def __init__(self, *, leaks: bool = False) -> None:
        """Begin with the `with` block."""
        self._leaks = leaks
        self._measured: list[tuple[str, Measurement]] = []
        self._marks: dict[int, Mark] = {}
        self._end: Callable[[], None] | None = None
        self.left: list[Leak] = []

    def __enter__(self) -> Stretch:
        if self._leaks:
            gc.collect()
            self._marks = {pool.number: pool.mark() for pool in open_pools()}
        self._end = follow_pools(self._follow)
        return self

    def _follow(self, pool: Pool) -> None:
        measurement = pool.measure()
        measurement.__enter__()
        self._measured.append((pool.memory, measurement))
        if self._leaks:
            pool._keep_stacks(True, self)

    def __exit__(self, failed: object, *exception: object) -> None:
        assert self._end is not None
        self._end()
        for _, measurement in self._measured:
            measurement.__exit__()
        if self._leaks:
            self._let_go()
        if self._leaks and failed is None:
            self._look_for_leaks()

    def _let_go(self) -> None:
        for pool in open_pools():
            pool._keep_stacks(False, self)

    def _look_for_leaks(self) -> None:
        gc.collect()
        for pool in open_pools():
            self.left += pool.leaks(since=self._marks.get(pool.number))
        self.left.sort(key=lambda leak: -leak.bytes)

    @property
    def peaks(self) -> dict[str, int]:
        """The most bytes live at once above those at the beginning, by device.

        Where several pools share a device it is the sum of their peaks, which is at least the peak.
        """
        peaks: defaultdict[str, int] = defaultdict(int)
        for place, measurement in self._measured:
            peaks[place] += measurement.peak
        return dict(peaks)

    @property
    def kept(self) -> dict[str, int]:
        """Bytes live at the end beyond those at the beginning, by device."""
        kept: defaultdict[str, int] = defaultdict(int)
        for place, measurement in self._measured:
            kept[place] += measurement.kept
        return dict(kept)

    @property
    def allocations(self) -> dict[str, int]:
        """Allocations made, by device."""
        made: defaultdict[str, int] = defaultdict(int)
        for place, measurement in self._measured:
            made[place] += measurement.allocations
        return dict(made)
