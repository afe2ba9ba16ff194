"""Finding memory that streams share without ordering. `checker` observes a program and reports races."""

from __future__ import annotations

from vram.race.checker import Race, RaceChecker, RaceWarning, race_check, reads
from vram.race.sites import Site

__all__ = ["Race", "RaceChecker", "RaceWarning", "Site", "race_check", "reads"]
