"""examples/cnn_arena.py: three ways to get memory, one result; arenas ask in the first iteration only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cnn_arena.py"
SMALL = ["--images", "40", "--size", "32"]


def run(*arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE), *SMALL, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    return {way: json.loads(run("--way", way)) for way in ("allocate", "one", "two")}


def test_the_losses_are_the_same_to_the_last_bit_and_fall(results: dict[str, dict[str, Any]]) -> None:
    first, second, third = (result["losses"] for result in results.values())
    assert len(first) == 40 and first == second == third
    losses = [float.fromhex(loss) for loss in first]
    assert sum(losses[-10:]) < sum(losses[:10])


def test_memory_is_constant_after_the_first_image(results: dict[str, dict[str, Any]]) -> None:
    counts = {way: result["arrays"] for way, result in results.items()}
    assert len(set(counts.values())) == 1 and counts["one"] > 40 * 20
    assert results["allocate"]["requests"] == counts["allocate"]
    for way, chunks in (("one", 1), ("two", 2)):
        assert results[way]["requests"] == chunks
        assert results[way]["held"] == results[way]["held_first"] > 0
    # What is given back with each layer's scope does not add up.
    assert results["two"]["high_water"] < results["one"]["high_water"]


def test_it_says_what_it_saw() -> None:
    shown = run()
    for part in ("the same to the last bit in all 40 images", "page faults", "wall time", "one shared"):
        assert part in shown
    assert "two arenas, compared with allocating freely: requests better" in shown
