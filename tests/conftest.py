"""What every test shares: Hypothesis profiles, and skipping tests that need a device which is not there."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# Deadlines measure the machine, not the code. The sanitized module is many times slower.
settings.register_profile("default", deadline=None)
settings.register_profile(
    "sanitize", deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")


def _has_cuda() -> bool:
    import vram

    return any(device.kind == "cuda" for device in vram.devices())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and not _has_cuda():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
