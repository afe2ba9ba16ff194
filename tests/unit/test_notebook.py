"""What a notebook shows: our objects as HTML in which nothing is obeyed, and the magics."""

from __future__ import annotations

import io
import pickle
from contextlib import redirect_stdout
from html.parser import HTMLParser
from typing import Any

import pytest
from made_jobs import MIB, Job

import vram
from vram import analysis
from vram.core.html import ranking_html, table
from vram.observe.measure import Stretch
from vram.replay import compare, replay, sweep

HOSTILE = "<script>alert('\"x\"')</script>&<img src=x onerror=y>"
ALLOWED = {
    *("p", "b", "div", "span", "table", "thead", "tbody", "tr", "th", "td"),
    *("svg", "rect", "title"),
}


class Reader(HTMLParser):
    """Every tag is one of ours and closed in its turn; keeps the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED, tag
        assert not [name for name, _ in attrs if name.startswith("on")]
        self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(shown: str) -> Reader:
    reader = Reader()
    reader.feed(shown)
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture
def pool() -> Any:
    with vram.Pool(vram.Device.model("1GiB"), stacks="python") as made:
        yield made


def trace_of(pool: vram.Pool, path: Any) -> Any:
    with vram.record(pool, path):
        for _ in range(3):
            kept = [pool.allocate("3MiB", tag=HOSTILE) for _ in range(5)]
            del kept
    return vram.open(path, trusted=True)


# ---- objects ----------------------------------------------------------------------------------------------


def test_a_pool_and_its_snapshot_show_their_memory(pool: vram.Pool) -> None:
    kept = [pool.allocate("8MiB", tag=HOSTILE), pool.allocate(1000)]
    seen = read(pool._repr_html_())
    assert HOSTILE in seen.text and "8 MiB" in seen.text and "test_a_pool_and_its_snapshot" in seen.text
    seen = read(pool.snapshot()._repr_html_())
    assert HOSTILE in seen.text and seen.tags.count("rect") >= 2
    del kept


ANSWERS = {
    "trace": lambda trace, pool: trace,
    "explain": lambda trace, pool: analysis.explain(trace),
    "difference": lambda trace, pool: analysis.difference(trace, trace),
    "find_leaks": lambda trace, pool: analysis.find_leaks(trace),
    "merge": lambda trace, pool: analysis.merge([trace]),
    "memory_at": lambda trace, pool: analysis.memory_at(trace, 3),
    "summary": lambda trace, pool: analysis.summary(trace),
    "explain.table": lambda trace, pool: analysis.explain(trace).table(),
    "difference.table": lambda trace, pool: analysis.difference(trace, trace).table,
    "find_leaks.table": lambda trace, pool: analysis.find_leaks(trace).table,
    "merge.table": lambda trace, pool: analysis.merge([trace]).table,
    "gpus": lambda trace, pool: vram.predict.gpus(),
    "replay": lambda trace, pool: replay(trace, "torch"),
    "compare": lambda trace, pool: compare(trace, ["torch", "vram"]),
    "sweep": lambda trace, pool: sweep(trace, policies=["torch"]),
    "suggest": lambda trace, pool: vram.suggest(trace, policies=["torch"]),
    "plan": lambda trace, pool: vram.plan(trace),
    "stats": lambda trace, pool: pool.stats(),
    "snapshot": lambda trace, pool: pool.snapshot(),
    "manager": lambda trace, pool: vram.get_memory_manager(),
    "arena_report": lambda trace, pool: vram.arena_report(vram.Arena(pool)),
}
ONE_LINE = {
    "group": lambda trace, pool: analysis.explain(trace).holders["stack"][0],
    "grid": lambda trace, pool: vram.replay.grid(),
    "memories": lambda trace, pool: analysis.Memories(trace),
    "lifetimes": lambda trace, pool: vram.trace.lifetimes(trace),
    "find_steps": lambda trace, pool: vram.trace.find_steps(trace),
    "leaks": lambda trace, pool: pool.leaks(),
    "devices": lambda trace, pool: vram.devices(),
    "race_check": lambda trace, pool: vram.race_check(),
}
MOST_LETTERS, MOST_ROWS = 400, 60


@pytest.fixture
def job(tmp_path: Any) -> Any:
    """Many steps and allocations with hostile names that run out of memory."""
    made = Job()
    for step in range(200):
        made.mark(f"step#{step}")
        made.alloc(3 * MIB, line=step)
    made.events[1]["frames"][0]["filename"] = HOSTILE
    made.out_of_memory(64 * MIB, device_free=0)
    return made.trace()


@pytest.mark.parametrize("name", ANSWERS)
def test_what_vram_returns_is_a_line_and_a_table(name: str, job: Any, pool: vram.Pool) -> None:
    kept = [pool.allocate("1MiB") for _ in range(500)]
    found = ANSWERS[name](job, pool)
    assert len(repr(found)) <= MOST_LETTERS and "\n" not in repr(found)
    seen = read(found._repr_html_())
    assert len(seen.tags) > 0 and seen.tags.count("tr") <= MOST_ROWS
    del kept


@pytest.mark.parametrize("name", ONE_LINE)
def test_handles_and_columns_are_one_line(name: str, job: Any, pool: vram.Pool) -> None:
    kept = [pool.allocate("1MiB") for _ in range(500)]
    assert len(repr(ONE_LINE[name](job, pool))) <= MOST_LETTERS
    del kept


def test_a_table_is_one_for_everything_that_reads_arrow(job: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    found = analysis.summary(job)
    assert pyarrow.table(found) == found.to_arrow() and isinstance(found.to_arrow(), pyarrow.Table)
    assert (
        found["bytes"].to_pylist()
        == found.to_pydict()["bytes"]
        == [row["bytes"] for row in found.to_pylist()]
    )
    assert pickle.loads(pickle.dumps(found)) == found
    assert HOSTILE in read(found._repr_html_()).text


def test_an_explanation_shows_names_as_text(job: Any) -> None:
    seen = read(analysis.explain(job, "peak")._repr_html_())
    assert "Verdict" in seen.text and "true-demand" in seen.text
    assert "and " in seen.text and "more" in seen.text


def test_pools_in_every_state_can_be_shown(pool: vram.Pool) -> None:
    assert "0 B allocated" in read(pool._repr_html_()).text
    assert "0 B reserved" in read(pool.snapshot()._repr_html_()).text
    pool.close()
    assert "closed" in read(pool._repr_html_()).text
    assert "not made" in read(vram.Pool.__new__(vram.Pool)._repr_html_()).text


def test_a_map_has_no_more_shapes_than_a_browser_draws(
    pool: vram.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vram.core.html.MOST_SHAPES", 50)
    streams = [vram.Stream(pool.device) for _ in range(4)]
    kept = [pool.allocate(512, stream=stream) for stream in streams for _ in range(30)]
    seen = read(pool.snapshot()._repr_html_())
    assert seen.tags.count("rect") == 50 and "more blocks" in seen.text
    del kept


def test_a_measurement_shows_its_numbers(pool: vram.Pool) -> None:
    measurement = pool.measure()
    assert "not begun" in read(measurement._repr_html_()).text
    with measurement:
        pool.allocate("5MiB")
    assert "5 MiB" in read(measurement._repr_html_()).text


def test_a_plan_shows_its_picture_unless_it_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    found = vram.plan([(HOSTILE, 0, 2, 1000), ("b", 1, 3, 2000)])
    seen = read(found._repr_html_())
    assert seen.tags.count("rect") == 2 and HOSTILE in seen.text
    monkeypatch.setattr("vram.core.html.MOST_SHAPES", 1)
    seen = read(found._repr_html_())
    assert seen.tags.count("rect") == 0 and "too many" in seen.text


def test_comparisons_are_tables(pool: vram.Pool, tmp_path: Any) -> None:
    trace = trace_of(pool, tmp_path / "a <b> & c.vtrace")
    report = compare(trace, ["vram", "torch"])
    seen = read(report._repr_html_())
    assert "a <b> & c.vtrace" in seen.text and seen.tags.count("tr") == 3
    ranking = sweep(trace, policies=["torch-expandable"])
    assert isinstance(ranking, tuple)
    seen = read(ranking._repr_html_())
    assert seen.tags.count("tr") == len(ranking) + 1 and "expandable_segments" in seen.text
    assert ranking_html(ranking[:1]).count("<tr>") == 2


def test_a_table_shows_text_as_text() -> None:
    assert HOSTILE in read(table("name|>number", [(HOSTILE, "1")])).text


# ---- a stretch over all pools -----------------------------------------------------------------------------


def test_a_stretch_sees_every_pool_and_what_is_left(pool: vram.Pool) -> None:
    before = pool.allocate("1MiB")
    kept = []
    with Stretch(leaks=True) as stretch:
        kept.append(pool.allocate("4MiB", tag="kept"))
        pool.allocate("2MiB")
        with vram.Pool(vram.Device.model("1GiB")) as other:
            other.allocate("6MiB")
    assert stretch.peaks[pool.device.name] == 6 << 20
    assert stretch.kept[pool.device.name] == 4 << 20
    assert stretch.peaks[other.device.name] == 6 << 20
    assert [(leak.tag, leak.bytes) for leak in stretch.left] == [("kept", 4 << 20)]
    assert stretch.left[0].stacks[0][0].name == "test_a_stretch_sees_every_pool_and_what_is_left"
    del before, kept


# ---- the magics -------------------------------------------------------------------------------------------


@pytest.fixture
def shell() -> Any:
    pytest.importorskip("IPython", reason="IPython is not installed")
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    made = InteractiveShell(config=config)
    made.run_line_magic("load_ext", "vram")
    yield made
    made.run_line_magic("unload_ext", "vram")


def test_the_cell_magic_measures_a_cell(shell: Any) -> None:
    shell.run_cell("import vram\npool = vram.Pool(vram.Device.model('1GiB'))\nkept = []")
    report = shell.run_cell_magic(
        "vram", "", "kept.append(pool.allocate('4MiB'))\nb = pool.allocate('2MiB')\ndel b"
    )
    (place,) = report.peaks
    assert (report.peaks[place], report.kept[place], report.allocations[place]) == (6 << 20, 4 << 20, 2)
    assert len(report.left) == 1 and "4 MiB" in report.left[0]
    assert "left behind" in read(report._repr_html_()).text
    assert f"{place}: peak 6 MiB, kept 4 MiB, 2 allocations" in repr(report)
    shell.run_cell("kept.clear(); pool.close()")


def test_a_cell_that_fails_shows_its_error_and_is_still_measured(shell: Any) -> None:
    with redirect_stdout(io.StringIO()) as shown:
        report = shell.run_cell_magic("vram", "", "1 / 0")
    assert "ZeroDivisionError" in shown.getvalue()
    assert "nothing allocated" in repr(report)


def test_the_line_magic_shows_what_is_held(shell: Any, pool: vram.Pool) -> None:
    kept = pool.allocate("4MiB")
    held = shell.run_line_magic("vram", "")
    assert f"Pool {pool.number} on {pool.device.name}: 4 MiB allocated" in repr(held)
    assert "4 MiB" in read(held._repr_html_()).text
    del kept


def test_the_magics_can_be_taken_out(shell: Any) -> None:
    assert shell.find_cell_magic("vram") is not None
    shell.run_line_magic("unload_ext", "vram")
    assert shell.find_cell_magic("vram") is None and shell.find_line_magic("vram") is None
    shell.run_line_magic("load_ext", "vram")
