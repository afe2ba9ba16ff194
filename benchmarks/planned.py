"""What does a planned step cost, and how much memory does it need?

    python benchmarks/planned.py [--device cuda:0] [--json FILE]

From Python: an allocation and its free out of the stream's cache, and at its offset of a plan; on any device.
With PyTorch and a CUDA device: GPT-2 steps, planned and not, each in a process of its own. The lower bound is
the most that the step without a plan has live at one time; reserved is the peak of settled steps.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import vram
from vram.sizes import format_size

JOBS = Path(__file__).resolve().parent / "jobs"
PAIRS, ROUNDS = 2000, 30
SIZES = {"512 B": 512, "256 KiB": 256 << 10, "64 MiB": 64 << 20}
STEPS, SETTLED = 16, 6
RESULT = "RESULT "


def pair_cost(pool: vram.Pool, size: int) -> float:
    """Nanoseconds of one malloc and free, in a loop."""
    malloc, free = pool.malloc, pool.free
    begun = time.perf_counter_ns()
    for _ in range(PAIRS):
        free(malloc(size))
    return (time.perf_counter_ns() - begun) / PAIRS


def cost(device: str) -> list[dict[str, Any]]:
    """Medians over rounds in which both take turns, so that both meet the same machine."""
    rows = []
    for name, size in SIZES.items():
        with vram.Pool(device) as pool:
            cached, planned_costs = [], []
            pair_cost(pool, size)
            for _ in range(2):
                with vram.planned(pool) as planned:
                    pair_cost(pool, size)
            for _ in range(ROUNDS):
                cached.append(pair_cost(pool, size))
                with planned:
                    planned_costs.append(pair_cost(pool, size))
            hits = planned.report().hits
        assert hits == (ROUNDS + 1) * PAIRS, "not every allocation was planned"
        of = {"cached": statistics.median(cached), "planned": statistics.median(planned_costs)}
        rows.append({"size": name, **of, "ratio": of["planned"] / of["cached"]})
    return rows


def gpt2(with_plan: bool) -> dict[str, Any]:
    """Train in this process."""
    import vram.torch

    vram.torch.install(max_page="2MiB")
    sys.path.insert(0, str(JOBS))
    import torch
    from workloads import gpt2 as job_of

    torch.manual_seed(0)
    pool = vram.get_memory_manager().pool("cuda:0")
    planned = vram.planned(pool)
    job, seconds, losses = job_of(STEPS), [], []
    for number in range(STEPS):
        if number == SETTLED:
            torch.cuda.synchronize()
            pool.trim(wait=True)
            pool.reset_peak()
            before = planned.report()
        begun = time.perf_counter()
        if with_plan:
            with planned:
                losses.append(next(job))
        else:
            losses.append(next(job))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    stats, after = pool.stats(), planned.report()
    return {
        "planned": with_plan,
        "allocated": stats.peak_allocated,
        "reserved": stats.peak_reserved,
        "step_ms": 1e3 * statistics.median(seconds[SETTLED:]),
        "slowest_ms": 1e3 * max(seconds[1:]),
        "plans": after.plans,
        "hits": after.hits - before.hits,
        "left": after.left - before.left,
        "fallbacks": after.fallbacks - before.fallbacks,
        "region": after.planned_bytes,
        "losses": [float(loss) for loss in losses],
    }


def in_process(with_plan: bool) -> dict[str, Any]:
    """Run it in a new process."""
    command = [sys.executable, __file__, "--one", "planned" if with_plan else "free"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in ended.stdout.splitlines() if line.startswith(RESULT)]
    if not lines:
        raise SystemExit(f"the job failed:\n{ended.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(lines[-1].removeprefix(RESULT))
    return result


def has_gpu_and_torch() -> bool:
    """Whether there is anything to train on."""
    return importlib.util.find_spec("torch") is not None and any(
        device.kind == "cuda" for device in vram.devices()
    )


def main() -> None:
    """Print two tables, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda:0" if has_gpu_and_torch() else "host")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--one", choices=["planned", "free"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(RESULT + json.dumps(gpt2(arguments.one == "planned")))
        return
    result: dict[str, Any] = {"device": arguments.device, "cost": cost(arguments.device), "gpt2": []}
    print(f"{'malloc and free, ns':24} {'cached':>10} {'planned':>10} {'ratio':>8}")
    for row in result["cost"]:
        print(f"{row['size']:24} {row['cached']:10.0f} {row['planned']:10.0f} {row['ratio']:8.2f}")
    if arguments.device.startswith("cuda") and has_gpu_and_torch():
        free, planned = result["gpt2"] = [in_process(False), in_process(True)]
        bound = free["allocated"]
        print(f"\n{'GPT-2 step':24} {'reserved':>12} {'÷ bound':>10} {'step, ms':>10} {'slowest':>10}")
        for name, row in (("pool", free), ("planned", planned)):
            row["ratio"] = row["reserved"] / bound
            print(
                f"{name:24} {format_size(row['reserved']):>12} {row['ratio']:10.4f} {row['step_ms']:10.1f} "
                f"{row['slowest_ms']:10.1f}"
            )
        print(
            f"lower bound {format_size(bound)}; {planned['hits']} at their offsets, {planned['left']} left "
            f"to the pool, {planned['fallbacks']} fallbacks in {STEPS - SETTLED} steps; "
            f"{planned['plans']} plans"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
