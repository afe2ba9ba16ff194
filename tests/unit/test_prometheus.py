"""`vram.metrics`: what Prometheus reads is what the pools say, and the dashboard asks for nothing else."""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vram

client = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
DASHBOARD = Path(__file__).resolve().parents[2] / "examples" / "grafana.json"


@pytest.fixture
def pool() -> Iterator[vram.Pool]:
    with vram.Pool(vram.Device.model("1GiB"), limit="512MiB") as made:
        yield made


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name and labels, as Prometheus itself would parse it."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of_pool(found: dict[Any, float], name: str, pool: vram.Pool) -> float:
    wanted = {"device": pool.memory, "pool": str(pool.number), "kind": "Pool"}
    return found[name, tuple(sorted(wanted.items()))]


def test_what_is_served_is_what_the_pool_says(pool: vram.Pool) -> None:
    kept = [pool.allocate("3MiB", tag="weights"), pool.allocate(1000, tag='say "hi"\n\\')]
    with pytest.raises(vram.OutOfMemory):
        pool.allocate("600MiB")
    with vram.metrics(0) as offered:
        assert offered.url is not None and offered.url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(offered.url, timeout=120) as answer:
            found = samples(answer.read().decode())
    stats = pool.stats()
    assert of_pool(found, "vram_memory_allocated_bytes", pool) == stats.allocated > 3 << 20
    assert of_pool(found, "vram_memory_reserved_bytes", pool) == stats.reserved
    assert of_pool(found, "vram_memory_limit_bytes", pool) == 512 << 20
    assert of_pool(found, "vram_allocations_total", pool) == 2
    assert of_pool(found, "vram_out_of_memory_total", pool) == 1
    assert found["vram_tag_allocated_bytes", (("tag", "weights"),)] == 3 << 20
    assert found["vram_tag_allocated_bytes", (("tag", 'say "hi"\n\\'),)] == kept[1].size + 24
    device = [
        value
        for (name, labels), value in found.items()
        if name == "vram_device_memory_bytes" and ("device", pool.device.name) in labels
    ]
    assert len(device) == 5 and sum(device) == 1 << 30


def test_it_is_found_only_on_this_machine_and_ends_when_closed(pool: vram.Pool) -> None:
    offered = vram.metrics(0)
    assert offered._server.server_address[0] == "127.0.0.1"
    url = offered.url
    offered.close()
    offered.close()
    assert "closed" in repr(offered) and url is not None
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=5)


def test_it_joins_a_registry_of_the_programs_own(pool: vram.Pool) -> None:
    registry = client.CollectorRegistry()
    with vram.metrics(None, registry=registry) as offered:
        assert offered.url is None
        assert "vram_memory_reserved_bytes" in client.generate_latest(registry).decode()
    assert client.generate_latest(registry) == b""


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(vram.ConfigError, match="registry"):
        vram.metrics(None)
    with vram.metrics(0) as offered:
        taken = offered._server.server_address[1]
        with pytest.raises(vram.ConfigError, match=str(taken)):
            vram.metrics(taken)


def test_tags_without_end_do_not_make_series_without_end(pool: vram.Pool) -> None:
    kept = [pool.allocate(512, tag=f"request {number}") for number in range(200)]
    registry = client.CollectorRegistry()
    with vram.metrics(None, registry=registry):
        found = samples(client.generate_latest(registry).decode())
    tags = {labels: value for (name, labels), value in found.items() if name == "vram_tag_allocated_bytes"}
    assert len(tags) <= 51
    assert sum(tags.values()) >= sum(each.size for each in kept)
    assert tags[(("tag", "(other)"),)] >= 150 * 512


@pytest.mark.fork
def test_a_fork_serves_nothing(pool: vram.Pool) -> None:
    from programs import assert_quiet, run_program

    ended = run_program(
        """
        import os, urllib.request, vram
        offered = vram.metrics(0)
        child = os.fork()
        if not child:
            offered.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with urllib.request.urlopen(offered.url, timeout=120) as answer:
            assert b"vram_info" in answer.read()
        """
    )
    assert_quiet(ended)


def test_the_dashboard_asks_only_for_what_there_is(pool: vram.Pool) -> None:
    kept = pool.allocate("1MiB", tag="weights")
    registry = client.CollectorRegistry()
    with vram.metrics(None, registry=registry):
        offered = client.generate_latest(registry).decode()
    names = {sample[0] for sample in samples(offered)}
    labels = {(name, label) for name, pairs in samples(offered) for label, _ in pairs}
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    expressions += [each["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    asked = {name for text in expressions for name in re.findall(r"\bvram_\w+", text)}
    assert asked <= names, asked - names
    assert len(asked) > 10
    for text in expressions:
        for wanted in re.findall(r"by \(([^)]*)\) \((?:rate\()?(vram_\w+)", text):
            for label in wanted[0].split(", "):
                assert (wanted[1], label) in labels, (wanted[1], label)
    del kept
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_without_prometheus_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(vram.ConfigError, match=r"vram\[metrics\]"):
        vram.metrics(0)
