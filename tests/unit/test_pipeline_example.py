"""examples/pipeline.py: more data than memory goes through, and the report says how."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pipeline.py"


def test_it_runs_as_a_program_and_says_what_it_did() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE)], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "96 MiB through 16MiB" in result.stdout
    assert "48 chunks of 2 MiB" in result.stdout
    assert "20 batches of different lengths" in result.stdout
