"""The C++ compiler of this machine."""

from __future__ import annotations

import os
import shlex
import shutil

from vram.errors import DeviceError

__all__ = ["find_compiler"]


def find_compiler() -> list[str]:
    """Return the C++ compiler as a command: $CXX, else c++, g++ or clang++."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    for command in filter(None, (wanted, ["c++"], ["g++"], ["clang++"])):
        found = shutil.which(command[0])
        if found is not None:
            return [found, *command[1:]]
    raise DeviceError("no C++ compiler found (tried $CXX, c++, g++ and clang++)", code="missing")
