"""Runs programs with PyTorch, each in an interpreter of its own, because install() must come first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

TIMEOUT = 150.0  # seconds; only a deadlock, or the first run of a compiler, comes near it

INSTALL = """
    import vram.torch
    vram.torch.install()
    import torch
"""
WITHOUT = """
    import atexit, os, sys
    import torch
    def end():
        sys.stdout.flush()
        os._exit(hasattr(sys, "last_value"))
    atexit.register(end)
"""
"""For comparison: PyTorch with its own allocator, without the end of the interpreter, in which a thread of
PyTorch can abort the process. Programs with vram end as usual, because their end is tested as well."""
REST = """
    import time
    time.sleep(0.05)
"""
"""Threads of PyTorch release a graph after backward() has returned, and can abort a process that ends."""


def run(*parts: str, arguments: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    program = "\n".join(textwrap.dedent(part) for part in (*parts, REST))
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def output(*parts: str, arguments: tuple[str, ...] = (), **environment: str) -> str:
    ended = run(*parts, arguments=arguments, **environment)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


def told(*parts: str, arguments: tuple[str, ...] = (), **environment: str) -> Any:
    """What a program printed as JSON in its last line."""
    return json.loads(output(*parts, arguments=arguments, **environment).splitlines()[-1])
