"""Begins a session in every Python process of a program on a null GPU, then runs the next sitecustomize.

The folder of this file is first in PYTHONPATH. It leaves `sys.path` again at once, so that no module of the
program is found here.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = "_vram_predict"


def _load(name: str, path: str, folders: list[str] | None = None) -> None:
    """Import the file at `path` as the module `name`, a package if it has `folders`."""
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def _run_next() -> None:
    """Run the sitecustomize that Python would have found without this one."""
    found = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if found is not None and found.origin is not None:
        _load("sitecustomize", found.origin)


sys.path[:] = [each for each in sys.path if os.path.abspath(each or os.curdir) != HERE]
try:
    _load(PACKAGE, os.path.join(HERE, "__init__.py"), [HERE])
    _load(f"{PACKAGE}.session", os.path.join(HERE, "session.py"))
    sys.modules[f"{PACKAGE}.session"].begin()
finally:
    _run_next()
