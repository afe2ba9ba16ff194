"""Measure how fast the page opens a recording and pans over it, in a browser with software rendering.

Needs Chromium and Playwright, and the page built into the package (make web). `--copies N` repeats the events
of the recording N times. Opening is measured from the navigation to the first drawing; reading the file is
reported separately.
"""

from __future__ import annotations

import shutil
import statistics
import time
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import rich_click as click

from vram.bench.report import Column, Report, Table
from vram.cli.bench import measuring_command
from vram.core.device import Device
from vram.trace import Trace, open_trace
from vram.trace.model import COLUMNS
from vram.web import Page
from vram.web.recordings import Recording

TRACES = Path(__file__).parents[1] / "traces"
SECONDS = 5.0
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]

PAN = """(seconds) => new Promise((resolve) => {
  const over = document.querySelector(".u-over");
  const box = over.getBoundingClientRect();
  const frames = [];
  const start = performance.now();
  let last = start;
  let direction = 1;
  const step = (now) => {
    frames.push(now - last);
    last = now;
    if (now - start > seconds * 1000) return resolve(frames.slice(1));
    if (frames.length % 90 === 0) direction = -direction;
    over.dispatchEvent(new WheelEvent("wheel", {
      deltaX: 30 * direction, clientX: box.left + 300, clientY: box.top + 50, bubbles: true, cancelable: true,
    }));
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
})"""


def repeated(trace: Trace, copies: int) -> Trace:
    if copies == 1:
        return trace
    columns: dict[str, Any] = {name: getattr(trace, name) * copies for name in COLUMNS if name != "time_us"}
    span = trace.span_us + 1
    times = array("q", [time + copy * span for copy in range(copies) for time in trace.time_us])
    return replace(trace, **columns, time_us=times)


def measure(trace: Trace, seconds: float) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as driver, Page([TRACES / "gpt2_train.pickle.xz"]) as served:
        served.recordings._open[0] = Recording(trace)  # read already
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 760})
        started = time.perf_counter()
        page.goto(f"{served.url}&view=timeline")
        page.wait_for_selector("aside", timeout=120_000)
        page.wait_for_selector(".u-over")
        drawn = "document.querySelector('.chart canvas')?.getContext('2d').getImageData(300, 300, 600, 300)"
        while not page.evaluate(f"{drawn}?.data.some((each) => each > 0) ?? false"):
            page.wait_for_timeout(10)
        opened = time.perf_counter() - started
        page.wait_for_timeout(1500)
        for _ in range(6):
            page.click("button[aria-label='Zoom in']")
            page.wait_for_timeout(150)
        page.wait_for_timeout(1000)
        frames = page.evaluate(PAN, seconds)
        browser.close()
    return {
        "events": trace.events,
        "open_s": opened,
        "frames_per_s": 1000 * len(frames) / sum(frames),
        "median_ms": statistics.median(frames),
        "p95_ms": sorted(frames)[int(0.95 * len(frames))],
    }


def run(device: str | None, *, quick: bool, trace: Path, copies: tuple[int, ...]) -> Report:
    started = time.perf_counter()
    recording = open_trace(trace, trusted=True)
    title = f"{trace.name}, read in {time.perf_counter() - started:.2f} s"
    rows = [measure(repeated(recording, each), 1.0 if quick else SECONDS) for each in copies]
    columns = [
        Column("events", "events", "count"),
        Column("open_s", "drawn after, s", "s"),
        Column("frames_per_s", "panning, frames per second", "count"),
        Column("median_ms", "median frame, ms", "ms"),
        Column("p95_ms", "95 % within, ms", "ms"),
    ]
    return Report.of("web", Device(device), [Table(title, columns, rows)], quick=quick)


if __name__ == "__main__":
    measuring_command(
        "web",
        __doc__,
        run,
        click.option(
            "--trace",
            type=click.Path(path_type=Path),
            default=TRACES / "llm_serve.pickle.xz",
            help="A recording.",
        ),
        click.option("--copies", type=int, multiple=True, default=(1, 13), help="How often it is repeated."),
    )()
