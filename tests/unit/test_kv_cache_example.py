"""examples/kv_cache.py on the host: the same numbers three ways, and what growing in place saves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "kv_cache.py"


COPIED = 6 << 30
"""Bytes that concatenation may copy on the host: most of the time of the example."""


def test_it_runs_and_says_what_growing_in_place_saves(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    figures = tmp_path / "figures.json"
    program = (
        "import runpy, sys, vram; vram.devices = lambda: []; "
        f"sys.argv = ['kv_cache.py', '--json', {str(figures)!r}]; "
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__'); "
        "import os; print('threads', os.environ['OPENBLAS_NUM_THREADS'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"},
    )
    assert done.returncode == 0, done.stderr
    assert "All three compute the same numbers" in done.stdout
    ways = json.loads(figures.read_text())["ways"]
    assert "threads 1" in done.stdout
    assert ways["grow"]["copied_bytes"] == 0 < ways["concatenate"]["copied_bytes"] < COPIED
    assert ways["grow"]["most_bytes"] <= ways["maximum"]["most_bytes"] < ways["concatenate"]["most_bytes"]
    assert ways["grow"]["pages_created_late"] == 0
