"""What the views show and how they are reached, light and dark, in a wide and in a narrow window."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from made_jobs import MIB, Job

from vram.analysis import explain
from vram.analysis.differences import difference
from vram.sizes import format_size
from vram.trace import open_trace
from vram.web import files

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "traces"
FAILED = TRACES / "oom_gpt2_train_9000.pickle.xz"
TRAINED = TRACES / "gpt2_train.pickle.xz"
AXE = ROOT / "web/node_modules/axe-core/axe.min.js"
VIEWS = ("timeline", "map", "flame", "why", "whatif", "compare", "files")


@pytest.fixture(params=[(1440, "light"), (420, "dark")], ids=str)
def window(request: pytest.FixtureRequest) -> tuple[int, str]:
    """Width and theme: both widths and both themes in every test, all four pairs in the last one."""
    found: tuple[int, str] = request.param
    return found


@pytest.fixture
def look(
    window: tuple[int, str], serve: Callable[..., Any], open_tab: Callable[..., Any]
) -> Callable[..., Any]:
    """Serves files and opens a view of them, in each of the windows."""
    width, scheme = window

    def start(
        *files: Path, more: str = "", wait: str = "aside", quiet: bool = True, clean: bool = True
    ) -> Any:
        tab = open_tab(serve(*files).url + more, color_scheme=scheme, wait=wait, clean=clean)
        tab.page.set_viewport_size({"width": width, "height": 860})
        if quiet:
            tab.quiet()
        return tab

    return start


def box(tab: Any, selector: str) -> dict[str, float]:
    found = tab.page.locator(selector).first.bounding_box()
    assert found is not None, selector
    return dict(found)


def chosen(tab: Any) -> dict[str, str]:
    """What the address says."""
    return {name: values[0] for name, values in parse_qs(tab.page.url.partition("#")[2]).items()}


# ---- timeline ----------------------------------------------------------------------------------------------


def test_every_band_has_an_entry_in_the_legend(look: Callable[..., Any]) -> None:
    tab = look(TRAINED, more="&view=timeline")
    tab.page.wait_for_selector(".bands button.entry")
    tab.until(lambda: "…" not in tab.page.locator(".bands .what").all_inner_texts(), "all are named")
    assert "smaller allocations" in tab.text(".bands")
    tab.choose("Bands", "module")
    tab.quiet()
    names = tab.page.locator(".bands .what").all_inner_texts()
    assert "transformers.activations" in names
    dots = tab.page.eval_on_selector_all(
        ".bands .dot", "dots => dots.map((dot) => getComputedStyle(dot).backgroundColor)"
    )
    assert len(set(dots)) == len(dots) == len(names), "each group has a color of its own"
    tab.page.click(f".bands button:has-text('{names[0]}')")
    assert chosen(tab)["group"] == names[0]


def test_the_tooltip_is_at_the_pointer_and_inside_the_chart(look: Callable[..., Any]) -> None:
    tab = look(TRAINED, more="&view=timeline")
    plot = box(tab, ".u-over")
    for share in (0.05, 0.5, 0.97):
        at = plot["x"] + share * plot["width"], plot["y"] + plot["height"] * 0.6
        tab.page.mouse.move(*at)
        tab.page.wait_for_selector(".tip:not([hidden])")
        tip, chart = box(tab, ".tip"), box(tab, ".chart")
        assert chart["x"] - 1 <= tip["x"] and tip["x"] + tip["width"] <= chart["x"] + chart["width"] + 1
        beside = max(tip["x"] - at[0], at[0] - tip["x"] - tip["width"])
        above = max(tip["y"] - at[1], at[1] - tip["y"] - tip["height"])
        assert 0 < max(beside, above) < 30, "near the pointer, but not under it"
        assert "allocated" in tab.text(".tip") and "iB" in tab.text(".tip")
    tab.page.mouse.move(plot["x"] + plot["width"] * 0.47, plot["y"] + plot["height"] - 12)
    tab.wait("document.querySelector('.tip').innerText.includes('allocation')")
    tab.page.mouse.move(2, 2)
    tab.wait("document.querySelector('.tip').hidden")


def test_the_strip_has_the_axis_of_the_chart(look: Callable[..., Any]) -> None:
    tab = look(TRAINED, more="&view=timeline")
    strip, plot = box(tab, ".overview canvas"), box(tab, ".u-over")
    assert abs(strip["x"] - plot["x"]) <= 1
    assert abs(strip["width"] - plot["width"]) <= 1


def test_labels_do_not_collide(look: Callable[..., Any]) -> None:
    rects = """(labels) => labels.map((each) => each.getBoundingClientRect())
      .map(({ left, right, top, bottom }) => [left, right, top, bottom])"""
    for file in (TRAINED, FAILED):
        tab = look(file, more="&view=timeline")
        tab.page.wait_for_selector(".labels span", state="attached")
        labels = tab.page.eval_on_selector_all(".labels span", rects)
        plot = box(tab, ".u-over")
        for place, (left, right, top, bottom) in enumerate(labels):
            assert plot["x"] - 1 <= left and right <= plot["x"] + plot["width"] + 1
            for other in labels[:place]:
                apart = right <= other[0] or other[1] <= left or bottom <= other[2] or other[3] <= top
                assert apart, (labels[place], other)
    assert "out of memory" in tab.text(".labels")


def test_steps_of_the_program_are_named_in_their_lane(look: Callable[..., Any]) -> None:
    tab = look(TRAINED, more="&view=timeline")
    tab.wait("document.querySelector('.labels .step') !== null")
    assert re.fullmatch(r"step \d+", tab.page.locator(".labels .step").first.inner_text())


# ---- the address -------------------------------------------------------------------------------------------


def test_the_address_has_everything_and_back_undoes_it(
    look: Callable[..., Any], open_tab: Callable[..., Any]
) -> None:
    tab = look(TRAINED, FAILED, more="&view=timeline")
    first = chosen(tab)
    assert "range" not in first
    tab.page.click("button[aria-label='Zoom in']")
    tab.until(lambda: "range" in chosen(tab), "the zoom is in the address")
    zoomed = chosen(tab)["range"]
    tab.choose("Bands", "module")
    tab.quiet()
    tab.page.click(".bands button >> nth=0")
    assert {"split": "module", "range": zoomed}.items() <= chosen(tab).items() and "group" in chosen(tab)
    tab.view("flame")
    tab.choose("Compare with", "peak:1")
    tab.page.fill("input[type=search]", "forward")
    tab.quiet()
    assert {"view": "flame", "against": "peak:1", "term": "forward"}.items() <= chosen(tab).items()

    copy = open_tab(tab.page.url, wait="g.frame")
    copy.quiet()
    assert chosen(copy) == chosen(tab)
    assert copy.page.input_value("input[type=search]") == "forward"
    assert copy.text("section.flame .tools") == tab.text("section.flame .tools")

    tab.page.go_back()
    tab.until(lambda: "against" not in chosen(tab), "the comparison is undone")
    tab.page.go_back()
    tab.page.wait_for_selector("section.timeline")
    tab.page.go_back()
    tab.page.go_back()
    tab.until(lambda: "split" not in chosen(tab), "the bands are undone")
    assert tab.page.input_value("select[aria-label=Bands]") == "allocations"
    tab.page.go_back()
    tab.until(lambda: "range" not in chosen(tab), "the zoom is undone")
    assert chosen(tab)["view"] == "timeline"


def test_another_file_can_be_left_by_back(look: Callable[..., Any]) -> None:
    tab = look(TRAINED, FAILED, more="&view=map")
    tab.page.select_option("select.file", "1")
    tab.until(lambda: chosen(tab).get("file") == "1", "the file is in the address")
    tab.page.go_back()
    tab.until(lambda: tab.page.input_value("select.file") == "0", "the first file is shown again")
    tab.page.wait_for_selector("section.map")


# ---- map ---------------------------------------------------------------------------------------------------


def luminance(color: str) -> float:
    digits = color.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(part, 16) / 255 for part in re.findall("..", digits)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_holes_are_hatched_with_enough_contrast(look: Callable[..., Any]) -> None:
    tab = look(FAILED, more="&view=map")
    tab.page.wait_for_selector("section.map canvas")
    style = "(name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim()"
    hatch, hole, idle = (tab.page.evaluate(style, f"--{name}") for name in ("hatch", "hole", "cached"))
    assert contrast(hatch, hole) >= 3 and contrast(hatch, idle) >= 3
    seen = tab.page.evaluate(
        """(wanted) => {
          const canvas = document.querySelector("section.map canvas");
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const ground = [1, 3, 5].map((at) => parseInt(wanted.slice(at, at + 2), 16));
          let count = 0;
          for (let at = 0; at < data.length; at += 4) {
            if (ground.every((part, index) => Math.abs(data[at + index] - part) < 24)) count++;
          }
          return count;
        }""",
        hatch,
    )
    assert seen > 50, "the lines of the hatching are drawn"


def test_the_map_has_addresses_and_a_list_of_events(look: Callable[..., Any]) -> None:
    tab = look(FAILED, more="&view=map")
    tab.page.wait_for_selector(".events tr[aria-selected=true]")
    trace = open_trace(FAILED, trusted=True)
    last = trace.events - 1
    row = tab.text(".events tr[aria-selected=true]")
    assert "oom" in row and format_size(trace.size[last]) in row
    assert f"{trace.address[last - 1]:#x}" in tab.text(".events")
    tab.page.click(".events tr[aria-selected=true] >> xpath=preceding-sibling::tr[1] >> button")
    tab.wait(f"Number(document.querySelector('aside input').value) === {last - 1}")
    assert chosen(tab)["event"] == str(last - 1)
    inked = tab.page.evaluate(
        """() => {
          const canvas = document.querySelector("section.map canvas");
          const gutter = canvas.getContext("2d").getImageData(0, 24, 100 * devicePixelRatio, 120);
          return gutter.data.some((each) => each > 0);
        }"""
    )
    assert inked, "the addresses of the lines are written"
    canvas = box(tab, "section.map canvas")
    tab.page.mouse.move(canvas["x"] + 140, canvas["y"] + 36)
    tab.wait("/0x[0-9a-f]+.*stream 0/.test(document.querySelector('section.map .readout').textContent)")


# ---- flame graph -------------------------------------------------------------------------------------------


def frames(tab: Any) -> list[str]:
    names = tab.page.eval_on_selector_all("g.frame", "boxes => boxes.map((box) => box.getAttribute('name'))")
    return [str(name) for name in names]


def test_the_flame_graph_names_functions_first(look: Callable[..., Any]) -> None:
    tab = look(FAILED, more="&view=flame")
    tab.page.wait_for_selector("g.frame")
    assert "lm_loss  workloads.py:24" in frames(tab)
    assert any("torch/nn/" in name for name in frames(tab))
    tab.page.click("text=hide framework")
    tab.until(lambda: not any("torch/nn/" in name for name in frames(tab)), "frames of PyTorch are hidden")
    assert "lm_loss  workloads.py:24" in frames(tab)
    assert chosen(tab)["hidden"] == "1"


def test_the_flame_graph_can_start_with_the_innermost_call(look: Callable[..., Any]) -> None:
    tab = look(FAILED, more="&view=flame&hidden=1&inverted=1")
    tab.page.wait_for_selector("g.frame")
    depth = """(boxes) => Object.fromEntries(boxes.map((box) =>
      [box.getAttribute("name"), Number(box.getAttribute("transform").match(/,([\\d.]+)/)[1])]))"""
    depths = tab.page.eval_on_selector_all("g.frame", depth)
    assert depths["forward  transformers/activations.py:66"] == min(
        each for name, each in depths.items() if name != "all"
    )
    assert depths["<module>  workloads.py:246"] > depths["forward  transformers/activations.py:66"]
    allocated = explain(open_trace(FAILED, trusted=True)).account.allocated
    assert f"{format_size(allocated)} in" in tab.text("section.flame .tools"), "the total stays"


def test_a_search_tells_how_much_it_matched(look: Callable[..., Any]) -> None:
    tab = look(FAILED, more="&view=flame")
    tab.page.wait_for_selector("g.frame")
    tab.page.fill("input[type=search]", "activations.py:66")
    tab.page.wait_for_selector("#matched")
    trace = open_trace(FAILED, trusted=True)
    held = sum(
        group.bytes
        for group in explain(trace).holders["stack"]
        if any("activations.py:66 " in frame for frame in group.frames)
    )
    assert tab.text("#matched").startswith(f"{format_size(held)} matched")
    tab.page.fill("input[type=search]", "no such function")
    tab.wait("document.querySelector('#matched').innerText === 'nothing matched'")


# ---- why ---------------------------------------------------------------------------------------------------


def test_a_failed_job_is_explained_first(look: Callable[..., Any]) -> None:
    tab = look(FAILED)
    tab.page.wait_for_selector("section.why #verdict")
    found = explain(open_trace(FAILED, trusted=True))
    assert found.request is not None
    assert f"failed to allocate {format_size(found.request.size)}" in tab.text("section.why h1")
    next_step, evidence = (box(tab, f"section[aria-label='{name}']") for name in ("Next step", "Evidence"))
    assert box(tab, "section.why h1")["y"] < next_step["y"] < evidence["y"]
    assert found.remedies[0].what.lower() in tab.text(".remedies.first").lower()
    tab.page.click("text=Try other allocators")
    tab.page.wait_for_selector("section.whatif")


def test_a_plain_peak_has_a_next_step(look: Callable[..., Any]) -> None:
    tab = look(TRAINED)
    tab.page.wait_for_selector("section.timeline")
    tab.view("why")
    tab.page.wait_for_selector("#verdict")
    found = explain(open_trace(TRAINED, trusted=True))
    assert "The peak" in tab.text("section.why h1")
    assert found.remedies[0].what.lower() in tab.text(".remedies.first").lower()


def test_the_same_thing_is_the_same_number_in_every_view(look: Callable[..., Any]) -> None:
    tab = look(TRAINED, FAILED, more="&view=timeline")
    peak = tab.text("#peak")
    assert peak == format_size(explain(open_trace(TRAINED, trusted=True)).account.allocated)
    assert tab.text("#allocated") == peak
    tab.view("flame")
    tab.page.wait_for_selector("g.frame")
    assert f"{peak} in" in tab.text("section.flame .tools")
    tab.view("why")
    tab.page.wait_for_selector("#verdict")
    assert f"{peak} allocated" in tab.text("section.why h1")
    shares = tab.page.locator("aside .legend .dim").all_inner_texts()
    assert shares and all(share in tab.text("section[aria-label=Evidence]") for share in shares)
    tab.view("compare")
    tab.page.wait_for_selector("table.numbers")
    assert tab.text("table.numbers tbody tr td").startswith(peak)
    tab.view("files")
    tab.wait("document.querySelectorAll('section.files .meter').length === 2")
    assert peak in tab.text("section.files tbody tr")


# ---- files -------------------------------------------------------------------------------------------------


def test_a_folder_has_an_index(look: Callable[..., Any], tmp_path: Path) -> None:
    plain, failed = Job(), Job()
    for job in (plain, failed):
        job.alloc(30 * MIB)
    failed.out_of_memory(64 * MIB, device_free=MIB)
    plain.save(tmp_path / "plain.pickle")
    failed.save(tmp_path / "failed.pickle")
    (tmp_path / "notes.md").write_text("no recording")
    (tmp_path / "broken.pickle").write_bytes(b"no recording")
    tab = look(tmp_path, wait="section.files", clean=False)  # one of them is broken
    tab.wait("document.querySelectorAll('section.files .meter').length === 2")
    rows = tab.page.locator("section.files tbody tr").all_inner_texts()
    assert len(rows) == 3
    assert "this is not a PyTorch memory snapshot" in rows[0]
    assert "out of memory" in rows[1] and "64 MiB" in rows[1]
    assert "completed" in rows[2] and "30 MiB" in rows[2]
    tab.page.click("text=failed.pickle >> visible=true")
    tab.page.wait_for_selector("section.why #verdict")
    tab.page.go_back()
    tab.page.wait_for_selector("section.files")


def test_two_files_are_compared_by_one_link(look: Callable[..., Any]) -> None:
    tab = look(TRAINED, FAILED, more="&view=compare&file=0&other=1", wait="table.differences")
    tab.page.wait_for_selector("table.numbers")
    found = difference(open_trace(TRAINED, trusted=True), open_trace(FAILED, trusted=True), "line")
    assert tab.text("#gap").replace("−", "-") == f"-{format_size(-found.gap)}"
    assert tab.page.locator("table.differences tbody tr").count() == len(found.table)
    panels = tab.page.locator("section.compare figure canvas")
    assert panels.count() == 2 and tab.colors("section.compare figure canvas") >= 3
    tab.page.click("text=Swap")
    tab.until(lambda: tab.page.locator("#gap").count() == 1 and tab.text("#gap")[0] == "+", "it is swapped")


DROP = """([name, bytes]) => {
  const data = new DataTransfer();
  data.items.add(new File([new Uint8Array(bytes)], name));
  for (const kind of ["dragover", "drop"]) {
    document.body.dispatchEvent(new DragEvent(kind, { bubbles: true, cancelable: true, dataTransfer: data }));
  }
}"""


def test_a_dropped_file_is_opened(look: Callable[..., Any], tmp_path: Path) -> None:
    job = Job()
    job.alloc(30 * MIB)
    job.out_of_memory(64 * MIB, device_free=MIB)
    content = job.save(tmp_path / "job.pickle").read_bytes()
    tab = look(TRAINED, more="&view=timeline")
    tab.page.evaluate(DROP, ["<i>dropped</i>.pickle", list(content)])
    tab.wait("document.querySelector('select.file')?.selectedOptions[0].text === 'i>.pickle'")
    tab.until(lambda: tab.text("#peak") == "30 MiB", "it is shown")
    tab.view("files")
    tab.wait("document.querySelectorAll('section.files .meter').length === 2")


def test_a_file_that_is_no_recording_is_refused_with_a_reason(
    serve: Callable[..., Any], open_tab: Callable[..., Any]
) -> None:
    tab = open_tab(serve(TRAINED).url, clean=False)
    tab.page.evaluate(DROP, ["x.pickle", [1, 2, 3]])
    tab.page.wait_for_selector("[role=alert]")
    assert "x.pickle" in tab.text("[role=alert]")


def test_reading_shows_how_far_it_is(
    look: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The process that reads stops half-way until the page has shown that."""
    stopped: list[int] = []

    class Slow(files._Process):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            os.kill(self._child.pid, signal.SIGSTOP)
            stopped.append(self._child.pid)
            self.read = (50, 100)

    monkeypatch.setattr(files, "_Process", Slow)
    job = Job()
    job.alloc(30 * MIB)
    try:
        tab = look(job.save(tmp_path / "slow.pickle"), wait="progress[value='0.5']", quiet=False)
        assert "Reading slow.pickle" in tab.text("[role=status]")
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    tab.page.wait_for_selector("aside")
    assert tab.page.locator("progress").count() == 0


