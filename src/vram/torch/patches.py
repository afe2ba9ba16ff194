"""Queries that PyTorch does not support with a pluggable allocator, answered by vram's pools.

PyTorch's public functions (`memory_stats`, `memory_allocated`, `memory_summary`, `_snapshot`,
`_dump_snapshot`, `_record_memory_history`, …) call a few functions of `torch._C`, which raise with a
pluggable allocator. Only those few are replaced; every public function stays PyTorch's own. `formats`
produces the values.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from vram.core.journal import pool_trace
from vram.core.pool import Pool
from vram.torch.formats import ACCUMULATED, nested_stats, torch_snapshot

__all__ = ["History", "Patches", "replacements"]

HISTORY_ENTRIES = 1 << 18
"""Events kept for each stream if _record_memory_history sets no bound; 15 MB per stream."""
MOST_HISTORY_ENTRIES = 1 << 24

_log = logging.getLogger("vram")


# ---- history ----------------------------------------------------------------------------------------------


class History:
    """What `_record_memory_history` requested, applied to all pools, including those created later."""

    def __init__(self, pools: Mapping[int, Pool], usual_entries: Callable[[], int]) -> None:
        """Start without a history; the journals then keep `usual_entries()` events."""
        self._pools = pools
        self._usual_entries = usual_entries
        self._entries: int | None = None
        self._stacks = False
        self._oom_observers: list[Callable[[int, int, int, int], object]] = []
        self.enabled = False

    def record(self, enabled: str | None, *, stacks: bool, entries: int, clear: bool = False) -> None:
        """Keep a history ("all"), only the stacks of live blocks ("state"), or nothing (None)."""
        if enabled not in (None, "state", "all"):
            raise ValueError(f"expected enabled to be 'state', 'all', or None, not {enabled!r}")
        bound = HISTORY_ENTRIES if entries > MOST_HISTORY_ENTRIES else max(1, entries)
        before, self._entries = self._entries, bound if enabled == "all" else None
        self.enabled = enabled is not None
        self._stacks = enabled is not None and stacks
        for pool in dict(self._pools).values():
            pool._keep_stacks(self._stacks, self)
            if clear or before != self._entries:
                pool.journal_start(self._wanted_entries())

    def join(self, device: int, pool: Pool) -> None:
        """Apply the current request to a new pool."""
        pool._keep_stacks(self._stacks, self)
        if self._entries is not None:
            pool.journal_start(self._entries)
        for observer in self._oom_observers:
            pool.on_oom(_oom_callback(observer, device, pool))

    def _wanted_entries(self) -> int:
        return self._usual_entries() if self._entries is None else self._entries

    def observe_oom(self, observer: Callable[[int, int, int, int], object]) -> None:
        """Call `observer(device, size, reserved, free)` before an allocation fails on any device."""
        self._oom_observers.append(observer)
        for device, pool in dict(self._pools).items():
            pool.on_oom(_oom_callback(observer, device, pool))


def _oom_callback(
    observer: Callable[[int, int, int, int], object], device: int, pool: Pool
) -> Callable[[int, int], bool]:
    """Wrap an observer of torch as a callback of the pool that never asks for a retry."""

    def tell(size: int, _stream: int) -> bool:
        observer(device, size, pool.stats().reserved, pool.device.free_memory)
        return False

    return tell


# ---- the functions of torch._C ----------------------------------------------------------------------------


def replacements(pools: Mapping[int, Pool], history: History, devices: int) -> dict[str, Callable[..., Any]]:
    """Return replacements for functions of `torch._C`, by name. `pools` is keyed by device index."""
    since: dict[int, dict[str, float]] = {}

    def memory_stats(device: int) -> dict[str, Any]:
        pool = pools.get(device)
        return nested_stats({} if pool is None else pool.stats(), since.get(device))

    def reset_peaks(device: int) -> None:
        if device in pools:
            pools[device].reset_peak()

    def reset_accumulated(device: int) -> None:
        if device in pools:
            stats = pools[device].stats()
            since[device] = {key: stats[key] for key in ACCUMULATED}

    def memory_fraction(device: int) -> float:
        pool = pools.get(device)
        limit = None if pool is None else pool.limit
        return 1.0 if pool is None or limit is None else min(1.0, limit / pool.device.total_memory)

    def snapshot(wanted: tuple[Any, ...] | None = None) -> dict[str, Any]:
        pool_id, traces = (wanted or ())[:2], len(wanted or ()) < 3 or wanted[2]  # type: ignore[index]
        if any(pool_id):
            raise RuntimeError(
                f"vram's snapshots are not split by pool; there is no snapshot of pool {pool_id} alone"
            )
        return _snapshot(pools, devices, traces=traces)

    def record_history(
        enabled: str | None = "all",
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = sys.maxsize,
        clear_history: bool = False,
        *_other: Any,
    ) -> None:
        history.record(enabled, stacks=context is not None, entries=max_entries, clear=clear_history)

    def record_history_legacy(
        enabled: bool,
        record_context: bool = True,
        trace_alloc_max_entries: int = 1,
        trace_alloc_record_context: bool = False,
        *_other: Any,
    ) -> None:
        mode = None if not enabled else "all" if trace_alloc_max_entries > 1 else "state"
        wanted = record_context or trace_alloc_record_context
        history.record(mode, stacks=wanted, entries=trace_alloc_max_entries)

    return {
        "_cuda_memoryStats": memory_stats,
        "_cuda_resetPeakMemoryStats": reset_peaks,
        "_cuda_resetAccumulatedMemoryStats": reset_accumulated,
        "_cuda_getMemoryFraction": memory_fraction,
        "_cuda_memorySnapshot": snapshot,
        "_cuda_record_memory_history": record_history,
        "_cuda_record_memory_history_legacy": record_history_legacy,
        "_cuda_isHistoryEnabled": lambda: history.enabled,
        "_cuda_attach_out_of_memory_observer": lambda observer: history.observe_oom(observer),
        "_accelerator_getDeviceStats": lambda device: memory_stats(device),
        "_accelerator_resetPeakStats": lambda device: reset_peaks(device),
        "_accelerator_resetAccumulatedStats": lambda device: reset_accumulated(device),
    }


def _snapshot(pools: Mapping[int, Pool], devices: int, *, traces: bool) -> dict[str, Any]:
    found = {index: pool_trace(pool, events=traces) for index, pool in dict(pools).items()}
    settings = next((pool.config() for pool in pools.values()), {})
    return torch_snapshot(found, devices=devices, settings=settings)


# ---- installing them --------------------------------------------------------------------------------------


class Patches:
    """Temporarily replaced attributes; `restore` restores all of them."""

    def __init__(self) -> None:
        """Start with no replacements."""
        self._replaced: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> bool:
        """Replace an attribute; return false and do nothing if it does not exist."""
        try:
            original = getattr(owner, name)
        except AttributeError:
            return False
        setattr(owner, name, value)
        self._replaced.append((owner, name, original))
        return True

    def replace_functions(self, owner: Any, functions: Mapping[str, Callable[..., Any]]) -> None:
        """Replace functions; the replacements take over names and docstrings."""
        missing = [name for name, function in functions.items() if not self._replace(owner, name, function)]
        if missing:
            _log.debug("this PyTorch has no %s; nothing to replace", ", ".join(missing))

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> bool:
        original = getattr(owner, name, None)
        if original is None:
            return False
        for attribute in ("__name__", "__qualname__", "__doc__"):
            with contextlib.suppress(AttributeError, TypeError):
                setattr(function, attribute, getattr(original, attribute))
        return self.replace(owner, name, function)

    def restore(self) -> None:
        """Restore everything in reverse order. Calling it again has no effect."""
        while self._replaced:
            owner, name, original = self._replaced.pop()
            setattr(owner, name, original)

    def without_graph_trees(self) -> None:
        """Make torch.compile record one graph per function.

        Its graph trees save and restore the state of PyTorch's own allocator, which a pluggable allocator
        lacks.
        """
        try:
            config = importlib.import_module("torch._inductor.config")
        except ImportError:
            return
        self.replace(config.triton, "cudagraph_trees", False)
