"""Run real jobs with less memory than they need, spilling the rest to the host; compare time and losses.

    python benchmarks/jobs/spill.py [JOB…] [--limits 90,75,60] [--predict] [--peer] [--json FILE]

The scripts of benchmarks/predict/jobs can be named as well; their losses are not compared.

Needs PyTorch and a CUDA device with host pages. Each run is a process of its own. The first run of a job has
no limit; its peak is what the job needs, and its losses are the reference. Algorithms are deterministic, so
losses must be equal bit for bit. *Bound* is the step without a limit, and the time to move the missing memory
to the host and back at 55 GB/s; *of bound* compares what the step took beyond that step with 1.5 times the
latter. *Traffic* is what went over the bus in the whole job: pages and saved tensors that were copied, and
what is assumed to be read in place: what was in host memory at the end of each step, once, and what was freed
there, once. `--predict` records each job once more without a limit, and adds what a replay of the recording
predicts. Traffic can be compared on a null GPU as well (`vram run --null-gpu h200`); times have no meaning
there. `--peer` also runs `torch.autograd.graph.save_on_cpu(pin_memory=True)` over PyTorch's own allocator,
with all and with 90 % of the memory.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import runpy
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import vram
from vram.bench.report import Column, Table, markdown
from vram.replay import replay
from vram.trace import open_trace

JOBS = {
    "gpt2": 24,
    "llama": 16,
    "llama_recorded": 10,
    "resnet": 30,
    "experts": 12,
    "decode": 300,
    "streams": 40,
}
"""Each job and its steps."""
SCRIPTS = Path(__file__).resolve().parents[1] / "predict" / "jobs"
SCRIPT_STEPS = 12
WARM_STEPS = 4
"""Steps that find out how much is lacking, and create host memory."""
PEER_PERCENT = 90
BYTES_PER_SECOND = 55e9
MOST_SECONDS = 240
"""A run that takes longer is ended."""
MOST_SECONDS_TO_END = 30
"""So is a process that has sent its result and goes on for longer than this."""
MOVED = [f"spill.{kind}_{way}_bytes" for kind in ("moved", "saved") for way in ("out", "back")]


def measure(name: str, how: str, limit: int, spill: str, recording: str) -> dict[str, Any]:
    """Run one job in this process."""
    if how == "vram":
        from vram.torch import install

        install(**{"limit": limit or None, "spill": spill if spill != "0" else None})
    import torch
    from workloads import JOBS as WORKLOADS

    torch.use_deterministic_algorithms(name in JOBS)  # not all scripts can
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    torch.manual_seed(0)
    if how != "vram" and limit:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    on_cpu = torch.autograd.graph.save_on_cpu(pin_memory=True)
    seen = _Seen(torch, vram_only=how == "vram")
    with contextlib.ExitStack() as stack:
        if how == "save_on_cpu":
            stack.enter_context(on_cpu)
        if recording:
            stack.enter_context(vram.record(_pool(), recording))
        if name in JOBS:
            steps = WORKLOADS[name][0](JOBS[name])
            for _ in range(JOBS[name]):
                seen.begin()
                seen.end(next(steps))
        else:
            _run_script(name, seen)
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "seconds": seen.seconds,
        "losses": seen.losses,
        "spill": seen.spill,
    }


class _Seen:
    """What was measured of each step; of spilling, the counters at its end."""

    def __init__(self, torch: Any, *, vram_only: bool) -> None:
        self._torch = torch
        self._counts = vram_only
        self._begun = 0.0
        self._step = contextlib.ExitStack()
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.spill: list[dict[str, Any]] = []

    def begin(self) -> None:
        self._begun = time.perf_counter()
        self._step.enter_context(vram.step(len(self.seconds)))

    def end(self, loss: Any = 0.0) -> None:
        self._step.close()
        self._torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._begun)
        self.losses.append(float(loss))
        if self._counts:
            stats = _pool().stats()
            self.spill.append({key: stats[key] for key in stats if key.startswith("spill.")})


def _run_script(name: str, seen: _Seen) -> None:
    """Run a script, which says when its steps end."""
    sys.path.insert(0, str(SCRIPTS))
    import job

    def next_step(_number: int) -> None:
        seen.end()
        seen.begin()

    job.after_step.append(next_step)
    sys.argv = [name, "--steps", str(SCRIPT_STEPS)]
    seen.begin()
    runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    seen.end()


def _pool() -> vram.Pool:
    return vram.get_memory_manager().pool("cuda:0")


def run(name: str, how: str, limit: int = 0, spill: str = "0", recording: str = "") -> dict[str, Any]:
    """Run one job in a process of its own; on failure, say what happened."""
    receiver, sender = _context().Pipe(duplex=False)
    process = _context().Process(target=_send, args=(sender, name, how, limit, spill, recording))
    process.start()
    sender.close()
    try:
        if receiver.poll(MOST_SECONDS):
            return dict(receiver.recv())
        process.kill()
        return {"failed": f"it took longer than {MOST_SECONDS} s"}
    except EOFError:
        return {"failed": "its process died"}
    finally:
        process.join(MOST_SECONDS_TO_END)
        process.kill()
        process.join()


@functools.cache
def _context() -> Any:
    """Processes are copies of one that has imported PyTorch and has not used it: that saves seconds each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "vram.torch"])
    return context


