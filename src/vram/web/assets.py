"""The built page: a fixed table of files in the package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from vram.errors import ConfigError

__all__ = ["Asset", "built_page", "index_html"]

TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css"}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the page."""

    content: bytes
    media_type: str


@cache
def built_page() -> dict[str, Asset]:
    """Return every file of the page by its path; raise ConfigError if the package does not contain it."""
    folder = resources.files("vram.web") / "static"
    found = {}
    if folder.is_dir():
        for entry in folder.iterdir():
            suffix = "." + entry.name.rpartition(".")[2]
            if entry.is_file() and suffix in TYPES:
                found[entry.name] = Asset(entry.read_bytes(), TYPES[suffix])
    if "index.html" not in found:
        raise ConfigError(
            "this vram was built without the page: run `make web` in the source tree (it needs Node 20 or "
            "later) and install again; vram explain, summary and replay print the same information in a "
            "terminal"
        )
    return found


def index_html() -> tuple[str, str, str]:
    """Return the page as text, with the script and the styles it refers to."""
    page = built_page()
    html = page["index.html"].content.decode()
    script = re.search(r'<script[^>]*src="\./([\w.-]+\.js)"[^>]*></script>', html)
    styles = re.search(r'<link[^>]*href="\./([\w.-]+\.css)"[^>]*>', html)
    if script is None or styles is None:
        raise ConfigError("the built page has no script or no styles; run `make web` again")
    bare = html.replace(script[0], "").replace(styles[0], "")
    return bare, page[script[1]].content.decode(), page[styles[1]].content.decode()
