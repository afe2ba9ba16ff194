"""The page: recordings and running processes in a browser on this machine, and the same page as one file.

`recordings` answers what the page asks, `server` lets it ask and nobody else, `report` writes the answers
into the page itself. The page is TypeScript, in `web/` of the source; `assets` finds what was built of it.
"""

from __future__ import annotations

from .report import write_report
from .server import Page

__all__ = ["Page", "write_report"]
