"""`vram run --on-oom`: keeps evidence when memory runs out, as a message or as a recording of what was held.

The pool explains the failure; this module decides where the explanation goes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from vram import _native
from vram.core import observer
from vram.core.pool import Pool
from vram.errors import ConfigError, OutOfMemory, VramError
from vram.observe.recorder import Recorder

__all__ = ["KINDS", "keep_failures"]

KINDS = ("explain", "snapshot")
MOST_KEPT = 5
"""Failures kept per process; a program that retries forever would fill the disk."""


def keep_failures(kinds: Iterable[str], folder: str | os.PathLike[str] = ".") -> Callable[[], None]:
    """Keep evidence of every request that fails, even if the program catches the error.

    "explain" writes the error and its place to stderr. "snapshot" writes everything the pool holds to
    `vram-oom-PID-N.vtrace` in `folder`, for `vram explain` and the other commands. The first five failures
    are kept. Pools keep stacks meanwhile. Call the returned function to end it.
    """
    wanted = tuple(kinds)
    unknown = [kind for kind in wanted if kind not in KINDS]
    if unknown or not wanted:
        what = f"unknown evidence {', '.join(map(repr, unknown))}" if unknown else "no evidence is named"
        raise ConfigError(f"{what}; valid: {', '.join(KINDS)}")
    numbers = itertools.count(1)

    def keep(pool: Pool, error: OutOfMemory) -> None:
        number = next(numbers)
        if number > MOST_KEPT:
            return
        if "explain" in wanted:
            _explain(error)
        if "snapshot" in wanted:
            _say(_snapshot(pool, error, Path(folder) / f"vram-oom-{os.getpid()}-{number}.vtrace"))
        if number == MOST_KEPT:
            _say(f"{MOST_KEPT} failures were kept; later ones are not")

    ends = contextlib.ExitStack()
    ends.callback(observer.keep_stacks())
    ends.callback(observer.failures.add(keep))
    return ends.close


def _explain(error: OutOfMemory) -> None:
    stack = _native.stack_here()
    where = f" at {stack[0].filename}:{stack[0].line} in {stack[0].name}" if stack else ""
    _say(f"memory ran out{where}\n{error}")


def _snapshot(pool: Pool, error: OutOfMemory, path: Path) -> str:
    """Write a recording of what is held, unless the pool is being recorded; returns where it is."""
    if pool._recorder is not None:
        pool._recorder.flush()
        return f"the recording {pool._recorder.path} has this moment: vram explain {pool._recorder.path}"
    try:
        with Recorder(pool, path) as recorder:
            recorder.note_failure(error)
    except (VramError, ImportError, OSError) as failure:
        return f"no snapshot was kept: {failure}"
    return f"what was held is in {path}: vram explain {path}"


def _say(text: str) -> None:
    print(f"vram: {text}", file=sys.stderr, flush=True)
