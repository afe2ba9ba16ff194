"""Run a job in this process and write what PyTorch's allocator says of it, on a real GPU or a null one.

    python watch.py --result FILE [--cap BYTES] [--record] [--vram] SCRIPT [ARGUMENTS…]

Reading statistics allocates nothing, so the job is as if nobody watched.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import itertools
import json
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

PARTS = ("allocated_bytes", "reserved_bytes", "requested_bytes", "active_bytes")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", required=True)
    parser.add_argument("--cap", type=int)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--vram", action="store_true")
    parser.add_argument("script")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.vram:
        import vram.torch

        vram.torch.install()
    import torch

    watched = Watched(torch, options.vram)
    if options.cap:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.cap / total)
    if options.record:
        torch.cuda.memory._record_memory_history(context=None, stacks="python", max_entries=10**7)
    sys.path.insert(0, str(Path(options.script).resolve().parent))
    sys.argv = [options.script, *options.rest]
    import job

    job.after_step.append(watched.step)
    try:
        runpy.run_path(options.script, run_name="__main__")
        watched.result["outcome"] = "completed"
    except torch.OutOfMemoryError as error:
        watched.result |= {"outcome": "out of memory", "error": str(error)[:300]}
    except BaseException as error:
        watched.result |= {"outcome": "failed", "error": repr(error)[:500]}
        traceback.print_exc()
    watched.write(Path(options.result), record=options.record)


class Watched:
    """What is known of the job so far."""

    def __init__(self, torch: Any, over_vram: bool) -> None:
        self._torch = torch
        self.result: dict[str, Any] = {"steps": [], "out_of_memory": []}
        if not over_vram:
            torch.cuda.init()
            torch._C._cuda_attach_out_of_memory_observer(self._refused)

    def _refused(self, device: int, size: int, allowed: int, free: int) -> None:
        step = len(self.result["steps"])
        self.result["out_of_memory"].append({"step": step, "bytes": size})

    def step(self, number: int) -> None:
        cuda = self._torch.cuda
        self.result["steps"].append([cuda.max_memory_allocated(), cuda.max_memory_reserved()])

    def write(self, path: Path, *, record: bool) -> None:
        cuda, result = self._torch.cuda, self.result
        if cuda.is_initialized():
            free, total = cuda.mem_get_info()
            result["device_used"], result["device_total"] = total - free, total
            result["allocated"], result["reserved"] = cuda.max_memory_allocated(), cuda.max_memory_reserved()
            result["reserved_now"] = cuda.memory_reserved()
            stats = cuda.memory_stats()
            for part in PARTS:
                for pool in ("all", "small_pool", "large_pool"):
                    result.setdefault("stats", {})[f"{part}.{pool}"] = stats.get(f"{part}.{pool}.peak")
            for part in ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free"):
                result["stats"][part] = stats.get(part)
        if record:
            result["events"] = pack(cuda.memory._snapshot()["device_traces"][0])
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(result))
        partial.rename(path)


def pack(events: list[dict[str, Any]]) -> str:
    """Actions and sizes in order, compressed."""
    plain = [[event["action"], event["size"]] for event in events if event["action"] != "snapshot"]
    return base64.b64encode(gzip.compress(json.dumps(plain).encode(), mtime=0)).decode()


def unpack(text: str) -> list[list[Any]]:
    """What pack() was given, as lists of an action and a size."""
    events: list[list[Any]] = json.loads(gzip.decompress(base64.b64decode(text)))
    return events


def settled(events: list[list[Any]]) -> list[list[Any]]:
    """Events with the frees between two other events sorted.

    Autocast drops its copies of weights in the order of a hash table, which differs from run to run.
    """
    result: list[list[Any]] = []
    for frees, group in itertools.groupby(events, key=lambda event: event[0].startswith("free")):
        run = list(group)
        result += sorted(run) if frees else run
    return result


if __name__ == "__main__":
    main()
