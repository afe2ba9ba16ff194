"""The lab on a GPU: everything runs, and what does not depend on speed comes out as it must."""

from __future__ import annotations

import math

import pytest

from vram import lab

pytestmark = pytest.mark.gpu

SURE = {
    "same-stream": "holds",
    "cross-stream": "holds",
    "record-stream": "holds",
    "two-addresses": "holds",
    "high-water-mark": "holds",
    "kernels-at-once": "holds",
}


@pytest.fixture(scope="module")
def report() -> lab.Report:
    return lab.run(device="cuda:0", quick=True)


@pytest.mark.parametrize("name", lab.EXPERIMENTS)
def test_every_experiment_gives_a_verdict(name: str, report: lab.Report) -> None:
    result = next(each for each in report.results if each.experiment.name == name)
    assert (result.failed, result.skipped) == ("", "")
    assert result.verdict == SURE.get(name, result.verdict)
    assert all(math.isfinite(quantity.value) for quantity in result.observation.numbers.values())


def test_freeing_waits_and_pages_do_not(report: lab.Report) -> None:
    result = next(each for each in report.results if each.experiment.name == "who-waits")
    waits = {row["call"]: row["waits"] for row in result.observation.rows()}
    assert waits["cudaFree"]
    assert not waits["cudaMalloc"]
    assert not any(waits[call] for call in ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap"))
