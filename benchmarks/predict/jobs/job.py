"""What every job shares: its arguments, its steps, and plain pieces of networks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch

after_step: list[Callable[[int], None]] = []
"""Called with a step's number when the step ends; whoever measures a job appends to it."""


def arguments(batch_size: int, steps: int = 8) -> argparse.Namespace:
    """The arguments of a job, whose defaults it names; seeds what draws numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=batch_size)
    parser.add_argument("--steps", type=int, default=steps)
    torch.manual_seed(0)
    return parser.parse_args()


def count(steps: int) -> Iterator[int]:
    """The numbers of the steps; says when each ends."""
    for step in range(steps):
        yield step
        for call in after_step:
            call(step)
        print(f"step {step + 1}/{steps}", flush=True)
