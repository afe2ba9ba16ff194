"""What every test shares: Hypothesis profiles, an environment that is always the same, and skipping tests
that need a device which is not there."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from effort import THOROUGH

# Deadlines and "too slow" measure the machine, not the code. The sanitized module is many times slower.
settings.register_profile(
    "default",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=200 if THOROUGH else 25,
)
settings.register_profile("sanitize", settings.get_profile("default"), max_examples=20)
settings.load_profile("default")

KEPT = {
    "VRAM_GPU_SPILL_OPERATIONS",
    "VRAM_GPU_SPILL_SECONDS",
    "VRAM_MUTANTS",
    "VRAM_NULL_GPU",
    "VRAM_SOAK_SECONDS",
    "VRAM_THOROUGH",
}
# What the user has set up must not change what the programs of tests print and do.
for name in [*os.environ]:
    if (name.startswith("VRAM_") and name not in KEPT) or name in {
        "COLUMNS",
        "LINES",
        "FORCE_COLOR",
        "NO_COLOR",
        "TTY_COMPATIBLE",
        "LOCAL_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "SLURM_NTASKS_PER_NODE",
    }:
        del os.environ[name]
os.environ["TERM"] = "xterm"
# Python 3.12 and later warn of a fork beside other threads, which is what tests of forks do.
os.environ["PYTHONWARNINGS"] = "ignore:This process:DeprecationWarning"

# A shell that starts the tests in the background has them, and all they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of each test's own for the sockets of monitors: other processes of the user are not seen.

    Its name is short, because that of a socket must fit into 107 bytes.
    """
    with tempfile.TemporaryDirectory(prefix="vr", dir="/tmp") as made:
        path = Path(made) / "vram"
        monkeypatch.setenv("VRAM_RUNTIME_DIR", str(path))
        yield path


ON_NULL_GPU = "VRAM_NULL_GPU" in os.environ


def _has_cuda() -> bool:
    import vram

    return any(device.kind == "cuda" for device in vram.devices())


def pytest_collection_finish() -> None:
    """Tests collect garbage thousands of times; without this, each time looks at every test of the suite."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and not _has_cuda():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    if ON_NULL_GPU:
        for item in items:
            if item.get_closest_marker("real_gpu") or "kernels" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason="a null GPU computes nothing"))
