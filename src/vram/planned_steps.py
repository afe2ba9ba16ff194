"""`vram.planned`: a repeated step whose allocations get fixed offsets in one region for each of its streams.

Each `with` block is a step. The first is recorded, its lifetimes are planned (`vram.plan`), and later ones
are served from their offsets; what a step does differently is the pool's. Recording, planning and serving
are native (native/planned.hpp); this is how Python begins and ends steps and reads what came of them.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from vram.core.device import Device
from vram.core.manager import get_memory_manager
from vram.core.pool import Pool
from vram.core.scope import Scope
from vram.errors import ConfigError
from vram.lifetimes.plan import Plan
from vram.sizes import format_size

__all__ = ["Planned", "PlannedReport", "planned"]

SECONDS = 1.0
"""Default time limit of one planning."""


@dataclass(frozen=True)
class PlannedReport:
    """What planned steps came to.

    - `steps`: finished; `plans`: made, `replans` of them after the first
    - `hits`: allocations served from their offsets; `left`: left to the pool as planned, because they live
      beyond their step; `fallbacks`: served by the pool because the step differed from the plan; `refused`:
      served by the pool because the region could not be had
    - `planned_bytes`: the regions held now
    - of the last step, or the one under way, in bytes: `lower_bound`, the most it had live at one time of
      what steps allocated; `peak`, the regions and the most that was live at one time beside them
    """

    steps: int
    plans: int
    hits: int
    left: int
    fallbacks: int
    refused: int
    planned_bytes: int
    lower_bound: int
    peak: int

    @property
    def replans(self) -> int:
        """Plans made after the first."""
        return max(self.plans - 1, 0)

    @property
    def ratio(self) -> float:
        """Peak ÷ lower bound of the last step."""
        return self.peak / self.lower_bound if self.lower_bound else 1.0

    def __str__(self) -> str:
        return (
            f"{self.steps} steps, {self.plans} plans: {self.hits} allocations at their offsets, {self.left} "
            f"left to the pool, {self.fallbacks} fallbacks, {self.refused} refused; "
            f"{format_size(self.planned_bytes)} planned, peak {format_size(self.peak)} "
            f"({self.ratio:.4f} of the lower bound)"
        )


class Planned(Scope):
    """The planned steps of a pool; made by `vram.planned`. Each `with` block is one step.

    Allocations of all threads between its begin and its end belong to the step, in their order; the thread
    that began a step ends it, and a pool has one at a time. A function may be decorated: each call is a step.
    """

    __slots__ = ("pool", "time_limit")

    def __init__(self, pool: Pool, time_limit: float) -> None:
        """Made by `vram.planned`."""
        self.pool = pool
        self.time_limit = time_limit

    def __enter__(self) -> Planned:
        """Begin a step. Plans what the last one did, where that is due, and gets the memory for it."""
        self.pool.planned_begin(self.time_limit)
        return self

    def __exit__(self, *exception: object) -> None:
        """End the step."""
        self.pool.planned_end()

    def step(self) -> None:
        """End the step and begin the next, for a loop inside one `with` block."""
        self.__exit__()
        self.__enter__()

    def report(self) -> PlannedReport:
        """Return what the steps came to so far."""
        return PlannedReport(**self.pool.planned_report())

    def plans(self) -> tuple[Plan, ...]:
        """Return the plan in force, one for each stream; ids are the positions of allocations in the step."""
        return tuple(map(_plan, self.pool.planned_layouts()))

    def close(self) -> None:
        """Forget the plan and what was counted, and give its memory back to the pool.

        What still lives there stays valid; its region goes back with the last of it. The next step is a first
        one again.
        """
        self.pool.planned_close()

    def __repr__(self) -> str:
        return f"<vram.Planned on {self.pool.device.name}: {self.report()}>"


def planned(pool: Pool | Device | str | None = None, *, time_limit: float = SECONDS) -> Planned:
    """Serve a repeated step from a plan: `with vram.planned(pool): ...` around each step.

    `pool` may be a device or its name, for the pool that `vram.get_memory_manager()` has of it. The plan is
    the pool's, so that calling this again for each step goes on with it; `close()` ends it. `time_limit` is
    for one planning, in seconds.
    """
    if not time_limit >= 0:
        raise ConfigError(f"time_limit is {time_limit!r}; it must be 0 seconds or more", value=time_limit)
    if not isinstance(pool, Pool):
        pool = get_memory_manager().pool(pool)
    return Planned(pool, float(time_limit))


def _plan(layout: dict[str, Any]) -> Plan:
    def column(name: str, kind: str) -> array[int]:
        values: array[int] = array(kind)
        values.frombytes(layout[name])
        return values

    return Plan(
        ids=tuple(column("index", "Q")),
        lower=column("lower", "q"),
        upper=column("upper", "q"),
        size=column("size", "Q"),
        offset=column("offset", "Q"),
        align=512,
        capacity=None,
        peak=layout["peak"],
        lower_bound=layout["lower_bound"],
        method=layout["method"],
        proven=layout["proven"],
        seconds=layout["seconds"],
    )
