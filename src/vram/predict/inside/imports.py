"""Calls functions when the program has imported a module, without importing the module itself."""

from __future__ import annotations

import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["after_import"]


def after_import(name: str, function: Callable[[Any], object]) -> None:
    """Call `function(module)` once the module `name` is imported; at once if it is already."""
    if name in sys.modules:
        function(sys.modules[name])
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.awaited.setdefault(name, []).append(function)


class _Finder:
    """Finds the awaited modules where the other finders do, and has their loaders call the functions."""

    def __init__(self) -> None:
        self.awaited: dict[str, list[Callable[[Any], object]]] = {}
        self._searching = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # A finder that asks the others as this one does asks this one again.
        if name not in self.awaited or getattr(self._searching, "name", None) == name:
            return None
        others = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        self._searching.name = name
        try:
            found = next(filter(None, (each.find_spec(name, path, target) for each in others)), None)
        finally:
            self._searching.name = None
        if found is not None and found.loader is not None:
            self._follow(name, found.loader)
        return found

    def _follow(self, name: str, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for function in self.awaited.pop(name, ()):
                function(module)

        loader.exec_module = exec_module


_finder = _Finder()
