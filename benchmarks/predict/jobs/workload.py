"""A job of benchmarks/jobs by name; those have sizes of their own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from job import count

sys.path.append(str(Path(__file__).resolve().parents[2] / "jobs"))
from workloads import JOBS

parser = argparse.ArgumentParser()
parser.add_argument("name", choices=JOBS)
parser.add_argument("--steps", type=int, default=10)
options = parser.parse_args()
torch.manual_seed(0)
job = JOBS[options.name][0](options.steps)
for _ in count(options.steps):
    next(job)
