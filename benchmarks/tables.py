"""Convert the output of `vram bench NAME --json` to the Markdown tables of docs/benchmarks.md.

    python benchmarks/tables.py hotpath.json threads.json …

prints the tables. With `--into docs/benchmarks.md` they replace the text between the markers of each
benchmark (`<!-- hotpath: begin -->` and `<!-- hotpath: end -->`).
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from vram.bench.report import machine_lines
from vram.bench.report import markdown as table_markdown


def markdown(report: dict[str, Any]) -> str:
    """Return a report as Markdown."""
    parts = [header(report)]
    if report["quick"]:
        parts.append("**Quick run: these figures are not reliable enough to quote.**")
    parts += [table_markdown(table) for table in report["tables"]]
    if report["left_out"]:
        left = "\n".join(f"- {left['name']}: {left['reason']}" for left in report["left_out"])
        parts.append(f"Not measured:\n\n{left}")
    return "\n\n".join(parts)


def header(report: dict[str, Any]) -> str:
    """Return the command, the machine, the versions and the date."""
    machine = report["machine"]
    return (
        f"`vram bench {report['bench']} --device {machine['device']['name']}` on {machine['date'][:10]}: "
        f"{'; '.join(machine_lines(machine))}."
    )


def put_into(document: str, name: str, text: str) -> str:
    """Return `document` with `text` between the markers of one benchmark."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(document):
        raise SystemExit(f"there are no marks {begin} … {end} in the document")
    return pattern.sub(lambda _: f"{begin}\n{text}\n{end}", document)


def main() -> None:
    """Print the tables, or write them into a document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="output of vram bench NAME --json")
    parser.add_argument("--into", type=Path, metavar="DOCUMENT")
    arguments = parser.parse_args()
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.files]
    if arguments.into is None:
        print("\n\n".join(markdown(report) for report in reports))
        return
    document = arguments.into.read_text(encoding="utf-8")
    for report in reports:
        document = put_into(document, report["bench"], markdown(report))
    arguments.into.write_text(document, encoding="utf-8")


if __name__ == "__main__":
    main()
