"""How notebooks show vram's objects: small pieces of HTML, for `_repr_html_` and `vram.views.notebook`.

Everything from a program or a file passes `escape`. The module uses only attributes of the objects, so the
modules of these objects can import it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from vram.sizes import format_count, format_size

__all__ = [
    "arenas_html",
    "heading",
    "manager_html",
    "measurement_html",
    "plan_html",
    "pool_html",
    "ranking_html",
    "report_html",
    "results_html",
    "snapshot_html",
    "stats_html",
    "table",
]

COLOURS = {"live": "#2f7d4f", "pending": "#c78a1b", "cached": "#4b7db8", "free": "#b9bec4"}
"""Colours of the states of memory, readable on light and dark backgrounds."""
SPILLED_COLOUR = "#8a5fb0"
MOST_HOLDERS = 8
MOST_SHAPES = 3000
"""The most shapes of a picture; with more, browsers become slow."""
WIDTH, ROW_HEIGHT = 960, 14


def heading(text: str) -> str:
    """A line above the rest."""
    return f"<p><b>{escape(text)}</b></p>"


def table(columns: str, rows: Iterable[Sequence[str]]) -> str:
    """A table; `columns` are titles separated by `|`, with `>` for columns of numbers."""
    titles = columns.split("|")
    align = ["right" if title.startswith(">") else "left" for title in titles]
    head = "".join(
        _cell("th", title.removeprefix(">"), side) for title, side in zip(titles, align, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(_cell('td', cell, side) for cell, side in zip(row, align, strict=True))}</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(kind: str, text: str, side: str) -> str:
    return f'<{kind} style="text-align:{side}">{escape(text)}</{kind}>'


def _bar(parts: dict[str, int]) -> str:
    """Reserved memory by state, as a bar with its legend."""
    total = sum(parts.values())
    pieces = "".join(
        f'<span style="display:inline-block;height:12px;width:{100 * size / total:.3f}%;'
        f'background:{COLOURS[state]}" title="{state} {format_size(size)}"></span>'
        for state, size in parts.items()
        if size
    )
    legend = " · ".join(
        f'<span style="color:{COLOURS[state]}">■</span> {state} {format_size(size)}'
        for state, size in parts.items()
    )
    shown = (
        f'<div style="max-width:{WIDTH}px;line-height:0;white-space:nowrap">{pieces}</div>' if total else ""
    )
    return f"{shown}<div>{legend}</div>"


# ---- pools and snapshots ----------------------------------------------------------------------------------


def pool_html(pool: Any) -> str:
    """A pool: its memory by state, its numbers, and the largest holders."""
    if "_futures" not in pool.__dict__ or pool.closed:
        return heading(repr(pool))
    stats = pool.stats()
    bar = _bar(
        {
            "live": max(0, stats.reserved - stats.pending - stats.cached - stats.free),  # on the device
            "pending": stats.pending,
            "cached": stats.cached,
            "free": max(0, stats.free),
        }
    )
    numbers = {
        "reserved": format_size(stats.reserved),
        "limit": format_size(pool.limit) if pool.limit else "none",
        "peak allocated": format_size(stats.peak_allocated),
        "live allocations": f"{stats.live:,}",
        "allocations so far": f"{stats.allocations:,}",
        "without a driver call": f"{stats.hit_rate:.1%}",
        "from the stream's cache": f"{stats.stream_cache_hit_rate:.1%}",
        "fragmentation": f"{stats.fragmentation:.1%}",
        "out of memory": f"{stats.out_of_memory:,}",
        **_spilled_numbers(stats),
    }
    return (
        heading(f"{pool._title} on {pool.device.name}: {format_size(stats.allocated)} allocated")
        + bar
        + table("|>now", numbers.items())
        + _holders(pool)
    )


def stats_html(stats: Any) -> str:
    """The most common numbers of a pool."""
    sizes = ("allocated", "requested", "pending", "cached", "reserved", "peak_allocated")
    rows = {name.replace("_", " "): format_size(getattr(stats, name)) for name in sizes}
    rows |= {
        "live allocations": f"{stats.live:,}",
        "allocations so far": f"{stats.allocations:,}",
        "without a driver call": f"{stats.hit_rate:.1%}",
        "fragmentation": f"{stats.fragmentation:.1%}",
        "out of memory": f"{stats.out_of_memory:,}",
        **_spilled_numbers(stats),
    }
    return table("|>now", rows.items())


def _spilled_numbers(stats: Any) -> dict[str, str]:
    """What has moved to host memory; nothing for a pool that never spilled."""
    if not stats.get("spill.count"):
        return {}
    return {
        "spilled": format_size(stats.spilled),
        "moved to host memory so far": format_size(stats["spill.moved_out_bytes"]),
        "moved back so far": format_size(stats["spill.moved_back_bytes"]),
        "saved tensors copied to host memory so far": format_size(stats["spill.saved_out_bytes"]),
        "streams held by swaps": f"{stats['spill.seconds']:.3f} s",
    }


def manager_html(manager: Any) -> str:
    """The pools of a manager."""
    rows = []
    for pool in manager.pools:
        stats = pool.stats()
        sizes = (stats.allocated, stats.reserved, stats.peak_allocated)
        rows.append((pool.device.name, *map(format_size, sizes), f"{stats.live:,}"))
    count = format_count(len(rows), "pool")
    return heading(f"vram.MemoryManager: {count}") + table(
        "device|>allocated|>reserved|>peak|>live allocations", rows
    )


def arenas_html(report: Any) -> str:
    """The marks of several arenas."""
    rows = [(line.name, format_size(line.high_water), format_size(line.capacity)) for line in report.arenas]
    rows += [("apart", format_size(report.apart), ""), ("one shared", format_size(report.shared), "")]
    return table("arena|>high water|>held", rows)


def _holders(pool: Any) -> str:
    held = sorted(pool.raw_holders(), key=lambda each: -each[3])
    if not held:
        return ""
    rows = [
        (
            tag or "",
            f"{stack[0].filename}:{stack[0].line} in {stack[0].name}" if stack else "",
            f"{count:,}",
            format_size(size),
        )
        for tag, stack, count, size, *_ in held[:MOST_HOLDERS]
    ]
    more = f"<p>and {len(held) - MOST_HOLDERS} more holders</p>" if len(held) > MOST_HOLDERS else ""
    return table("tag|allocated at|>blocks|>bytes", rows) + more


def snapshot_html(snapshot: Any, runs: list[list[Any]]) -> str:
    """A snapshot: totals, a map of the runs of blocks with memory behind them, and bytes by tag."""
    spilled = snapshot.spilled_by_tag()
    live = max(0, snapshot.allocated - snapshot.suspended - sum(spilled.values()))
    free = max(0, snapshot.reserved - live - snapshot.pending - snapshot.cached)
    parts = {"live": live, "pending": snapshot.pending, "cached": snapshot.cached, "free": free}
    columns = "tag|>live bytes" + ("|>in host memory" if spilled else "")
    tags = [
        (tag or "(no tag)", format_size(size), *([format_size(spilled.get(tag, 0))] if spilled else ()))
        for tag, size in list(snapshot.by_tag().items())[:MOST_HOLDERS]
    ]
    count = format_count(len(snapshot.segments), "segment")
    return (
        heading(f"Snapshot of {snapshot.device}: {format_size(snapshot.reserved)} reserved in {count}")
        + _bar(parts)
        + _map(runs)
        + (table(columns, tags) if tags else "")
    )


def _map(rows: list[list[Any]]) -> str:
    """Each run of blocks in a row, by address, as far as there is room for shapes."""
    longest = max((sum(block.size for block in run) for run in rows), default=0)
    shapes: list[str] = []
    drawn = 0
    for place, run in enumerate(rows):
        room = MOST_SHAPES - len(shapes)
        if room <= 0:
            break
        shapes += _row(run[:room], place, longest)
        drawn += 1
    more = sum(len(run) for run in rows) - len(shapes)
    left = f"<p>and {format_count(more, 'more block')}</p>" if more else ""
    if not shapes:
        return left
    height = drawn * ROW_HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" style="max-width:100%" preserveAspectRatio="none">{"".join(shapes)}</svg>{left}'
    )


def _row(run: list[Any], place: int, longest: int) -> list[str]:
    begin, across = run[0].address, WIDTH / max(longest, 1)
    return [
        f'<rect x="{(block.address - begin) * across:.2f}" y="{place * ROW_HEIGHT + 1}" '
        f'width="{max(block.size * across, 0.2):.2f}" height="{ROW_HEIGHT - 2}" '
        f'fill="{_colour(block)}">'
        f"<title>{escape(_block_words(block))}</title></rect>"
        for block in run
    ]


def _colour(block: Any) -> str:
    return SPILLED_COLOUR if block.spilled else COLOURS.get(block.state, COLOURS["free"])


def _block_words(block: Any) -> str:
    tag = f", tag {block.tag}" if block.tag else ""
    tag += f", {format_size(block.spilled)} in host memory" if block.spilled else ""
    return f"{block.state} {format_size(block.size)} at {block.address:#x}, stream {block.stream}{tag}"


def measurement_html(measurement: Any) -> str:
    """The numbers of a measurement."""
    sizes = {"bytes", "requested", "kept", "peak", "peak_allocated", "peak_reserved"}
    shares = {"hit_rate", "stream_cache_hit_rate", "fragmentation"}
    rows = [
        (
            name,
            format_size(int(value)) if name in sizes else f"{value:.1%}" if name in shares else f"{value:,}",
        )
        for name, value in measurement.to_dict().items()
    ]
    return table("|>", rows)


# ---- plans and comparisons --------------------------------------------------------------------------------


def plan_html(plan: Any) -> str:
    """A plan: how good it is, and its picture where it is not too large."""
    count = format_count(len(plan), "buffer")
    words = heading(f"{count} in {format_size(plan.peak)}, {plan.ratio:.4f} times what is live at once")
    if len(plan) > MOST_SHAPES:
        return f"{words}<p>{len(plan):,} buffers are too many to draw here; plan.picture() has them.</p>"
    return f'{words}<div style="max-width:{WIDTH}px">{plan.picture()}</div>'


def report_html(report: Any) -> str:
    """The table of `vram.replay.compare`: one allocator a row."""
    source = str(report.heading["source"])
    recorded = f"<p>The job was recorded with {escape(report.recorded)}.</p>" if report.recorded else ""
    title = heading(f"{source}: {report.heading['events']:,} events")
    return title + results_html(report.results) + recorded


def results_html(results: Iterable[Any]) -> str:
    """What policies did, one in a row."""
    rows = [
        (
            result.policy,
            format_size(result.peak_allocated),
            format_size(result.peak_reserved),
            f"{result.ratio:.4f}",
            f"{result.driver_us / 1000:.1f} ms",
            "no" if result.oom is None else f"event {result.oom['event']}",
        )
        for result in results
    ]
    return table("allocator|>allocated|>reserved|>ratio|>driver time|out of memory", rows)


def ranking_html(ranking: Sequence[Any]) -> str:
    """The table of a sweep: one setting a row, the best first."""
    rows = [
        (
            str(each.rank),
            each.policy,
            "none" if each.smallest_capacity is None else format_size(each.smallest_capacity),
            format_size(each.peak_reserved),
            str(each.retries),
            each.environment or "defaults",
        )
        for each in ranking
    ]
    return table(">rank|allocator|>smallest device|>reserved|>retries|to set", rows)


def status_html(status: dict[str, Any]) -> str:
    """A process's status from `vram.observe.status`: devices and pools."""
    devices = [
        (
            each["name"],
            *(
                format_size(each[part])
                for part in ("total", "pools", "libraries", "processes", "unknown", "free")
            ),
        )
        for each in status["devices"]
    ]
    pools = [
        (
            f"{each['kind']} {each['pool']}",
            each["memory"],
            *(format_size(each[part]) for part in ("allocated", "reserved", "peak_allocated")),
            f"{each['live']:,}",
        )
        for each in status["pools"]
    ]
    return table(
        "device|>total|>vram's pools|>other libraries|>other processes|>unknown|>free", devices
    ) + table("pool|memory|>allocated|>reserved|>peak|>live", pools)
