"""How runs are timed: after a warm-up, in turn so that disturbances affect all equally, and by the minimum.

`workloads` and `peers` define what is run.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator, Mapping

from vram.bench.report import Left
from vram.bench.workloads import Run

__all__ = ["WARM_RUNS", "factor", "least", "undisturbed"]

WARM_RUNS = 2
"""Runs before the first that counts: they fill caches and let the interpreter specialize the loop."""


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


def least(runs: Mapping[str, Run], repeats: int, failures: list[Left] | None = None) -> dict[str, float]:
    """Return the minimum of `repeats` results for each name, measured in turn.

    A run that raises is omitted, with the reason in `failures`; without that list the error is raised.
    """
    running, found = dict(runs), dict.fromkeys(runs, math.inf)
    with undisturbed():
        for repeat in range(-WARM_RUNS, repeats):
            for name, run in tuple(running.items()):
                try:
                    result = run()
                except Exception as error:
                    if failures is None:
                        raise
                    failures.append(Left(name, reason(error)))
                    del running[name]
                else:
                    if repeat >= 0:
                        found[name] = min(found[name], result)
    return {name: found[name] for name in running}


def reason(error: BaseException) -> str:
    """Return why something failed, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def factor(whole: float | None, part: float | None) -> float | None:
    """Return `whole / part`; None if one of them was not measured."""
    return whole / part if whole is not None and part else None
