"""A description of this machine in plain values: devices, drivers, versions and effective settings.

Imports none of the frameworks it reports.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vram.config import PAGE_SIZES, VARIABLES, Config
from vram.core.device import Device, devices
from vram.core.manager import current_config
from vram.system.version import version as own_version

__all__ = [
    "describe_device",
    "describe_machine",
    "describe_settings",
    "features",
    "info",
    "observed",
    "packages",
    "plugged",
]

PACKAGES = {
    "torch": ("torch",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy"),
    "numba": ("numba",),
    "numba-cuda": ("numba-cuda",),
    "cuda.core": ("cuda-core",),
    "rmm": ("rmm-cu13", "rmm-cu12", "rmm"),
    "jax": ("jax",),
    "numpy": ("numpy",),
}
"""Libraries that share a device with vram, and the distributions that may provide them."""

FEATURES = {
    "trace": ("pyarrow", "recordings (vram.record, vram run --record)", 'pip install "vram[trace]"'),
    "zstd": ("zstandard", "recordings compressed with zstd", 'pip install "vram[trace]"'),
    "tui": ("textual", "the full screen of vram top", 'pip install "vram[tui]"'),
    "nvml": ("pynvml", "GPU memory of each process", 'pip install "vram[nvml]"'),
    "metrics": ("prometheus_client", "Prometheus (vram.metrics)", 'pip install "vram[metrics]"'),
    "notebook": ("IPython", "%load_ext vram and %%vram", "pip install ipython"),
    "dask": ("distributed", "pools of Dask workers (vram.dask)", 'pip install "vram[dask]"'),
}
"""Optional features: the required module, what it is for, how to install it."""

PLUGS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "torch": ("torch", lambda module: module.installed()),
    "cupy": ("cupy", lambda module: module._before is not None),
    "numba": ("numba", lambda module: True),
    "cuda_core": ("cuda.core", lambda module: module._before),
}
"""Our module for each library: its name, and the function that tells whether it is installed."""

ASYNC_ENGINES, MULTIPROCESSORS, MAJOR, MINOR = 40, 16, 75, 76
"""CUDA's numbers of device attributes."""


def packages() -> dict[str, str]:
    """Return the versions of installed libraries by name, without importing them."""
    found = {name: _first_version(distributions) for name, distributions in PACKAGES.items()}
    return {name: text for name, text in found.items() if text is not None}


def _first_version(distributions: tuple[str, ...]) -> str | None:
    for distribution in distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def describe_device(device: Device) -> dict[str, Any]:
    """Describe a device and its features."""
    found: dict[str, Any] = {
        "name": device.name,
        "kind": device.kind,
        "hardware": _hardware(device),
        "total_bytes": device.total_memory,
        "free_bytes": device.free_memory,
        "pages": device.pages,
        "no_pages": "" if device.pages else device.backend.no_pages or "the device has no pages",
        "page_sizes": list(PAGE_SIZES) if device.pages else [],
    }
    if device.kind == "cuda":
        found.update(_describe_cuda(device.backend))
    return found


def _describe_cuda(backend: Any) -> dict[str, Any]:
    number = backend.driver_version
    return {
        "driver_cuda": f"{number // 1000}.{number % 1000 // 10}",
        "driver": _kernel_driver(),
        "compute_capability": f"{backend.attribute(MAJOR)}.{backend.attribute(MINOR)}",
        "multiprocessors": backend.attribute(MULTIPROCESSORS),
        "async_engines": backend.attribute(ASYNC_ENGINES),
    }


def _kernel_driver() -> str | None:
    """Return the version of the NVIDIA kernel driver, such as 580.65.06."""
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _hardware(device: Device) -> str:
    named = getattr(device.backend, "hardware", None)
    return str(named) if named else _processor()


def _processor() -> str:
    """Return the name of the processor if the system provides it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def describe_machine(device: Device) -> dict[str, Any]:
    """Describe where, with what and when a measurement was made."""
    return {
        "device": describe_device(device),
        "processor": _processor(),
        "processors": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "vram": own_version(),
        "packages": packages(),
        "settings": describe_settings()["environment"],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def describe_settings() -> dict[str, Any]:
    """Return the environment variables that are set, and the resulting value of every option."""
    names = ("VRAM_CONF", *VARIABLES)
    config = current_config() or Config()
    return {
        "environment": {name: os.environ[name] for name in names if os.environ.get(name)},
        "options": {name: config[name] for name in config},
        "set": [name for name in config if config.is_set(name)],
        "origins": {name: config.origin(name) for name in config if config.is_set(name)},
    }


def features() -> list[dict[str, Any]]:
    """Return the optional features: whether each is installed, and what it is for."""
    return [
        {
            "name": name,
            "there": importlib.util.find_spec(module) is not None,
            "for": purpose,
            "install": install,
        }
        for name, (module, purpose, install) in FEATURES.items()
    ]


def plugged() -> dict[str, bool]:
    """Return for each loaded library whether it allocates from vram, without importing anything."""
    return {
        name: bool(f"vram.{name}" in sys.modules and is_plugged(sys.modules[f"vram.{name}"]))
        for name, (library, is_plugged) in PLUGS.items()
        if library in sys.modules
    }


def observed() -> dict[str, Any]:
    """Return what observes this process: its monitor, recordings, and the race checker."""
    monitoring, recorder = sys.modules.get("vram.observe.monitor"), sys.modules.get("vram.observe.recorder")
    monitor = getattr(monitoring, "_monitor", None)
    return {
        "monitor": str(monitor.path) if monitor is not None and not monitor.closed else None,
        "recordings": [str(each.path) for each in getattr(recorder, "_open", ())],
        "race_check": sys.modules["vram.core.observer"].active is not None,
    }


def info() -> dict[str, Any]:
    """Return everything that `vram info` prints."""
    return {
        "vram": own_version(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "devices": [describe_device(device) for device in devices()],
        "no_cuda": _why_no_cuda(),
        "packages": packages(),
        "features": features(),
        "plugged": plugged(),
        "observed": observed(),
        "settings": describe_settings(),
    }


def _why_no_cuda() -> str:
    from vram import _native

    count, why = _native.cuda_devices()
    return "" if count else why
