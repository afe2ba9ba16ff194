"""Every view in a real browser, one selection through all of them, and a stranger's names as text."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_jobs import MIB, Job

from vram.analysis import explain, memory_at
from vram.trace import open_trace

TRACES = Path(__file__).parents[2] / "traces"
FAILED = TRACES / "oom_gpt2_train_9000.pickle.xz"
STREAMS = TRACES / "multistream_prefetch.pickle.xz"
CHART = ".chart canvas"

HOSTILE = '<img src=x onerror="alert(1)"><script>alert(2)</script>"\'&amp;\u202e${alert(3)}'


@pytest.fixture
def tab(serve: Callable[..., Any], open_tab: Callable[..., Any]) -> Any:
    return open_tab(f"{serve(FAILED, STREAMS).url}&view=timeline")


def nth_level(tab: Any) -> list[str]:
    return [url for url in tab.asked if "/api/level" in url]


# ---- timeline ----------------------------------------------------------------------------------------------


def test_the_timeline_draws_what_was_held(tab: Any) -> None:
    trace = open_trace(FAILED, trusted=True)
    tab.wait("document.querySelector('.chart canvas') !== null")
    tab.quiet()
    assert tab.colors(CHART) > 20
    assert f"{trace.events:,}".replace(",", "\u202f") in tab.text("header")
    assert tab.event() == trace.events - 1, "the out-of-memory is looked at first"
    assert "oom" in tab.text("aside")


def test_a_brush_zooms_and_asks_for_more_detail(tab: Any) -> None:
    tab.quiet()
    box = tab.page.locator(".u-over").bounding_box()
    asked = len(nth_level(tab))
    tab.page.mouse.move(box["x"] + 200, box["y"] + 100)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + 300, box["y"] + 120, steps=5)
    tab.page.mouse.up()
    tab.quiet()
    low, high = re.search(r"low=([\d.]+)&high=([\d.]+)", nth_level(tab)[-1]).groups()  # type: ignore[union-attr]
    assert len(nth_level(tab)) > asked
    assert float(high) - float(low) < 0.5 * open_trace(FAILED, trusted=True).span_us
    tab.page.click("text=Whole run")
    tab.quiet()


@pytest.mark.parametrize("split", ["stream", "tag", "module", "line", "none"])
def test_bands_may_be_groups(tab: Any, split: str) -> None:
    tab.quiet()
    tab.choose("Bands", split)
    tab.quiet()
    assert tab.colors(CHART) > 3
    if split != "none":
        assert any(f"by={split}" in url for url in nth_level(tab))


def test_events_may_be_the_axis(tab: Any) -> None:
    tab.choose("Over", "event")
    tab.quiet()
    assert any("axis=event" in url for url in nth_level(tab))
    assert tab.colors(CHART) > 20


def is_zoomed(tab: Any) -> bool:
    """The chart has asked for a part of the recording last."""
    span = open_trace(FAILED, trusted=True).span_us
    low, high = re.search(r"low=([\d.]+)&high=([\d.]+)", nth_level(tab)[-1]).groups()  # type: ignore[union-attr]
    return 0 <= float(low) < float(high) < span


def test_keys_pan_and_zoom_the_chart(tab: Any) -> None:
    tab.page.wait_for_selector('.plot[aria-busy="false"]')
    tab.page.focus(".chart")
    for key in "wwwwd":
        tab.page.keyboard.press(key)
    tab.until(lambda: is_zoomed(tab), "a part of the chart is asked for")


def test_a_zoom_outlives_a_change_of_the_size(tab: Any) -> None:
    """The chart is made anew for another size, before the page has heard of the zoom."""
    tab.page.wait_for_selector('.plot[aria-busy="false"]')
    tab.page.evaluate(
        """() => {
          const chart = document.querySelector(".chart");
          const press = () => new KeyboardEvent("keydown", {key: "w", bubbles: true});
          for (let i = 0; i < 4; i++) chart.dispatchEvent(press());
          chart.style.width = "600px";
        }"""
    )
    tab.until(lambda: is_zoomed(tab), "a part of the chart is asked for")
    tab.quiet()
    assert is_zoomed(tab)


# ---- one selection -----------------------------------------------------------------------------------------


def test_a_click_on_the_timeline_is_the_moment_of_all_views(tab: Any) -> None:
    tab.quiet()
    before = tab.event()
    box = tab.page.locator(".u-over").bounding_box()
    tab.page.mouse.click(box["x"] + box["width"] * 0.8, box["y"] + box["height"] - 12)
    tab.wait(f"Number(document.querySelector('aside input').value) !== {before}")
    tab.quiet()
    event = tab.event()
    tab.page.wait_for_selector("#stack-label")
    label = tab.text("#stack-label")
    tab.view("map")
    assert (tab.event(), tab.text("#stack-label")) == (event, label)
    tab.view("why")
    tab.page.wait_for_selector("#verdict")
    assert explain(open_trace(FAILED, trusted=True), event).headline in tab.text("section.why")
    tab.view("flame")
    tab.page.wait_for_selector("g.frame")
    assert any(f"/api/holders?file=0&event={event}&" in url for url in tab.asked)


def test_the_strip_above_chooses_a_moment_in_every_view(tab: Any) -> None:
    tab.view("map")
    box = tab.page.locator(".overview canvas").bounding_box()
    before = tab.event()
    tab.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 20)
    tab.wait(f"Number(document.querySelector('aside input').value) < {before}")


def test_arrow_keys_step_through_events(tab: Any) -> None:
    tab.view("map")
    start = tab.event()
    tab.page.keyboard.press("ArrowLeft")
    tab.wait(f"document.querySelector('aside input').value === '{start - 1}'")
    tab.page.keyboard.press("Shift+ArrowLeft")
    tab.wait(f"document.querySelector('aside input').value === '{start - 101}'")
    tab.page.keyboard.press("ArrowRight")
    tab.wait(f"document.querySelector('aside input').value === '{start - 100}'")
    tab.quiet()
    memory = memory_at(open_trace(FAILED, trusted=True), start - 100)
    assert f"{len(memory.segments)} segments" in tab.text("section.map .tools")


def test_a_reload_shows_the_same(tab: Any) -> None:
    tab.view("map")
    tab.page.keyboard.press("ArrowLeft")
    tab.quiet()
    event = tab.event()
    tab.page.reload()
    tab.page.wait_for_selector("section.map")
    tab.wait(f"document.querySelector('aside input').value === '{event}'")


def test_another_file_may_be_chosen(tab: Any) -> None:
    tab.page.select_option("select.file", "1")
    tab.page.wait_for_selector("aside select[aria-label=Stream]")
    options = tab.page.locator("aside select[aria-label=Stream] option").all_inner_texts()
    assert len(options) == 4, "all of them, and three streams"
    tab.view("map")
    tab.quiet()
    tab.page.wait_for_timeout(300)
    canvas = tab.page.locator("section.map canvas")
    before = canvas.screenshot()
    tab.page.select_option("aside select[aria-label=Stream]", options[1])
    tab.until(lambda: canvas.screenshot() != before, "other streams step back")


# ---- map, flame graph --------------------------------------------------------------------------------------


def test_the_map_has_blocks_that_can_be_chosen(tab: Any) -> None:
    tab.view("map")
    tab.quiet()
    assert tab.colors("section.map canvas") > 8
    assert re.search(r"[\d.]+ % fragmentation", tab.text("section.map .tools"))
    box = tab.page.locator("section.map canvas").bounding_box()
    tab.page.mouse.move(box["x"] + 140, box["y"] + 36)
    tab.wait("/live|hole|idle|pending/.test(document.querySelector('section.map .readout').textContent)")
    tab.page.mouse.click(box["x"] + 140, box["y"] + 36)
    tab.page.wait_for_selector("#stack-label")
    tab.page.keyboard.press("Escape")
    tab.wait("document.querySelector('#stack-label') === null")


def test_the_flame_graph_names_who_holds(tab: Any) -> None:
    tab.view("flame")
    tab.page.wait_for_selector("g.frame")
    trace = open_trace(FAILED, trusted=True)
    memory = memory_at(trace, trace.events - 1)
    count = sum(1 for _ in memory.blocks())
    assert f"{count} blocks" in tab.text("section.flame .tools")
    names = tab.page.eval_on_selector_all("g.frame", "boxes => boxes.map((box) => box.getAttribute('name'))")
    assert any("workloads.py" in name for name in names)
    for by in ("module", "tag", "stream"):
        tab.choose("By", by)
        tab.quiet()
        tab.page.wait_for_selector("g.frame")
    names = tab.page.eval_on_selector_all("g.frame", "boxes => boxes.map((box) => box.getAttribute('name'))")
    assert "stream 0" in names


def test_the_flame_graph_is_searched_and_compared(tab: Any) -> None:
    tab.view("flame")
    tab.page.wait_for_selector("g.frame")
    found = """(boxes) => {
      const accent = getComputedStyle(document.documentElement).getPropertyValue("--accent-soft").trim();
      const lit = boxes.filter((box) => box.querySelector("rect").getAttribute("fill") === accent);
      return lit.map((box) => box.getAttribute("name"));
    }"""
    assert tab.page.eval_on_selector_all("g.frame", found) == []
    tab.page.fill("input[type=search]", "WORKLOADS.py")
    tab.until(lambda: bool(tab.page.eval_on_selector_all("g.frame", found)), "what is searched for is lit")
    names = tab.page.eval_on_selector_all("g.frame", found)
    assert all("workloads.py" in name for name in names)
    tab.page.fill("input[type=search]", "")
    tab.until(lambda: tab.page.eval_on_selector_all("g.frame", found) == [], "nothing is lit again")
    tab.choose("Compare with", "start")
    tab.wait("document.querySelector('section.flame .tools').innerText.includes('→')")
    tab.choose("Compare with", "peak:1")
    tab.quiet()
    assert any("against_file=1" in url for url in tab.asked)


def test_a_box_chooses_its_stack(tab: Any) -> None:
    tab.view("flame")
    tab.page.wait_for_selector("g.frame")
    innermost = tab.page.evaluate(
        """() => {
          const boxes = [...document.querySelectorAll("g.frame")];
          const depth = (box) => Number(box.getAttribute("transform").match(/,([\\d.]+)/)[1]);
          boxes.sort((one, other) => depth(other) - depth(one));
          boxes[0].focus();
          return boxes[0].getAttribute("name");
        }"""
    )
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector("#stack-label")
    tab.wait("document.querySelector('.frames li') !== null")
    function, place = innermost.split("  ")
    assert f"{place} {function}" in tab.text(".frames")


# ---- why, what if ------------------------------------------------------------------------------------------


def test_why_says_what_explain_says(tab: Any) -> None:
    tab.view("why")
    tab.page.wait_for_selector("#verdict")
    found = explain(open_trace(FAILED, trusted=True))
    assert tab.text("#verdict") == found.verdict
    shown = tab.text("section.why").lower()
    for sentence in (found.headline, found.reason, *found.doubts, *(each.what for each in found.remedies)):
        assert sentence.lower() in shown
    tab.page.click("section.why .segmented >> text=module")
    assert found.holders["module"][0].label in tab.text("table.holders")


def test_what_if_runs_with_progress_and_a_setting_to_copy(tab: Any) -> None:
    pytest.importorskip("vram._native")
    tab.view("whatif")
    tab.page.evaluate(
        """() => {
          window.told = [];
          new MutationObserver(() => {
            const bar = document.querySelector("progress");
            if (bar) window.told.push([bar.value, bar.max]);
          }).observe(document.body, { subtree: true, childList: true, attributes: true });
        }"""
    )
    tab.page.click("button.primary")
    tab.page.wait_for_selector("table.ranked tbody tr", timeout=120_000)
    told = tab.page.evaluate("window.told")
    assert told and all(done <= count for done, count in told)
    rows = tab.page.locator("table.ranked tbody tr")
    assert rows.count() == 4, "one for each allocator"
    badges = tab.page.locator("table.ranked .badge").all_inner_texts()
    assert len(badges) == 4 and set(badges) <= {"fits", "may fit", "does not fit"}
    tab.page.fill("input[aria-label='Limit in GiB']", "1")
    tab.until(
        lambda: set(tab.page.locator("table.ranked .badge").all_inner_texts()) == {"does not fit"}, "1 GiB"
    )
    tab.page.fill("input[aria-label='Limit in GiB']", "500")
    tab.until(lambda: set(tab.page.locator("table.ranked .badge").all_inner_texts()) == {"fits"}, "500 GiB")
    more = tab.page.locator("table.ranked button.more").first
    more.click()
    assert rows.count() > 6
    more.click()
    assert rows.count() == 4
    first = rows.nth(0)
    setting = first.locator("code").inner_text()
    first.locator(".setting button").click()
    tab.wait("document.querySelector('table.ranked .setting button').textContent === 'Copied'")
    assert "vram" in setting or "PYTORCH" in setting
    tab.view("timeline")
    tab.view("whatif")
    assert tab.page.locator("table.ranked tbody tr").count() == rows.count(), "it is not lost"


# ---- strangers ---------------------------------------------------------------------------------------------


def hostile(tmp_path: Path) -> Path:
    job = Job()
    for line in range(1, 6):
        job.alloc(line * MIB, line=line)
    job.mark(HOSTILE)
    job.alloc(30 * MIB)
    document = job.snapshot()
    for event in document["device_traces"][0]:
        event["user_metadata"] = HOSTILE
        for frame in event["frames"]:
            frame["filename"], frame["name"] = f"/{HOSTILE}.py", HOSTILE
    path = tmp_path / '<b onmouseover="alert(4)">.pickle'
    path.write_bytes(pickle.dumps(document))
    return path


@pytest.mark.parametrize("served", [True, False])
def test_names_of_a_stranger_are_shown_as_text(
    served: bool, serve: Callable[..., Any], open_tab: Callable[..., Any], tmp_path: Path
) -> None:
    path = hostile(tmp_path)
    if served:
        url = serve(path).url
    else:
        from vram.web import write_report

        write_report(open_trace(path, trusted=True), tmp_path / "report.html", sweep=False)
        url = (tmp_path / "report.html").as_uri()
    tab = open_tab(url)
    seen = ""
    for view in ("timeline", "map", "flame", "why"):
        tab.view(view)
        tab.quiet()
        if view == "timeline":
            tab.page.wait_for_timeout(400)
            box = tab.page.locator(".u-over").bounding_box()
            tab.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 5)
            tab.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] - 5)
        if view == "flame":
            tab.page.wait_for_selector("g.frame")
            for by in ("tag", "module"):
                tab.choose("By", by)
                tab.quiet()
            tab.page.wait_for_timeout(200)
        if view == "why":
            tab.page.wait_for_selector("#verdict")
        seen += str(tab.page.evaluate("document.body.textContent"))
        found = tab.page.evaluate("document.querySelectorAll('img, b[onmouseover], iframe, object').length")
        assert found == 0
        scripts = "[...document.scripts].filter((each) => each.textContent.startsWith('alert')).length"
        assert tab.page.evaluate(scripts) == 0
    assert '<img src=x onerror="alert(1)">' in seen
    assert tab.wrong == []


def test_nothing_is_loaded_from_elsewhere(tab: Any, serve: Callable[..., Any]) -> None:
    for view in ("timeline", "map", "flame", "why", "whatif"):
        tab.view(view)
        tab.quiet()
    assert {re.sub(r"^(\w+:/*[\d.]*).*", r"\1", url) for url in tab.asked} == {"http://127.0.0.1"}


def test_a_wrong_token_shows_why_and_no_data(serve: Callable[..., Any], open_tab: Callable[..., Any]) -> None:
    page = serve(FAILED)
    tab = open_tab(page.url.replace(page.token, "x" * 32), clean=False, wait="[role=alert]")
    assert "token" in tab.text("[role=alert]")
    assert "gpt2" not in tab.page.content()


def test_another_site_learns_nothing(serve: Callable[..., Any], open_tab: Callable[..., Any]) -> None:
    """Even a page that knows the token: the browser says where it is from."""
    page = serve(FAILED)
    other = serve(STREAMS)
    tab = open_tab(other.url, clean=False)
    outcome = tab.page.evaluate(
        """async ([url, token]) => {
          try {
            const response = await fetch(url, { headers: { "X-Vram-Token": token } });
            return response.status;
          } catch (error) { return "refused"; }
        }""",
        [f"http://127.0.0.1:{page.port}/api/start", page.token],
    )
    assert outcome == "refused"


# ---- windows, themes, keys, reports ------------------------------------------------------------------------


@pytest.mark.parametrize("width", [360, 700, 1600])
def test_no_window_is_too_narrow(tab: Any, width: int) -> None:
    tab.page.set_viewport_size({"width": width, "height": 700})
    for view in ("timeline", "map", "flame", "why", "whatif"):
        tab.view(view)
        tab.quiet()
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view


def test_light_and_dark(serve: Callable[..., Any], open_tab: Callable[..., Any]) -> None:
    url = serve(STREAMS).url
    background = "getComputedStyle(document.body).backgroundColor"
    light, dark = (open_tab(url, color_scheme=scheme) for scheme in ("light", "dark"))
    assert light.page.evaluate(background) != dark.page.evaluate(background)
    for _ in range(2):
        light.page.click("button[aria-label^=Theme]")
    assert light.page.evaluate(background) == dark.page.evaluate(background)


def test_everything_is_reached_by_keyboard(tab: Any) -> None:
    for number, view in enumerate(("timeline", "map", "flame", "why", "whatif"), 1):
        tab.page.keyboard.press(str(number))
        tab.page.wait_for_selector(f"section.{view}")
    tab.page.keyboard.press("1")
    reached = set()
    for _ in range(40):
        tab.page.keyboard.press("Tab")
        reached.add(tab.page.evaluate("document.activeElement.className + document.activeElement.tagName"))
    assert {"chartDIV", "CANVAS"} <= {name.strip() for name in reached} | {
        name.split()[-1] for name in reached if name
    }
    assert any("BUTTON" in name for name in reached) and any("SELECT" in name for name in reached)


def test_a_report_shows_every_view_without_a_server(open_tab: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("vram._native")
    from vram.web import write_report

    write_report(open_trace(FAILED, trusted=True), tmp_path / "report.html")
    tab = open_tab((tmp_path / "report.html").as_uri())
    tab.page.wait_for_selector("section.why #verdict")
    tab.view("timeline")
    tab.page.wait_for_selector(CHART)
    tab.until(lambda: tab.colors(CHART) > 20, "the chart is drawn")
    tab.page.click("aside >> text=Peak")
    tab.view("map")
    assert tab.colors("section.map canvas") > 8
    tab.view("flame")
    tab.page.wait_for_selector("g.frame")
    tab.page.click("aside >> text=Out of memory")
    tab.view("why")
    tab.page.wait_for_selector("#verdict")
    assert tab.text("#verdict") == explain(open_trace(FAILED, trusted=True)).verdict
    tab.view("whatif")
    assert tab.page.locator("table.ranked tbody tr").count() == 4
    assert {url.split(":")[0] for url in tab.asked} <= {"file", "data"}
