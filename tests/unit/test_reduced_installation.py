"""Recordings are explained where parts are missing: pyarrow, the native core, and what only Unix has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRACES = Path(__file__).parents[2] / "traces"
FAILED = TRACES / "oom_gpt2_train_9000.pickle.xz"
PREFETCH = TRACES / "multistream_prefetch.pickle.xz"

LIGHT = ("pyarrow", "numpy", "zstandard", "starlette", "textual")
"""What only the extras install."""
FOREIGN = ("vram._native", "fcntl", "resource", "termios", "tty", "pwd", "grp")
"""What macOS and Windows lack, all of it together."""


def vram(missing: tuple[str, ...], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return python(missing, f"import vram.cli; vram.cli.main({list(map(str, arguments))!r})")


def python(missing: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.modules.update(dict.fromkeys({missing!r}))\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("missing", [LIGHT, (*LIGHT, *FOREIGN)], ids=["light", "no native core"])
@pytest.mark.parametrize(
    ("command", "status", "expected"),
    [
        (("explain", FAILED), 1, "Verdict: true-demand"),
        (("summary", PREFETCH, "--by", "line"), 0, "live at the peak, event"),
        (("leaks", PREFETCH), 0, "no leak is likely"),
        (("diff", PREFETCH, FAILED, "--fail-above", "1GiB"), 1, "exceeds the limit"),
        (("merge", PREFETCH, FAILED, "--json"), 0, '"peak_allocated"'),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, tuple) else "",
)
def test_recordings_are_explained(
    missing: tuple[str, ...], command: tuple[str | Path, ...], status: int, expected: str
) -> None:
    result = vram(missing, *command)
    assert (result.returncode, expected in result.stdout) == (status, True), result.stdout + result.stderr


def test_a_light_installation_replays() -> None:
    result = vram(LIGHT, "replay", PREFETCH)
    assert result.returncode == 0 and "torch-expandable" in result.stdout, result.stderr


@pytest.mark.parametrize(
    "command", [("info",), ("demo",), ("bench", "hotpath"), ("replay", PREFETCH), ("plan", PREFETCH)]
)
def test_a_command_without_the_native_core_says_what_works(command: tuple[str | Path, ...]) -> None:
    result = vram(FOREIGN, *command)
    assert result.returncode == 2 and "Linux on x86_64 and aarch64" in result.stderr, result.stderr
    assert "Traceback" not in result.stderr


def test_a_program_is_not_started_if_it_cannot_be_recorded(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('started')")
    result = vram(LIGHT, "run", "--record", tmp_path / "run.vtrace", script)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert 'pip install "vram[trace]"' in result.stderr


def test_explain_says_what_was_not_tried() -> None:
    result = vram(FOREIGN, "explain", FAILED)
    assert "not tried     other allocators" in result.stdout


def test_importing_a_pool_says_that_the_native_core_is_missing() -> None:
    code = (
        "import vram, vram.errors, pickle\n"
        "try: vram.Pool\n"
        "except vram.errors.MissingCore as error:\n"
        "    print(isinstance(error, ImportError), pickle.loads(pickle.dumps(error)))"
    )
    result = python(FOREIGN, code)
    assert result.stdout.startswith("True this installation of vram has no native core"), result.stderr


def test_plain_tables_name_what_arrow_would_add() -> None:
    code = (
        "import vram; from vram.analysis import summary\n"
        f"table = summary(vram.open({str(PREFETCH)!r}))\n"
        "print(table.num_rows == len(table) == len(table.to_pylist()), table.column_names[0])\n"
        "try: table.to_pandas()\n"
        "except AttributeError as error: print(error)"
    )
    result = python(LIGHT, code)
    assert result.stdout.splitlines()[0] == "True group", result.stderr
    assert 'pip install "vram[trace]"' in result.stdout
