"""Finding memory that streams share without order. `checker` watches a program and reports."""

from __future__ import annotations

from vram.race.call_sites import Site
from vram.race.checker import Race, RaceChecker, RaceWarning, race_check, reads

__all__ = ["Race", "RaceChecker", "RaceWarning", "Site", "race_check", "reads"]
