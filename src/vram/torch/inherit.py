"""Processes that `multiprocessing` starts use the allocator of the process that starts them."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from typing import Any

__all__ = ["inherit"]

KEY = "vram.torch"
_log = logging.getLogger("vram")


class _Inheritance:
    """Travels with every process that this one starts, and installs vram where it arrives."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def __reduce__(self) -> tuple[Callable[..., _Inheritance], tuple[dict[str, Any]]]:
        return _arrive, (self.config,)


def inherit(config: dict[str, Any]) -> None:
    """Install vram with `config` in processes that this one starts from now on, by `spawn` or `forkserver`.

    The methods that start a process pickle its settings, which they take from the current process.
    """
    settings: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before = settings[KEY].config if KEY in settings else {}
    settings[KEY] = _Inheritance({**before, **config})


def _arrive(config: dict[str, Any]) -> _Inheritance:
    """Install vram in the new process, which must start whatever happens here."""
    import vram.torch

    try:
        vram.torch.install(**config)
    except Exception as error:
        _log.warning("this process uses PyTorch's own allocator, although its parent uses vram: %s", error)
    return _Inheritance(config)
