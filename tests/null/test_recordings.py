"""Jobs on a null GPU, compared event by event with what PyTorch's allocator did for them on an H200."""

from __future__ import annotations

import importlib
import itertools
import json
import platform
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vram.predict import find_gpu, null_environment
from vram.predict.environment import cuda_of_torch

pytestmark = [
    pytest.mark.fork,
    pytest.mark.slow,
    pytest.mark.skipif(not cuda_of_torch(), reason="no CUDA build of PyTorch can be imported"),
]

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "predict"

# The GPU's machine was an x86-64. Compiled for ARM, PyTorch converts the arguments of an operator under
# autocast (input, weight, bias) from the first to the last, for x86-64 from the last to the first.
SAME_ORDER = platform.machine() == "x86_64"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[SimpleNamespace]:
    """The modules of benchmarks/predict, and what was measured."""
    names = ("catalog", "measure", "watch")
    sys.path.insert(0, str(BENCHMARK))
    modules = {name: importlib.import_module(name) for name in names}
    sys.path.remove(str(BENCHMARK))
    yield SimpleNamespace(**modules, truth=json.loads((BENCHMARK / "truth-h200.json").read_text()))
    for name in names:
        del sys.modules[name]


@pytest.fixture
def predicting(benchmark: SimpleNamespace, tmp_path: Path) -> Any:
    """Runs jobs on a null GPU like that of the truth."""
    room = benchmark.measure.Room(gib=1 << 20, processes=1)
    variables = null_environment(find_gpu(benchmark.truth["device"]))
    return benchmark.measure.Measurement(tmp_path / "predicted.json", {"jobs": {}}, room, 60, variables)


def apart(events: list[list[Any]]) -> tuple[list[list[Any]], dict[tuple[Any, ...], list[int]]]:
    """All events but frees; and for each kind of free, after how many of those it happened."""
    others: list[list[Any]] = []
    frees: dict[tuple[Any, ...], list[int]] = {}
    for event in events:
        if event[0].startswith("free"):
            frees.setdefault(tuple(event), []).append(len(others))
        else:
            others.append(event)
    return others, frees


def swaps(expected: list[list[Any]], found: list[list[Any]]) -> Iterator[int]:
    """The lengths of the shortest stretches that hold the same events, in any order."""
    length, missing = 0, Counter[tuple[Any, ...]]()
    for a, b in itertools.zip_longest(expected, found, fillvalue=["nothing"]):
        length += 1
        for event, by in ((tuple(a), 1), (tuple(b), -1)):
            missing[event] += by
            if not missing[event]:
                del missing[event]
        if not missing:
            yield length
            length = 0
    assert not missing, missing


@pytest.mark.parametrize(("name", "allocator"), [("vit", "default"), ("bert", "expandable")])
def test_every_allocation_and_segment_is_that_of_the_gpu(
    benchmark: SimpleNamespace, predicting: Any, name: str, allocator: str
) -> None:
    job, key = benchmark.catalog.JOBS[name], f"recorded {allocator}"
    measured = benchmark.truth["jobs"][name][key]
    predicting.recorded(job, allocator)
    found = predicting.known["jobs"][name][key]
    assert found["outcome"] == measured["outcome"] == "completed", found
    (real, real_frees), (null, null_frees) = (
        apart(benchmark.watch.unpack(each["events"])) for each in (measured, found)
    )
    assert len(real) + sum(map(len, real_frees.values())) > 10_000
    if not SAME_ORDER:
        real, null = ([event for event in events if event[0] == "alloc"] for events in (real, null))
        assert max(swaps(real, null)) <= 3
        for step, expected in zip(found["steps"], measured["steps"], strict=True):
            assert step == pytest.approx(expected, rel=0.005)
        return
    for number, (expected, event) in enumerate(itertools.zip_longest(real, null)):
        assert event == expected, f"event {number} of {len(real)}"
    # A thread of PyTorch's drops its last reference to a scalar a little sooner or later, and those to the
    # last gradients before or after the recording ends. What matters for memory is in its place.
    assert null_frees.keys() == real_frees.keys()
    end, moved = len(real), []
    for free, times in real_frees.items():
        pairs = list(itertools.zip_longest(times, null_frees[free], fillvalue=end))
        assert all(end - 10 <= a for a, _ in pairs[len(null_frees[free]) :]), free
        assert all(end - 10 <= b for _, b in pairs[len(times) :]), free
        moved += [(free, abs(a - b)) for a, b in pairs if a != b and min(a, b) < end - 10]
    assert len(moved) <= 5 and all(size <= 4096 and by <= 10 for (_, size), by in moved), moved
    assert found["steps"] == measured["steps"]


def test_a_job_dies_of_the_same_request(benchmark: SimpleNamespace, predicting: Any) -> None:
    measured = benchmark.truth["jobs"]["vit"]["caps"]["default 0.85"]
    assert measured["outcome"] == "out of memory" and len(measured["out_of_memory"]) == 1
    predicting.capped(benchmark.catalog.JOBS["vit"], "default", measured["cap"], "0.85")
    found = predicting.known["jobs"]["vit"]["caps"]["default 0.85"]
    if not SAME_ORDER:
        assert found["allocated"] == pytest.approx(measured["allocated"], rel=0.005)
        found, measured = ({**each, "allocated": None} for each in (found, measured))
    assert found == measured


def test_a_job_short_of_memory_takes_other_plans_for_convolutions(
    benchmark: SimpleNamespace, predicting: Any
) -> None:
    measured = benchmark.truth["jobs"]["dcgan"]["caps"]["default 0.98"]
    assert measured["outcome"] == "completed" and len(measured["out_of_memory"]) > 1
    predicting.capped(benchmark.catalog.JOBS["dcgan"], "default", measured["cap"], "0.98")
    found = predicting.known["jobs"]["dcgan"]["caps"]["default 0.98"]
    assert found["outcome"] == "completed", found
    assert len(found["out_of_memory"]) > 1
