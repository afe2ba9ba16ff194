"""The page of options is what the table of options says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from vram.config import OPTIONS, VARIABLES

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
SOURCES = Path(__file__).parents[2] / "src" / "vram"
INTERNAL = {"VRAM_NULL_GPU", "VRAM_PREDICT_FOLDER", "VRAM_PREDICT_STEPS"}
"""Set by vram for the processes it starts."""


def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_options", REFERENCE / "make_options.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date() -> None:
    page = (REFERENCE / "options.md").read_text(encoding="utf-8")
    assert page == maker().text(), "run python docs/reference/make_options.py"
    for name in (*OPTIONS, *VARIABLES):
        assert f"`{name}`" in page


def test_every_variable_that_the_package_reads_is_on_the_page() -> None:
    page = (REFERENCE / "options.md").read_text(encoding="utf-8")
    read = {
        name
        for path in SOURCES.rglob("*.py")
        for name in re.findall(r'"(VRAM_[A-Z_]+)"', path.read_text(encoding="utf-8"))
    }
    assert len(read) > 4
    assert {name for name in read - INTERNAL if f"`{name}`" not in page} == set()
