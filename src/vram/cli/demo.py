"""`vram demo`: runs the tour, examples/tour.py, which lies in the package as data."""

from __future__ import annotations

import linecache
from pathlib import Path

import rich_click as click

from vram.errors import ConfigError

__all__ = ["demo_command"]

NAME = "tour.py"


@click.command("demo")
def demo_command() -> None:
    """Take a tour: allocate, a race shown and cured, out of memory explained, a real job, and what if.

    Takes well under a minute and needs no GPU.
    """
    path = _find()
    text = path.read_text(encoding="utf-8")
    # Under a name of its own: stacks leave out what lies inside this package, and the tour is a program.
    linecache.cache[NAME] = (len(text), None, text.splitlines(keepends=True), NAME)
    exec(compile(text, NAME, "exec"), {"__name__": "__main__", "__file__": str(path)})


def _find() -> Path:
    """Installed beside its recording, or in the repository that this package is part of."""
    here = Path(__file__).resolve()
    places = [here.parents[1] / "data" / NAME, *(parent / "examples" / NAME for parent in here.parents)]
    for place in places:
        if place.exists():
            return place
    raise ConfigError(f"{NAME} was not installed with this package; the repository has it in examples/")
