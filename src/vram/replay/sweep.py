"""Which setting would have needed the least memory: tries and ranks sensible settings of every allocator.

A setting is judged by the smallest device on which the job completes, found by replaying it on devices of
several sizes. Memory often costs time in the driver: `worthwhile` weighs both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from vram.arguments import require
from vram.sizes import parse_size
from vram.trace import Lifetimes, Trace, peak_allocated
from vram.trace.lifetimes import intended

from .executors import run_all
from .policies import policy_kind
from .recorded import Setting
from .run import DEFAULT_LAG_US, ReplayResult, replay

__all__ = ["Grid", "Ranked", "Ranking", "collapsed", "grid", "suggest", "sweep", "sweep_all", "worthwhile"]

CAPACITY_STEP = 2 << 20
"""The smallest device is found to this precision: the driver allocates no less."""
DEFAULT_SUGGESTIONS = ("torch", "torch-expandable", "cuda-async", "vram")
"""What a PyTorch job can use without changing its code."""


@dataclass(frozen=True)
class Ranked:
    """What a setting is predicted to need, in bytes. Better ones have a smaller `rank`, from 1.

    `smallest_capacity`: the least memory with which the job completes (None: it completes with none that was
    tried); `peak_reserved`: the most that the allocator reserves with unlimited memory; `retries`: how often
    it had to release memory and retry on the smallest device.
    """

    rank: int
    policy: str
    conf: dict[str, str]
    environment: str
    peak_reserved: int
    smallest_capacity: int | None
    driver_us: float
    retries: int


_GRID: dict[str, dict[str, Sequence[str | None]]] = {
    "torch": {
        "max_split_size_mb": (None, "64", "128", "256", "512"),
        "roundup_power2_divisions": (None, "4", "8", "16"),
        "garbage_collection_threshold": (None, "0.8"),
    },
    "torch-expandable": {
        "roundup_power2_divisions": (None, "4", "8", "16"),
        "large_segment_size_mb": (None, "12"),
    },
    "cuda-async": {},
    "bfc": {"garbage_collection": (None, "true")},
    "rmm-pool": {"initial_pool_size": (None, "1GiB")},
    "rmm-arena": {},
    "vram": {"cross_stream": (None, "wait"), "max_page": (None, "8MiB", "2MiB")},
}


class Ranking(tuple[Ranked, ...]):
    """Ranked settings, the best first: a tuple that a notebook shows as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        first = self[0] if self else None
        best = (
            f", the best with {first.policy}: {first.environment or 'defaults'}"
            if isinstance(first, Ranked)
            else ""
        )
        return f"<Ranking of {len(self)} settings{best}>"

    def _repr_html_(self) -> str:
        from vram.core.html import ranking_html

        return ranking_html(self)


