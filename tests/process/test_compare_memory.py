"""The script of the GitHub Action: two commits of a program, compared by the memory of their runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".github" / "compare-memory.sh"
PROGRAM = """
import sys, vram

pool = vram.get_memory_manager().pool("model:16GiB")

def step():
    large = pool.allocate("{size}MiB")
    return large, pool.allocate("2MiB", tag=sys.argv[1])

kept = step()
"""

pytestmark = pytest.mark.skipif(
    shutil.which("git") is None or shutil.which("bash") is None, reason="needs git and bash"
)


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Two commits; the second needs 8 MiB more in a line that also moved."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch", "main")
    for size in (32, 40):
        (folder / "train.py").write_text("# a comment\n" * size + PROGRAM.format(size=size))
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "-m", "change")
    return folder


def compare(checkout: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    commands = checkout.parent / "bin"
    commands.mkdir(exist_ok=True)
    (commands / "vram").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m vram "$@"\n')
    (commands / "vram").chmod(0o755)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")},
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "FOLDER": str(checkout.parent / "out"),
        "PROGRAM": "train.py 'a tag'",
        "BASE": "HEAD~1",
        "GPU": "",
        **settings,
    }
    command = ["bash", str(SCRIPT)]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=600)


def test_growth_is_reported_by_line_and_fails_above_the_limit(checkout: Path) -> None:
    result = compare(checkout, FAIL_ABOVE="5%", BASE=git(checkout, "rev-parse", "HEAD~1"))
    assert result.returncode == 1, result.stderr
    report = (checkout.parent / "out" / "report.md").read_text()
    assert report.startswith("### ❌ Peak GPU memory: +8 MiB (+23.5%)")
    assert "34 MiB before, 42 MiB after. This is more than the limit of 5%." in report
    rows = [line for line in report.splitlines() if line.startswith("| `")]
    assert len(rows) == 1 and "train.py:" in rows[0] and "32 MiB | 40 MiB | +8 MiB" in rows[0]
    assert git(checkout, "rev-parse", "--abbrev-ref", "HEAD") == "main"


def test_a_workflow_gets_the_report_and_the_verdict(checkout: Path, tmp_path: Path) -> None:
    output, summary = tmp_path / "output", tmp_path / "summary"
    result = compare(
        checkout,
        FAIL_ABOVE="64MiB",
        BASE=git(checkout, "rev-parse", "HEAD~1"),
        GITHUB_OUTPUT=str(output),
        GITHUB_STEP_SUMMARY=str(summary),
    )
    assert result.returncode == 0, result.stderr
    assert output.read_text().splitlines()[1] == "failed=false"
    assert summary.read_text().startswith("### ✅ Peak GPU memory: +8 MiB")


def test_a_program_that_fails_fails_the_comparison(checkout: Path) -> None:
    result = compare(checkout, PROGRAM="missing.py", BASE=git(checkout, "rev-parse", "HEAD~1"))
    assert result.returncode == 2 and "missing.py" in result.stderr
    assert git(checkout, "rev-parse", "--abbrev-ref", "HEAD") == "main"
    assert "name the program" in compare(checkout, PROGRAM="").stderr
