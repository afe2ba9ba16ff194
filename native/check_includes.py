"""Checks that files in native/ include only from their own folder and floors below, without a cycle."""

from __future__ import annotations

import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

FLOORS = [
    {"tests"},
    {"bindings", "c"},
    {"plug", "bench", "null_gpu"},
    {"replay", "sharing"},
    {"arena", "driver_pool", "planner"},
    {"pool"},
    {"order"},
    {"placement"},
    {"journal"},
    {"backends"},
    {"base"},
]
HEIGHT = {folder: len(FLOORS) - number for number, floor in enumerate(FLOORS) for folder in floor}
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def main() -> int:
    """Print what breaks the rule; return the exit code."""
    root = Path(__file__).parent
    files = {path.relative_to(root) for path in root.rglob("*.[ch]pp")} | {Path("c/vram.h")}
    graph = {path: includes(root, path) & files for path in files}
    wrong = [
        f"{path} includes {other}, which is not below it"
        for path, others in sorted(graph.items())
        for other in sorted(others)
        if path.parts[0] != other.parts[0] and HEIGHT[path.parts[0]] <= HEIGHT[other.parts[0]]
    ]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        wrong.append("a cycle: " + " includes ".join(map(str, error.args[1])))
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


def includes(root: Path, path: Path) -> set[Path]:
    """The files that one names in quotes, by their path from native/."""
    named = INCLUDE.findall((root / path).read_text(encoding="utf-8"))
    return {Path(name) if (root / name).exists() else path.parent / name for name in named}


if __name__ == "__main__":
    sys.exit(main())
