"""`vram.metrics()`: the numbers of `vram.observe.status` for Prometheus and compatible tools.

Names follow the conventions of OpenTelemetry: the quantity, then the unit, `_total` for counters.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from vram.arguments import shown, whole_number
from vram.core.closing import Closing
from vram.core.observer import open_pools
from vram.errors import ConfigError
from vram.observe.status import Observatory

__all__ = ["Metrics", "metrics"]

DEFAULT_PORT = 9464
"""The default port of OpenTelemetry's exporters for Prometheus."""
MOST_TAGS = 50
"""The most tags with their own series; the others are summed under OTHER_TAGS."""
OTHER_TAGS = "(other)"
POOL = ("device", "pool", "kind")
"""The labels of a pool's series."""

GAUGES = {
    "vram_memory_allocated_bytes": ("allocated", "Bytes in live blocks."),
    "vram_memory_requested_bytes": ("requested", "Bytes that live allocations asked for, before rounding."),
    "vram_memory_reserved_bytes": ("reserved", "Bytes held from the device."),
    "vram_memory_pending_bytes": ("pending", "Bytes freed that a stream may still use."),
    "vram_memory_cached_bytes": ("cached", "Bytes in the caches of streams."),
    "vram_memory_free_bytes": ("free", "Bytes reserved and neither live, pending nor cached."),
    "vram_memory_largest_free_bytes": ("largest_free", "Bytes of the largest free block."),
    "vram_memory_spilled_bytes": ("spilled", "Bytes of pages under live memory that are in host memory."),
    "vram_memory_allocated_peak_bytes": ("peak_allocated", "The most bytes that were live at once."),
    "vram_memory_reserved_peak_bytes": ("peak_reserved", "The most bytes held from the device at once."),
    "vram_memory_limit_bytes": ("limit", "The most bytes to hold from the device; absent without a limit."),
    "vram_allocations_live": ("live", "Allocations not freed yet."),
    "vram_fragmentation_ratio": (
        "fragmentation",
        "Share of what is reserved that is free and of little use.",
    ),
}
COUNTERS = {
    "vram_allocations": ("allocations", "Allocations made."),
    "vram_frees": ("frees", "Allocations freed."),
    "vram_cache_hits": ("hits", "Allocations served without a driver call."),
    "vram_stream_cache_hits": (
        "stream_cache_hits",
        "Of these, allocations that the stream's own cache served.",
    ),
    "vram_out_of_memory": ("out_of_memory", "Requests that could not be served."),
}
SAVED = {
    "vram_spill_saved_bytes": ("saved_bytes", "Bytes of PyTorch's saved tensors that are in pinned memory."),
}
"""Gauges of pools that can spill."""
SPILLING = {
    "vram_spill_moved_out_bytes": ("moved_out_bytes", "Bytes of pages moved to host memory."),
    "vram_spill_moved_back_bytes": ("moved_back_bytes", "Bytes of pages moved back to the device."),
    "vram_spill_saved_out_bytes": ("saved_out_bytes", "Bytes of saved tensors copied to host memory."),
    "vram_spill_saved_back_bytes": ("saved_back_bytes", "Bytes of saved tensors copied back."),
    "vram_spill_swaps": ("count", "Swaps to host memory."),
    "vram_spill_held_seconds": ("seconds", "Time for which swaps held the streams."),
}
"""Counters of pools that can spill."""
TAG_SPILLING = {
    "vram_tag_spill_moved_out_bytes": ("moved_out_bytes", "Bytes moved to host memory by tag."),
    "vram_tag_spill_moved_back_bytes": ("moved_back_bytes", "Bytes moved back to the device by tag."),
    "vram_tag_spill_saved_out_bytes": (
        "saved_out_bytes",
        "Bytes of saved tensors copied to host memory by tag.",
    ),
    "vram_tag_spill_saved_back_bytes": ("saved_back_bytes", "Bytes of saved tensors copied back by tag."),
    "vram_tag_spill_held_seconds": ("seconds", "Share of the time for which swaps held the streams by tag."),
}
"""Counters of tags with memory that was moved."""
DEVICE_STATES = ("pools", "libraries", "processes", "unknown", "free")


def metrics(port: int | None = DEFAULT_PORT, *, address: str = "127.0.0.1", registry: Any = None) -> Metrics:
    """Serve the numbers of this process's pools to Prometheus at http://127.0.0.1:9464/metrics.

    `port` 0 selects any free port; `address` is where to listen (default: only this machine). With a
    `registry` of prometheus_client the numbers are added to it; with `port=None` nothing is served. The
    numbers are read from counters on each request and cost nothing in between. Needs
    `pip install "vram[metrics]"`.
    """
    return Metrics(port, address, registry)


