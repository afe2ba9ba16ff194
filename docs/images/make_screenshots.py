"""Make the pictures of the page in this folder from the recordings in `traces/`: `make screenshots`.

Needs Chromium, Playwright (the `browser` extra) and the built page (`make web`).
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from vram.web import Page

FOLDER = Path(__file__).parent
TRACES = FOLDER.parents[1] / "traces"
FILES = [
    TRACES / f"{name}.pickle.xz"
    for name in ("oom_llama_varlen_ckpt_13400", "gpt2_train", "multistream_prefetch")
]
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--force-color-profile=srgb"]
MOST_BYTES = 1 << 20

# Name, address, what to wait for, theme, width and height.
SHOTS = [
    ("out-of-memory", "view=why&file=0", "section.why #verdict", "light", 1280, 800),
    ("timeline", "view=timeline&file=1", "section.timeline .bands button", "light", 1280, 640),
    ("map", "view=map&file=0", ".events tr[aria-selected=true]", "dark", 1280, 640),
    ("flame", "view=flame&file=0&hidden=1&term=forward", "g.frame", "light", 1280, 480),
    ("compare", "view=compare&file=1&other=2", "table.differences", "light", 1280, 640),
    ("narrow", "view=why&file=0", "section.why #verdict", "dark", 420, 760),
]


def main() -> None:
    """Write every picture, and fail if they have become too large for the repository."""
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with Page(FILES) as served, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        for shot in SHOTS:
            take(browser, served.url, *shot)
        browser.close()
    written = sum((FOLDER / f"{shot[0]}.png").stat().st_size for shot in SHOTS)
    print(f"{len(SHOTS)} pictures, {written / 1024:.0f} KiB")
    if written > MOST_BYTES:
        sys.exit("the pictures have more than 1 MiB; make them smaller")


def take(
    browser: Any, url: str, name: str, place: str, selector: str, theme: str, width: int, height: int
) -> None:
    """Open a place of the page and write what it shows."""
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
    page.goto(f"{url}&{place}")
    page.wait_for_selector(selector, timeout=120_000)
    page.wait_for_load_state("networkidle")
    if name == "timeline":
        plot = page.locator(".u-over").bounding_box()
        page.mouse.move(plot["x"] + 0.475 * plot["width"], plot["y"] + 0.48 * plot["height"])
    page.wait_for_timeout(600)
    page.screenshot(path=FOLDER / f"{name}.png")
    page.close()


if __name__ == "__main__":
    main()
