"""Run real jobs with PyTorch's allocators and with vram; compare memory, time and loss.

    python benchmarks/jobs/run.py [JOB…] [--allocators default,expandable,async,vram] [--json FILE]

Needs PyTorch and a CUDA device. Each allocator runs in its own process. The processes of a job take their
steps in turns, so that a disturbance affects all of them. Reserved ÷ allocated compares peaks; the time of a
step is the median. "Of default, step by step" divides each step by the same step under the default allocator
and is the median of these quotients; `again` is the default a second time and shows what is noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vram.bench.report import Column, Table, markdown

ALLOCATORS = {
    "default": "",
    "again": "",  # the default a second time: what differs between the two is noise
    "expandable": "expandable_segments:True",
    "async": "backend:cudaMallocAsync",
    "vram": "",
    "spill": "",  # vram with the option `spill`, which must cost nothing while memory is not short
}
OURS = ("vram", "spill")
WARM_STEPS = 3
RESULT = "RESULT "


def measure(name: str, allocator: str, cap: int, deterministic: bool) -> None:
    """Run one job in this process, one step per line of input; the last line of output is the result."""
    if allocator in OURS:
        import vram.torch

        vram.torch.install(spill="64GiB" if allocator == "spill" else None)
    import torch
    from workloads import JOBS

    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    total = torch.cuda.get_device_properties(0).total_memory
    if cap:
        torch.cuda.set_per_process_memory_fraction(cap / total)
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = False
    job, count = JOBS[name]
    steps = job(count)
    seconds, losses, held, most_held, calls = [], [], 0, 0, []
    for line in sys.stdin:
        free = torch.cuda.mem_get_info()[0]
        begun = time.perf_counter()
        loss = next(steps, None)
        if loss is None:
            break
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
        held += free - torch.cuda.mem_get_info()[0]  # the others wait: what changed is ours
        most_held = max(most_held, held)
        losses.append(float(loss))
        if allocator in OURS:
            calls.append(_driver_calls())
        print(line.strip(), flush=True)
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    result = {
        "job": name,
        "allocator": allocator,
        "allocated": allocated,
        "reserved": reserved,
        "ratio": reserved / allocated,
        "device": most_held,
        "step_ms": 1e3 * statistics.median(seconds[WARM_STEPS:]),
        "first_ms": 1e3 * seconds[0],
        "total_s": sum(seconds),
        "seconds": seconds,
        "losses": losses,
    }
    if allocator in OURS:
        pool = vram.get_memory_manager().pool("cuda:0")
        result |= {"rungs": dict(pool.stats().rungs), "calls": calls, "check": pool.check()}
    print(RESULT + json.dumps(result), flush=True)


def _driver_calls() -> int:
    import vram

    stats = vram.get_memory_manager().pool("cuda:0").stats()
    return stats["pages.mappings"] + stats["num_device_alloc"]


class Runner:
    """One job with one allocator, in a process that makes a step on request."""

    def __init__(self, name: str, allocator: str, cap: int, deterministic: bool) -> None:
        self.name, self.allocator, self.result = name, allocator, None
        environment = {**os.environ, "PYTORCH_ALLOC_CONF": ALLOCATORS[allocator]}
        environment["PYTORCH_CUDA_ALLOC_CONF"] = ALLOCATORS[allocator]
        if deterministic:
            environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        command = [sys.executable, __file__, "--one", name, allocator, str(cap), str(int(deterministic))]
        pipe = subprocess.PIPE
        self._errors = open(os.memfd_create("stderr"), "w+", encoding="utf-8")  # noqa: SIM115 lives as we do
        self._process = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=self._errors, text=True
        )

    def step(self) -> None:
        """Make one step and wait for it; after the last one, `result` is set, or describes the failure."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it failed between two steps: its output ends
        for line in self._process.stdout:
            if line.startswith(RESULT):
                self.result = json.loads(line.removeprefix(RESULT))
            elif line == "go\n":
                return
        self._process.wait()
        if self.result is None:
            self._errors.seek(0)
            last = self._errors.read().strip().splitlines()[-1:]
            self.result = {"job": self.name, "allocator": self.allocator, "failed": last}


def run_job(name: str, allocators: list[str], cap: int, deterministic: bool) -> list[dict[str, Any]]:
    """Return one result per allocator. The allocator that begins changes from round to round."""
    runners = [Runner(name, allocator, cap, deterministic) for allocator in allocators]
    going = list(runners)
    while going:
        for runner in going:
            runner.step()
        going = [runner for runner in going[1:] + going[:1] if runner.result is None]
    return [runner.result for runner in runners if runner.result]


COLUMNS = (
    Column("job", "job"),
    Column("allocator", "allocator"),
    Column("allocated", "allocated", "bytes"),
    Column("reserved", "reserved", "bytes"),
    Column("ratio", "reserved ÷ allocated", "exact ratio"),
    Column("device", "device", "bytes"),
    Column("step_ms", "step, ms", "ms"),
    Column("of_default", "of default, step by step", "exact ratio"),
    Column("of_fastest", "of PyTorch's fastest", "exact ratio"),
    Column("same_losses", "same losses"),
)


def table(results: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    worked = [result for result in results if "failed" not in result]
    rows = [{**result, **compared(result, worked)} for result in worked]
    failed = [f"{each['job']} {each['allocator']}: {each['failed']}" for each in results if "failed" in each]
    note = f"Failed: {'; '.join(failed)}" if failed else ""
    return markdown(asdict(Table("Jobs under each allocator", COLUMNS, rows, note)))


def compared(result: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare a result with PyTorch's own allocators on the same job."""
    others = [each for each in results if each["job"] == result["job"] and each["allocator"] not in OURS]
    fastest = min((each["step_ms"] for each in others), default=result["step_ms"])
    reference = next((each for each in others if each["allocator"] == "default"), result)
    same = "yes" if result["losses"] == reference["losses"] else "no"
    steps = zip(result["seconds"][WARM_STEPS:], reference["seconds"][WARM_STEPS:], strict=False)
    return {
        "of_default": statistics.median(ours / theirs for ours, theirs in steps),
        "of_fastest": result["step_ms"] / fastest,
        "same_losses": same,
    }


def main() -> None:
    """Run the jobs and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", nargs="*")
    parser.add_argument("--allocators", default="default,expandable,async,vram")
    parser.add_argument("--cap", type=int, default=0, help="most MiB that the allocator may hold")
    parser.add_argument("--deterministic", action="store_true", help="only algorithms that repeat exactly")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, allocator, cap, deterministic = arguments.one
        measure(name, allocator, int(cap), deterministic == "1")
        return
    jobs = arguments.jobs or ["gpt2", "llama", "resnet", "experts", "decode", "streams", "empty"]
    results = []
    for name in jobs:
        found = run_job(name, arguments.allocators.split(","), arguments.cap << 20, arguments.deterministic)
        for result in found:
            print(
                f"{name} {result['allocator']}: {result.get('step_ms', result.get('failed'))}",
                file=sys.stderr,
            )
        results += found
        if arguments.json:  # after each job: what was measured stays when a later one hangs
            arguments.json.write_text(json.dumps(results), encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
