"""Decoding with a key-value cache that grows in place, compared with concatenation and maximum size.

    python examples/kv_cache.py [--requests N] [--longest N] [--json FILE]

A toy attention decodes requests of random lengths, a few at a time: each step appends a key and a value to
every layer's cache of the request and attends over all of them. There are three ways to store the caches:

- `concatenate`: a new array with one more row in every step, as with `torch.cat` or `np.concatenate`;
- `maximum`: an array for the longest allowed request from the start;
- `grow`: a vram.GrowableBuffer, with addresses for the longest request and memory for the current length.

All three compute the same numbers. The example prints the time, the maximum memory of the caches, the bytes
copied, and for `grow` the pages created after the first requests, which are the longest: none. It runs on the
GPU if there is one and PyTorch is installed, else on the host with NumPy. There the requests are shorter: the
bytes that concatenation copies grow with the square of the length, and they take most of the time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any, Protocol

import vram

LAYERS, WIDTH, AT_ONCE = 2, 4096, 3
ROW = WIDTH * 4  # bytes of a key, or a value
TABLE = 512  # random keys, values and queries to choose from
SEED = 1


class Arrays(Protocol):
    """What the example needs from an array library."""

    name: str
    device: str
    longest: int

    def empty(self, rows: int) -> Any: ...
    def join(self, rows: Any, row: Any) -> Any: ...
    def over(self, buffer: vram.GrowableBuffer) -> Any: ...
    def rows(self, seed: int) -> tuple[Any, Any, Any]: ...
    def attend(self, query: Any, keys: Any, values: Any) -> Any: ...
    def finish(self) -> None: ...


class OnHost:
    """NumPy."""

    name = "host, NumPy"
    device = "host"
    longest = 160

    def __init__(self) -> None:
        # These products are too small for threads. If other programs use the cores, the threads of OpenBLAS
        # wait for each other.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        import numpy

        self.np = numpy
        chance = numpy.random.default_rng(SEED)
        self.table = chance.standard_normal((TABLE, 3, WIDTH), dtype=numpy.float32)

    def empty(self, rows: int) -> Any:
        return self.np.empty((rows, WIDTH), self.np.float32)

    def join(self, rows: Any, row: Any) -> Any:
        return self.np.concatenate([rows, row[None]])

    def over(self, buffer: vram.GrowableBuffer) -> Any:
        return buffer.array((buffer.size // ROW, WIDTH), "float32")

    def rows(self, seed: int) -> tuple[Any, Any, Any]:
        query, key, value = self.table[seed % TABLE]
        return query, key, value

    def attend(self, query: Any, keys: Any, values: Any) -> Any:
        scores = keys @ query / WIDTH**0.5
        weights = self.np.exp(scores - scores.max())
        return (weights / weights.sum()) @ values

    def finish(self) -> None: ...


class OnGpu:
    """PyTorch on a GPU. The work runs on PyTorch's current stream, which is the default stream."""

    name = "GPU, PyTorch"
    device = "cuda:0"
    longest = 4096

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        torch.manual_seed(SEED)
        self.table = torch.randn(TABLE, 3, WIDTH, device="cuda")

    def empty(self, rows: int) -> Any:
        return self.torch.empty(rows, WIDTH, device="cuda")

    def join(self, rows: Any, row: Any) -> Any:
        return self.torch.cat([rows, row[None]])

    def over(self, buffer: vram.GrowableBuffer) -> Any:
        return self.torch.from_dlpack(buffer).view(self.torch.float32).view(-1, WIDTH)

    def rows(self, seed: int) -> tuple[Any, Any, Any]:
        query, key, value = self.table[seed % TABLE].unbind()
        return query, key, value

    def attend(self, query: Any, keys: Any, values: Any) -> Any:
        scores = keys @ query / WIDTH**0.5
        return self.torch.softmax(scores, 0) @ values

    def finish(self) -> None:
        self.torch.cuda.synchronize()


class Concatenated:
    """A new array in every step."""

    def __init__(self, arrays: Arrays, _: vram.Pool) -> None:
        self.arrays = arrays
        self.rows = arrays.empty(0)
        self.copied = 0

    def append(self, row: Any) -> Any:
        self.copied += len(self.rows) * ROW
        self.rows = self.arrays.join(self.rows, row)
        return self.rows

    @property
    def held(self) -> int:
        """Count the old array as well, which exists while the new one is created."""
        return (2 * len(self.rows) - 1) * ROW

    def close(self) -> None:
        del self.rows


class Largest:
    """The maximum length from the start."""

    copied = 0

    def __init__(self, arrays: Arrays, _: vram.Pool) -> None:
        self.rows = arrays.empty(arrays.longest)
        self.held = arrays.longest * ROW
        self.length = 0

    def append(self, row: Any) -> Any:
        self.rows[self.length] = row
        self.length += 1
        return self.rows[: self.length]

    def close(self) -> None:
        del self.rows


