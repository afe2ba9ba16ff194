"""Runs the program of a trace through allocators on a model device, and reports what it would have needed.

`run` replays, `policies` knows the allocators and their settings, `sweep` tries many settings on `executors`.
"""

from __future__ import annotations

from .policies import POLICY_KINDS
from .recorded import Setting, recorded_setting
from .run import (
    DEFAULT_LAG_US,
    NEVER_FULL,
    POLICIES,
    ReplayReport,
    ReplayResult,
    SpillTraffic,
    compare,
    replay,
    replay_stream,
)
from .sweep import Ranked, Ranking, grid, suggest, sweep, sweep_all

__all__ = [
    "DEFAULT_LAG_US",
    "NEVER_FULL",
    "POLICIES",
    "POLICY_KINDS",
    "Ranked",
    "Ranking",
    "ReplayReport",
    "ReplayResult",
    "Setting",
    "SpillTraffic",
    "compare",
    "grid",
    "recorded_setting",
    "replay",
    "replay_stream",
    "suggest",
    "sweep",
    "sweep_all",
]
