"""What programs read on a null GPU is the same as on the CPU, or is listed as a guess."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vram

HERE = Path(__file__).parent
PACKAGE = Path(vram.__file__).parent
LIBRARY = PACKAGE / "lib" / "libvram_null_gpu.so"
EXAMPLES = 150


def _cuda_of_torch() -> bool:
    """Whether PyTorch is there, and built for CUDA; without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    return "cuda: Optional[str] = '" in (Path(found.origin).parent / "version.py").read_text()


pytestmark = [
    pytest.mark.fork,
    pytest.mark.slow,
    pytest.mark.skipif(not _cuda_of_torch(), reason="no CUDA build of PyTorch can be imported"),
    pytest.mark.skipif(not LIBRARY.exists(), reason="the null GPU was not built"),
]


def _programs(kind: str) -> list[str]:
    """The names of the programs with a decorator, without importing PyTorch."""
    tree = ast.parse((HERE / "values_programs.py").read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [each.name for each in found if any(ast.unparse(d) == kind for d in each.decorator_list)]


def _run(program: str, *arguments: str) -> str:
    """Run a program of this folder on a null GPU."""
    environment = {
        **os.environ,
        "LD_PRELOAD": str(LIBRARY),
        "VRAM_NULL_GPU": "name=NVIDIA H200;memory=150110011392;overhead=0",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, str(HERE / program), str(PACKAGE / "predict"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What every program read, in one process: importing PyTorch takes longest."""
    path = tmp_path_factory.mktemp("values") / "results.json"
    _run("values_programs.py", str(path))
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", _programs("exact"))
def test_what_is_known_is_read_as_on_the_cpu_and_not_guessed(results: Any, name: str) -> None:
    assert results[name]["device"] == results[name]["host"]
    assert results[name]["guesses"] == []


@pytest.mark.parametrize("name", _programs("guessed"))
def test_what_is_not_known_is_plausible_and_listed(results: Any, name: str) -> None:
    assert results[name]["device"] == "None"  # its own checks passed
    assert results[name]["guesses"]


def test_a_guess_names_the_line_that_asked_and_counts(results: Any) -> None:
    (guess,) = results["a_guess_in_a_loop"]["guesses"]
    source = (HERE / "values_programs.py").read_text().splitlines()
    file, _, line = guess["where"].rpartition(":")
    assert Path(file).name == "values_programs.py"
    assert guess["what"] == "total.item()"
    assert guess["what"] in source[int(line) - 1]
    assert (guess["kind"], guess["count"], guess["value"]) == ("read", 3, 0.0)


def test_random_programs_read_what_the_cpu_reads_or_a_guess_is_listed() -> None:
    assert _run("values_fuzz.py", str(EXAMPLES)).strip().endswith("ok")


def test_every_allocation_is_the_same_whether_values_are_followed_or_not(tmp_path: Path) -> None:
    for followed in ("0", "1"):
        _run("values_allocations.py", str(tmp_path / followed), followed)
    without, following = (json.loads((tmp_path / each).read_text()) for each in ("0", "1"))
    assert len(without) > 1000
    assert following == without


def test_nothing_is_kept_once_the_tensors_are_gone(results: Any) -> None:
    assert results["no_shadow_remains"]["device"] == "[0, 0]"
