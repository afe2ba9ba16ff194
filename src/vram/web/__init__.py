"""The page: recordings and running processes in a browser on this machine, and the same page as one file.

`files` starts processes in which `recordings` answers the page's queries, `server` authorizes requests,
`report` writes the answers into the page itself. The page is TypeScript in `web/` of the source tree.
`assets` finds the built files.
"""

from __future__ import annotations

from .report import write_report
from .server import Page

__all__ = ["Page", "write_report"]
