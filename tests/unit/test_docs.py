"""Every Python block of the README and of docs/ runs as it stands, each in a fresh interpreter.

A block that cannot run alone has the comment `<!-- not run -->` on the line above its fence.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_RUN = "<!-- not run -->"


def python_blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number of the first line of code, code) of each block that is meant to run."""
    above, opened, body = "", 0, []
    for number, line in enumerate(text.splitlines(), start=1):
        if opened and line.strip() == "```":
            yield opened + 1, "\n".join(body) + "\n"
            opened, body = 0, []
        elif opened:
            body.append(line)
        elif line.strip() == "```python" and above != NOT_RUN:
            opened = number
        above = line.strip()


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


BLOCKS = [
    pytest.param(path, line, code, id=f"{path.relative_to(ROOT)}:{line}")
    for path in documents()
    for line, code in python_blocks(path.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("path", "line", "code"), BLOCKS)
def test_block_runs(path: Path, line: int, code: str, tmp_path: Path) -> None:
    # Blank lines in front, so that a traceback names the line of the document.
    script = tmp_path / path.with_suffix(".py").name
    script.write_text("\n" * (line - 1) + code, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, f"{path.relative_to(ROOT)}:{line}\n{result.stdout}{result.stderr}"


def test_readme_has_examples() -> None:
    assert list(python_blocks((ROOT / "README.md").read_text(encoding="utf-8")))


def test_blocks_marked_as_not_run_are_left_out() -> None:
    text = f"{NOT_RUN}\n```python\nboom()\n```\n\n```python\nfine = 1\n```\n"
    assert list(python_blocks(text)) == [(7, "fine = 1\n")]
