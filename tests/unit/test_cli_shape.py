"""The shape of what commands print: whole in a pipe, and completed by shells."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import vram
from vram.bench.report import Column, Table
from vram.cli import COMMANDS, GROUPS
from vram.cli.bench import _columns, _rows
from vram.cli.console import draw_facts, draw_grid, open_console

Command = Callable[..., tuple[int, str, str]]
LONG = "a_very_long_name_" * 12


@pytest.fixture(autouse=True)
def piped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


# ---- in a pipe --------------------------------------------------------------------------------------------


def test_a_row_is_a_line_and_nothing_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    draw_grid(open_console(), "name|>size > 0|also", [(LONG, "1,234", LONG), ("b", "9", "c")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[1].split() == [LONG, "1,234", LONG]
    assert "size > 0" in lines[0]
    assert [line for line in lines if line != line.rstrip()] == []


def test_a_fact_is_a_line_and_nothing_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    draw_facts(open_console(), {"name": LONG, "other name": "x"})
    assert capsys.readouterr().out.splitlines() == [f"  name        {LONG}", "  other name  x"]


def test_a_benchmarks_table_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    columns = (Column("name", LONG, "text"), Column("ns", "time", "ns"))
    table = Table("title", columns, [{"name": LONG, "ns": 1.0}], "")
    draw_grid(open_console(), _columns(table), _rows(table))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(LONG) and second.startswith(LONG)


def test_settings_of_any_length_are_one_line(vram_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = "warmup_sizes:[" + ",".join(f"{size}KiB:{size}" for size in range(1, 60)) + "]"
    monkeypatch.setenv("VRAM_CONF", conf)
    _, out, _ = vram_command("info")
    assert len(conf) > 300
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("  VRAM_CONF ")] == [conf]


def test_the_lab_lists_its_claims_whole(vram_command: Command) -> None:
    _, out, _ = vram_command("lab", "--list")
    _, listed, _ = vram_command("lab", "--list", "--json")
    for each in json.loads(listed):
        (line,) = [line for line in out.splitlines() if line.startswith(f"{each['name']} ")]
        assert each["claim"] in line


def test_no_colours_and_no_frames_reach_a_pipe() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "vram", "info"], capture_output=True, text=True, timeout=600, check=True
    )
    assert "\x1b" not in ended.stdout and not set("│─╭┃") & set(ended.stdout)


# ---- completion -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(vram_command: Command, shell: str) -> None:
    code, out, _ = vram_command("completion", shell)
    assert code == 0
    assert "_VRAM_COMPLETE" in out and f"{shell}_complete" in out


def test_a_shell_that_is_not_known_is_refused(vram_command: Command) -> None:
    code, _, err = vram_command("completion", "tcsh")
    assert code == 2 and "bash" in err


def completions(vram_command: Command, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    monkeypatch.setenv("_VRAM_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", " ".join(("vram", *words)))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    _, out, _ = vram_command()
    return [line.partition(",")[2] for line in out.split()]


def test_commands_options_and_processes_are_offered(
    vram_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert completions(vram_command, monkeypatch, "to") == ["top", "torch"]
    assert "--filter" in completions(vram_command, monkeypatch, "top", "--f")
    with vram.monitor():
        mine = str(os.getpid())
        assert completions(vram_command, monkeypatch, "top", mine[0]) == [mine]
        assert completions(vram_command, monkeypatch, "doctor", mine[0]) == [mine]


@pytest.mark.fork
def test_bash_completes_with_the_script(vram_command: Command, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    _, script, _ = vram_command("completion", "bash")
    (tmp_path / "script").write_text(script)
    command = tmp_path / "vram"
    command.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c \'from vram.cli import main; main(prog_name="vram")\' "$@"\n'
    )
    command.chmod(0o755)
    program = (
        f"source {tmp_path}/script; COMP_WORDS=(vram doc); COMP_CWORD=1; _vram_completion vram doc vram; "
        'echo "${COMPREPLY[@]}"'
    )
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    ended = subprocess.run(
        [bash, "--norc", "-c", program],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PATH": path},
    )
    assert ended.stdout.split() == ["doctor"], ended.stderr


# ---- the help ---------------------------------------------------------------------------------------------


def test_the_help_shows_every_command_in_one_group(vram_command: Command) -> None:
    code, out, _ = vram_command("--help")
    assert code == 0
    titles = [line.strip("╭─╮ ") for line in out.splitlines() if line.startswith("╭")]
    assert titles == ["Options", *GROUPS]
    shown = [line[1:].split()[0] for line in out.splitlines() if line.startswith("│ ") and line[2] != " "]
    assert [name for name in shown if not name.startswith("-")] == [
        name for names in GROUPS.values() for name in names
    ]
    assert len(COMMANDS) == len(set(COMMANDS)) == sum(map(len, GROUPS.values()))


def test_an_unknown_command_names_what_was_meant(vram_command: Command, tmp_path: Path) -> None:
    code, _, err = vram_command("explian", "job.pickle")
    assert code == 2 and "Did you mean explain" in err
    recording = tmp_path / "job.pickle"
    recording.write_bytes(b"")
    code, _, err = vram_command(str(recording))
    assert code == 2 and "To explain this file:" in err
    assert "Did you mean" not in vram_command("zzzzzz")[2]
