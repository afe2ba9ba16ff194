"""Runs a program in an interpreter of its own and checks how it ended."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

TIMEOUT = 600.0  # seconds; only a deadlock reaches it


FORK = f"""
    import sys
    sys.path.append({str(Path(__file__).parent)!r})
    from forks import child, refused
"""
"""The part of a program that gives it `child(body)` and `refused(use)`."""


def run_program(*parts: str, **environ: str) -> subprocess.CompletedProcess[str]:
    program = "\n".join(textwrap.dedent(part) for part in parts)
    warn = ["-W", "error", "-W", "ignore:This process:DeprecationWarning"]  # forks beside threads are meant
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", *warn, "-c", program],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def assert_quiet(ended: subprocess.CompletedProcess[str]) -> None:
    assert (ended.returncode, ended.stderr) == (0, ""), f"exit code {ended.returncode}:\n{ended.stderr}"


def assert_ended_well(ended: subprocess.CompletedProcess[str]) -> None:
    """As assert_quiet, for programs with other libraries, which may say what they like."""
    assert ended.returncode == 0, f"exit code {ended.returncode}:\n{ended.stderr}"
