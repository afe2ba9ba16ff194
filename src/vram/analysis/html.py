"""How notebooks show answers about recordings: HTML for `_repr_html_`, made of pieces of `vram.core.html`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from vram.core.html import heading, table
from vram.core.verdict import MEANINGS
from vram.sizes import format_count, format_size

__all__ = ["difference_html", "explanation_html", "leaks_html", "memory_html", "merged_html", "table_html"]

MOST_ROWS = 10
SHARES = ("share", "confidence", "deviation")
"""Columns of tables whose values are parts of a whole."""
SIZES = (
    *("bytes", "requested", "bytes_at_end", "growth", "before", "after", "gap"),
    *("peak_allocated", "peak_reserved", "allocated_at_end"),
)
"""Columns of tables whose values are bytes."""
FITS = {True: "fits", None: "may fit", False: "does not fit"}


def _first(columns: str, rows: Sequence[Sequence[str]]) -> str:
    """A table of the first rows, and how many are left out."""
    left = len(rows) - MOST_ROWS
    return table(columns, rows[:MOST_ROWS]) + (f"<p>and {left} more</p>" if left > 0 else "")


def _paragraphs(texts: Iterable[str]) -> str:
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


def explanation_html(found: Any) -> str:
    """What happened, where the memory is, who holds it, and what to do next."""
    shares = found.account.shares()
    parts = [
        (name, format_size(size), "" if shares[name] is None else f"{shares[name]:.1%}", MEANINGS[name])
        for name, size in found.account.parts().items()
        if size
    ]
    held = [(group.label, format_size(group.bytes), f"{group.blocks:,}") for group in found.holders["stack"]]
    steps = [
        (FITS[each.fits] if each.evidence else "try", each.what, each.evidence, each.setting)
        for each in found.remedies
    ]
    return (
        heading(found.headline)
        + _paragraphs([f"Verdict: {found.verdict}: {found.reason}", *found.doubts])
        + table("memory|>size|>share|meaning", parts)
        + _first("held by stack|>size|>blocks", held)
        + (table("|next step|evidence|setting", steps) if steps else "")
    )


def difference_html(found: Any) -> str:
    """The gap between two runs, and the groups that make it."""
    rows = [
        (row["group"], format_size(row["before"]), format_size(row["after"]), _signed(row["gap"]))
        for row in found.table.to_pylist()
    ]
    title = f"{format_size(found.before)} before, {format_size(found.after)} after: {_signed(found.gap)}"
    return heading(title) + _first(f"{found.by}|>before|>after|>difference", rows)


def leaks_html(found: Any) -> str:
    """What a range of events left behind, by stack."""
    rows = [
        (
            row["group"],
            format_size(row["bytes"]),
            f"{row['blocks']:,}",
            format_size(round(row["growth"])),
            f"{row['confidence']:.0%}",
        )
        for row in found.table.to_pylist()
    ]
    title = f"Events {found.first} to {found.last}, {format_count(found.steps, found.unit)}: {found.headline}"
    return heading(title) + _first(f"stack|>left|>blocks|>per {found.unit}|>confidence", rows)


def merged_html(found: Any) -> str:
    """The ranks of a run, the oddest first."""
    rows = [
        (
            rank.name,
            format_size(rank.peak_allocated),
            format_size(rank.peak_reserved),
            f"{rank.deviation:.1%}",
            "odd" if rank.odd else "",
        )
        for rank in found.ranks
    ]
    title = (
        f"{format_count(len(found.ranks), 'rank')}, {format_count(len(found.common_steps), 'common step')}"
    )
    return heading(title) + _first("rank|>peak allocated|>peak reserved|>deviation|", rows)


def memory_html(memory: Any) -> str:
    """What an allocator held after an event."""
    rows = [
        (name, format_size(getattr(memory, name))) for name in ("allocated", "pending", "cached", "reserved")
    ]
    count = format_count(len(memory.segments), "segment")
    return heading(f"Memory after event {memory.event}, in {count}") + table("|>size", rows)


def _signed(size: int) -> str:
    return f"{'−' if size < 0 else '+'}{format_size(abs(size))}"


def table_html(found: Any) -> str:
    """The first rows, without the frames of stacks."""
    rows = found.to_pylist()
    names = [name for name in found.column_names if name != "frames"]
    titles = "|".join(name if _is_text(rows, name) else f">{name}" for name in names)
    return _first(titles, [[_value(name, row[name]) for name in names] for row in rows])


def _is_text(rows: Sequence[Any], name: str) -> bool:
    return any(isinstance(row[name], str) for row in rows)


def _value(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if name in SHARES:
        return f"{value:.1%}"
    if name in SIZES:
        return _signed(value) if name == "gap" else format_size(round(value))
    return f"{value:,}"
