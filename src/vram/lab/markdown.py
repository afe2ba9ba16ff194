"""A run of the lab as a section of a Markdown page, from its JSON, which may come from another machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vram.sizes import format_size

__all__ = ["cell_text", "markdown", "measured_text", "outcome"]


def markdown(document: Mapping[str, Any]) -> str:
    """Return the section: the machine, a table of verdicts, then each experiment with its numbers."""
    return "\n".join([*_summary(document), *_details(document)]) + "\n"


def _summary(document: Mapping[str, Any]) -> Iterator[str]:
    machine = dict(document["machine"])
    note = machine.pop("note", "")
    yield f"Measured with `vram lab`: {', '.join(f'{key} {value}' for key, value in machine.items())}."
    if note:
        yield note
    yield ""
    yield from _table(
        ("experiment", "claim", "verdict"), [_summary_row(each) for each in document["experiments"]]
    )


def _summary_row(each: Mapping[str, Any]) -> tuple[str, str, str]:
    name = each["name"] if each.get("skipped") else f"[{each['name']}](#{each['name']})"
    return name, each["claim"], f"**{outcome(each)}**"


def outcome(each: Mapping[str, Any]) -> str:
    """Return the verdict, or why there is none."""
    if each.get("skipped"):
        return str(each["skipped"])
    return "failed" if each.get("failed") else str(each["verdict"])


def _details(document: Mapping[str, Any]) -> Iterator[str]:
    for each in document["experiments"]:
        if each.get("skipped"):
            continue
        yield from ("", f"### {each['name']}", "", f"> {each['claim']}", "")
        yield f"**{outcome(each).capitalize()}.** {each.get('failed') or each['sentence']}"
        yield from ("", each["why"])
        if each["measured"]:
            numbers = [measured_text(name, **quantity) for name, quantity in each["measured"].items()]
            yield ""
            yield from _table(("measured", "value"), numbers)
        if table := each.get("table"):
            yield ""
            yield from _table(table["columns"], [[cell_text(cell) for cell in row] for row in table["rows"]])


def _table(columns: Any, rows: Any) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |"


# ---- text for numbers, shared with the terminal -----------------------------------------------------------

UNIT_SUFFIXES = ("_ms", "_us", "_mib", "_gb_s")


def label(name: str) -> str:
    """Return "chain alone" for `chain_alone_ms`."""
    for suffix in UNIT_SUFFIXES:
        name = name.removesuffix(suffix)
    return name.replace("_", " ")


def measured_text(name: str, value: float, unit: str) -> tuple[str, str]:
    """Return what was measured and its value, with the unit unless the label contains it."""
    words = label(name)
    if unit == "bytes":
        return words, format_size(int(value))
    if unit == "yes or no":
        return words, "yes" if value else "no"
    number = cell_text(float(value))
    return words, number if unit in words else f"{number} {unit}"


def cell_text(cell: str | int | float | bool) -> str:
    """Format a cell of a table: three significant digits, integers without decimals."""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, str):
        return cell
    if cell == int(cell):
        return str(int(cell))
    return f"{cell:.3f}" if abs(cell) < 1 else f"{cell:.2f}" if abs(cell) < 100 else f"{cell:.0f}"
