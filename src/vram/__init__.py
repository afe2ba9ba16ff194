"""A memory engine for GPU and host memory: fast, low in waste, stream-ordered and observable.

`Pool` allocates memory. `Buffer` is one allocation, `Arena` is many with one lifetime. `Stream` and `Event`
order work. `get_memory_manager()` has one pool per device for the whole process. Modules are loaded when
a name is first used. Reading recordings (`vram.open`, `vram.trace`) works without the native core.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vram.core.async_pool import AsyncMemoryPool as AsyncMemoryPool
    from vram.core.buffer import Buffer as Buffer
    from vram.core.device import Device as Device
    from vram.core.device import devices as devices
    from vram.core.dlpack import from_dlpack as from_dlpack
    from vram.core.driver_pool import DriverPool as DriverPool
    from vram.core.manager import MemoryManager as MemoryManager
    from vram.core.manager import configure as configure
    from vram.core.manager import get_memory_manager as get_memory_manager
    from vram.core.measure import Measurement as Measurement
    from vram.core.pinned import pin as pin
    from vram.core.pool import PinnedPool as PinnedPool
    from vram.core.pool import Pool as Pool
    from vram.core.snapshot import Snapshot as Snapshot
    from vram.core.stats import Stats as Stats
    from vram.core.stream import Event as Event
    from vram.core.stream import Graph as Graph
    from vram.core.stream import Stream as Stream
    from vram.core.tags import tag as tag
    from vram.errors import ConfigError as ConfigError
    from vram.errors import DeviceError as DeviceError
    from vram.errors import InvalidFree as InvalidFree
    from vram.errors import OutOfMemory as OutOfMemory
    from vram.errors import RaceError as RaceError
    from vram.errors import Suspended as Suspended
    from vram.errors import TraceError as TraceError
    from vram.errors import VramError as VramError
    from vram.lifetimes.arena import Arena as Arena
    from vram.lifetimes.arena import arena_report as arena_report
    from vram.lifetimes.growable import GrowableBuffer as GrowableBuffer
    from vram.lifetimes.plan import Plan as Plan
    from vram.lifetimes.plan import plan as plan
    from vram.lifetimes.scratch import Scratch as Scratch
    from vram.observe.annotations import annotate as annotate
    from vram.observe.annotations import step as step
    from vram.observe.monitor import Monitor as Monitor
    from vram.observe.monitor import monitor as monitor
    from vram.observe.prometheus import Metrics as Metrics
    from vram.observe.prometheus import metrics as metrics
    from vram.observe.recorder import Recorder as Recorder
    from vram.observe.recorder import record as record
    from vram.pipeline.pipeline import Pipeline as Pipeline
    from vram.race.checker import race_check as race_check
    from vram.replay import suggest as suggest
    from vram.sizes import format_size as format_size
    from vram.sizes import parse_size as parse_size
    from vram.trace import open_trace as open

    __version__: str

# The module of each name. It is imported when the name is first used; the result is stored here.
_PLACES = {
    "Arena": "vram.lifetimes.arena",
    "AsyncMemoryPool": "vram.core.async_pool",
    "Buffer": "vram.core.buffer",
    "ConfigError": "vram.errors",
    "Device": "vram.core.device",
    "DeviceError": "vram.errors",
    "DriverPool": "vram.core.driver_pool",
    "Event": "vram.core.stream",
    "Graph": "vram.core.stream",
    "GrowableBuffer": "vram.lifetimes.growable",
    "InvalidFree": "vram.errors",
    "Measurement": "vram.core.measure",
    "MemoryManager": "vram.core.manager",
    "Metrics": "vram.observe.prometheus",
    "Monitor": "vram.observe.monitor",
    "OutOfMemory": "vram.errors",
    "PinnedPool": "vram.core.pool",
    "Pipeline": "vram.pipeline",
    "Plan": "vram.lifetimes.plan",
    "Pool": "vram.core.pool",
    "RaceError": "vram.errors",
    "Recorder": "vram.observe.recorder",
    "Scratch": "vram.lifetimes.scratch",
    "Snapshot": "vram.core.snapshot",
    "Stats": "vram.core.stats",
    "Stream": "vram.core.stream",
    "Suspended": "vram.errors",
    "TraceError": "vram.errors",
    "VramError": "vram.errors",
    "annotate": "vram.observe.annotations",
    "arena_report": "vram.lifetimes.arena",
    "configure": "vram.core.manager",
    "devices": "vram.core.device",
    "format_size": "vram.sizes",
    "from_dlpack": "vram.core.dlpack",
    "get_memory_manager": "vram.core.manager",
    "load_ipython_extension": "vram.views.notebook",
    "metrics": "vram.observe.prometheus",
    "monitor": "vram.observe.monitor",
    "open": "vram.trace",
    "parse_size": "vram.sizes",
    "pin": "vram.core.pinned",
    "plan": "vram.lifetimes.plan",
    "race_check": "vram.race",
    "record": "vram.observe.recorder",
    "step": "vram.observe.annotations",
    "suggest": "vram.replay",
    "tag": "vram.core.tags",
    "unload_ipython_extension": "vram.views.notebook",
}
# Names that people look for here, and where they are.
_ELSEWHERE = {
    "difference": "vram.analysis.difference(vram.open(BEFORE), vram.open(AFTER))",
    "explain": "vram.analysis.explain(vram.open(FILE))",
    "find_leaks": "vram.analysis.find_leaks(vram.open(FILE))",
    "install": "vram.torch.install()",
    "memory_at": "vram.analysis.memory_at(vram.open(FILE), EVENT)",
    "merge": "vram.analysis.merge([vram.open(FILE), ...])",
    "summary": "vram.analysis.summary(vram.open(FILE))",
    "watch": "vram.torch.watch(FILE)",
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
    "predict",
    "race",
    "replay",
    "torch",
    "trace",
)

__all__ = [
    "Arena",
    "AsyncMemoryPool",
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
    "predict",
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
        value = _module(name)
    elif name == "_native" and importlib.util.find_spec("vram._native") is None:
        raise importlib.import_module("vram.errors").MissingCore()
    elif name == "__version__":
        value = importlib.import_module("vram.system.version").version()
    else:
        hint = f"; use {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"module 'vram' has no attribute {name!r}{hint}")
    globals()[name] = value
    return value


def _module(name: str) -> Any:
    """A module of this package. Where a package that it needs is missing, it is an attribute that is not
    there, so that `hasattr`, `help` and `inspect` work; `import vram.NAME` raises the ImportError itself.
    """
    try:
        return importlib.import_module(f"vram.{name}")
    except ImportError as error:
        raise AttributeError(f"vram.{name} is not available: {error}") from error


def __dir__() -> list[str]:
    names = {*globals(), *__all__, *_MODULES}
    if any(importlib.util.find_spec(needed) is None for needed in ("vram._native", "numpy")):
        names = {name for name in names if _loads(name)}
    return sorted(names)


def _loads(name: str) -> bool:
    """Whether a name works where the native core is not built, or NumPy is not installed."""
    try:
        return name in globals() or __getattr__(name) is not None
    except (AttributeError, ImportError):
        return False
