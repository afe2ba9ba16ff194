"""Finding memory that streams share without ordering. `checker` observes a program and reports races."""

from __future__ import annotations

from vram.race.call_sites import Site
from vram.race.checker import Race, RaceChecker, RaceWarning, race_check, reads

__all__ = ["Race", "RaceChecker", "RaceWarning", "Site", "race_check", "reads"]
