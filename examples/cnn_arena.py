"""A small convolutional network, trained in plain NumPy, with three ways to allocate its arrays.

The arrays come from the allocator, from one arena that is reset after each image, or from two arenas, one for
the forward pass and one for the backward pass. The arithmetic is the same, so the losses must be
bit-identical. The table compares memory requests, page faults, system time and wall time; each way runs in
its own process. Run it as `python examples/cnn_arena.py [--images 200] [--size 64]`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

import vram

Array = Any
New = Callable[..., Array]  # new(shape, dtype): an array with undefined contents
WAYS = {"allocate": "allocate freely", "one": "one arena", "two": "two arenas"}
CLASSES, CHANNELS, RATE = 4, (1, 8, 16), 0.01


# ---- images and weights: the same for every way -----------------------------------------------------------


def images(count: int, size: int) -> list[tuple[Array, int]]:
    """Stripes in four directions, with noise."""
    random = np.random.default_rng(7)
    rows, columns = np.mgrid[:size, :size]
    directions = [rows, columns, rows + columns, rows - columns]
    found = []
    for _ in range(count):
        label = int(random.integers(CLASSES))
        stripes = np.sin(directions[label] * random.uniform(0.5, 0.9) + random.uniform(0, 6))
        found.append(((stripes + random.normal(0, 0.4, (size, size)))[None].astype("f4"), label))
    return found


def weights(size: int) -> list[Array]:
    random = np.random.default_rng(1)
    shapes = [(CHANNELS[1], CHANNELS[0], 3, 3), (CHANNELS[2], CHANNELS[1], 3, 3)]
    shapes.append((CLASSES, CHANNELS[2] * (size // 4) ** 2))
    return [(random.normal(size=shape) / np.sqrt(np.prod(shape[1:]))).astype("f4") for shape in shapes]


# ---- layers: `new` creates every array, nothing else allocates --------------------------------------------


def convolve(x: Array, w: Array, new: New) -> tuple[Array, Array]:
    """Compute a 3 by 3 convolution; return the result and the columns that its backward pass needs."""
    channels, height, width = x.shape
    padded = new((channels, height + 2, width + 2), "f4")
    padded[...] = 0
    padded[:, 1:-1, 1:-1] = x
    columns = new((channels, 3, 3, height, width), "f4")
    for i in range(3):
        for j in range(3):
            columns[:, i, j] = padded[:, i : i + height, j : j + width]
    y = new((len(w), height, width), "f4")
    np.matmul(w.reshape(len(w), -1), columns.reshape(-1, height * width), out=y.reshape(len(w), -1))
    return y, columns


def convolve_back(dy: Array, columns: Array, w: Array, dw: Array, dx: Array | None, new: New) -> None:
    channels, _, _, height, width = columns.shape
    flat = dy.reshape(len(w), -1)
    np.matmul(flat, columns.reshape(-1, height * width).T, out=dw.reshape(len(w), -1))
    if dx is None:
        return
    moved = new(columns.shape, "f4")
    np.matmul(w.reshape(len(w), -1).T, flat, out=moved.reshape(-1, height * width))
    padded = new((channels, height + 2, width + 2), "f4")
    padded[...] = 0
    for i in range(3):
        for j in range(3):
            padded[:, i : i + height, j : j + width] += moved[:, i, j]
    dx[...] = padded[:, 1:-1, 1:-1]


def halve(x: Array, new: New) -> tuple[Array, Array]:
    """Compute ReLU, then the maximum of each 2 by 2 square."""
    channels, height, width = x.shape
    positive = new(x.shape, "f4")
    np.maximum(x, 0, out=positive)
    squares = positive.reshape(channels, height // 2, 2, width // 2, 2)
    y = new((channels, height // 2, width // 2), "f4")
    np.max(squares, axis=(2, 4), out=y)
    return y, squares


def halve_back(dy: Array, y: Array, squares: Array, dx: Array, new: New) -> None:
    chosen, positive = new(squares.shape, bool), new(squares.shape, bool)
    np.equal(squares, y[:, :, None, :, None], out=chosen)
    np.greater(squares, 0, out=positive)
    np.logical_and(chosen, positive, out=chosen)
    np.multiply(chosen, dy[:, :, None, :, None], out=dx.reshape(squares.shape))


# ---- one image --------------------------------------------------------------------------------------------


def train(
    image: Array, label: int, ws: list[Array], forward: New, backward: New, scope: Callable[[], Any]
) -> float:
    """Run both passes over one image and the optimizer step; return the loss.

    What the backward pass needs from the forward pass must last until it ends, so the two cannot share an
    arena that is reset in between. Each layer's workspace is released with the layer, by its `scope`.
    """
    y1, columns1 = convolve(image, ws[0], forward)
    h1, squares1 = halve(y1, forward)
    y2, columns2 = convolve(h1, ws[1], forward)
    h2, squares2 = halve(y2, forward)
    scores = forward(CLASSES, "f4")
    np.matmul(ws[2], h2.reshape(-1), out=scores)
    np.subtract(scores, scores.max(), out=scores)
    np.exp(scores, out=scores)
    np.divide(scores, scores.sum(), out=scores)
    loss = -float(np.log(scores[label]))

    steps = [backward(w.shape, "f4") for w in ws]
    scores[label] -= 1
    np.multiply(scores[:, None], h2.reshape(-1), out=steps[2])
    dh2 = backward(h2.shape, "f4")
    np.matmul(ws[2].T, scores, out=dh2.reshape(-1))
    dy2 = backward(y2.shape, "f4")
    with scope():
        halve_back(dh2, h2, squares2, dy2, backward)
    dh1 = backward(h1.shape, "f4")
    with scope():
        convolve_back(dy2, columns2, ws[1], steps[1], dh1, backward)
    dy1 = backward(y1.shape, "f4")
    with scope():
        halve_back(dh1, h1, squares1, dy1, backward)
        convolve_back(dy1, columns1, ws[0], steps[0], None, backward)
    for w, step in zip(ws, steps, strict=True):
        step *= RATE
        w -= step
    return loss


# ---- three ways -------------------------------------------------------------------------------------------


class Counted:
    """`np.empty`, with a count of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, shape: Any, dtype: Any) -> Array:
        self.calls += 1
        return np.empty(shape, dtype)


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def run(way: str, count: int, size: int) -> dict[str, Any]:
    data, ws, losses = images(count, size), weights(size), []
    counted = Counted()
    arenas = {"allocate": [], "one": ["both"], "two": ["forward", "backward"]}[way]
    open_arenas = [vram.Arena("host", name=name) for name in arenas]
    forward: New = open_arenas[0].empty if open_arenas else counted
    backward: New = open_arenas[-1].empty if open_arenas else counted
    scope: Callable[[], AbstractContextManager[Any]] = (
        open_arenas[1].scope if way == "two" else contextlib.nullcontext
    )
    after: list[tuple[int, int]] = []
    began, usage = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    for image, label in data:
        losses.append(train(image, label, ws, forward, backward, scope))
        for arena in open_arenas:
            arena.reset()
        after.append((sum(arena.capacity for arena in open_arenas), resident()))
        if len(after) == 1:
            first = resource.getrusage(resource.RUSAGE_SELF)
    seconds, end = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "losses": [loss.hex() for loss in losses],
        "arrays": counted.calls + sum(arena.stats().allocations for arena in open_arenas),
        "requests": counted.calls + sum(arena.stats().requests for arena in open_arenas),
        "held_first": after[0][0],
        "held": after[-1][0],
        "resident_first": after[0][1],
        "resident": after[-1][1],
        "faults": end.ru_minflt - usage.ru_minflt,
        "faults_later": end.ru_minflt - first.ru_minflt,
        "system": end.ru_stime - usage.ru_stime,
        "user": end.ru_utime - usage.ru_utime,
        "wall": seconds,
        "high_water": sum(arena.high_water for arena in open_arenas),
        "report": str(vram.arena_report(*open_arenas)) if open_arenas else "",
    }


