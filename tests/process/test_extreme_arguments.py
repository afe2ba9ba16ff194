"""Whatever a public function is given, it returns or raises a documented error: it never crashes or hangs.

The calls are generated from signatures by extreme_calls.py, in a process of their own for each part.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy")
extreme_calls = pytest.importorskip("extreme_calls")

TIMEOUT = 1000.0  # seconds; the program itself notices a call that hangs
FUNCTIONS = (
    *("Arena", "Device", "Event", "GrowableBuffer", "Pool", "Stream", "annotate", "format_size"),
    *("open", "parse_size", "pin", "plan", "record", "step", "tag"),
)
OBJECTS = (
    *(
        ("Arena", "host"),
        ("Event", "model"),
        ("GrowableBuffer", "host"),
        ("Monitor", "host"),
        ("Plan", "host"),
    ),
    *(
        ("Recorder", "host"),
        ("Scratch", "host"),
        ("Snapshot", "host"),
        ("Stream", "host"),
    ),
)
PARTS = [*((name, "function") for name in FUNCTIONS), *OBJECTS]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), PARTS)
def test_extreme_arguments_are_served_or_refused(name: str, kind: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", extreme_calls.__file__, name, kind],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        cwd=tmp_path,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)},
    )
    last = ended.stdout.splitlines()[-1:]
    assert (ended.returncode, last) == (0, ["done"]), f"{last} ended it:\n{ended.stderr[-4000:]}"