class Growing:
    """A GrowableBuffer: after a growth the array is created again, the memory is not."""

    copied = 0

    def __init__(self, arrays: Arrays, pool: vram.Pool) -> None:
        self.arrays = arrays
        self.buffer = vram.GrowableBuffer(arrays.longest * ROW, pool)
        self.rows: Any = None
        self.length = 0

    def append(self, row: Any) -> Any:
        self.length += 1
        if self.length * ROW > self.buffer.size:
            # Cover all memory that is already backed: a new array for every row would cost more than the row.
            self.buffer.grow(ROW)
            self.buffer.resize(self.buffer.capacity)
            self.rows = self.arrays.over(self.buffer)
        self.rows[self.length - 1] = row
        return self.rows[: self.length]

    @property
    def held(self) -> int:
        return self.buffer.capacity

    def close(self) -> None:
        del self.rows
        self.buffer.close()


class Request:
    """One sequence: a cache of keys and one of values in each layer."""

    def __init__(self, way: Any, arrays: Arrays, pool: vram.Pool, number: int, length: int) -> None:
        self.arrays, self.number, self.left = arrays, number, length
        self.layers = [(way(arrays, pool), way(arrays, pool)) for _ in range(LAYERS)]
        self.result: Any = 0.0

    def step(self) -> None:
        self.left -= 1
        for layer, (keys, values) in enumerate(self.layers):
            query, key, value = self.arrays.rows(self.number * 31 + self.left * LAYERS + layer)
            self.result = self.result + self.arrays.attend(query, keys.append(key), values.append(value))

    @property
    def caches(self) -> list[Any]:
        return [cache for pair in self.layers for cache in pair]

    def close(self) -> float:
        for cache in self.caches:
            cache.close()
        return float(self.result.sum())


def decode(way: Any, arrays: Arrays, requests: int, pool: vram.Pool) -> dict[str, Any]:
    """Serve requests of random length, AT_ONCE at a time; the longest come first."""
    chance = random.Random(SEED)
    longest = arrays.longest
    lengths = [longest] * AT_ONCE + [chance.randint(longest // 16, longest) for _ in range(requests)]
    results: list[float] = []
    live: list[Request] = []
    most = copied = steps = created = 0
    began = time.perf_counter()
    for number, length in enumerate(lengths):
        if number == AT_ONCE:  # the pool has reached its peak
            created = pool.raw_stats()["segments"]["total"]
        live.append(Request(way, arrays, pool, number, length))
        while len(live) == AT_ONCE or (number == len(lengths) - 1 and live):
            for request in live:
                request.step()
                steps += 1
            if steps % 64 == 0 or any(not request.left for request in live):
                most = max(most, sum(cache.held for request in live for cache in request.caches))
            for request in [request for request in live if not request.left]:
                live.remove(request)
                copied += sum(cache.copied for cache in request.caches)
                results.append(request.close())
    arrays.finish()
    return {
        "seconds": time.perf_counter() - began,
        "steps": steps,
        "most_bytes": most,
        "copied_bytes": copied,
        "pages_created_late": pool.raw_stats()["segments"]["total"] - created,
        "results": results,
    }


def arrays_here() -> OnHost | OnGpu:
    """Return PyTorch if there is a GPU and PyTorch, else NumPy."""
    if any(device.kind == "cuda" for device in vram.devices()):
        try:
            import torch
        except ImportError:
            pass
        else:
            return OnGpu(torch)
    return OnHost()


def compare(requests: int, longest: int | None = None) -> dict[str, Any]:
    """Run all three ways on the same requests."""
    arrays = arrays_here()
    arrays.longest = longest or arrays.longest
    ways = {"concatenate": Concatenated, "maximum": Largest, "grow": Growing}
    found: dict[str, Any] = {}
    for name, way in ways.items():
        with vram.Pool(arrays.device) as pool:
            found[name] = decode(way, arrays, requests, pool)
    expected = found["maximum"]["results"]
    for name in ways:
        results = found[name].pop("results")
        if not all(
            math.isclose(*pair, rel_tol=1e-3, abs_tol=1e-2) for pair in zip(results, expected, strict=True)
        ):
            raise AssertionError(f"{name} computes different numbers")
    return {"on": arrays.name, "requests": requests + AT_ONCE, "longest": arrays.longest, "ways": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--requests", type=int, default=8, help="number of random requests after the longest ones (8)"
    )
    parser.add_argument(
        "--longest", type=int, help="steps of the longest request (160 on the host, 4096 on a GPU)"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    found = compare(options.requests, options.longest)
    print(
        f"{found['requests']} requests of up to {found['longest']} steps, {AT_ONCE} at once, on {found['on']}"
    )
    print(f"{'':12} {'time':>9} {'per step':>9} {'caches, peak':>13} {'copied':>10}")
    for name, way in found["ways"].items():
        each = f"{way['seconds'] / way['steps'] * 1e6:.0f} µs"
        sizes = (vram.format_size(way[key]) for key in ("most_bytes", "copied_bytes"))
        print(f"{name:12} {way['seconds']:>7.2f} s {each:>9} {next(sizes):>13} {next(sizes):>10}")
    late = found["ways"]["grow"]["pages_created_late"]
    print(f"All three compute the same numbers. Pages created after the first {AT_ONCE} requests: {late}.")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
