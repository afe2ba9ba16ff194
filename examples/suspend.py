"""One process that trains and serves in turn, on a device that has memory for only one of the two.

While it serves, the memory of the training (data, weights, momentum) is released to the driver, and its
contents are in host memory. The arrays of the training keep their addresses, and the final weights are
bit-identical to those of an uninterrupted training. NumPy on the host, PyTorch on a GPU:
`python examples/suspend.py [device]`.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import vram

ROWS, COLUMNS, STEPS = 1 << 14, 1 << 10, 4
ROUNDS = 3


def array(buffer: vram.Buffer, *shape: int) -> Any:
    """Return the buffer as an array of 32-bit floats, without a copy: NumPy on the host, PyTorch on a GPU."""
    if buffer.device.kind == "cuda":
        import torch

        return torch.from_dlpack(buffer).view(torch.float32).view(*shape)
    return np.asarray(buffer).view(np.float32).reshape(*shape)


def filled(pool: vram.Pool, values: Any) -> Any:
    """Create an array in the pool that holds `values`."""
    buffer = pool.allocate(values.nbytes)
    buffer.copy_from(np.ascontiguousarray(values))
    return array(buffer, *values.shape)


class Training:
    """Linear regression by gradient descent with momentum."""

    def __init__(self, pool: vram.Pool) -> None:
        """Allocate data, weights and momentum in the pool, with the tag "training"."""
        random = np.random.default_rng(1)
        data = random.standard_normal((ROWS, COLUMNS), np.float32)
        with vram.tag("training"):
            self.data = filled(pool, data)
            self.target = filled(pool, data @ random.standard_normal((COLUMNS, 1), np.float32))
            self.weights = filled(pool, np.zeros((COLUMNS, 1), np.float32))
            self.momentum = filled(pool, np.zeros((COLUMNS, 1), np.float32))

    def run(self, steps: int) -> float:
        """Run this many steps and return the loss."""
        for _ in range(steps):
            error = self.data @ self.weights - self.target
            self.momentum *= 0.5
            self.momentum -= 0.3 / ROWS * (self.data.T @ error)
            self.weights += self.momentum
        return float((error * error).mean())


def serve(pool: vram.Pool, requests: int) -> float:
    """Answer requests with a table that needs the memory of the training; it is freed afterwards."""
    table = array(pool.allocate(ROWS * COLUMNS * 4), ROWS, COLUMNS)
    table[:] = 0.5
    return float(sum(table[request].sum() for request in range(requests)))


def weights_of(training: Training) -> bytes:
    """Return the weights as bytes, to compare them bit by bit."""
    weights = training.weights
    return bytes(np.asarray(weights.cpu() if hasattr(weights, "cpu") else weights).tobytes())


def main() -> None:
    """Alternate, and compare with an uninterrupted training."""
    device = vram.Device(sys.argv[1] if len(sys.argv) > 1 else None)
    limit = ROWS * COLUMNS * 4 * 3 // 2  # enough for the training or for the table, not for both

    def say(what: str, pool: vram.Pool) -> None:
        stats = pool.stats()
        figures = (stats.reserved, stats.suspended, device.free_memory)
        reserved, suspended, free = map(vram.format_size, figures)
        print(f"{what:32} reserved {reserved:>8}, suspended {suspended:>8}, free on the device {free}")

    with vram.Pool(device) as alone:
        undisturbed = Training(alone)
        undisturbed.run(ROUNDS * STEPS)
        expected = weights_of(undisturbed)
        del undisturbed

    with vram.Pool(device, limit=limit) as pool:
        training = Training(pool)
        for turn in range(ROUNDS):
            loss = training.run(STEPS)
            say(f"round {turn}: trained, loss {loss:.4f}", pool)
            pool.suspend("training")
            say("  suspended", pool)
            answered = serve(pool, requests=100)
            say(f"  served, sum {answered:.0f}", pool)
            pool.resume("training")
            say("  resumed", pool)
        same = weights_of(training) == expected
        print(f"weights compared with an uninterrupted training: {'bit-identical' if same else 'DIFFERENT'}")
        del training
        if not same:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
