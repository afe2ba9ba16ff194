"""What unit tests share: the command, run in this process."""

from __future__ import annotations

import importlib
import os
import sys
import weakref
from collections.abc import Callable

import pytest


@pytest.fixture
def vram_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `vram` with arguments: exit code, stdout, stderr."""
    main = importlib.import_module("vram.cli").main

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments), prog_name="vram")
        captured = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), captured.out, captured.err

    return run


@pytest.fixture
def as_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which nothing of vram was used yet: no manager, no pools that other tests left open."""
    monkeypatch.setattr(importlib.import_module("vram.core.manager"), "_manager", None)
    monkeypatch.setattr(importlib.import_module("vram.core.observer"), "_pools", weakref.WeakSet())


@pytest.fixture
def torch_with_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """PyTorch seems to be built for CUDA, here and in programs, whichever is installed; nobody imports it."""
    folder = tmp_path_factory.mktemp("torch_with_cuda")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise ImportError('PyTorch was imported')")
    (folder / "torch" / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(folder))
    inherited = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), inherited))))
