"""An array larger than the device goes through it in chunks, while upload, compute and download overlap.

The device's memory is played by a pool with a limit, so the example is the same with and without a GPU:
it brightens 96 MiB of images with 16 MiB of device memory and draws when each chunk was where. Then batches
of different lengths, several arrays each, go through another function.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import vram

LIMIT = "16MiB"
IMAGES, HEIGHT, WIDTH = 1536, 128, 128  # of float32: 96 MiB


def brighten(images: Any) -> Any:
    """Works on arrays of any library: each image's brightest point becomes 1."""
    brightest = images.reshape(len(images), -1).max(1)
    brightest = getattr(brightest, "values", brightest)  # PyTorch tells the places, too
    return images / brightest.reshape(-1, 1, 1)


def make_images() -> Any:
    """Gradients of different strength, from a formula."""
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
    """Batches as a tokeniser would make them: every length is another."""
    chance = np.random.default_rng(0)
    for number in range(20):
        length = int(chance.integers(10, 20_000))
        yield {
            "tokens": chance.integers(0, 1000, length),
            "weights": chance.random(length, np.float32),
            "name": f"batch {number}",
        }


def weigh(batch: dict[str, Any]) -> tuple[str, Any]:
    """What is no array comes through as it is; a result may be of any shape and type."""
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