# ---- comparison -------------------------------------------------------------------------------------------


def table(results: dict[str, dict[str, Any]], count: int) -> str:
    mib = 1 << 20
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("loss of the last image", lambda r: f"{float.fromhex(r['losses'][-1]):.6f}"),
        ("arrays", lambda r: str(r["arrays"])),
        ("requests for memory", lambda r: str(r["requests"])),
        ("high water of arenas, MiB", lambda r: f"{r['high_water'] / mib:.1f}"),
        ("held by arenas after 1 image, MiB", lambda r: f"{r['held_first'] / mib:.1f}"),
        (f"held by arenas after {count}, MiB", lambda r: f"{r['held'] / mib:.1f}"),
        ("resident after 1 image, MiB", lambda r: f"{r['resident_first'] / mib:.1f}"),
        (f"resident after {count}, MiB", lambda r: f"{r['resident'] / mib:.1f}"),
        ("page faults", lambda r: str(r["faults"])),
        ("page faults after the first image", lambda r: str(r["faults_later"])),
        ("system time, ms", lambda r: f"{r['system'] * 1e3:.0f}"),
        ("wall time, ms", lambda r: f"{r['wall'] * 1e3:.0f}"),
    ]
    lines = [f"{'':<34}" + "".join(f"{WAYS[way]:>17}" for way in results)]
    lines += [
        f"{name:<34}" + "".join(f"{show(result):>17}" for result in results.values()) for name, show in rows
    ]
    return "\n".join(lines)


def verdict(results: dict[str, dict[str, Any]]) -> str:
    """Tell which figures improved over the allocator; differences up to 5 % count as equal."""
    lines = []
    for way in ("one", "two"):
        words = []
        for key, name in (("requests", "requests"), ("faults_later", "page faults after the first image"),
                          ("system", "system time"), ("wall", "wall time")):  # fmt: skip
            before, now = results["allocate"][key], results[way][key]
            share = now / before if before else (1.0 if not now else float("inf"))
            word = "better" if share < 0.95 else "worse" if share > 1.05 else "the same"
            words.append(f"{name} {word} ({share:.2f} of it)")
        lines.append(f"{WAYS[way]}, compared with allocating freely: {', '.join(words)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--size", type=int, default=64, help="size of an image, a multiple of 4")
    parser.add_argument("--way", choices=WAYS, help="run one way in this process and print JSON")
    options = parser.parse_args()
    if options.way:
        print(json.dumps(run(options.way, options.images, options.size)))
        return
    command = [
        sys.executable,
        __file__,
        "--images",
        str(options.images),
        "--size",
        str(options.size),
        "--way",
    ]
    results = {
        way: json.loads(subprocess.run([*command, way], check=True, capture_output=True, text=True).stdout)
        for way in WAYS
    }
    print(table(results, options.images))
    same = len({tuple(result["losses"]) for result in results.values()}) == 1
    print(f"\nlosses: {'the same to the last bit' if same else 'DIFFERENT'} in all {options.images} images")
    print(verdict(results))
    print(f"\n{results['two']['report']}")
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    main()
