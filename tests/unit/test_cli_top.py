"""`vram top`: the tables, printed once and on the full screen, and attached to a real second process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import vram
from vram.cli.top import TABLES, device_line, heading
from vram.observe.status import Observatory

Command = Callable[..., tuple[int, str, str]]
HOSTILE = "[red]\x1b[31mtag[/red] & <b>"


@pytest.fixture(autouse=True)
def as_wide_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def status(as_new: None) -> Iterator[dict[str, Any]]:
    """The status of two pools with a few holders."""
    with (
        vram.Pool(vram.Device.model("1GiB"), stacks="python") as one,
        vram.Pool(vram.Device.model("2GiB"), limit="1GiB") as two,
    ):
        kept = [one.allocate("8MiB", tag="weights"), one.allocate("2MiB", tag="cache")]
        kept += [two.allocate("64MiB", tag=HOSTILE)]
        looking = Observatory()
        looking.sample()
        found = looking.status()
        yield found
        del kept


@contextmanager
def other_process() -> Iterator[subprocess.Popen[str]]:
    """A process that holds memory and is monitored, until the end of the block."""
    program = (
        "import vram\n"
        "pool = vram.Pool(vram.Device.model('1GiB'))\n"
        "vram.monitor(stacks='python')\n"
        "kept = [pool.allocate('8MiB', tag='weights') for _ in range(4)]\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    line = input()\n"
        "    kept.append(pool.allocate(line, tag='later')); print('done', flush=True)\n"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert started.stdin is not None and started.stdout is not None
    with started:
        assert started.stdout.readline() == "ready\n"
        try:
            yield started
        finally:
            started.kill()


# ---- rows -------------------------------------------------------------------------------------------------


def test_rows_are_sorted_by_their_values_not_by_their_text(status: dict[str, Any]) -> None:
    holders = next(table for table in TABLES if table.name == "holders")
    assert [row[1] for row in holders.rows(status)] == ["64 MiB", "8 MiB", "2 MiB"]
    assert [row[1] for row in holders.rows(status, reverse=True)] == ["2 MiB", "8 MiB", "64 MiB"]
    assert [row[0] for row in holders.rows(status, sort=0)] == sorted([HOSTILE, "cache", "weights"])
    assert [row[0] for row in holders.rows(status, wanted="WEIGHT")] == ["weights"]
    assert holders.rows(status, wanted="nothing such") == []


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_table_can_be_sorted_by_every_column(status: dict[str, Any], table: Any) -> None:
    for column in range(len(table.titles)):
        rows = table.rows(status, sort=column)
        assert len(rows) == len(status[table.name])
        assert all(len(row) == len(table.titles) for row in rows)


def test_a_device_is_a_sum_in_words(status: dict[str, Any]) -> None:
    device = {
        "name": "cuda:0", "named": {"torch": 3 << 20}, "total": 10 << 20, "pools": 1 << 20,
        "libraries": 3 << 20, "processes": 2 << 20, "unknown": 0, "free": 4 << 20,
    }  # fmt: skip
    assert device_line(device) == (
        "cuda:0: 10 MiB = pools 1 MiB + other libraries 3 MiB (torch 3 MiB) + other processes 2 MiB + "
        "unknown 0 B + free 4 MiB"
    )
    assert "74 MiB allocated" in heading(status) and "2 pools" in heading(status)


def test_spilled_memory_is_shown_in_total_by_pool_and_by_tag(as_new: None) -> None:
    with vram.Pool(vram.Device.model("64MiB"), spill="1GiB") as pool:
        kept = [pool.allocate("16MiB", tag="cold"), pool.allocate("16MiB", tag="warm")]
        kept[0].spill()
        kept[0].prefetch()
        kept[0].spill()
        looking = Observatory()
        looking.sample()
        found = looking.status()
    assert ", 16 MiB spilled (32 MiB moved to host memory so far, 16 MiB back, streams held for " in heading(
        found
    )
    tables = {table.name: table for table in TABLES}
    for name, column, expected in (
        ("pools", "spilled", ["16 MiB"]),
        ("holders", "spilled", ["16 MiB", "0 B"]),
        ("spilled", "tag", ["cold"]),
        ("spilled", "in host memory", ["16 MiB"]),
        ("spilled", "moved there", ["32 MiB"]),
        ("spilled", "moved back", ["16 MiB"]),
    ):
        place = tables[name].titles.index(column)
        assert sorted(row[place] for row in tables[name].rows(found)) == sorted(expected)


def test_saved_tensors_in_host_memory_are_said(status: dict[str, Any]) -> None:
    assert "saved tensors" not in heading(status)
    status["pools"][0]["spill"] = {"saved_bytes": 3 << 20}
    assert "3 MiB of saved tensors in host memory" in heading(status)


def test_holders_of_one_tag_are_together_below_the_largest_tag() -> None:
    with vram.Pool(vram.Device.model("1GiB"), stacks="python") as pool:
        kept = [pool.allocate("8MiB", tag="many")]
        kept += [pool.allocate("10MiB", tag="one")]
        kept += [pool.allocate("6MiB", tag="many")]
        found = Observatory().status()
        del kept
    holders = next(table for table in TABLES if table.name == "holders")
    rows = [(row[0], row[1], row[4]) for row in holders.rows(found) if row[0] in ("many", "one")]
    assert rows == [("many", "14 MiB", "8 MiB"), ("many", "14 MiB", "6 MiB"), ("one", "10 MiB", "10 MiB")]


def test_other_processes_and_how_busy_a_device_is_are_told(status: dict[str, Any]) -> None:
    device = {**status["devices"][0], "utilization": 87}
    assert device_line(device).endswith("; 87 % busy")
    others = [
        {"device": "cuda:0", "pid": 11, "name": "python", "bytes": 3 << 30},
        {"device": "cuda:0", "pid": 7, "name": "", "bytes": None},
    ]
    processes = next(table for table in TABLES if table.name == "processes")
    assert processes.rows({**status, "processes": others}) == [
        ("11", "python", "cuda:0", "3 GiB"),
        ("7", "(not visible here)", "cuda:0", "not told"),
    ]


# ---- printed ----------------------------------------------------------------------------------------------


def test_once_prints_what_another_process_holds(vram_command: Command) -> None:
    with other_process() as other:
        pid = other.pid
        code, out, err = vram_command("top", "-1")
        assert (code, err) == (0, "")
        assert str(pid) in out and "32 MiB allocated" in out
        assert "<string>:4" in out  # the line that holds them
        lines = [line for line in out.splitlines() if "weights" in line]
        assert len(lines) == 1 and lines[0].count("32 MiB") == 2, "the tag and its only holder"
        code, out, _ = vram_command("top", str(pid), "--json")
        assert code == 0 and json.loads(out)["pid"] == pid
        code, out, _ = vram_command("top", "-1", "--filter", "nothing such")
        assert code == 0 and out.count("none with 'nothing such'") == len(TABLES)


def test_printed_names_cannot_talk_to_the_terminal(vram_command: Command) -> None:
    with vram.Pool(vram.Device.model("1GiB")) as pool, vram.monitor():
        kept = pool.allocate("1MiB", tag=HOSTILE)
        _, out, _ = vram_command("top", "-1")
        del kept
    assert "\x1b" not in out
    assert "[red]?[31mtag[/red] & <b>" in out


def test_nobody_to_attach_to_is_one_line(vram_command: Command) -> None:
    code, out, err = vram_command("top", "-1")
    assert (code, out) == (2, "")
    assert err.startswith("vram: no process of yours is monitored") and err.count("\n") == 1


def test_without_textual_the_screen_says_what_to_install(
    vram_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "textual"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "vram.cli.top_screen", raising=False)
    monkeypatch.setitem(sys.modules, "textual", None)
    code, out, err = vram_command("top")
    assert (code, out) == (2, "") and "vram[tui]" in err


# ---- the full screen --------------------------------------------------------------------------------------


@pytest.fixture
def screen() -> Any:
    pytest.importorskip("textual", reason="Textual is not installed")
    from vram.cli import top_screen

    return top_screen


def text_of(app: Any, name: str) -> str:
    return str(app.query_one(f"#{name}").render())


def cells(app: Any, table: str, column: int) -> list[str]:
    widget = app.query_one(f"#{table}-rows")
    return [widget.get_row_at(row)[column].plain for row in range(widget.row_count)]


async def until(pilot: Any, met: Callable[[], bool]) -> None:
    """Wait for as long as it takes; only a deadlock keeps it waiting, which ends the run."""
    while not met():
        await pilot.pause(0.02)


def test_the_screen_shows_pauses_sorts_and_filters(screen: Any, status: dict[str, Any]) -> None:
    looks: list[int] = []

    def look() -> dict[str, Any]:
        looks.append(1)
        return {**status, "history": [[0, size, size, 0, 0] for size in range(len(looks))]}

    async def use() -> None:
        app = screen.TopScreen(look, every=0.05)
        async with app.run_test(size=(140, 40)) as pilot:
            await until(pilot, lambda: len(looks) > 2 and app.status is not None)
            assert "74 MiB allocated" in text_of(app, "heading")
            assert "1 GiB = pools" in text_of(app, "devices")
            assert len(app.query_one("#history").data) > 1
            await pilot.press("p")
            await until(pilot, lambda: not app._asking)  # a look that was under way
            seen = len(looks)
            assert text_of(app, "state") == "paused"
            app._ask()  # as the clock does
            assert not app._asking and len(looks) == seen

            await pilot.press("3")
            await pilot.pause()
            assert cells(app, "holders", 1) == ["64 MiB", "8 MiB", "2 MiB"]
            assert cells(app, "holders", 0)[0] == "[red]?[31mtag[/red] & <b>"  # as text, nothing obeyed
            await pilot.press("r")
            assert cells(app, "holders", 1) == ["2 MiB", "8 MiB", "64 MiB"]
            await pilot.press(*"ssssss")  # past the blocks to the names
            assert app.sorted_by["holders"] == 0
            await pilot.press("slash", *"cach")
            await pilot.pause()
            assert cells(app, "holders", 0) == ["cache"]
            await pilot.press("enter")
            assert "only rows with 'cach'" in text_of(app, "state")
            await pilot.press("escape")
            await pilot.pause()
            assert len(cells(app, "holders", 0)) == 3

            await pilot.press("p")
            await until(pilot, lambda: len(looks) > seen)
            await pilot.press("q")

    asyncio.run(use())


def test_the_screen_asks_one_question_at_a_time(screen: Any, status: dict[str, Any]) -> None:
    """A process that was stopped lets its asker wait, and a connection takes one question at a time."""
    under_way: list[int] = []
    most: list[int] = []

    def look() -> dict[str, Any]:
        under_way.append(1)
        most.append(len(under_way))
        time.sleep(0.2)
        under_way.pop()
        return status

    async def use() -> None:
        app = screen.TopScreen(look, every=0.02)
        async with app.run_test(size=(100, 30)) as pilot:
            await until(pilot, lambda: len(most) >= 3)

    asyncio.run(use())
    assert max(most) == 1


def test_the_screen_survives_the_end_of_the_process(screen: Any, status: dict[str, Any]) -> None:
    answers = iter([status])

    def look() -> dict[str, Any]:
        for answer in answers:
            return answer
        raise vram.DeviceError("process 7 has ended")

    async def use() -> None:
        app = screen.TopScreen(look, every=0.05)
        async with app.run_test(size=(60, 20)) as pilot:  # narrow, too
            await until(pilot, lambda: bool(app.ended))
            assert text_of(app, "state") == "process 7 has ended"
            assert "74 MiB allocated" in text_of(app, "heading")
            assert len(cells(app, "pools", 0)) == 2

    asyncio.run(use())


def test_the_screen_follows_a_real_process(screen: Any) -> None:
    from vram.observe.monitor import attach

    async def use() -> None:
        with other_process() as other, attach(other.pid) as client:
            app = screen.TopScreen(client.status, every=0.05)
            async with app.run_test(size=(140, 40)) as pilot:
                await until(pilot, lambda: app.status is not None)
                assert cells(app, "pools", 1) == ["32 MiB"]
                assert cells(app, "holders", 0) == ["weights"]
                assert other.stdin is not None
                other.stdin.write("100MiB\n")
                other.stdin.flush()
                await until(pilot, lambda: cells(app, "pools", 1) == ["132 MiB"])
                await until(pilot, lambda: cells(app, "holders", 0) == ["later", "weights"])
                other.kill()
                await until(pilot, lambda: "ended" in text_of(app, "state"))

    asyncio.run(use())
