"""`vram bench hotpath`: the cost of an allocate+free pair, from Python, C++ and every installed peer."""

from __future__ import annotations

from typing import Any

from vram import _native
from vram.bench import peers
from vram.bench.measure import factor, least
from vram.bench.report import Column, Report, Table
from vram.bench.workloads import HOTPATH, Run, Scenario
from vram.core.device import Device
from vram.core.pool import Pool

__all__ = ["run"]

REPEATS, QUICK_REPEATS = 9, 1
RAW, FLOOR = "vram malloc, free", peers.FLOOR.name
OURS_NATIVE = "vram, C++"
DRIVER_NATIVE = "cuMemAllocFromPoolAsync, C++"


def run(device: str | Device | None = None, *, quick: bool = False) -> Report:
    """Measure the six scenarios on a device."""
    place = Device(device)
    others, left_out = peers.find(place)
    columns: dict[str, dict[str, float]] = {}
    for scenario in HOTPATH:
        with Pool(place) as pool:
            ways = [peers.raw_way(pool), peers.buffer_way(pool), peers.FLOOR, *others]
            runs = {way.name: scenario.run(way) for way in ways} | _native_runs(pool, scenario)
            repeats = QUICK_REPEATS if quick else REPEATS
            columns[scenario.name] = least(runs, repeats, left_out, where=scenario.name)
        for way in others:
            way.trim()
    return Report.of("hotpath", place, [_all(columns), _against(columns)], left_out, quick=quick)


def _native_runs(pool: Pool, scenario: Scenario) -> dict[str, Run]:
    name, backend = scenario.name, pool.device.backend
    runs: dict[str, Run] = {OURS_NATIVE: lambda: _native.bench_pairs(pool, name)}
    if isinstance(backend, _native.CudaBackend):
        runs[DRIVER_NATIVE] = lambda: _native.bench_driver_pairs(backend, name)
    return runs


def _all(columns: dict[str, dict[str, float]]) -> Table:
    names = list(dict.fromkeys(name for results in columns.values() for name in results))
    rows = [
        {"way": name, **{scenario: results.get(name) for scenario, results in columns.items()}}
        for name in names
    ]
    return Table(
        "One allocate+free pair, ns",
        [Column("way", "way"), *(Column(scenario, scenario, "ns") for scenario in columns)],
        rows,
    )


def _against(columns: dict[str, dict[str, float]]) -> Table:
    """Compare vram with the floor and with the fastest peer in each scenario."""
    return Table(
        "vram malloc+free, the floor and the fastest peer of the same run",
        [
            Column("scenario", "scenario"),
            Column("ours", "vram, ns", "ns"),
            Column("over_floor", "over the floor", "ratio"),
            Column("peer", "fastest peer"),
            Column("theirs", "its ns", "ns"),
            Column("factor", "vram faster by", "ratio"),
            Column("native", "C++, ns", "ns"),
            Column("native_factor", "faster than driver by", "ratio"),
        ],
        [_against_row(scenario, results) for scenario, results in columns.items()],
    )


def _against_row(scenario: str, results: dict[str, float]) -> dict[str, Any]:
    theirs = {name: ns for name, ns in results.items() if name in peers.PEERS}
    fastest = min(theirs, key=lambda name: theirs[name], default=None)
    best = None if fastest is None else theirs[fastest]
    ours, native = results.get(RAW), results.get(OURS_NATIVE)
    return {
        "scenario": scenario,
        "ours": ours,
        "over_floor": factor(ours, results.get(FLOOR)),
        "peer": fastest,
        "theirs": best,
        "factor": factor(best, ours),
        "native": native,
        "native_factor": factor(results.get(DRIVER_NATIVE), native),
    }
