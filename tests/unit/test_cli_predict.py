"""`vram predict` and `vram run --null-gpu`: what they print and how they exit, without PyTorch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_results import FAILURE, OUT_OF_MEMORY, RESULT, program, recorded, result

from vram.cli.predict import _split

pytestmark = [pytest.mark.fork, pytest.mark.usefixtures("torch_with_cuda")]

Command = Callable[..., tuple[int, str, str]]
VALUED = {"--gpu": True, "--steps": True, "--json": False, "--help": False, "-h": False}


@pytest.mark.parametrize(
    ("words", "ours", "theirs"),
    [
        ("--gpu h200 x.py --lr 1", "--gpu h200", "x.py --lr 1"),
        ("x.py --lr 1 --gpu h200 --json", "--gpu h200 --json", "x.py --lr 1"),
        ("x.py --gpu=h200 -h", "--gpu=h200", "x.py -h"),
        ("--json -- x.py --gpu h200", "--json", "x.py --gpu h200"),
        ("-m tool --steps 3 a", "--steps 3", "-m tool a"),
        ("x.py a -- --gpu h200", "--gpu h200", "x.py a --"),
        ("--help", "--help", ""),
    ],
)
def test_options_may_stand_before_or_after_the_program(words: str, ours: str, theirs: str) -> None:
    assert _split(words.split(), VALUED) == (ours.split(), theirs.split())


def test_an_option_that_the_script_has_too_is_not_guessed(
    vram_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("parser.add_argument('--steps')")
    code, _, err = vram_command("predict", "train.py", "--steps", "3")
    assert code == 2 and "has an option --steps, too" in " ".join(err.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.py"], "script 'missing.py' not found"),
        (["--gpu", "rtx4091", "x.py"], "rtx-4090"),
        (["--find", "b=2..1", "x.py"], "is empty"),
        ([], "Missing argument"),
        (["--nope", "x.py"], "No such option"),
    ],
)
def test_wrong_usage_is_two(vram_command: Command, arguments: list[str], said: str) -> None:
    code, out, err = vram_command("predict", *arguments)
    assert (code, out) == (2, "") and said in " ".join(err.split())


def left(folder: Path, changes: dict[str, Any], body: str = "") -> str:
    """A program that leaves a result with a recording."""
    recorded(folder, oom=bool(changes.get("failures")))
    copy = f"import shutil; shutil.copy({str(folder / '1.pickle')!r}, os.environ['VRAM_PREDICT_FOLDER'])\n"
    return program(folder, copy + body, result(**changes))


def test_a_program_that_fits_is_zero(vram_command: Command, tmp_path: Path) -> None:
    code, out, _ = vram_command("predict", left(tmp_path, {}), "--gpu", "t4")
    assert code == 0
    assert out.startswith("Fits NVIDIA Tesla T4 (14.56 GiB), with 1.56 GiB to spare.")
    for part in ("peak reserved       12 GiB", "train.py:3 step", "expandable_segments:True", "rtx-3060"):
        assert part in out


def test_a_program_that_does_not_fit_is_one(vram_command: Command, tmp_path: Path) -> None:
    failed = {"outcome": "failed", "failures": [FAILURE], "error": OUT_OF_MEMORY}
    code, out, _ = vram_command("predict", "--gpu", "t4", left(tmp_path, failed, "sys.exit(1)"))
    assert code == 1
    assert "Does not fit" in out and "requesting 5 GiB" in out and "held when memory ran out" in out


def test_a_program_that_fails_is_two(vram_command: Command, tmp_path: Path) -> None:
    error = {"type": "ValueError", "message": "mine", "place": None, "out_of_memory": False}
    code, out, _ = vram_command(
        "predict", left(tmp_path, {"outcome": "failed", "error": error}, "sys.exit(1)")
    )
    assert code == 2 and "failed with exit status 1" in out and "ValueError: mine" in out


def test_json_is_alone_on_standard_output(tmp_path: Path) -> None:
    script = left(tmp_path, {}, "print('mine')")
    ended = subprocess.run(
        [sys.executable, "-m", "vram", "predict", "--json", "--save", "kept.vtrace", script],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        check=False,
    )
    assert ended.returncode == 0 and ended.stderr == "mine\n"
    assert json.loads(ended.stdout)["saved"] == ["kept.vtrace"] and (tmp_path / "kept.vtrace").exists()


def test_on_a_terminal_the_program_has_one_too_and_its_output_is_whole(tmp_path: Path) -> None:
    body = (
        "print(sys.stdout.isatty(), sys.stderr.isatty())\n"
        "for number in range(2000):\n"
        "    print('line', number, file=(sys.stdout, sys.stderr)[number % 2], flush=True)\n"
    )
    script = left(tmp_path, {}, body)
    ours, theirs = os.openpty()
    running = subprocess.Popen(
        [sys.executable, "-m", "vram", "predict", script, "--gpu", "t4"],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # the terminal is closed when the last process has ended
        while data := os.read(ours, 1 << 16):
            said += data
    os.close(ours)
    assert running.wait(600) == 0
    text = re.sub(r"(vram: [^\r\n]*)?\r\x1b\[2K", "", said.decode()).replace("\r", "")
    lines = text.split("\n")
    assert lines[:2001] == ["True True", *(f"line {number}" for number in range(2000))]
    assert "Fits NVIDIA Tesla T4" in text


SEARCHED = """
size = int(sys.argv[sys.argv.index('--batch-size') + 1])
used = {'device': 0, 'peak_allocated': 0, 'peak_reserved': size << 30, 'peak_used': size << 30, 'retries': 0}
failed = size > 14
error = {'type': 'E', 'message': 'out of memory', 'place': None, 'out_of_memory': True} if failed else None
leave({**json.loads(%r), 'devices': [used], 'error': error, 'recordings': []})
sys.exit(failed)
"""


def test_a_search_prints_the_answer_and_the_curve(vram_command: Command, tmp_path: Path) -> None:
    script = program(tmp_path, SEARCHED % json.dumps(RESULT))
    code, out, _ = vram_command("predict", script, "--gpu", "t4", "--find", "batch_size=1..512")
    assert code == 0 and "batch_size up to 14" in out and "█" in out
    code, out, _ = vram_command("predict", script, "--gpu", "t4", "--find", "batch_size=20..30", "--json")
    assert code == 1 and json.loads(out)["best"] is None


def test_a_search_ends_where_the_program_fails_for_another_reason(
    vram_command: Command, tmp_path: Path
) -> None:
    script = program(tmp_path, "sys.exit('no such option: ' + sys.argv[-2])")
    code, out, err = vram_command("predict", script, "--find", "batch_size=1..512")
    assert (code, out) == (2, "") and "no such option: --batch_size" in err


# ---- vram run --null-gpu ----------------------------------------------------------------------------------


def vram_run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vram", "run", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=cwd,
    )


SHOWS = (
    "import os, sys\nfacts = dict(part.split('=') for part in os.environ['VRAM_NULL_GPU'].split(';'))\n"
    "print(facts['name'], facts['devices'], sys.argv[1:])\n"
    "assert 'libvram_null_gpu' in open('/proc/self/maps').read()\n"
)


def test_a_script_runs_on_a_null_gpu(tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text(SHOWS)
    ended = vram_run("--null-gpu", "l4:2", "shows.py", "--null-gpu", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "NVIDIA L4 2 ['--null-gpu']\n"), ended.stderr
    ended = vram_run("--null-gpus", "3", "--conf", "stream_cache:9", "-m", "shows", "x", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "NVIDIA H200 3 ['x']\n"), ended.stderr


def test_any_command_runs_on_a_null_gpu(tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text(SHOWS + "sys.exit(3)")
    ended = vram_run("--null-gpu", "t4", "--", "sh", "-c", f"exec {sys.executable} shows.py a", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (3, "NVIDIA Tesla T4 1 ['a']\n"), ended.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--null-gpu", "nope", "x.py"], "no GPU is named"),
        (["--null-gpu", "t4", "missing.py"], "not found"),
        (["--null-gpu", "t4", "--", "no-such-command"], "not found"),
        (["--null-gpu", "t4", "--conf", "stream_cache:9", "--", "sh", "-c", "true"], "Python programs"),
    ],
)
def test_a_wrong_null_gpu_runs_nothing(tmp_path: Path, arguments: list[str], said: str) -> None:
    ended = vram_run(*arguments, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "") and said in " ".join(ended.stderr.split())
    assert os.listdir(tmp_path) == []
