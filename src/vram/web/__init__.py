"""The page: recordings and running processes in a browser on this machine, and the same page as one file.

`recordings` answers the page's queries, in processes that `files` starts. `server` authorizes requests, `report`
writes the answers into the page itself. The page is TypeScript in `web/` of the source tree; `assets` finds the
built files.
"""

from __future__ import annotations

from .report import write_report
from .server import Page

__all__ = ["Page", "write_report"]
