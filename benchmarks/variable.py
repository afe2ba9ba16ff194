"""Measure what a pair costs if sizes hardly ever repeat: mixes of sizes, in nanoseconds and instructions.

Runs `build/bench/bench_variable`, which `make bench` builds, on a model device. Instructions are counted by
valgrind: those of a longer run less those of a shorter one. They do not depend on the load of the machine.
Where valgrind is not installed, the column is empty.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import rich_click as click

from vram.bench.report import Column, LeftOut, Report, Table
from vram.cli.bench import measuring_command
from vram.core.device import Device

PROGRAM = Path(__file__).resolve().parent.parent / "build" / "bench" / "bench_variable"
COUNTED_ROUNDS = 2


def counted(valgrind: str, mix: int, rounds: int) -> int:
    """Return the instructions of a whole run."""
    command = [valgrind, "--tool=callgrind", "--callgrind-out-file=/dev/null", PROGRAM, str(mix), str(rounds)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    found = re.search(r"Collected : (\d+)", said)
    if found is None:
        raise RuntimeError(f"valgrind did not count the instructions: {said}")
    return int(found[1])


def instructions(valgrind: str, mix: int, pairs: int) -> float:
    """Return the instructions of a pair in the rounds after the first two."""
    more = counted(valgrind, mix, 1 + COUNTED_ROUNDS) - counted(valgrind, mix, 1)
    return more / (COUNTED_ROUNDS * pairs)


def run(device: str | None, *, quick: bool) -> Report:
    if not PROGRAM.exists():
        raise click.ClickException(f"{PROGRAM} is missing. Build it with: make bench")
    command = [PROGRAM, "--json", *(["--quick"] if quick else [])]
    rows: list[dict[str, Any]] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    valgrind = shutil.which("valgrind")
    missing = [] if valgrind else [LeftOut("instructions", "valgrind is not installed")]
    for mix, row in enumerate(rows):
        pairs = row.pop("pairs")
        row["instructions"] = instructions(valgrind, mix, pairs) if valgrind else None
    columns = [
        Column("mix", "sizes"),
        Column("ns", "a pair, ns", "ns"),
        Column("instructions", "instructions of a pair", "count"),
    ]
    table = Table("Mixes of sizes, C++", columns, rows)
    return Report.of("variable", Device(device), [table], missing, quick=quick)


if __name__ == "__main__":
    measuring_command("variable", __doc__, run)()