class Grid(tuple[Setting, ...]):
    """Settings to try: a tuple with a short repr."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<Grid of {len(self)} settings of {', '.join(dict.fromkeys(each.policy for each in self))}>"


def grid(policies: Iterable[str] | None = None) -> Grid:
    """The sensible settings of each allocator, its defaults first."""
    found = []
    for policy in dict.fromkeys(_GRID if policies is None else policies):
        options = _GRID[policy_kind(policy).name]
        for values in product(*options.values()):
            conf = {key: value for key, value in zip(options, values, strict=True) if value is not None}
            found.append(Setting(policy, conf))
    return Grid(found)


def sweep(
    trace: Trace | Lifetimes,
    settings: Iterable[Setting] | None = None,
    *,
    policies: Iterable[str] | None = None,
    capacity: int | str | None = None,
    lag_us: float = DEFAULT_LAG_US,
    jobs: int = 1,
    executor: str | Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> Ranking:
    """Try `settings` (default: `grid(policies)`) and rank them by the smallest device that they need.

    `capacity` is the largest device to consider. `jobs` replays run in parallel, in threads or on `executor`:
    "dask" (a cluster on this machine), "dask=ADDRESS", or a client of `distributed`. `progress` is called
    with the number of settings done and their total.
    """
    (ranked,) = sweep_all(
        [trace],
        settings,
        policies=policies,
        capacity=capacity,
        lag_us=lag_us,
        jobs=jobs,
        executor=executor,
        progress=progress,
    )
    return ranked


def sweep_all(
    traces: Iterable[Trace | Lifetimes],
    settings: Iterable[Setting] | None = None,
    *,
    policies: Iterable[str] | None = None,
    capacity: int | str | None = None,
    lag_us: float = DEFAULT_LAG_US,
    jobs: int = 1,
    executor: str | Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Ranking]:
    """`sweep` over several traces at once: one ranking each."""
    chosen = grid(policies) if settings is None else tuple(settings)
    for setting in chosen:
        require(setting, Setting, "each of the settings")
    programs = [trace if isinstance(trace, Lifetimes) else intended(trace) for trace in traces]
    limit = None if capacity is None else parse_size(capacity)
    tasks = [
        (place, Question(setting.policy, dict(setting.conf), least, limit, lag_us))
        for place, least in enumerate(map(peak_allocated, programs))
        for setting in chosen
    ]
    outcomes = run_all(judge, programs, tasks, jobs=jobs, executor=executor, progress=progress)
    starts = range(0, len(outcomes), max(len(chosen), 1))
    return [_ranked(chosen, outcomes[start : start + len(chosen)]) for start in starts]


def suggest(
    trace: Trace | Lifetimes,
    *,
    policies: Iterable[str] = DEFAULT_SUGGESTIONS,
    capacity: int | str | None = None,
    jobs: int = 1,
) -> Ranking:
    """The settings with which a recorded PyTorch job would have needed the least memory, best first.

    With a `capacity`, settings that would not fit are left out.
    """
    ranked = sweep(trace, policies=policies, capacity=capacity, jobs=jobs)
    return Ranking(each for each in ranked if each.smallest_capacity is not None)


class Question(NamedTuple):
    """What `judge` answers for a program that holds `least` bytes at its peak."""

    policy: str
    conf: dict[str, str]
    least: int
    limit: int | None
    lag_us: float


def judge(program: Lifetimes, question: Question) -> dict[str, Any]:
    """One setting: what it reserves with unlimited memory, and the smallest device that it needs."""

    def run(capacity: int | None) -> ReplayResult:
        return replay(program, question.policy, conf=question.conf, capacity=capacity, lag_us=question.lag_us)

    free, smallest, on_smallest = find_smallest(run, question.least)
    fits = smallest is not None and (question.limit is None or smallest <= question.limit)
    return {
        "peak_reserved": free.peak_reserved,
        "smallest_capacity": smallest if fits else None,
        "driver_us": free.driver_us,
        "retries": on_smallest.retries if on_smallest is not None else 0,
    }


def find_smallest(
    run: Callable[[int | None], ReplayResult], least: int
) -> tuple[ReplayResult, int | None, ReplayResult | None]:
    """A replay with unlimited memory; the smallest device on which `run` completes, and the replay there.

    `run` replays on a device of some size (None: never full); `least` is what the program holds at its peak.
    """

    def ends(capacity: int) -> ReplayResult | None:
        result = run(capacity)
        return result if result.oom is None else None

    free = run(None)
    if free.oom is not None:
        return free, None, None
    low, high = least // CAPACITY_STEP, -(-free.peak_reserved // CAPACITY_STEP)
    return free, *_smallest(ends, max(low, 1), max(high, 1))


def _smallest(
    ends: Callable[[int], ReplayResult | None], low: int, high: int
) -> tuple[int | None, ReplayResult | None]:
    """The least multiple of CAPACITY_STEP with which the job completes, and the result; by bisection.

    An allocator may fail with more memory although it succeeded with less. Then this is a capacity that is
    enough while one step less is not.
    """
    done = ends(high * CAPACITY_STEP)
    for _ in range(4):  # what was reserved without a limit is not always enough with one
        if done is not None:
            break
        low, high = high, high + max(high // 4, 1)
        done = ends(high * CAPACITY_STEP)
    if done is None:
        return None, None
    while low < high:
        middle = (low + high) // 2
        result = ends(middle * CAPACITY_STEP)
        if result is None:
            low = middle + 1
        else:
            high, done = middle, result
    return high * CAPACITY_STEP, done


def collapsed(ranking: Sequence[Ranked]) -> list[tuple[Ranked, list[Ranked]]]:
    """Settings that come to the same, as one: the simplest of each allocator, and the others like it."""
    alike: dict[tuple[Any, ...], list[Ranked]] = {}
    for each in ranking:
        outcome = (each.policy, each.smallest_capacity, each.peak_reserved, each.retries, each.driver_us)
        alike.setdefault(outcome, []).append(each)
    return [(group[0], group[1:]) for group in alike.values()]


def worthwhile(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Of pairs of memory and driver time, which are worth their price: none other has less of both.

    Of equal pairs, all are.
    """
    return [
        not any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)
        for point in points
    ]


def _ranked(settings: Sequence[Setting], outcomes: Sequence[Mapping[str, Any]]) -> Ranking:
    def order(place: int) -> tuple[Any, ...]:
        outcome, setting = outcomes[place], settings[place]
        smallest = outcome["smallest_capacity"]
        return (
            smallest is None,
            smallest or 0,
            outcome["peak_reserved"],
            len(setting.conf),
            outcome["driver_us"],
            place,
        )

    return Ranking(
        Ranked(
            rank=rank,
            policy=settings[place].policy,
            conf=dict(settings[place].conf),
            environment=settings[place].environment,
            **outcomes[place],
        )
        for rank, place in enumerate(sorted(range(len(settings)), key=order), 1)
    )
