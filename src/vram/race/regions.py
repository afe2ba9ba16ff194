"""Which bytes a use touches: ranges, strided arrays, and pointers, of which only the start is known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

__all__ = ["Region", "array_region"]

MOST_STEPS = 10_000
"""Maximum steps to find a byte shared by two strided arrays; beyond it they count as overlapping."""


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes from `start` to `end`, excluding `end`.

    With `steps`, only runs of `run` bytes in it: one for each combination of `count` multiples of each
    `stride`. With `open`, it is a pointer: its bytes begin at `start` and end at `end` at the latest.
    """

    start: int
    end: int
    run: int = 0
    steps: tuple[tuple[int, int], ...] = ()  # (count, stride), strides longer than the run
    open: bool = False

    @property
    def solid(self) -> bool:
        """Whether every byte of it is touched."""
        return not self.steps and not self.open

    def closed(self) -> Region:
        """Return the region in which a pointer reaches as far as it can."""
        return replace(self, open=False) if self.open else self

    def overlaps(self, other: Region) -> bool:
        """Return whether both touch the same byte. Two pointers do only if they are equal."""
        if self.open and other.open:
            return self.start == other.start
        if self.start >= other.end or other.start >= self.end:
            return False
        return not (self.steps or other.steps) or _share_a_byte(self, other)

    def _runs(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        return (self.run, self.steps) if self.steps else (self.end - self.start, ())


def array_region(
    address: int, item: int, shape: Sequence[int], strides: Sequence[int] | None
) -> Region | None:
    """Return the bytes of an array's elements; None if it is empty. Strides are bytes; None: packed."""
    if 0 in shape or item == 0:
        return None
    if strides is None:
        return Region(address, address + item * math.prod(shape))
    steps = []
    for count, stride in zip(shape, strides, strict=True):
        if stride < 0:
            address += (count - 1) * stride
        if count > 1 and stride:
            steps.append((abs(stride), count))
    run = item
    left: list[tuple[int, int]] = []
    for stride, count in sorted(steps):
        if stride <= run and not left:
            run += (count - 1) * stride
        else:
            left.append((count, stride))
    end = address + run + sum((count - 1) * stride for count, stride in left)
    return Region(address, end, run, tuple(left)) if left else Region(address, end)


def _share_a_byte(one: Region, other: Region) -> bool:
    """Solve one.start + Σ iₖsₖ + r = other.start + Σ jₖtₖ + q for integers within their bounds.

    With jₖ counted from the other end, all terms are positive: Σ cₖxₖ + slack = goal.
    """
    (run, steps), (other_run, other_steps) = one._runs(), other._runs()
    goal = other.end - 1 - one.start
    most: dict[int, int] = {}
    for count, stride in (*steps, *other_steps):
        most[stride] = most.get(stride, 0) + count - 1
    terms = sorted(most.items(), reverse=True)
    return _Search(terms, run + other_run - 2).reaches(goal)


class _Search:
    """Whether a goal is a sum of bounded multiples of the terms, plus a slack smaller than the runs."""

    def __init__(self, terms: Iterable[tuple[int, int]], slack: int) -> None:
        self._terms = list(terms)
        self._slack = slack
        self._steps_left = MOST_STEPS
        self._reach = [slack]  # maximum sum of the remaining terms, last first
        self._common = [0]
        for term, count in reversed(self._terms):
            self._reach.append(self._reach[-1] + term * count)
            self._common.append(math.gcd(self._common[-1], term))

    def reaches(self, goal: int, at: int = 0) -> bool:
        left = len(self._terms) - at
        if goal < 0 or goal > self._reach[left]:
            return False
        if left == 0:
            return True
        if goal % self._common[left] > self._slack:
            return False
        self._steps_left -= 1
        if self._steps_left < 0:
            return True
        term, count = self._terms[at]
        least = max(0, -(-(goal - self._reach[left - 1]) // term))
        return any(self.reaches(goal - term * x, at + 1) for x in range(least, min(count, goal // term) + 1))
