"""The largest value of a setting with which a program fits: by bisection, with the memory of every trial.

The setting is an argument of the program or an environment variable; `place_of` finds out which.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vram.errors import ConfigError
from vram.sizes import format_count, format_size

from .gpus import Gpu

__all__ = ["Found", "Place", "Trial", "place_of", "read_range", "search"]

MOST_MISSES = 2
"""Estimates that may fail to halve the range before the middle is tried."""
_RANGE = re.compile(r"\s*([^=\s]+)\s*=\s*(\d+)\s*\.\.\s*(\d+)\s*")


@dataclass(frozen=True)
class Trial:
    """One value, whether the program fits with it, and its peaks in bytes (as far as it ran)."""

    value: int
    fits: bool
    peak_allocated: int
    peak_reserved: int
    peak_used: int


@dataclass(frozen=True)
class Found:
    """The result of a search: `best` is the largest value that fits, None if not even `low` does.

    `trials` are in the order of their values: the curve.
    """

    program: str
    name: str
    low: int
    high: int
    gpu: Gpu
    best: int | None
    trials: tuple[Trial, ...]

    @property
    def text(self) -> str:
        """The answer in one sentence."""
        gpu = f"{self.gpu.name} ({format_size(self.gpu.memory)})"
        if self.best is None:
            return f"{self.program} does not fit {gpu} even with {self.name} = {self.low}."
        used = next(trial.peak_used for trial in self.trials if trial.value == self.best)
        room = f"with {format_size(self.gpu.memory - used)} to spare"
        if self.best == self.high:
            return f"{self.program} fits {gpu} with the whole range: {self.name} = {self.best}, {room}."
        return f"{self.program} fits {gpu} with {self.name} up to {self.best}, {room}."

    def to_json(self) -> dict[str, Any]:
        """Plain data; the command line prints it as JSON."""
        return {
            "program": self.program,
            "name": self.name,
            "low": self.low,
            "high": self.high,
            "gpu": {"key": self.gpu.key, "name": self.gpu.name, "memory": self.gpu.memory},
            "best": self.best,
            "trials": [asdict(trial) for trial in self.trials],
            "text": self.text,
        }

    def __repr__(self) -> str:
        return f"<vram.predict.Found: {self.text} {format_count(len(self.trials), 'trial')}>"

    def _repr_html_(self) -> str:
        from .html import found_html

        return found_html(self)


def read_range(text: str) -> tuple[str, int, int]:
    """Name, lowest and highest value of "batch_size=1..512"."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a range; write batch_size=1..512 or env:BATCH=1..512", value=text)
    low, high = int(match[2]), int(match[3])
    if low > high:
        raise ConfigError(f"{text!r} is empty: {low} is more than {high}", value=text)
    return match[1], low, high


# ---- the search -------------------------------------------------------------------------------------------


def search(low: int, high: int, memory: int, attempt: Callable[[int], Trial]) -> list[Trial]:
    """Try values until the largest that fits is known; returns the trials in the order of their values.

    Both ends are tried first. Where the memory of two values is known, the next value is where a line through
    them reaches `memory`; the middle of the range is tried if that does not narrow it fast enough.
    """
    trials = [attempt(low)]
    if trials[0].fits and high > low:
        trials.append(attempt(high))
    misses = 0
    while trials[0].fits and not trials[-1].fits:
        below = max(trial.value for trial in trials if trial.fits)
        above = min(trial.value for trial in trials if not trial.fits)
        if above - below <= 1:
            break
        middle = (below + above) // 2
        value = middle if misses >= MOST_MISSES else _estimate(trials, below, above, memory) or middle
        tried = attempt(value)
        left = above - value if tried.fits else value - below
        misses = 0 if 2 * left <= above - below + 1 else misses + 1
        trials = sorted([*trials, tried], key=lambda trial: trial.value)
    return trials


def _estimate(trials: Sequence[Trial], below: int, above: int, memory: int) -> int | None:
    """Where a line through the two largest values that fit reaches `memory`; None if there is none."""
    known = [trial for trial in trials if trial.fits][-2:]
    if len(known) < 2 or known[1].peak_used <= known[0].peak_used:
        return None
    rise = known[1].peak_used - known[0].peak_used
    value = known[1].value + (memory - known[1].peak_used) * (known[1].value - known[0].value) // rise
    return min(max(value, below + 1), above - 1)


def best_of(trials: Iterable[Trial]) -> int | None:
    """The largest value that fits and below which nothing failed."""
    best = None
    for trial in trials:
        if not trial.fits:
            break
        best = trial.value
    return best


# ---- where a value goes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where the value of a setting goes.

    Into the word `index` behind `prefix`, behind all words as an `option`, or into a `variable` of the
    environment.
    """

    index: int | None = None
    prefix: str = ""
    option: str | None = None
    variable: str | None = None

    def apply(
        self, words: Sequence[str], environment: Mapping[str, str], value: int
    ) -> tuple[list[str], dict[str, str]]:
        """The words and the environment of the program with that value."""
        told, variables = list(words), dict(environment)
        if self.index is not None:
            told[self.index] = f"{self.prefix}{value}"
        elif self.option is not None:
            told += [self.option, str(value)]
        elif self.variable is not None:
            variables[self.variable] = str(value)
        return told, variables


def place_of(name: str, words: Sequence[str], environment: Mapping[str, str]) -> Place:
    """Where a program takes the setting `name` from.

    "env:NAME" is an environment variable. Another name is an argument if the command has it
    (`--batch-size 8`, `--batch_size=8`, `batch_size=8`) or the script mentions it; else a variable if the
    environment has it or the script reads it; else the argument `--NAME`.
    """
    if name.startswith("env:"):
        return Place(variable=name.removeprefix("env:"))
    return (
        _place_in_words(name, words)
        or _place_in_source(name, _source(words))
        or (Place(variable=name) if name in environment else None)
        or Place(option=name if name.startswith("-") else f"--{name}")
    )


def _place_in_words(name: str, words: Sequence[str]) -> Place | None:
    wanted = _canonical(name)
    for index, word in enumerate(words):
        key, equals, _value = word.partition("=")
        if index == 0 or _canonical(key) != wanted:
            continue
        if equals:
            return Place(index=index, prefix=f"{key}=")
        if word.startswith("-") and index + 1 < len(words):
            return Place(index=index + 1)
    return None


def _place_in_source(name: str, source: str) -> Place | None:
    """The option or the variable that a script mentions in quotes."""
    letters = re.escape(_canonical(name)).replace("_", "[-_]")
    if option := re.search(rf"""["'](--?{letters})["'=]""", source):
        return Place(option=option[1])
    if re.search(rf"""(environ|getenv)\W+(get\W+)?["']{re.escape(name)}["']""", source):
        return Place(variable=name)
    return None


def _canonical(name: str) -> str:
    return name.lstrip("-+").replace("-", "_")


def _source(words: Sequence[str]) -> str:
    """The text of the script among the words of a command; empty if there is none."""
    script = next((word for word in words if word.endswith(".py") and os.path.isfile(word)), None)
    try:
        return "" if script is None else Path(script).read_text("utf-8", errors="replace")
    except OSError:
        return ""
