"""Runs the program of a trace through allocators on a model device, and says what it would have cost.

`run` replays, `policies` knows the allocators and their settings, `sweep` tries many of these, where
`executors` say. Reading files is for `vram.trace`, drawing for the front ends.
"""

from __future__ import annotations

from .policies import POLICY_KINDS
from .run import (
    DEFAULT_LAG_US,
    NEVER_FULL,
    POLICIES,
    ReplayReport,
    ReplayResult,
    compare,
    replay,
    replay_stream,
)
from .sweep import Ranked, Ranking, Setting, grid, suggest, sweep, sweep_all

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
    "compare",
    "grid",
    "replay",
    "replay_stream",
    "suggest",
    "sweep",
    "sweep_all",
]
