"""What runs inside a predicted program, as far as it needs neither PyTorch nor a null GPU."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import traceback
import weakref
from pathlib import Path

import pytest

from vram.predict.inside import session, tracebacks


def test_marks_of_a_long_program_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MOST_MARKS", 10)
    recorded = session.Session(str(tmp_path), None)
    monkeypatch.setattr(recorded, "_tell", lambda: None)
    for number in range(50):
        recorded._marked("START", f"step#{number}")
        recorded._marked("END", f"step#{number}")
    assert recorded.steps == 50
    assert [name for _stage, name, _time in recorded.marks] == [
        f"step#{number}" for number in range(45, 50) for _ in "12"
    ]


def test_a_failure_keeps_nothing_of_the_program_alive(tmp_path: Path) -> None:
    recorded = session.Session(str(tmp_path), None)

    def step() -> weakref.ref[set[str]]:
        batch = {"a batch"}
        recorded._out_of_memory(0, 1 << 30, 0, 0)
        return weakref.ref(batch)

    gc.disable()
    try:
        held = [step()]
        thread = threading.Thread(target=lambda: held.append(step()))
        thread.start()
        thread.join()
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()
    assert [each["place"].rpartition(" ")[2] for each in recorded.failures] == ["step", "step"]


OURS = compile("def through(function):\n    function()\n", tracebacks.HERE + "values.py", "exec")
PROGRAM = """
from vram.predict.inside import tracebacks
tracebacks.begin()
made = {}
exec(compile("def through(function):\\n    function()\\n", tracebacks.HERE + "values.py", "exec"), made)
def fail():
    raise KeyError("first")
def fail_again():
    try:
        made["through"](fail)
    except KeyError as error:
        raise ValueError("mine") from error
made["through"](fail_again)
"""


def test_our_calls_are_not_in_a_traceback(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "values.py" not in ended.stderr
    calls = [line.rpartition(" ")[2] for line in ended.stderr.splitlines() if line.startswith("  File")]
    assert calls == ["fail_again", "fail", "<module>", "fail_again"]
    assert ended.stderr.endswith("ValueError: mine\n")


def test_an_exception_that_came_from_itself_ends() -> None:
    made: dict[str, object] = {}
    exec(OURS, made)
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__cause__ = second, first

    def fail() -> None:
        raise first

    with pytest.raises(ValueError, match="first") as caught:
        made["through"](fail)  # type: ignore[operator]
    tracebacks.hide_ours(caught.value)
    names = [call.name for call in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "fail" and "through" not in names
