"""The benchmarks as a library: what they measure, in which order, and what they say when a peer is missing.

Never how fast anything is: only that figures are there, finite and consistent.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

import vram
from vram import _native, bench
from vram.bench import measure, peers, workloads
from vram.bench.report import Column, LeftOut, Report, Table, shown

MIB = 1 << 20


def numbers(report: Report) -> list[float]:
    """Every figure of a report."""
    return [
        row[column.key]
        for table in report.tables
        for row in table.rows
        for column in table.columns
        if column.unit != "text" and row.get(column.key) is not None
    ]


class Ledger:
    """An allocator that counts, and refuses when it has nothing left."""

    def __init__(self, limit: float = math.inf) -> None:
        self.live: dict[int, int] = {}
        self.made: list[int] = []
        self.peak = 0
        self.most = 0
        self.limit = limit
        self.refused = 0

    def make(self, size: int) -> int:
        if self.held() + size > self.limit:
            self.refused += 1
            raise MemoryError
        self.made.append(size)
        self.live[len(self.made)] = size
        self.peak = max(self.peak, len(self.live))
        self.most = max(self.most, self.held())
        return len(self.made)

    def drop(self, block: int, size: int) -> None:
        assert self.live.pop(block) == size, "the loop gave the wrong size back"

    def held(self) -> int:
        return sum(self.live.values())

    def way(self) -> workloads.Way:
        return workloads.Way(
            "ledger", "make(size)", "drop(block, {size})", {"make": self.make, "drop": self.drop}
        )


# ---- the workloads ----------------------------------------------------------------------------------------

SCENARIOS = [*workloads.HOTPATH, *workloads.PROGRAMS.values(), workloads.training_step(64 * MIB)]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_scenario_makes_the_pairs_it_counts_and_frees_them_all(scenario: workloads.Scenario) -> None:
    ledger = Ledger()
    assert scenario.run(ledger.way())() > 0
    assert len(ledger.made) == scenario.pairs
    assert ledger.live == {}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_scenario_drops_what_is_freed_by_its_last_reference(scenario: workloads.Scenario) -> None:
    with vram.Pool("host") as pool:
        scenario.run(peers.buffer_way(pool))()
        assert pool.stats().live == 0
        assert pool.stats().allocations == scenario.pairs


def test_the_hotpath_has_the_scenarios_of_the_native_benchmark() -> None:
    with vram.Pool("host") as pool:
        for scenario in workloads.HOTPATH:
            assert _native.bench_pairs(pool, scenario.name) > 0
        assert pool.stats().live == 0
        with pytest.raises(ValueError, match="unknown scenario fastest"):
            _native.bench_pairs(pool, "fastest")


def test_variable_sizes_keep_64_blocks_live_and_hardly_ever_repeat_a_size() -> None:
    ledger = Ledger()
    workloads.HOTPATH[-1].run(ledger.way())()
    assert ledger.peak == 64
    assert len(set(ledger.made)) > 1000


def test_a_training_step_holds_about_the_activations_asked_for() -> None:
    with vram.Pool("model:4GiB") as pool:
        workloads.training_step(1024 * MIB).run(peers.raw_way(pool))()
        assert pool.stats().peak_allocated == pytest.approx(1024 * MIB, rel=0.05)


PRESSURE = [workloads.pressure(512 * MIB, 8), workloads.fragmented(512 * MIB, 200)]


@pytest.mark.parametrize("scenario", PRESSURE, ids=lambda scenario: scenario.name)
def test_memory_pressure_comes_near_its_limit_and_never_beyond(scenario: workloads.Scenario) -> None:
    most = 512 * MIB * 95 // 100
    ledger = Ledger(limit=most)
    spent, refused = scenario.compile(ledger.way())()
    assert spent > 0
    assert refused == 0
    assert ledger.live == {}
    assert most - 64 * MIB < ledger.most <= most
    assert len(ledger.made) == len(scenario.names["fill"]) + scenario.pairs


@pytest.mark.parametrize("scenario", PRESSURE, ids=lambda scenario: scenario.name)
def test_who_is_refused_under_pressure_frees_its_oldest_and_goes_on(scenario: workloads.Scenario) -> None:
    ledger = Ledger(limit=448 * MIB)
    _, refused = scenario.compile(ledger.way())()
    assert refused == ledger.refused > 0
    assert ledger.live == {}


def test_memory_pressure_frees_half_and_requests_the_same_sizes_again() -> None:
    scenario = PRESSURE[0]
    ledger = Ledger()
    scenario.compile(ledger.way())()
    filled = len(scenario.names["fill"])
    assert sorted(set(ledger.made)) == sorted(set(workloads.KEPT))
    assert scenario.pairs == 8 * (filled // 2)
    assert ledger.peak == filled


def test_a_benchmark_on_threads_frees_everything_and_hands_half_over() -> None:
    with vram.Pool("host") as pool, vram.Stream("host") as one, vram.Stream("host") as two:
        wall, processor, share = _native.bench_threads([pool], [one.handle, two.handle], True, 100)
        assert wall > 0
        assert processor > 0
        assert 0 < share <= 0.5
        assert pool.stats().live == 0
        assert _native.bench_threads([pool], [one.handle], False, 10)[2] == 0
        with pytest.raises(ValueError, match="one stream"):
            _native.bench_threads([pool], [], False, 10)


def test_a_native_benchmark_takes_an_open_pool_only() -> None:
    pool = vram.Pool("host")
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        _native.bench_pairs(pool, "512 B")
    with pytest.raises(TypeError, match=r"vram\.Pool"):
        _native.bench_pairs(object(), "512 B")  # type: ignore[arg-type]


def test_a_native_benchmark_that_runs_out_of_memory_says_so() -> None:
    with vram.Pool("model:64MiB") as pool, pytest.raises(MemoryError):
        _native.bench_pairs(pool, "transformer step")


# ---- measuring --------------------------------------------------------------------------------------------


def test_runs_are_taken_in_turn_and_the_least_counts() -> None:
    order: list[str] = []

    def run(name: str, results: list[float]) -> Callable[[], float]:
        def once() -> float:
            order.append(name)
            return results[order.count(name) - 1]

        return once

    # Two runs to warm up do not count, however fast they are.
    found = measure.least({"a": run("a", [0, 0, 5, 3, 4]), "b": run("b", [0, 0, 2, 9, 8])}, repeats=3)
    assert found == {"a": 3, "b": 2}
    assert order == ["a", "b"] * 5


def test_what_fails_is_named_with_the_reason_and_the_others_go_on() -> None:
    def broken() -> float:
        raise RuntimeError("no such\nthing")

    failures: list[LeftOut] = []
    assert measure.least({"bad": broken, "good": lambda: 1.0}, 2, failures) == {"good": 1.0}
    assert failures == [LeftOut("bad", "RuntimeError: no such thing")]
    measure.least({"bad": broken}, 1, failures, where="512 B")
    assert failures[1].name == "bad, 512 B"
    with pytest.raises(RuntimeError):
        measure.least({"bad": broken}, 1)


def test_the_garbage_collector_is_off_while_measuring_and_as_before_afterwards() -> None:
    during: list[bool] = []

    def look() -> float:
        during.append(gc.isenabled())
        return 1.0

    measure.least({"look": look}, 1)
    assert not any(during)
    assert gc.isenabled()


# ---- peers ------------------------------------------------------------------------------------------------


def test_on_the_host_every_peer_is_listed_with_the_reason() -> None:
    ways, left_out = peers.find(vram.Device("host"))
    assert ways == []
    assert [left.name for left in left_out] == list(peers.PEERS)
    assert all("CUDA" in left.reason for left in left_out)


def test_a_peer_that_cannot_be_imported_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: vram.Device) -> workloads.Way:
        importlib.import_module("no_such_allocator")
        raise AssertionError

    def present(device: vram.Device) -> workloads.Way:
        return peers.FLOOR

    class OnGpu:
        kind, index, name = "cuda", 0, "cuda:0"

    monkeypatch.setattr(peers, "PEERS", {"missing": missing, "present": present})
    ways, left_out = peers.find(OnGpu(), ["missing", "present"])  # type: ignore[arg-type]
    assert ways == [peers.FLOOR]
    assert left_out == [LeftOut("missing", "ModuleNotFoundError: No module named 'no_such_allocator'")]


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(peers.PEERS))
def test_a_peer_runs_every_scenario(name: str) -> None:
    ways, left_out = peers.find(vram.Device("cuda:0"), [name])
    if left_out:
        pytest.skip(left_out[0].reason)
    for scenario in workloads.HOTPATH:
        assert scenario.run(ways[0])() > 0
    ways[0].trim()


# ---- reports ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(bench.BENCHES))
def test_a_benchmark_runs_on_the_host_and_all_its_figures_are_finite(name: str) -> None:
    report = bench.run(name, "host", quick=True)
    assert report.bench == name
    assert report.quick
    assert report.tables
    assert all(table.rows for table in report.tables)
    assert numbers(report)
    assert all(math.isfinite(number) and number >= 0 for number in numbers(report))
    assert json.loads(json.dumps(report.to_json())) == json.loads(json.dumps(report.to_json()))


def test_every_row_has_only_what_its_columns_show() -> None:
    for name in bench.BENCHES:
        for table in bench.run(name, "host", quick=True).tables:
            keys = {column.key for column in table.columns}
            assert all(set(row) <= keys for row in table.rows), table.title


def test_the_hotpath_compares_python_with_the_floor_and_c_plus_plus() -> None:
    every, against = bench.run("hotpath", "host", quick=True).tables
    rows = {row["way"]: row for row in every.rows}
    assert set(rows) == {"vram malloc, free", "vram Buffer", "two calls of a no-op builtin", "vram, C++"}
    assert [row["scenario"] for row in against.rows] == [scenario.name for scenario in workloads.HOTPATH]
    for row in against.rows:
        floor = rows["two calls of a no-op builtin"][row["scenario"]]
        assert row["ours"] == rows["vram malloc, free"][row["scenario"]]
        assert row["over_floor"] == pytest.approx(row["ours"] / floor)
        assert row["peer"] is row["factor"] is row["native_factor"] is None


def test_threads_are_compared_with_one() -> None:
    for table in bench.run("threads", "host", quick=True).tables:
        assert table.rows[0]["threads"] == 1
        assert table.rows[0]["wall_ratio"] == table.rows[0]["cpu_ratio"] == 1
        for row in table.rows:
            assert row["wall_ratio"] == pytest.approx(row["wall"] / table.rows[0]["wall"])


def test_the_machine_is_named_in_every_report() -> None:
    machine = bench.run("warmup", "host", quick=True).machine
    assert machine["device"]["name"] == "host"
    assert machine["device"]["total_bytes"] > 0
    assert machine["processors"] >= 1
    assert machine["vram"] == vram.__version__
    assert machine["date"].startswith("20")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "ns", "–"),
        (1234.56, "ns", "1235"),
        (12.34, "ns", "12.3"),
        (0.01234, "ms", "0.0123"),
        (1234.5, "us", "1234"),
        (2.345, "ratio", "2.35×"),
        (0.5, "share", "50%"),
        (16, "count", "16"),
        ("CuPy pool", "text", "CuPy pool"),
    ],
)
def test_figures_are_shown_with_the_digits_that_mean_something(value: Any, unit: str, text: str) -> None:
    assert shown(value, unit) == text


def test_a_report_is_plain_values() -> None:
    table = Table("t", [Column("a", "A", "ns")], [{"a": 1.0}])
    report = Report("hotpath", {"device": {}}, [table], [LeftOut("x", "gone")])
    assert report.to_json() == {
        "bench": "hotpath",
        "machine": {"device": {}},
        "tables": [
            {"title": "t", "columns": [{"key": "a", "title": "A", "unit": "ns"}],
             "rows": [{"a": 1.0}], "note": ""}
        ],
        "left_out": [{"name": "x", "reason": "gone"}],
        "quick": False,
    }  # fmt: skip