class Metrics(Closing):
    """Serves the numbers, created by `vram.metrics`. `close()` or the end of a `with` block ends it."""

    def __init__(self, port: int | None, address: str, registry: Any) -> None:
        """Register the numbers and start to serve; see `vram.metrics`."""
        try:
            import prometheus_client
        except ModuleNotFoundError as error:
            raise ConfigError('vram.metrics needs prometheus_client: pip install "vram[metrics]"') from error
        if port is None and registry is None:
            raise ConfigError("pass port= to serve the numbers, or registry= to add them to a registry")
        if not (registry is None or hasattr(registry, "register")):
            raise TypeError(f"a registry is one of prometheus_client, not {type(registry).__name__}")
        port = None if port is None else whole_number(port, "port", most=65535)
        self.registry = prometheus_client.CollectorRegistry() if registry is None else registry
        self._observatory = Observatory()
        self._named: set[str] = set()  # tags with series of their own of what spilling moved
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self.registry.register(self)
        if port is not None:
            try:
                self._server, self._thread = prometheus_client.start_http_server(port, address, self.registry)
            except (OSError, TypeError, ValueError) as error:
                self.registry.unregister(self)
                raise ConfigError(f"nothing can be served at {shown(address)}:{port}: {error}") from error
        _open.add(self)

    @property
    def url(self) -> str | None:
        """The address for Prometheus; None if nothing is served."""
        if self._server is None:
            return None
        host, port = self._server.server_address[:2]
        return f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"

    def collect(self) -> Iterator[Any]:
        """The current numbers, as prometheus_client expects them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        told = self._observatory.status(top=1000, history=0)
        yield InfoMetricFamily("vram", "What tells.", value={"version": told["vram"]})
        for families, make in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
            for name, (key, text) in families.items():
                family = make(name, text, labels=POOL)
                for pool in told["pools"]:
                    if pool[key] is not None:
                        family.add_metric(_labels(pool), pool[key])
                yield family
        for families, make in ((SAVED, GaugeMetricFamily), (SPILLING, CounterMetricFamily)):
            for name, (key, text) in families.items():
                family = make(name, text, labels=POOL)
                for pool in told["pools"]:
                    if key in pool["spill"]:
                        family.add_metric(_labels(pool), pool["spill"][key])
                yield family
        rungs = CounterMetricFamily(
            "vram_rung_allocations", "Allocations served by each rung of the ladder.", labels=(*POOL, "rung")
        )
        for pool in told["pools"]:
            for rung, count in pool["rungs"].items():
                rungs.add_metric([*_labels(pool), rung], count)
        yield rungs
        devices = GaugeMetricFamily(
            "vram_device_memory_bytes", "A device's memory by who has it.", labels=("device", "state")
        )
        for device in told["devices"]:
            for state in DEVICE_STATES:
                devices.add_metric([device["name"], state], device[state])
        yield devices
        tags = GaugeMetricFamily("vram_tag_allocated_bytes", "Bytes in live blocks by tag.", labels=("tag",))
        spilled = GaugeMetricFamily(
            "vram_tag_spilled_bytes", "Bytes in host memory by tag; absent for tags without.", labels=("tag",)
        )
        for family, key in ((tags, "bytes"), (spilled, "spilled")):
            for tag, size in _tags(told["tags"], key).items():
                if size or key == "bytes":
                    family.add_metric([tag], size)
            yield family
        moved = self._moved(told["pools"])
        for name, (key, text) in TAG_SPILLING.items():
            counter = CounterMetricFamily(name, text, labels=(*POOL, "tag"))
            for labels, totals in moved.items():
                counter.add_metric(labels, totals[key])
            yield counter

    def _moved(self, told: list[dict[str, Any]]) -> dict[tuple[str, ...], Counter[str]]:
        """What spilling moved by pool and tag. A tag with a series keeps it: counters must not decrease."""
        labels = {pool["pool"]: _labels(pool) for pool in told}
        totals: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        for pool in open_pools():
            for row in pool.spilled_tags() if pool.number in labels else ():
                tag = row.tag or ""
                if len(self._named) < MOST_TAGS:
                    self._named.add(tag)
                series = (*labels[pool.number], tag if tag in self._named else OTHER_TAGS)
                totals[series].update({key: getattr(row, key) for key, _ in TAG_SPILLING.values()})
        return totals

    def describe(self) -> list[Any]:
        """Nothing: the series are known when they are collected."""
        return []

    def close(self) -> None:
        """Stop. Closing again does nothing."""
        if self not in _open:
            return
        _open.discard(self)
        self.registry.unregister(self)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._thread is not None:
            self._thread.join()

    def __repr__(self) -> str:
        return f"<vram.Metrics at {self.url or 'a registry'}{'' if self in _open else ', closed'}>"


def _labels(pool: dict[str, Any]) -> list[str]:
    return [pool["memory"], str(pool["pool"]), pool["kind"]]


def _tags(tags: list[dict[str, Any]], key: str) -> dict[str, int]:
    """Bytes of a kind by tag; only the largest by name, because each series costs memory in Prometheus."""
    totals: defaultdict[str, int] = defaultdict(int)
    for place, tag in enumerate(tags):
        totals[tag["tag"] or "" if place < MOST_TAGS else OTHER_TAGS] += tag[key]
    return dict(totals)


_open: weakref.WeakSet[Metrics] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """The server's thread belongs to the parent; the child closes its copy of the socket."""
    for each in list(_open):
        if each._server is not None:
            each._server.socket.close()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
