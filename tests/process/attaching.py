"""Processes to attach to, and the command that does, for the tests of `vram attach`."""

from __future__ import annotations

import contextlib
import functools
import json
import platform
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE, wait_until

WORK = """
    import json, os, sys, threading, time
    names = None
    names = sorted(globals())
    print("ready", flush=True)
    while not os.path.exists("end"):
        step()
        time.sleep(0.002)
    print(json.dumps({
        "left": sorted(set(globals()) - set(names)),
        "threads": [thread.name for thread in threading.enumerate()],
        "marks": [name for name in vars(sys) if "vram_attached" in name],
        "more": more(),
    }))
"""
"""The end of a program that defines `step()` and `more()`: it works until it is told to end, and then reports
what others have left in it."""
UNHARMED: dict[str, Any] = {"left": [], "threads": ["MainThread"], "marks": []}


NO_REGISTERS = "this gdb cannot restore the registers of a process on this CPU"


@functools.cache
def _why_no_gdb() -> str:
    """Why gdb cannot attach to a process that is not its child; empty if it can."""
    gdb = shutil.which("gdb")
    if gdb is None:
        return "gdb is not installed"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as other:
        write = ("-ex", "set var $mxcsr = $mxcsr ^ 1") * 2 if platform.machine() == "x86_64" else ()
        ended = subprocess.run(
            [gdb, "-nx", "-batch", "-p", str(other.pid), *write],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        other.communicate("\n")
    said = ended.stdout + ended.stderr
    if "extended state" in said:
        return NO_REGISTERS
    return "gdb is not allowed to attach to processes here" if "not permitted" in said else ""


def cannot_restore_registers() -> bool:
    """Whether this gdb cannot restore all registers of this CPU."""
    return _why_no_gdb() == NO_REGISTERS


def require_gdb() -> None:
    """Skip the test where processes cannot be attached to."""
    if why := _why_no_gdb():
        pytest.skip(why)


@dataclass
class Target:
    """A running program, in a folder of its own."""

    process: subprocess.Popen[str]
    folder: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self) -> dict[str, Any]:
        """Let the program end, and return its report."""
        (self.folder / "end").touch()
        out, err = self.process.communicate(timeout=PATIENCE)
        assert (self.process.returncode, err) == (0, ""), err
        report: dict[str, Any] = json.loads(out)
        return report


@contextlib.contextmanager
def target(folder: Path, *parts: str, command: tuple[str, ...] = (sys.executable,)) -> Iterator[Target]:
    """A process that runs the program, once it says that it is ready."""
    (folder / "program.py").write_text("\n".join(textwrap.dedent(part) for part in parts))
    with subprocess.Popen(
        [*command, "program.py"],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            yield Target(process, folder)
        finally:
            process.kill()


def command(pid: int, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "vram", "attach", str(pid), *arguments]


def attach(pid: int, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(pid, *arguments), cwd=cwd, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@contextlib.contextmanager
def attached(pid: int, *arguments: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A `vram attach` that records for a long time, once it has begun."""
    words = command(pid, "-o", "run.vtrace", "--for", "10min", *arguments)
    with subprocess.Popen(
        words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            assert f"recording process {pid} for 600 s" in process.stderr.readline()
            yield process
        finally:
            process.kill()


def assert_clean(folder: Path) -> None:
    """No temporary folder stays."""
    wait_until(lambda: not list(folder.glob(".vram-attach-*")))