def _send(sender: Any, *what: Any) -> None:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            sender.send(measure(*what))
    except Exception as error:
        sender.send({"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"})


def row_of(reference: dict[str, Any], result: dict[str, Any], limit: int, share: str) -> dict[str, Any]:
    """Compare a run under a limit with the one without."""
    if "failed" in result:
        return {"share": share, "completes": f"no: {result['failed'][:60]}"}
    need = reference["reserved"]
    pairs = list(zip(result["seconds"], reference["seconds"], strict=True))[WARM_STEPS:]
    bound = 2 * max(0, need - limit) / BYTES_PER_SECOND if limit else 0.0
    more = statistics.mean(ours - theirs for ours, theirs in pairs)
    spill = result["spill"]
    moved = [sum(stats[key] for key in MOVED) for stats in spill]
    return {
        "share": share,
        "completes": "yes",
        "same": "yes" if result["losses"] == reference["losses"] else "no",
        "step_ms": 1e3 * statistics.mean(ours for ours, _ in pairs),
        "plain_ms": 1e3 * statistics.mean(theirs for _, theirs in pairs),
        "bound_ms": 1e3 * bound,
        "of_bound": more / (1.5 * bound) if bound else None,
        "ratio": statistics.median(ours / theirs for ours, theirs in pairs),
        "moved": (moved[-1] - moved[WARM_STEPS - 1]) // (len(moved) - WARM_STEPS) if moved else None,
        "traffic": _traffic(spill, moved[-1]) if moved else None,
        "reserved": result["reserved"],
    }


def _traffic(spill: list[dict[str, Any]], moved: int) -> int:
    """Return what went over the bus: what was copied, and what was read at the end of a step, or freed."""
    read = sum(stats["spill.bytes"] for stats in spill)
    last = spill[-1]
    return int(
        moved + read + last["spill.moved_out_bytes"] - last["spill.moved_back_bytes"] - last["spill.bytes"]
    )


def predicted(recording: Path, limit: int, spill: str) -> int | None:
    """Return the traffic that a replay of the job without a limit predicts."""
    found = replay(open_trace(recording), capacity=limit, spill=spill).spill
    return found and found.moved_out + found.moved_back + found.read


COLUMNS = (
    Column("job", "job"),
    Column("share", "memory"),
    Column("completes", "completes"),
    Column("same", "same losses"),
    Column("plain_ms", "step without limit, ms", "ms"),
    Column("step_ms", "step, ms", "ms"),
    Column("ratio", "times", "exact ratio"),
    Column("bound_ms", "moving what is lacking, ms", "ms"),
    Column("of_bound", "of 1.5 × that", "exact ratio"),
    Column("moved", "copied per step", "bytes"),
    Column("traffic", "traffic of the job", "bytes"),
    Column("predicted", "predicted", "bytes"),
    Column("reserved", "reserved", "bytes"),
)


def main() -> None:
    """Run the jobs and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", nargs="*")
    parser.add_argument("--limits", default="90,75,60", help="percents of what the job needs")
    parser.add_argument("--spill", default="64GiB", help="host memory to use")
    parser.add_argument("--predict", action="store_true", help="also predict the traffic")
    parser.add_argument("--peer", action="store_true", help="also run save_on_cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(arguments, Path(folder))
    print(markdown(asdict(Table("Jobs with less memory than they need", COLUMNS, rows, ""))))


def compare(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run each job without a limit and with less memory; recordings go into the folder."""
    rows, results = [], {}
    to_predict: list[tuple[dict[str, Any], Path, int, str]] = []
    for name in arguments.jobs or JOBS:
        recording = folder / f"{name}.vtrace"
        reference = run(name, "vram")
        if "failed" in reference:
            rows.append({"job": name, "completes": f"no: {reference['failed'][:60]}"})
            continue
        recorded = arguments.predict and run(name, "vram", recording=str(recording))
        if recorded and "failed" in recorded:
            print(f"{name} was not recorded: {recorded['failed']}", flush=True)
        runs = [("100 %, save_on_cpu", 0, "save_on_cpu", "0")] if arguments.peer else []
        for percent in map(int, arguments.limits.split(",")):
            limit = reference["reserved"] * percent // 100
            runs.append((f"{percent} %", limit, "vram", arguments.spill))
            if arguments.peer and percent == PEER_PERCENT:
                runs.append((f"{percent} %, save_on_cpu", limit, "save_on_cpu", "0"))
        for share, limit, how, spill in runs:
            result = run(name, how, limit, spill)
            row = {"job": name, **row_of(reference, result, limit, share)}
            if how == "vram" and recorded and "failed" not in recorded:
                to_predict.append((row, recording, limit, spill))
            rows.append(row)
            results[f"{name} {share}"] = {**result, "limit": limit}
            print(row, flush=True)
        results[name] = reference
        if arguments.json:
            arguments.json.write_text(json.dumps(results))
    with ProcessPoolExecutor(mp_context=_context()) as executor:
        found = executor.map(predicted, *zip(*(rest for _, *rest in to_predict), strict=True))
        for (row, *_), traffic in zip(to_predict, found, strict=True):
            row["predicted"] = traffic
            print(row["job"], row["share"], traffic, flush=True)
    return rows


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
