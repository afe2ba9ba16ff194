"""A job of benchmarks/jobs by name; those have sizes of their own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from job import count

sys.path.append(str(Path(__file__).resolve().parents[2] / "jobs"))
from workloads import JOBS

PARTS = {"decode": 40}
"""How many times a step of a job yields, where not once."""

parser = argparse.ArgumentParser()
parser.add_argument("name", choices=JOBS)
parser.add_argument("--steps", type=int, default=10)
options = parser.parse_args()
torch.manual_seed(0)
losses = JOBS[options.name][0](options.steps)
for _ in count(PARTS.get(options.name, 1) * options.steps):
    next(losses)
