"""How runs are timed: after a warm-up, in turns, so that a disturbance affects all of them alike.

`vram bench` and the scripts in `benchmarks/` measure with these functions. What they run is in `workloads`
and `peers`.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from vram.bench.report import LeftOut
from vram.bench.workloads import Run

__all__ = ["WARM_RUNS", "elapsed_ns", "factor", "in_turns", "least", "least_of_each", "reason", "undisturbed"]

WARM_RUNS = 2
"""Runs before the first that counts: they fill caches and let the interpreter specialize the loop."""

Result = TypeVar("Result")


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Disable the garbage collector during a measurement."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def in_turns(
    runs: Mapping[str, Callable[[], Result]],
    repeats: int,
    failures: list[LeftOut] | None = None,
    *,
    where: str = "",
    warm: int = WARM_RUNS,
) -> dict[str, list[Result]]:
    """Return `repeats` results for each name. Every repeat goes through all runs before the next one begins.

    A run that raises is omitted, with the reason in `failures`; without that list the error is raised.
    `where` names what was measured, for that list.
    """
    found: dict[str, list[Result]] = {name: [] for name in runs}
    with undisturbed():
        for repeat in range(-warm, repeats):
            for name in tuple(found):
                try:
                    result = runs[name]()
                except Exception as error:
                    if failures is None:
                        raise
                    failures.append(LeftOut(f"{name}, {where}" if where else name, reason(error)))
                    del found[name]
                else:
                    if repeat >= 0:
                        found[name].append(result)
    return found


def least(
    runs: Mapping[str, Run], repeats: int, failures: list[LeftOut] | None = None, *, where: str = ""
) -> dict[str, float]:
    """Return the minimum of `repeats` results for each name, taken in turns as by `in_turns`."""
    return {name: min(results) for name, results in in_turns(runs, repeats, failures, where=where).items()}


def least_of_each(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the least value of each key over several results."""
    return {key: min(result[key] for result in results) for key in results[0]}


def elapsed_ns(work: Callable[[], object], clock: Callable[[], int] = time.perf_counter_ns) -> int:
    """Return the nanoseconds that a call takes."""
    start = clock()
    work()
    return clock() - start


def reason(error: BaseException) -> str:
    """Return why something failed, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def factor(whole: float | None, part: float | None) -> float | None:
    """Return `whole / part`; None if one of them was not measured."""
    return whole / part if whole is not None and part else None
