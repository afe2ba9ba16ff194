"""examples/starpu, built and run with the task runtime itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vram.system import clibrary

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "starpu"
TIMEOUT = 600.0
PACKAGE = "starpu-1.3"


def _missing() -> str | None:
    """Why the example cannot be built here."""
    if not (clibrary.PACKAGE / clibrary.LIBRARY).is_file():
        return f"the C library is not installed: no {clibrary.PACKAGE / clibrary.LIBRARY}"
    for tool in ("cc", "make", "pkg-config"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if subprocess.run(["pkg-config", "--exists", PACKAGE], check=False).returncode != 0:
        return f"StarPU is not installed: pkg-config knows no {PACKAGE} (Debian has it as libstarpu-dev)"
    return None


pytestmark = [pytest.mark.fork, pytest.mark.skipif(_missing() is not None, reason=str(_missing()))]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built as its Makefile says."""
    folder = tmp_path_factory.mktemp("starpu")
    command = ["make", "-s", "-C", str(EXAMPLE), f"PYTHON={sys.executable}", f"BUILD={folder}"]
    built = subprocess.run(
        [*command, "CFLAGS=-O2 -Werror"], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "network"


@pytest.fixture(scope="module")
def cnn(network: Path) -> Path:
    return network.parent / "cnn"


def run(network: Path, *arguments: str, **settings: str) -> str:
    # What StarPU measures of the machine is kept beside the program, not in the home folder.
    env = {**os.environ, "STARPU_HOME": str(network.parent), "STARPU_NCPU": "2", **settings}
    ended = subprocess.run(
        [network, *arguments], env=env, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert ended.returncode == 0, f"exit code {ended.returncode}:\n{ended.stdout}{ended.stderr}"
    return ended.stdout


def row(table: str, title: str) -> list[float]:
    (line,) = (line for line in table.splitlines() if line.strip().startswith(title))
    return [float(word) for word in line.strip().removeprefix(title).replace("-", "nan").split()]


def test_malloc_and_vram_agree_and_vram_asks_once(network: Path) -> None:
    said = run(network, "both", "6")
    assert "Same losses and weights to the last bit: yes." in said
    assert "Memory of vram constant after the first iteration: yes." in said
    assert "Reset only after the tasks had ended: yes." in said
    assert row(said, "matrices of the program") == [54, 54]
    assert row(said, "requests for their memory") == [54, 1]
    hooked = row(said, "allocations of StarPU, by the hooks")
    assert hooked[0] == hooked[1] >= 2  # the weights at least
    held = [row(said, f"KiB held by the pool after the {when}")[1] for when in ("first iteration", "last")]
    assert held[0] == held[1] > 0
    first, last = row(said, "loss of the first iteration")[1], row(said, "loss of the last")[1]
    assert last < first


def test_without_a_gpu_it_says_that_nothing_is_page_locked(network: Path) -> None:
    said = run(network, "both", "1", CUDA_VISIBLE_DEVICES="")
    assert "Page-locked: no, there is no GPU" in said


@pytest.mark.parametrize("scheduler", ["eager", "lws", "random"])
def test_whatever_the_order_of_tasks_the_numbers_are_the_same(network: Path, scheduler: str) -> None:
    alone = [run(network, which, "3", STARPU_SCHED=scheduler) for which in ("malloc", "vram", "vram")]
    weights = {re.findall(r"weights ([0-9a-f]{16})", said)[0] for said in alone}
    assert len(weights) == 1
    assert all("; 0 resets before their tasks had ended" in said for said in alone)


def test_a_reset_releases_the_handles_of_the_network() -> None:
    source = (EXAMPLE / "network.c").read_text(encoding="utf-8")
    assert "vram_arena_on_reset(arena, unregister, handle)" in source


def test_the_cnn_learns_the_same_with_each_memory(cnn: Path) -> None:
    said = run(cnn, "all", "2", "1200", "1")
    assert "Same weights to the last bit: yes." in said
    assert row(said, "arrays") == [1152, 1152, 1152]
    requests, registrations = row(said, "requests for their memory"), row(said, "registrations of handles")
    assert requests[0] == 1152 and requests[1] == requests[2] < 10
    assert registrations == [1152, 1152, 48]
    first, last = (float(loss) for loss in re.findall(r"average loss ([0-9.]+)", said))
    assert last < first


@pytest.mark.parametrize("scheduler", ["eager", "random"])
def test_the_cnn_does_not_depend_on_the_order_of_tasks(cnn: Path, scheduler: str) -> None:
    alone = [run(cnn, which, "1", "400", STARPU_SCHED=scheduler) for which in ("starpu", "arena", "kept")]
    assert len({re.findall(r"weights ([0-9a-f]{16})", said)[0] for said in alone}) == 1


def test_wrong_usage_is_said(network: Path, cnn: Path) -> None:
    for program in (network, cnn):
        ended = subprocess.run(
            [program, "sideways"], capture_output=True, text=True, timeout=600, check=False
        )
        assert ended.returncode == 2 and ended.stderr.startswith("usage:")
