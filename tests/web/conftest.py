"""A real browser for the page: the system's Chromium, driven by Playwright. Skips where either is missing."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # made_jobs

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
PATIENCE_MS = 120_000


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    pytest.importorskip("starlette", reason='the page needs pip install "vram[web]"')
    pytest.importorskip("uvicorn", reason='the page needs pip install "vram[web]"')
    if CHROMIUM is None:
        pytest.skip("there is no chromium here; install it, or name one in CHROMIUM")
    from vram.errors import ConfigError
    from vram.web.assets import built_page

    try:
        built_page()
    except ConfigError as error:
        pytest.skip(str(error))
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


class Tab:
    """One tab of the browser. What went wrong in it, and what it asked for, is kept."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.wrong: list[str] = []
        self.asked: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("console", self._heard)
        page.on("dialog", lambda dialog: (self.wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: self.asked.append(request.url))
        self._answered = 0
        for ended in ("requestfinished", "requestfailed"):
            page.on(ended, lambda request: self._count())

    def _heard(self, message: Any) -> None:
        if message.type == "error":
            self.wrong.append(message.text)

    def view(self, name: str) -> None:
        self.page.click(f"#tab-{name}")
        self.page.wait_for_selector(f"section.{name}")

    def _count(self) -> None:
        self._answered += 1

    def quiet(self) -> None:
        """Until everything that was asked is answered, and nothing more is asked."""
        until = time.monotonic() + PATIENCE_MS / 1000
        calm = 0
        while calm < 6:
            asked = len(self.asked)
            self.page.wait_for_timeout(50)
            calm = calm + 1 if self._answered >= asked == len(self.asked) else 0
            assert time.monotonic() < until, "the page keeps asking"

    def choose(self, label: str, value: str) -> None:
        self.page.get_by_label(label, exact=True).select_option(value)

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def event(self) -> int:
        return int(self.page.input_value("aside input[type=number]"))

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression is true; Playwright's own way needs eval, which the page forbids."""
        self.until(lambda: self.page.evaluate(f"Boolean({condition})"), condition)

    def until(self, met: Callable[[], bool], what: str) -> None:
        """Until `met()` is true, while the page goes on."""
        given_up = time.monotonic() + PATIENCE_MS / 1000
        while not met():
            assert time.monotonic() < given_up, f"never came true: {what}"
            self.page.wait_for_timeout(30)

    def colors(self, selector: str) -> int:
        """How many different colours a canvas shows."""
        return int(
            self.page.evaluate(
                """(selector) => {
                  const canvas = document.querySelector(selector);
                  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                  const seen = new Set();
                  for (let at = 0; at < data.length; at += 4) {
                    seen.add((data[at] << 24) | (data[at + 1] << 16) | (data[at + 2] << 8) | data[at + 3]);
                  }
                  return seen.size;
                }""",
                selector,
            )
        )


@pytest.fixture
def open_tab(browser: Any) -> Iterator[Callable[..., Tab]]:
    """Opens addresses. In the end nothing may have gone wrong in any of them, unless a test expects it."""
    with ExitStack() as open_contexts:
        tabs: list[tuple[Tab, bool]] = []

        def start(url: str, *, clean: bool = True, wait: str = "aside", **options: Any) -> Tab:
            context = browser.new_context(viewport={"width": 1200, "height": 720}, **options)
            open_contexts.callback(context.close)
            tab = Tab(context.new_page())
            tabs.append((tab, clean))
            tab.page.goto(url)
            tab.page.wait_for_selector(wait)
            return tab

        yield start
        for tab, clean in tabs:
            assert not clean or tab.wrong == []


@pytest.fixture
def serve(open_tab: Callable[..., Tab]) -> Iterator[Callable[..., Any]]:
    """Serves files, or a running process, and gives the page."""
    from vram.web import Page

    with ExitStack() as pages:
        yield lambda *files, **options: pages.enter_context(Page(files, **options))
