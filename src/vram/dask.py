"""vram on a Dask cluster: `client.register_plugin(vram.dask.VramSetup("cupy", limit="5GB"))`.

Configures the manager of every worker and installs the given adaptors.
"""

from __future__ import annotations

import importlib
from typing import Any

from vram.core.locks import new_lock
from vram.core.manager import get_memory_manager
from vram.errors import ConfigError
from vram.integrations.adaptors import require_library

__all__ = ["LIBRARIES", "VramSetup"]

_plugin: Any = require_library("distributed.diagnostics.plugin", "Dask")

LIBRARIES = {"cuda.core": "vram.cuda_core", "cupy": "vram.cupy", "numba": "vram.numba", "torch": "vram.torch"}
"""The supported libraries, and the module that installs vram for each."""

# Workers may share a process, and a plugin may be set up again after a restart.
_lock = new_lock()
_applied: dict[str, Any] = {}
_users: dict[str, int] = {}


class VramSetup(_plugin.WorkerPlugin):  # type: ignore[misc]
    """A worker plugin that calls `vram.configure(**config)` and makes the given libraries allocate from vram.

    `config` takes every option of `vram.config`; sizes are an int, a fraction (0.8) or a string ("5GB").
    Setting up again, for example after a restart of the worker, has no effect.
    """

    name = "vram"

    def __init__(self, *libraries: str, **config: Any) -> None:
        """Check the names now, on the client. Options are checked on the workers, where the devices are."""
        unknown = [each for each in libraries if each not in LIBRARIES]
        if unknown:
            raise ConfigError(
                f"{unknown[0]!r} is not a supported library; valid: {', '.join(LIBRARIES)}",
                value=unknown[0],
            )
        self.libraries = libraries
        self.config = config

    def setup(self, worker: Any) -> None:
        """Configure and install in the worker's process."""
        with _lock:
            changed = {
                name: value
                for name, value in self.config.items()
                if name not in _applied or _applied[name] != value
            }
            if changed:
                get_memory_manager().configure(changed)
                _applied.update(changed)
            for library in self.libraries:
                importlib.import_module(LIBRARIES[library]).install()
                _users[library] = _users.get(library, 0) + 1

    def teardown(self, worker: Any) -> None:
        """Restore the libraries' allocators when the last worker of the process stops."""
        with _lock:
            for library in self.libraries:
                _users[library] = _users.get(library, 0) - 1
                if _users[library] <= 0:
                    _users.pop(library)
                    _uninstall(library)


def _uninstall(library: str) -> None:
    """Uninstall vram if the library allows it: PyTorch keeps its allocator until the process ends."""
    uninstall = getattr(importlib.import_module(LIBRARIES[library]), "uninstall", None)
    if uninstall is not None:
        uninstall()
