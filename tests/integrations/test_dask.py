"""`vram.dask.VramSetup` on a cluster of processes, on the host device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import vram
from vram import ConfigError

distributed = pytest.importorskip("distributed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # Dask's warnings are its own


def limit_of_worker() -> int | None:
    return vram.get_memory_manager().pool("host").limit


def hit_rate_of_worker(size: int) -> tuple[int, int]:
    pool = vram.get_memory_manager().pool("host")
    with vram.tag("task"):
        buffer = pool.allocate(size)
    return buffer.size, pool.stats().live


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with (
            distributed.LocalCluster(
                n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
            ) as cluster,
            distributed.Client(cluster) as made,
        ):
            yield made


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("5GB", 5 * 10**9), (3 << 30, 3 << 30), (0.5, vram.Device("host").total_memory // 2)],
)
def test_every_worker_takes_the_settings(client: Any, limit: object, expected: int) -> None:
    client.register_plugin(vram.dask.VramSetup(limit=limit, stream_cache=128))
    found = client.run(limit_of_worker)
    assert len(found) == 2
    for each in found.values():
        assert each == pytest.approx(expected, rel=1e-6)


def test_workers_that_restart_are_set_up_again(client: Any) -> None:
    client.register_plugin(vram.dask.VramSetup(limit="1GiB"))
    client.restart()
    client.wait_for_workers(2)
    assert set(client.run(limit_of_worker).values()) == {1 << 30}


def test_setting_up_again_changes_nothing_though_pools_are_in_use(client: Any) -> None:
    plugin = vram.dask.VramSetup(pages=False, limit="1GiB")
    client.restart()
    client.register_plugin(plugin)
    client.run(limit_of_worker)  # makes the pools: `pages` cannot change any more
    client.register_plugin(plugin)
    assert set(client.run(limit_of_worker).values()) == {1 << 30}


def test_tasks_allocate_under_it(client: Any) -> None:
    futures = client.map(hit_rate_of_worker, [1000 * number for number in range(1, 9)], pure=False)
    assert client.gather(futures) == [(1000 * number, 1) for number in range(1, 9)]


def test_an_unknown_library_is_refused_on_the_client() -> None:
    with pytest.raises(ConfigError, match="'tensorflow' is not a supported library"):
        vram.dask.VramSetup("tensorflow")
