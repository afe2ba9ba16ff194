"""`vram bench scenarios`: six kinds of program, compared with PyTorch's allocator in the same run."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from vram.bench import peers
from vram.bench.measure import factor, in_turns, least
from vram.bench.report import Column, LeftOut, Report, Table
from vram.bench.workloads import PROGRAMS, Scenario, Way, fragmented, pressure
from vram.core.device import Device
from vram.core.pool import Pool

__all__ = ["CLAIMED", "run"]

REPEATS, QUICK_REPEATS = 7, 1
PRESSURE_REPEATS = 3
PRESSURE_ROUNDS, QUICK_ROUNDS = 10, 1
PRESSURE_REQUESTS, QUICK_REQUESTS = 1000, 100
PRESSURE_LIMIT, HOST_PRESSURE_LIMIT = 8 << 30, 512 << 20
CLAIMED = {
    "same size": 1.43,
    "large": 3.92,
    "transformer step": 1.89,
    "memory pressure": 4.83,
    "variable sizes": 0.83,
}
"""How much faster than PyTorch the reference design claims to be."""
FRAGMENTED = "memory pressure, fragmented"
OURS = ("vram malloc, free", "vram Buffer")


def run(device: str | Device | None = None, *, quick: bool = False) -> Report:
    """Measure the six programs on a device."""
    place = Device(device)
    others, left_out = peers.find(place, peers.TORCH)
    limit = PRESSURE_LIMIT if place.kind == "cuda" else HOST_PRESSURE_LIMIT
    limited = {
        "memory pressure": pressure(limit, QUICK_ROUNDS if quick else PRESSURE_ROUNDS),
        FRAGMENTED: fragmented(limit, QUICK_REQUESTS if quick else PRESSURE_REQUESTS),
    }
    rows = []
    for name in (*CLAIMED, FRAGMENTED):
        if name in PROGRAMS:
            found: dict[str, Any] = {"ns": _program(place, PROGRAMS[name], others, left_out, quick)}
        else:
            found = _under_pressure(place, limit, limited[name], others, left_out, quick)
        rows.append(_row(name, **found))
    return Report.of("scenarios", place, [_table(rows)], left_out, quick=quick)


def _program(
    place: Device, scenario: Scenario, others: list[Way], left_out: list[LeftOut], quick: bool
) -> dict[str, float]:
    with Pool(place) as pool:
        ways = [peers.raw_way(pool), peers.buffer_way(pool), *others]
        runs = {way.name: scenario.run(way) for way in ways}
        found = least(runs, QUICK_REPEATS if quick else REPEATS, left_out, where=scenario.name)
    for way in others:
        way.trim()
    return found


# ---- memory pressure --------------------------------------------------------------------------------------


def _under_pressure(
    place: Device, limit: int, scenario: Scenario, others: list[Way], left_out: list[LeftOut], quick: bool
) -> dict[str, Any]:
    """Run the same requests within the same limit for all, each starting from an empty pool."""
    runs: dict[str, Callable[[], tuple[int, int]]] = {
        "vram malloc, free": lambda: _ours(place, limit, scenario, peers.raw_way),
        "vram Buffer": lambda: _ours(place, limit, scenario, peers.buffer_way),
    }
    runs |= {way.name: lambda way=way: _torchs(place, limit, scenario, way) for way in others}  # type: ignore[misc]
    repeats = 1 if quick else PRESSURE_REPEATS
    found = in_turns(runs, repeats, left_out, where=scenario.name, warm=0)
    return {
        "ns": {name: min(spent for spent, _ in results) / scenario.pairs for name, results in found.items()},
        "refused": {name: results[-1][1] for name, results in found.items()},
    }


def _ours(place: Device, limit: int, scenario: Scenario, way: Callable[[Pool], Way]) -> tuple[int, int]:
    with Pool(place, limit=limit) as pool:
        result: tuple[int, int] = scenario.compile(way(pool))()
        return result


def _torchs(place: Device, limit: int, scenario: Scenario, way: Way) -> tuple[int, int]:
    with _torch_limit(place, limit):
        way.trim()
        result: tuple[int, int] = scenario.compile(way)()
        way.trim()
        return result


@contextlib.contextmanager
def _torch_limit(place: Device, limit: int) -> Iterator[None]:
    torch: Any = importlib.import_module("torch")
    total = torch.cuda.get_device_properties(place.index).total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total, place.index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, place.index)


# ---- the table --------------------------------------------------------------------------------------------


def _row(name: str, ns: dict[str, float], refused: dict[str, int] | None = None) -> dict[str, Any]:
    raw, buffer = (ns.get(ours) for ours in OURS)
    torch_raw, torch_empty = (ns.get(peer) for peer in peers.TORCH)
    return {
        "scenario": name,
        "raw": raw,
        "torch_raw": torch_raw,
        "factor": factor(torch_raw, raw),
        "buffer": buffer,
        "torch_empty": torch_empty,
        "empty_factor": factor(torch_empty, buffer),
        "claimed": CLAIMED.get(name),
        "refused": (refused or {}).get(OURS[0]),
        "torch_refused": (refused or {}).get(peers.TORCH[0]),
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    return Table(
        "One request and its free, ns, in the same run",
        [
            Column("scenario", "scenario"),
            Column("raw", "vram malloc", "ns"),
            Column("torch_raw", "torch raw", "ns"),
            Column("factor", "faster by", "ratio"),
            Column("buffer", "vram Buffer", "ns"),
            Column("torch_empty", "torch.empty", "ns"),
            Column("empty_factor", "faster by", "ratio"),
            Column("claimed", "claimed", "ratio"),
            Column("refused", "vram refused", "count"),
            Column("torch_refused", "torch refused", "count"),
        ],
        rows,
        "Memory pressure: 95 % of a limit is full; every round frees half of the blocks and requests the "
        "same sizes again. Fragmented: mixed sizes; random blocks are freed until the next one fits. A "
        "refused request frees the oldest block and is repeated, which is part of the time per served one.",
    )
