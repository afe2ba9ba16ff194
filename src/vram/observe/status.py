"""What this process holds now: every pool, its streams, tags and holders, and the owners of each device's
memory. Plain values, ready for JSON.

Reads counters, never events, and has a time budget: expensive queries run less often. The terminal, web page,
metrics and notebook display it, in this process or through `vram.observe.monitor`.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from vram.core.device import Device
from vram.core.locks import new_lock
from vram.core.observer import open_pools
from vram.core.pool import Pool
from vram.errors import VramError
from vram.system.version import version

__all__ = ["DeviceSplit", "Observatory", "split_device"]

MOST_SHARE = 0.004
"""The share of processor time for each of two expensive queries (holders, devices)."""
SAMPLES = 600
"""Samples kept: ten minutes at one per second."""
MOST_ROWS = 1000
"""The most holders, tags and streams in one answer; the rest is counted."""
SPILL_NUMBERS = (
    *("host_bytes", "parked_bytes", "moved_out_bytes", "moved_back_bytes"),
    *("saved_bytes", "saved_out_bytes", "saved_back_bytes"),
    *("count", "returns", "late", "failures", "seconds"),
)
"""What is told of a pool's spilling, by the names of its statistics; nothing for a driver's pool."""
TOTALS = ("bytes", "count", "spilled")
"""What is summed for each tag."""
STACK_DEPTH = 16
"""Frames of each holder."""

Answer: TypeAlias = dict[str, Any]
DeviceSplit: TypeAlias = dict[str, int]
"""total = pools + libraries + processes + unknown + free, in bytes; see `split_device`."""
_Found = TypeVar("_Found")


class Observatory:
    """Observes the pools of this process. Any thread may use it.

    `sample()` is cheap and is called at a steady pace; `status()` answers everything else.
    """

    def __init__(self) -> None:
        """Start without history."""
        self._lock = new_lock()
        self._history: deque[list[float]] = deque(maxlen=SAMPLES)
        self._counted: dict[int, tuple[float, int]] = {}
        self._rates: dict[int, float] = {}
        self._holders: dict[int, _Budgeted[list[Answer]]] = {}
        self._devices = _Budgeted(_memory_of_devices)
        self.started = time.time()
        self._version = version()  # finding it takes milliseconds

    def sample(self) -> None:
        """Record the totals of all pools: a row of the history, and each pool's allocations per second."""
        now = time.monotonic()
        raws = [(pool.number, pool.raw_stats()) for pool in open_pools()]
        with self._lock:
            counted = {}
            for number, raw in raws:
                made = sum(kind["total"] for kind in raw["allocations"].values())
                before, had = self._counted.get(number, (now, made))
                self._rates[number] = (made - had) / (now - before) if now > before else 0.0
                counted[number] = (now, made)
            self._counted = counted
            self._rates = {number: self._rates[number] for number in counted}
            self._history.append(
                [
                    time.time_ns() // 1_000_000 / 1000,
                    sum(raw["live"] for _, raw in raws),
                    sum(raw["reserved"]["current"] for _, raw in raws),
                    sum(raw["pending"]["current"] for _, raw in raws),
                    round(sum(self._rates.values()), 1),
                ]
            )

    def status(self, top: int = 20, history: int = SAMPLES) -> Answer:
        """Everything at this moment; the `top` largest holders and tags, the last `history` samples.

        `holders` are live allocations by tag and stack, most bytes first; `tag_bytes` is the sum of their
        tag. `processes` are others on the devices, as far as the driver tells. Holders and devices are as old
        as `holders_age_s` and `devices_age_s` say, because they are expensive to find.
        """
        top = max(0, min(top, MOST_ROWS))
        with self._lock:
            pools = open_pools()
            self._holders = {
                pool.number: self._holders.get(pool.number) or _Budgeted(_holders_of(pool)) for pool in pools
            }
            described = [self._pool(pool) for pool in pools]
            holders = sorted(
                ({"pool": number, **each} for number, seen in self._holders.items() for each in seen.look()),
                key=lambda each: -each["bytes"],
            )
            streams = [stream for pool in described for stream in pool.pop("streams")]
            spilled = [
                {"pool": pool.number, **asdict(each)} for pool in pools for each in pool.spilled_tags()
            ]
            spilled.sort(key=lambda each: -each["moved_out_bytes"] - each["saved_out_bytes"])
            tags = _by_tag(holders)
            of_tag = {each["tag"]: each["bytes"] for each in tags}
            devices = self._devices.look()
            return {
                "protocol": 1,
                "vram": self._version,
                "pid": os.getpid(),
                "program": _program(),
                "started": self.started,
                "time": time.time(),
                "pools": described,
                "devices": [
                    {**each, **split_device(ours=_ours(pools, each["name"]), **memory)}
                    for each, memory in devices
                ],
                "streams": streams[:MOST_ROWS],
                "tags": tags[:top],
                "spilled": spilled[:top],
                "holders": [
                    {**each, "stack": _frames(each["stack"]), "tag_bytes": of_tag[each["tag"]]}
                    for each in holders[:top]
                ],
                "processes": [
                    {"device": each["name"], **other} for each, _ in devices for other in each["others"]
                ],
                "left_out": {
                    "streams": max(0, len(streams) - MOST_ROWS),
                    "tags": max(0, len(tags) - top),
                    "spilled": max(0, len(spilled) - top),
                    "holders": max(0, len(holders) - top),
                },
                "holders_age_s": max((seen.age for seen in self._holders.values()), default=0.0),
                "devices_age_s": self._devices.age,
                "history": [list(row) for row in list(self._history)[-history:]] if history > 0 else [],
            }

    def _pool(self, pool: Pool) -> Answer:
        stats = pool.stats()
        return {
            "pool": pool.number,
            "kind": pool._title.removeprefix("vram."),
            "device": pool.device.name,
            "memory": pool.memory,
            "limit": pool.limit,
            "allocated": stats.allocated,
            "requested": stats.requested,
            "reserved": stats.reserved,
            "pending": stats.pending,
            "cached": stats.cached,
            "free": stats.free,
            "largest_free": stats.largest_free,
            "spilled": stats.spilled,
            "spill": {name: stats[f"spill.{name}"] for name in SPILL_NUMBERS if f"spill.{name}" in stats},
            "peak_allocated": stats.peak_allocated,
            "peak_reserved": stats.peak_reserved,
            "live": stats.live,
            "allocations": stats.allocations,
            "frees": stats.frees,
            "rate": round(self._rates.get(pool.number, 0.0), 1),
            "hits": stats.hits,
            "stream_cache_hits": stats.stream_cache_hits,
            "hit_rate": stats.hit_rate,
            "fragmentation": stats.fragmentation,
            "out_of_memory": stats.out_of_memory,
            "rungs": stats.rungs,
            "stacks": pool.keeps_stacks,
            "streams": [_stream(pool, each) for each in stats.streams],
        }