# ---- keys, accessibility -----------------------------------------------------------------------------------


def test_a_question_mark_shows_the_keys(look: Callable[..., Any]) -> None:
    tab = look(FAILED)
    tab.page.keyboard.press("?")
    tab.page.wait_for_selector("[role=dialog]")
    assert "zoom the timeline" in tab.text("[role=dialog]")
    assert tab.page.evaluate("document.activeElement.innerText") == "Close"
    tab.page.keyboard.press("Escape")
    tab.wait("document.querySelector('[role=dialog]') === null")
    tab.page.click("button[aria-label=Keys]")
    tab.page.wait_for_selector("[role=dialog]")
    tab.page.click("[role=dialog] button")
    tab.wait("document.querySelector('[role=dialog]') === null")
    tab.page.keyboard.press("p")
    peak = explain(open_trace(FAILED, trusted=True), "peak").moment.event
    tab.wait(f"Number(document.querySelector('aside input').value) === {peak}")
    tab.page.keyboard.press("/")
    tab.wait("document.activeElement.type === 'search'")


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed; see web/package.json")
@pytest.mark.parametrize("window", [*itertools.product((1440, 420), ("light", "dark"))], ids=str)
def test_nothing_keeps_anybody_from_using_it(look: Callable[..., Any]) -> None:
    tab = look(FAILED, TRAINED)
    tab.page.evaluate(AXE.read_text(encoding="utf-8"))
    for view in VIEWS:
        tab.view(view)
        tab.quiet()
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
        found = tab.page.evaluate(
            "async () => (await axe.run(document)).violations.map((each) => [each.id, each.nodes[0].html])"
        )
        assert found == [], view
