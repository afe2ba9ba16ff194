"""`Stretch` measures part of a program over all pools of the process: its peak and what it left behind.

`Pool.measure()` does the same for one pool. The pytest plugin and the notebook magic use `Stretch`.
"""

from __future__ import annotations

import contextlib
import gc

from vram.core.measure import Measurement
from vram.core.observer import follow_pools, keep_stacks, open_pools
from vram.core.snapshot import Leak, Mark

__all__ = ["Stretch"]


class Stretch:
    """Measures a `with` block over all pools, including those created inside.

    With `leaks`, pools keep stacks inside the block. At its end garbage is collected, and `left` has the
    allocations that the block left behind.
    """

    def __init__(self, *, leaks: bool = False) -> None:
        """Measure from the beginning of the `with` block."""
        self._leaks = leaks
        self._measured = Measurement(follow_pools)
        self._marks: dict[int, Mark] = {}
        self._ends = contextlib.ExitStack()
        self.left: list[Leak] = []

    def __enter__(self) -> Stretch:
        if self._leaks:
            gc.collect()
            self._marks = {pool.number: pool.mark() for pool in open_pools()}
            self._ends.callback(keep_stacks())
        self._ends.enter_context(self._measured)
        return self

    def __exit__(self, failed: object, *exception: object) -> None:
        self._ends.close()
        if self._leaks and failed is None:
            self._look_for_leaks()

    def _look_for_leaks(self) -> None:
        gc.collect()
        for pool in open_pools():
            self.left += pool.leaks(since=self._marks.get(pool.number))
        self.left.sort(key=lambda leak: -leak.bytes)

    @property
    def peaks(self) -> dict[str, int]:
        """The most bytes live at once above those at the beginning, by device.

        If several pools share a device, this is the sum of their peaks, an upper bound of the common peak.
        """
        return self._measured.by_memory("peak")

    @property
    def kept(self) -> dict[str, int]:
        """Bytes live at the end beyond those at the beginning, by device."""
        return self._measured.by_memory("kept")

    @property
    def allocations(self) -> dict[str, int]:
        """Allocations made, by device."""
        return self._measured.by_memory("allocations")
