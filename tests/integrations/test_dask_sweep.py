"""Sweeps on a Dask cluster find what they find in one process, whatever happens to its workers."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vram.replay import grid, sweep, sweep_all
from vram.trace import Lifetimes, lifetimes, open_trace

distributed = pytest.importorskip("distributed")

pytestmark = [pytest.mark.slow, pytest.mark.fork, pytest.mark.filterwarnings("default")]

TRACES = Path(__file__).resolve().parents[2] / "traces"


@pytest.fixture(scope="module")
def program() -> Lifetimes:
    return lifetimes(open_trace(TRACES / "llama_varlen_ckpt.pickle.xz"))


@pytest.fixture
def client() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with (
            distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
            distributed.Client(cluster) as made,
        ):
            yield made


def test_an_embedded_cluster_finds_the_same(program: Lifetimes) -> None:
    settings = grid(["torch-expandable", "cuda-async"])
    assert sweep(program, settings, executor="dask", jobs=2) == sweep(program, settings)


def test_a_worker_killed_midway_loses_nothing(client: Any, program: Lifetimes) -> None:
    settings = grid(["torch-expandable", "cuda-async", "torch"])[:24]
    workers = list(client.run(os.getpid).values())
    killed: list[int] = []

    def kill_one(done: int, count: int) -> None:
        if not killed:
            killed.append(workers[0])
            os.kill(workers[0], signal.SIGKILL)

    (ranked,) = sweep_all([program], settings, executor=client, progress=kill_one)
    assert killed == workers[:1]
    assert ranked == sweep(program, settings)


def test_a_cluster_is_reached_by_its_address(client: Any, program: Lifetimes) -> None:
    settings = grid(["cuda-async"])
    address = client.scheduler.address
    assert sweep(program, settings, executor=f"dask={address}") == sweep(program, settings)
