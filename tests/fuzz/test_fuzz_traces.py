"""The fuzz target runs a fixed number of files; and the mutations are what they claim to be."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
from mutations import FAMILIES, good_log, good_parquet, good_snapshot, good_stream, mutate_value

from effort import THOROUGH
from vram.errors import TraceError
from vram.trace import lifetimes, open_trace

COUNT = int(os.environ.get("VRAM_MUTANTS", "10000" if THOROUGH else "110"))


@pytest.mark.slow
@pytest.mark.fork
def test_mutated_files_of_every_format_are_read_or_refused_in_bounds(tmp_path: Path) -> None:
    script = Path(__file__).with_name("fuzz_traces.py")
    command = [
        sys.executable,
        str(script),
        "--json",
        "--count",
        str(COUNT),
        "--keep",
        str(tmp_path / "broken"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    families = json.loads(done.stdout)["families"]
    assert set(families) == set(FAMILIES)
    assert sum(tally["files"] for tally in families.values()) == COUNT
    assert sum(tally["read"] for tally in families.values()) > COUNT // 20
    assert all(tally["refused"] for tally in families.values())


def test_what_is_mutated_is_good_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for good in (pickle.dumps(good_snapshot()), good_log(), good_stream(), good_parquet()):
        path.write_bytes(good)
        assert open_trace(path, trusted=True).events > 0


def test_mutated_values_are_read_or_refused(tmp_path: Path) -> None:
    chance = random.Random(7)
    base = good_snapshot()
    path = tmp_path / "mutant.pickle"
    outcomes = set()
    for _ in range(2000):
        path.write_bytes(pickle.dumps(mutate_value(base, chance)))
        try:
            trace = open_trace(path, trusted=True)
        except TraceError as error:
            assert error.place
            outcomes.add("refused")
        else:
            blocks = sum(len(segment.blocks) for segment in trace.segments)
            assert len(lifetimes(trace)) <= 2 * trace.events + 2 * blocks
            outcomes.add("read")
    assert outcomes == {"read", "refused"}