class _Budgeted(Generic[_Found]):
    """An answer that is renewed only when its cost is a small share of the time since the last renewal."""

    def __init__(self, find: Callable[[], _Found]) -> None:
        self._find = find
        self._found: list[_Found] = []
        self._at = 0.0
        self._cost = 0.0

    @property
    def age(self) -> float:
        """Seconds since it was renewed."""
        return round(time.monotonic() - self._at, 3) if self._found else 0.0

    def look(self) -> _Found:
        if not self._found or time.monotonic() - self._at >= self._cost / MOST_SHARE:
            begin = time.thread_time()
            self._found = [self._find()]
            self._cost = time.thread_time() - begin
            self._at = time.monotonic()
        return self._found[0]


def _program() -> str:
    """How the process was started, short enough for one line."""
    return " ".join([os.path.basename(sys.argv[0] or sys.executable), *sys.argv[1:]])[:200]


# ---- holders ----------------------------------------------------------------------------------------------


def _holders_of(pool: Pool) -> Callable[[], list[Answer]]:
    find = weakref.ref(pool)

    def look() -> list[Answer]:
        found = find()
        held = [] if found is None or found.closed else found.raw_holders()
        return [
            {
                "tag": tag,
                "stack": stack,
                "count": count,
                "bytes": size,
                "requested": requested,
                "spilled": spilled,
            }
            for tag, stack, count, size, requested, spilled in held
        ]

    return look


def _by_tag(holders: list[Answer]) -> list[Answer]:
    totals: defaultdict[str | None, dict[str, int]] = defaultdict(lambda: dict.fromkeys(TOTALS, 0))
    for each in holders:
        for name in TOTALS:
            totals[each["tag"]][name] += each[name]
    found = [{"tag": tag, **total} for tag, total in totals.items()]
    return sorted(found, key=lambda each: -each["bytes"])


def _frames(stack: Any) -> list[list[str | int]]:
    return [[frame.filename, frame.line, frame.name] for frame in stack[:STACK_DEPTH]]


def _stream(pool: Pool, stream: Mapping[str, Any]) -> Answer:
    kept = {name: stream[name] for name in ("live", "cached", "pending_blocks", "retired")}
    return {"pool": pool.number, "device": pool.device.name, "stream": stream["handle"], **kept}


# ---- the owners of a device's memory ----------------------------------------------------------------------


def split_device(
    *, total: int, free: int, ours: int, libraries: int = 0, process: int | None = None, processes: int = 0
) -> DeviceSplit:
    """Split the bytes of a device between their owners; the parts always sum to `total`.

    `ours` are held by pools of this process, `libraries` by other libraries in it according to themselves.
    `process` is what the driver counts for the whole process (None: it does not), `processes` what it counts
    for others. The rest is `unknown`. The readings are of slightly different moments; if they contradict each
    other, the most reliable ones take precedence.
    """
    left = total

    def take(wanted: int) -> int:
        nonlocal left
        taken = max(0, min(wanted, left))
        left -= taken
        return taken

    used = total - max(0, min(free, total))
    pools = take(ours)
    within = take(max(libraries, 0 if process is None else process - ours))
    other = take(min(processes, used - pools - within))
    unknown = take(used - pools - within - other)
    return {
        "total": total,
        "pools": pools,
        "libraries": within,
        "processes": other,
        "unknown": unknown,
        "free": left,
    }


