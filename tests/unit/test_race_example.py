"""examples/race.py: the bug really happens, each cure really cures it, and the checker tells them apart."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import vram

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "race.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("race_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_protection_stream_2_reads_what_somebody_else_wrote(example: ModuleType) -> None:
    for _ in range(10):
        assert example.run(None) == bytes([example.NEW]) * example.SIZE


@pytest.mark.parametrize("cure", ["record_stream", "wait"])
def test_each_cure_keeps_the_old_contents(example: ModuleType, cure: str) -> None:
    for _ in range(10):
        assert example.run(cure) == bytes([example.OLD]) * example.SIZE


def test_the_checker_raises_at_the_free_before_anything_goes_wrong(example: ModuleType) -> None:
    with pytest.raises(vram.RaceError) as caught, vram.race_check():
        example.run(None)
    race = caught.value.race
    assert (race.kind, race.size, race.fix) == ("free", example.SIZE, "x.record_stream(s2)")
    assert race.reuse is None
    places = [site.stack[0] for site in (race.allocation, race.use, race.free)]
    assert {place.filename for place in places} == {str(EXAMPLE)}
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    found = [lines[place.line - 1].strip() for place in places]
    assert found[0].startswith("x = pool.allocate") and found[1].startswith("s2.launch")
    assert found[2] == "x.free()"


@pytest.mark.parametrize("cure", ["record_stream", "wait"])
def test_the_checker_is_content_with_each_cure(example: ModuleType, cure: str) -> None:
    with vram.race_check():
        example.run(cure)


def test_it_runs_as_a_program_and_says_what_it_saw() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE)], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    verdicts = result.stdout.splitlines()[:3]
    assert ["WRONG" in line for line in verdicts] == [True, False, False]
    for part in ("fix: x.record_stream(s2)", "allocated again", "in free_too_early: x.free()"):
        assert part in result.stdout
