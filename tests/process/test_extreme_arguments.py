"""Whatever a public function is given, it returns or raises a documented error: it never crashes or hangs.

The calls are generated from the public surface by extreme_calls.py. In `make test-all` each part has its own
process; in `make test` a few processes have several parts each, because most of their time is the start.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from effort import THOROUGH

pytest.importorskip("numpy")
pytest.importorskip("pyarrow")
pytest.importorskip("prometheus_client")
extreme_calls = pytest.importorskip("extreme_calls")

TIMEOUT = 1000.0  # seconds; the program itself notices a call that hangs


PARTS = [f"{part}:{kind}" for part, kind in extreme_calls.parts()]
PROCESSES = len(PARTS) if THOROUGH else 8


@pytest.mark.slow
@pytest.mark.parametrize("number", range(PROCESSES))
def test_extreme_arguments_are_served_or_refused(number: int, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-B", "-X", "faulthandler", extreme_calls.__file__, *PARTS[number::PROCESSES]],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        cwd=tmp_path,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)},
    )
    last = ended.stdout.splitlines()[-1:]
    assert (ended.returncode, last) == (0, ["done"]), f"{last} ended it:\n{ended.stderr[-4000:]}"


def test_everything_public_is_called_or_left_out_for_a_reason() -> None:
    surface = extreme_calls.surface()
    without_object = {
        entry.owner
        for entry in extreme_calls.called()
        if entry.name and entry.owner in extreme_calls.public_classes()
    } - extreme_calls.SUBJECTS.keys()
    assert not without_object, "classes with methods that nothing makes an object of"
    names = {str(entry) for entry in surface} | {entry.owner for entry in surface}
    assert extreme_calls.LEFT_OUT.keys() <= names, "left out, but not on the surface"
    assert {part for part, _ in extreme_calls.parts()} == {
        extreme_calls.part_of(entry) for entry in surface if extreme_calls.reason_to_leave_out(entry) is None
    }


def test_a_file_outside_the_working_directory_is_noticed(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    program = (
        "import extreme_calls, pathlib, sys\n"
        "extreme_calls.watch_files(pathlib.Path.cwd())\n"
        "open('kept', 'w').close()\n"
        "open(sys.argv[1], 'w').close()\n"
        "print(*extreme_calls.written)"
    )
    found = subprocess.run(
        [sys.executable, "-B", "-c", program, str(outside)],
        capture_output=True,
        text=True,
        cwd=inside,
        env={**os.environ, "PYTHONPATH": str(Path(extreme_calls.__file__).parent)},
        check=True,
    )
    assert found.stdout.split() == [str(outside)]
