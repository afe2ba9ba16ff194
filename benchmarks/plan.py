"""Measure how close plans come to the lower bound (what is live at once), and how long planning takes.

Plans steps of the recorded training jobs, tens of thousands of random buffers, and rectangles cut into
pieces, which fit into their capacity without a gap. CSV files given as arguments are planned to the
capacity in their names (`name.1048576.csv`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import rich_click as click

import vram
from vram.bench.report import Column, Report, Table
from vram.cli.bench import measuring_command
from vram.lifetimes.plan import Row, read_csv
from vram.trace import find_steps, open_trace

TRACES = Path(__file__).resolve().parent.parent / "traces"
JOBS = ("gpt2_train", "llama_varlen_ckpt", "resnet_multiscale", "multistream_prefetch")
MANY = 60_000
CAPACITY = 1 << 20


def random_buffers(longest: int, spread: bool) -> list[Row]:
    """Return MANY random buffers: lengths up to `longest`, sizes up to 1 MiB, uniform or log-uniform."""
    chance = random.Random(1)
    rows: list[Row] = []
    for index in range(MANY):
        begin = chance.randrange(MANY)
        length = math.exp(chance.uniform(0, math.log(longest))) if spread else chance.uniform(1, longest)
        size = 2 ** chance.uniform(9, 20) if spread else chance.uniform(1, 2**20)
        rows.append((index, begin, begin + math.ceil(length), math.ceil(size)))
    return rows


def cut_rectangle(count: int, seed: int) -> list[Row]:
    """Cut the rectangle CAPACITY × time repeatedly, in both directions, into `count` pieces."""
    chance = random.Random(seed)
    pieces = [(0, 1 << 20, 0, CAPACITY)]
    while len(pieces) < count:
        index = max(chance.choices(range(len(pieces)), k=3), key=lambda i: _area(pieces[i]))
        left, right, low, high = pieces[index]
        part = chance.uniform(0.2, 0.8)
        if chance.random() < 0.5 and right - left > 4:
            cut = left + 1 + int((right - left - 2) * part)
            pieces[index : index + 1] = [(left, cut, low, high), (cut, right, low, high)]
        elif high - low > 4:
            cut = low + 1 + int((high - low - 2) * part)
            pieces[index : index + 1] = [(left, right, low, cut), (left, right, cut, high)]
    chance.shuffle(pieces)  # the order of the cuts would reveal the solution
    return [(i, left, right, high - low) for i, (left, right, low, high) in enumerate(pieces)]


def _area(piece: tuple[int, int, int, int]) -> int:
    return (piece[1] - piece[0]) * (piece[3] - piece[2])


def cases(files: Iterable[Path]) -> Iterator[tuple[str, vram.Plan]]:
    """Yield a name and a plan for each case."""
    for name in JOBS:
        trace = open_trace(TRACES / f"{name}.pickle.xz")
        yield f"{name}, step 3", vram.plan(trace, between=find_steps(trace).range(3))
    for longest, spread in ((20, False), (100, False), (1000, False), (8000, True)):
        kind = "log-uniform lengths and sizes" if spread else "uniform lengths and sizes"
        yield f"{MANY} random, {kind}, up to {longest} long", vram.plan(random_buffers(longest, spread))
    for count in (100, 200, 300, 400, 500):
        for seed in (1, 2, 3):
            name = f"rectangle in {count} pieces, seed {seed}"
            yield name, vram.plan(cut_rectangle(count, seed), align=1, capacity=CAPACITY)
    for path in files:
        yield path.name, vram.plan(read_csv(path), align=1, capacity=path.stem.rpartition(".")[2])


def row(name: str, plan: vram.Plan) -> dict[str, Any]:
    plan.check()
    met = None if plan.capacity is None else "met" if plan.feasible else "NOT MET"
    return {"case": name, "buffers": len(plan), **plan.to_json(), "met": met}


def run(device: str | None, *, quick: bool, files: tuple[Path, ...]) -> Report:
    rows = [row(*case) for case in islice(cases(files), 1 if quick else None)]
    columns = [
        Column("case", "case"),
        Column("buffers", "buffers", "count"),
        Column("ratio", "of the bound", "exact ratio"),
        Column("seconds", "seconds", "s"),
        Column("met", "capacity"),
        Column("method", "method"),
    ]
    return Report.of("plan", vram.Device(device), [Table("Plans", columns, rows)], quick=quick)


if __name__ == "__main__":
    names = click.argument(
        "files", nargs=-1, type=click.Path(path_type=Path), metavar="[NAME.CAPACITY.csv...]"
    )
    measuring_command("plan", __doc__, run, names)()
