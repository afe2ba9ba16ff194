"""`vram demo`: run the tour, examples/tour.py, which is installed with the package as data."""

from __future__ import annotations

import linecache
from pathlib import Path

import rich_click as click

from vram.errors import ConfigError

__all__ = ["demo_command"]

NAME = "tour.py"


@click.command("demo")
def demo_command() -> None:
    """Take a tour: allocate, find and fix a race, explain an out-of-memory error, replay a recorded job.

    The tour takes less than a minute and needs no GPU.
    """
    path = _find()
    text = path.read_text(encoding="utf-8")
    # Run under its own name: stacks omit frames of this package, and the tour is a user program.
    linecache.cache[NAME] = (len(text), None, text.splitlines(keepends=True), NAME)
    exec(compile(text, NAME, "exec"), {"__name__": "__main__", "__file__": str(path)})


def _find() -> Path:
    """Find the tour next to its recording in the installed package, or in the repository."""
    here = Path(__file__).resolve()
    places = [here.parents[1] / "data" / NAME, *(parent / "examples" / NAME for parent in here.parents)]
    for place in places:
        if place.exists():
            return place
    raise ConfigError(f"{NAME} is missing from this installation; it is in the repository under examples/")
