"""Process an array larger than the device in chunks, while upload, compute and download overlap.

A pool with a limit stands for the device's memory, so the example works with and without a GPU. It brightens
96 MiB of images with 16 MiB of device memory and draws when each chunk was in which lane. Then batches of
different lengths, with several arrays each, go through another function.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import vram

LIMIT = "16MiB"
IMAGES, HEIGHT, WIDTH = 1536, 128, 128  # of float32: 96 MiB


def brighten(images: Any) -> Any:
    """Scale the brightest point of each image to 1; works on arrays of any library."""
    brightest = images.reshape(len(images), -1).max(1)
    brightest = getattr(brightest, "values", brightest)  # PyTorch also returns indices
    return images / brightest.reshape(-1, 1, 1)


def make_images() -> Any:
    """Compute gradients of different strength from a formula."""
    strength = np.linspace(0.1, 2.0, IMAGES, dtype=np.float32).reshape(-1, 1, 1)
    shape = np.linspace(0, 1, HEIGHT * WIDTH, dtype=np.float32).reshape(HEIGHT, WIDTH)
    return strength * shape


def in_chunks() -> None:
    images = make_images()
    result = np.empty_like(images)
    with vram.Pool(limit=LIMIT) as pool, vram.Pipeline(brighten, chunk="2MiB", pool=pool) as pipe:
        pipe.run(images, out=result)
        print(
            f"{vram.format_size(images.nbytes)} through {LIMIT} of {pool.device.name}: at most "
            f"{vram.format_size(pool.stats().peak_reserved)} reserved"
        )
        print(pipe.report())
    assert np.allclose(result.max(axis=(1, 2)), 1)
    assert np.allclose(result, images / images.max(axis=(1, 2), keepdims=True))


def sentences() -> Iterator[dict[str, Any]]:
    """Yield batches like a tokenizer: every batch has another length."""
    chance = np.random.default_rng(0)
    for number in range(20):
        length = int(chance.integers(10, 20_000))
        yield {
            "tokens": chance.integers(0, 1000, length),
            "weights": chance.random(length, np.float32),
            "name": f"batch {number}",
        }


def weigh(batch: dict[str, Any]) -> tuple[str, Any]:
    """Return values that are not arrays unchanged; results may have any shape and type."""
    return batch["name"], (batch["tokens"] * batch["weights"]).sum()


def in_batches() -> None:
    with vram.Pool(limit=LIMIT) as pool, vram.Pipeline(weigh, pool=pool) as pipe:
        totals = {name: float(total) for name, total in pipe.map(sentences())}
        print(f"\n{len(totals)} batches of different lengths; the first: {next(iter(totals.items()))}")
        print(pipe.report().explain())
    for batch in sentences():
        expected = float((batch["tokens"] * batch["weights"]).sum())
        assert abs(totals[batch["name"]] - expected) <= 1e-3 * expected


if __name__ == "__main__":
    in_chunks()
    in_batches()
