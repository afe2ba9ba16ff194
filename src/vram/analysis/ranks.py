"""Several ranks of one run: their memory in each step, and which rank differs from the others.

Clocks of ranks differ, so rows are aligned by step. Each recording is read separately.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from vram.arguments import require, require_label, require_path
from vram.errors import ConfigError
from vram.trace import Action, Trace, find_steps
from vram.trace.series import events_of, reserved_series

from .columns import Table
from .memory import memory_at
from .moments import allocated_series, peak_event

__all__ = ["Merged", "Rank", "merge", "write_table"]

ODD = 0.05
"""A rank whose peak differs from the median by more than this share of it is odd."""


@dataclass(frozen=True)
class Rank:
    """One rank. `deviation` is the distance of its peak from the median of all ranks, as a share of it.

    It is the largest of all steps that all ranks have, and of the whole run. `ooms` counts failed requests. A
    rank is `odd` if it deviates by more than ODD, or if it ran out of memory and others did not.
    """

    name: str
    peak_allocated: int
    peak_reserved: int
    steps: int
    ooms: int
    deviation: float
    odd: bool


@dataclass(frozen=True)
class Merged:
    """A run of several ranks, the oddest first. `table` has a row for each rank and step.

    Columns: `rank`, `step` (null for the whole run), `peak_allocated`, `peak_reserved`, `allocated_at_end`
    and `deviation` of the peak from the median of all ranks in that step.
    """

    ranks: tuple[Rank, ...]
    common_steps: tuple[int, ...]
    table: Table

    def _repr_html_(self) -> str:
        from .html import merged_html

        return merged_html(self)

    def __repr__(self) -> str:
        odd = sum(rank.odd for rank in self.ranks)
        return f"<Merged of {len(self.ranks)} ranks, {odd} odd, {len(self.common_steps)} common steps>"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "ranks": [asdict(rank) for rank in self.ranks],
            "common_steps": list(self.common_steps),
            "rows": self.table.to_pylist(),
        }


@dataclass(frozen=True)
class _Row:
    step: int | None
    peak_allocated: int
    peak_reserved: int
    at_end: int


def merge(traces: Sequence[Trace], names: Iterable[str] | None = None) -> Merged:
    """Align ranks by step. `names` are the names of the ranks (default: from the names of the files)."""
    traces = [require(trace, Trace, "each of the traces") for trace in traces]
    if not traces:
        raise ConfigError("there is nothing to merge; name the recordings of at least one rank")
    called = _names(traces) if names is None else [require_label(name, "a name") for name in names]
    if len(called) != len(traces):
        raise ConfigError(f"{len(traces)} recordings need as many names, not {len(called)}")
    rows = {name: _rows(trace) for name, trace in zip(called, traces, strict=True)}
    if len(rows) != len(traces):
        raise ConfigError(f"ranks need different names; these are {', '.join(called)}")
    middles = _middles(rows)
    ranks = [_rank(name, trace, rows[name], middles) for name, trace in zip(called, traces, strict=True)]
    if len({rank.ooms > 0 for rank in ranks}) > 1:
        ranks = [replace(rank, odd=rank.odd or rank.ooms > 0) for rank in ranks]
    ranks.sort(key=lambda rank: (not rank.odd, -rank.ooms, -abs(rank.deviation)))
    return Merged(
        tuple(ranks), tuple(step for step in middles if step is not None), _table(ranks, rows, middles)
    )


def write_table(merged: Merged, path: Path) -> None:
    """Write the rows: as JSON if the name ends in .json, else as Parquet, which needs pyarrow."""
    require(merged, Merged, "merged")
    path = Path(require_path(path))
    content = encode_table(merged, path)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def encode_table(merged: Merged, path: Path) -> bytes:
    """What `write_table` writes to `path`."""
    if path.suffix == ".json":
        return json.dumps(merged.to_json()).encode()
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            "Parquet files need pyarrow, which is not installed; "
            'pip install "vram[trace]", or name a .json file'
        ) from error
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(merged.table.to_arrow(), sink)
    return bytes(sink.getvalue())


def _names(traces: Sequence[Trace]) -> list[str]:
    """`rank 3` if the file names are numbered, else the file names, or full paths if these are not unique."""
    names = [Path(trace.source).name for trace in traces]
    numbers = [re.search(r"rank\D{0,2}(\d+)", name, re.IGNORECASE) for name in names]
    ranks = [f"rank {int(number[1])}" for number in numbers if number]
    paths = [trace.source for trace in traces]
    return next((each for each in (ranks, names) if len(set(each)) == len(traces)), paths)


def _rows(trace: Trace) -> list[_Row]:
    """The whole run, then each step; steps with the same number, as in several epochs, are one row."""
    if not trace.events:
        held = memory_at(trace, -1)
        return [_Row(None, held.allocated, held.reserved, held.allocated)]
    peak = peak_event(trace)
    allocated, reserved = allocated_series(trace), reserved_series(trace)
    before = memory_at(trace, peak).allocated - allocated[peak]
    stretches: dict[int | None, list[range]] = {None: [range(trace.events)]}
    for number, events in find_steps(trace).stretches():
        if events:
            stretches.setdefault(number, []).append(events)
    return [
        _Row(
            number,
            before + max(max(allocated[events.start : events.stop]) for events in found),
            max(max(reserved[events.start : events.stop]) for events in found),
            before + allocated[found[-1].stop - 1],
        )
        for number, found in stretches.items()
    ]


def _middles(rows: dict[str, list[_Row]]) -> dict[int | None, float]:
    """The median peak of all ranks, for the run and for each step that all of them have."""
    peaks = [{row.step: row.peak_allocated for row in each} for each in rows.values()]
    common = [step for step in peaks[0] if all(step in each for each in peaks)]
    return {step: median(each[step] for each in peaks) for step in common}


def _deviation(row: _Row, middles: dict[int | None, float]) -> float | None:
    middle = middles.get(row.step)
    return None if middle is None else (row.peak_allocated - middle) / max(1.0, middle)


def _rank(name: str, trace: Trace, rows: list[_Row], middles: dict[int | None, float]) -> Rank:
    found = [deviation for row in rows if (deviation := _deviation(row, middles)) is not None]
    deviation = max(found, key=abs, default=0.0)
    return Rank(
        name=name,
        peak_allocated=rows[0].peak_allocated,
        peak_reserved=rows[0].peak_reserved,
        steps=len(rows) - 1,
        ooms=len(events_of(trace, [Action.OOM])),
        deviation=deviation,
        odd=abs(deviation) > ODD,
    )


def _table(ranks: list[Rank], rows: dict[str, list[_Row]], middles: dict[int | None, float]) -> Table:
    flat = [(rank.name, row) for rank in ranks for row in rows[rank.name]]
    return Table(
        {
            "rank": ("string", [name for name, _ in flat]),
            "step": ("int64", [row.step for _, row in flat]),
            "peak_allocated": ("int64", [row.peak_allocated for _, row in flat]),
            "peak_reserved": ("int64", [row.peak_reserved for _, row in flat]),
            "allocated_at_end": ("int64", [row.at_end for _, row in flat]),
            "deviation": ("float64", [_deviation(row, middles) for _, row in flat]),
        }
    )
