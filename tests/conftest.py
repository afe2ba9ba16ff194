"""What every test shares: Hypothesis profiles, a place for monitors' sockets, and skipping tests that need a
device which is not there."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Deadlines and "too slow" measure the machine, not the code. The sanitized module is many times slower.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("sanitize", settings.get_profile("default"), max_examples=20)
settings.load_profile("default")

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


def _has_cuda() -> bool:
    import vram

    return any(device.kind == "cuda" for device in vram.devices())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and not _has_cuda():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
