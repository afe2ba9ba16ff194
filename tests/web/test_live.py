"""A running process on the page: updated as it tells, paused, and ended."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

MIB = 1 << 20
HOSTILE = "<img src=x onerror=alert(1)>"


def status(turn: int) -> dict[str, Any]:
    """What `vram.observe.monitor` would tell, a little more each time."""
    pool = {
        **dict.fromkeys(("requested", "pending", "cached", "free", "largest_free", "peak_reserved"), MIB),
        **{"pool": 1, "kind": "Pool", "device": "host", "limit": None, "allocated": turn * MIB},
        **{
            "reserved": 900 * MIB,
            "peak_allocated": turn * MIB,
            "live": turn,
            "allocations": turn,
            "rate": 5.0,
        },
        **{"hit_rate": 0.5, "fragmentation": 0.1, "out_of_memory": 0},
    }
    device = {"name": "host", "kind": "host", "total": 1000 * MIB, "pools": 900 * MIB, "libraries": 10 * MIB}
    return {
        **{"pid": 4711, "program": HOSTILE, "time": time.time(), "pools": [pool]},
        "devices": [{**device, "processes": 0, "unknown": 40 * MIB, "free": 50 * MIB, "utilization": 87}],
        "processes": [{"device": "host", "pid": 99, "name": HOSTILE, "bytes": 7 * MIB}],
        "streams": [
            {"pool": 1, "device": "host", "stream": 0, "live": MIB, "cached": 0, "pending_blocks": 0}
        ],
        "tags": [{"tag": HOSTILE, "bytes": MIB, "count": 1}],
        "holders": [{"pool": 1, "tag": HOSTILE, "stack": [[HOSTILE, 3, "f"]], "count": 1, "bytes": MIB}],
        "history": [[time.time() - 60 + each, each * MIB, 2 * each * MIB, 0, 5] for each in range(60)],
    }


def test_a_process_is_followed(serve: Callable[..., Any], open_tab: Callable[..., Any]) -> None:
    turns = itertools.count(1)
    page = serve(live=lambda: status(next(turns)), interval=0.1)
    tab = open_tab(page.url, wait="table.pools tbody tr")
    first = tab.text("table.pools tbody tr td:nth-child(3)")
    tab.wait(f"document.querySelector('table.pools tbody tr td:nth-child(3)').innerText !== '{first}'")
    assert tab.colors(".history canvas") > 5
    text = tab.text("section.live")
    assert "4711" in text and HOSTILE in text
    for part in (
        "pools of this process 900 MiB",
        "other libraries in this process 10 MiB",
        "unknown 40 MiB",
        "free 50 MiB",
        "87 % busy",
        "7 MiB",
    ):
        assert part.lower() in text.lower()
    assert tab.page.locator("img").count() == 0
    tab.page.click("text=Pause")
    tab.page.wait_for_selector("text=Resume")
    held = tab.text("table.pools tbody tr td:nth-child(3)")
    tab.page.wait_for_timeout(500)
    assert tab.text("table.pools tbody tr td:nth-child(3)") == held
    tab.page.click("text=Resume")
    tab.wait(f"document.querySelector('table.pools tbody tr td:nth-child(3)').innerText !== '{held}'")


def test_the_end_of_a_process_is_said(serve: Callable[..., Any], open_tab: Callable[..., Any]) -> None:
    turns = itertools.count(1)

    def tell() -> dict[str, Any]:
        turn = next(turns)
        if turn > 3:
            raise ConnectionError("process 4711 has ended")
        return status(turn)

    tab = open_tab(serve(live=tell, interval=0.1).url, wait="[role=alert]")
    assert "process 4711 has ended" in tab.text("[role=alert]")
    assert tab.page.locator("table.pools tbody tr").count() == 1, "what was seen last stays"


def test_a_monitored_process_has_a_page_of_its_own(open_tab: Callable[..., Any]) -> None:
    pytest.importorskip("vram._native")
    monitoring = pytest.importorskip("vram.observe.monitor", reason="vram.monitor is not in this version")
    import vram

    with monitoring.monitor(web=True, interval=0.2) as monitor, vram.Pool("host") as pool:
        held = pool.allocate(64 * MIB)
        tab = open_tab(monitor.page.url, wait="table.pools tbody tr")
        tab.wait("document.querySelector('table.pools').innerText.includes('64 MiB')")
        held.free()
        tab.wait(
            "!document.querySelector('table.pools tbody tr td:nth-child(3)').innerText.includes('64 MiB')"
        )


def test_spilled_memory_is_shown_by_pool_and_by_tag(open_tab: Callable[..., Any]) -> None:
    pytest.importorskip("vram._native")
    monitoring = pytest.importorskip("vram.observe.monitor", reason="vram.monitor is not in this version")
    import vram

    pool = vram.Pool(vram.Device.model("64MiB"), spill="64MiB")
    with monitoring.monitor(web=True, interval=0.2) as monitor, pool:
        cold, warm = pool.allocate(16 * MIB, tag="cold"), pool.allocate(8 * MIB, tag="warm")
        tab = open_tab(monitor.page.url, wait="table.pools tbody tr")
        assert tab.page.locator("p.moved").count() == 0
        cold.spill()
        tab.page.wait_for_selector("p.moved")
        assert "16 MiB moved to host memory, 0 B back, streams held for " in tab.text("p.moved")
        tab.wait("document.querySelector('section.live').innerText.includes('cold\\t16 MiB\\t16 MiB')")
        assert "warm\t8 MiB\t0 B" in tab.text("section.live")
        assert f"cold\t{pool.number}\t16 MiB\t16 MiB\t0 B" in tab.text("table.spilled")
        del warm