def _ours(pools: list[Pool], device: str) -> int:
    return sum(int(pool.raw_stats()["reserved"]["current"]) for pool in pools if pool.memory == device)


def _memory_of_devices() -> list[tuple[Answer, dict[str, Any]]]:
    """Each device that has a pool: its description, and the arguments of `split_device` except `ours`."""
    found = {pool.device.name: pool.device for pool in open_pools()}
    return [_memory_of(device) for device in found.values()]


def _memory_of(device: Device) -> tuple[Answer, dict[str, Any]]:
    named = _libraries(device)
    try:
        free, total = device.backend.memory_info()
    except VramError:  # a device that was lost; show the rest
        free, total = 0, 0
    source, ask = {"cuda": ("nvml", _nvml_memory), "host": ("system", _system_memory)}.get(
        device.kind, ("device", _nothing_more)
    )
    known = ask(device)
    source = source if known is not None else "device"
    about = {"name": device.name, "kind": device.kind, "named": named, "source": source}
    about |= _activity(device)
    memory = {"total": total, "free": free, "libraries": sum(named.values()), **(known or {})}
    return about, memory


def _nothing_more(_device: Device) -> dict[str, int] | None:
    """For devices that no system counter covers."""
    return None


def _system_memory(_device: Device) -> dict[str, int] | None:
    """The system's memory and the part of this process; None if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    return {"free": free * 1024, "process": pages * os.sysconf("SC_PAGE_SIZE")}


def _libraries(device: Device) -> dict[str, int]:
    """Bytes that other libraries in this process hold from the device with their own allocators."""
    if device.kind != "cuda":
        return {}
    askers = {"torch": _torch_bytes, "cupy": _cupy_bytes}
    found = {}
    for name, ask in askers.items():
        if name in sys.modules:
            try:
                found[name] = int(ask(sys.modules[name], device.index))
            except Exception:  # another library in an unknown state; its memory counts as unknown
                continue
    return {name: size for name, size in found.items() if size > 0}


def _torch_bytes(torch: Any, index: int) -> int:
    plug = sys.modules.get("vram.torch")
    if (plug is not None and plug.uses_pools()) or not torch.cuda.is_initialized():
        return 0  # its memory belongs to a pool and is counted there
    return int(torch.cuda.memory_reserved(index))


def _cupy_bytes(cupy: Any, index: int) -> int:
    with cupy.cuda.Device(index):
        return int(cupy.get_default_memory_pool().total_bytes())


PCI_BUS, PCI_DEVICE, PCI_DOMAIN = 33, 34, 50
"""The numbers of CUDA's device attributes."""


def _nvml_memory(device: Device) -> dict[str, int] | None:
    """Memory by process according to NVML; None if it is unavailable."""
    try:
        return _by_process(_running(*_nvml_of(device)), os.getpid())
    except Exception:  # not installed, no permission, not supported: each has its own error
        return None


def _nvml_of(device: Device) -> tuple[Any, Any]:
    """NVML and its handle of a device."""
    import pynvml

    pynvml.nvmlInit()  # reference-counted, and cheap after the first call
    attribute = device.backend.attribute  # type: ignore[attr-defined]
    bus = f"{attribute(PCI_DOMAIN):08x}:{attribute(PCI_BUS):02x}:{attribute(PCI_DEVICE):02x}.0"
    return pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(bus.encode())


def _running(nvml: Any, handle: Any) -> list[tuple[int, int | None]]:
    """Process and bytes (None: not told) of all that use a device."""
    running = [
        *nvml.nvmlDeviceGetComputeRunningProcesses(handle),
        *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
    ]
    return [(each.pid, each.usedGpuMemory) for each in running]


def _activity(device: Device) -> Answer:
    """How busy a device is, in percent, and who else uses it; None and nobody if the driver does not tell."""
    found: Answer = {"utilization": None, "others": []}
    if device.kind != "cuda":
        return found
    try:
        nvml, handle = _nvml_of(device)
        found["others"] = [
            {"pid": pid, "name": _process_name(pid), "bytes": size}
            for pid, size in dict(_running(nvml, handle)).items()
            if pid != os.getpid()
        ]
        found["utilization"] = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except Exception:  # as above; what was found stays
        pass
    return found


def _process_name(pid: int) -> str:
    """The name of a process; empty if it is not visible here, as in a container."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _by_process(running: list[tuple[int, int | None]], own: int) -> dict[str, int] | None:
    """Memory of this and of other processes. In a container pids are the host's: None if ours is missing."""
    held = {pid: size for pid, size in running if size is not None}
    if own not in held:
        return None
    return {"process": held[own], "processes": sum(size for pid, size in held.items() if pid != own)}
