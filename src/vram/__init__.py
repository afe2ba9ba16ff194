"""One memory engine for GPU and host memory under Python: fast, frugal, ordered across streams, and able to
explain itself.

`Pool` allocates, `Buffer` is one allocation, `Arena` is many with one lifetime, `Stream` and `Event` order
work, `get_memory_manager()` is the process-wide pool of each device. Everything here is loaded when it is
first used; reading recordings (`vram.open`, `vram.trace`) works where the native core is not built.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vram.arena import Arena as Arena
    from vram.arena import arena_report as arena_report
    from vram.buffer import Buffer as Buffer
    from vram.device import Device as Device
    from vram.device import Event as Event
    from vram.device import Stream as Stream
    from vram.device import devices as devices
    from vram.dlpack import from_dlpack as from_dlpack
    from vram.driver_pool import DriverPool as DriverPool
    from vram.errors import ConfigError as ConfigError
    from vram.errors import DeviceError as DeviceError
    from vram.errors import InvalidFree as InvalidFree
    from vram.errors import OutOfMemory as OutOfMemory
    from vram.errors import RaceError as RaceError
    from vram.errors import Suspended as Suspended
    from vram.errors import TraceError as TraceError
    from vram.errors import VramError as VramError
    from vram.graph import Graph as Graph
    from vram.growable import GrowableBuffer as GrowableBuffer
    from vram.manager import MemoryManager as MemoryManager
    from vram.manager import configure as configure
    from vram.manager import get_memory_manager as get_memory_manager
    from vram.marks import annotate as annotate
    from vram.marks import step as step
    from vram.monitoring import Monitor as Monitor
    from vram.monitoring import monitor as monitor
    from vram.pinned import PinnedPool as PinnedPool
    from vram.pinned import pin as pin
    from vram.pipeline import Pipeline as Pipeline
    from vram.plans import Plan as Plan
    from vram.plans import plan as plan
    from vram.pool import Pool as Pool
    from vram.prometheus import Metrics as Metrics
    from vram.prometheus import metrics as metrics
    from vram.race import race_check as race_check
    from vram.recorder import Recorder as Recorder
    from vram.recorder import record as record
    from vram.replay import suggest as suggest
    from vram.scratch import Scratch as Scratch
    from vram.sizes import format_size as format_size
    from vram.sizes import parse_size as parse_size
    from vram.snapshot import Snapshot as Snapshot
    from vram.stats import Measurement as Measurement
    from vram.stats import Stats as Stats
    from vram.tags import tag as tag
    from vram.trace import open_trace as open

    __version__: str

# Where each name lives: loaded when it is first asked for, then kept here.
_PLACES = {
    "Arena": "vram.arena",
    "Buffer": "vram.buffer",
    "ConfigError": "vram.errors",
    "Device": "vram.device",
    "DeviceError": "vram.errors",
    "DriverPool": "vram.driver_pool",
    "Event": "vram.device",
    "Graph": "vram.graph",
    "GrowableBuffer": "vram.growable",
    "InvalidFree": "vram.errors",
    "Measurement": "vram.stats",
    "MemoryManager": "vram.manager",
    "Metrics": "vram.prometheus",
    "Monitor": "vram.monitoring",
    "OutOfMemory": "vram.errors",
    "PinnedPool": "vram.pinned",
    "Pipeline": "vram.pipeline",
    "Plan": "vram.plans",
    "Pool": "vram.pool",
    "RaceError": "vram.errors",
    "Recorder": "vram.recorder",
    "Scratch": "vram.scratch",
    "Snapshot": "vram.snapshot",
    "Stats": "vram.stats",
    "Stream": "vram.device",
    "Suspended": "vram.errors",
    "TraceError": "vram.errors",
    "VramError": "vram.errors",
    "annotate": "vram.marks",
    "arena_report": "vram.arena",
    "configure": "vram.manager",
    "devices": "vram.device",
    "format_size": "vram.sizes",
    "from_dlpack": "vram.dlpack",
    "get_memory_manager": "vram.manager",
    "load_ipython_extension": "vram.notebook",
    "metrics": "vram.prometheus",
    "monitor": "vram.monitoring",
    "open": "vram.trace",
    "parse_size": "vram.sizes",
    "pin": "vram.pinned",
    "plan": "vram.plans",
    "race_check": "vram.race",
    "record": "vram.recorder",
    "step": "vram.marks",
    "suggest": "vram.replay",
    "tag": "vram.tags",
    "unload_ipython_extension": "vram.notebook",
}
_OTHER_NAMES = {"open": "open_trace"}
_MODULES = (
    "analysis",
    "config",
    "cuda_core",
    "cupy",
    "dask",
    "errors",
    "numba",
    "race",
    "replay",
    "torch",
    "trace",
)

__all__ = [
    "Arena",
    "Buffer",
    "ConfigError",
    "Device",
    "DeviceError",
    "DriverPool",
    "Event",
    "Graph",
    "GrowableBuffer",
    "InvalidFree",
    "Measurement",
    "MemoryManager",
    "Metrics",
    "Monitor",
    "OutOfMemory",
    "PinnedPool",
    "Pipeline",
    "Plan",
    "Pool",
    "RaceError",
    "Recorder",
    "Scratch",
    "Snapshot",
    "Stats",
    "Stream",
    "Suspended",
    "TraceError",
    "VramError",
    "__version__",
    "analysis",
    "annotate",
    "arena_report",
    "configure",
    "devices",
    "errors",
    "format_size",
    "from_dlpack",
    "get_memory_manager",
    "metrics",
    "monitor",
    "open",
    "parse_size",
    "pin",
    "plan",
    "race_check",
    "record",
    "replay",
    "step",
    "suggest",
    "tag",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        value = getattr(importlib.import_module(_PLACES[name]), _OTHER_NAMES.get(name, name))
    elif name in _MODULES:
        value = importlib.import_module(f"vram.{name}")
    elif name == "__version__":
        value = _version()
    else:
        raise AttributeError(f"module 'vram' has no attribute {name!r}")
    globals()[name] = value
    return value


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vram")
    except PackageNotFoundError:
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
