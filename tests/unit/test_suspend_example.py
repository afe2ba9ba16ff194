"""examples/suspend.py: what it serves fits because training is suspended, and the training never notices."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "suspend.py"


def test_it_trains_and_serves_in_turn() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE), "host"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 13
    for turn in range(3):
        trained, suspended, served, resumed = lines[4 * turn : 4 * turn + 4]
        assert re.search(r"trained, loss .* suspended\s+0 B", trained)
        assert re.search(r"reserved\s+0 B, suspended\s+66 MiB", suspended)
        assert re.search(r"reserved\s+64 MiB, suspended\s+66 MiB", served)
        assert re.search(r"reserved\s+66 MiB, suspended\s+0 B", resumed)
    assert lines[-1].endswith("bit-identical")
