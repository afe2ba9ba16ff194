"""What the processes of a predicted program would leave, and programs that leave it themselves."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from made_jobs import GIB, MIB, Job

DEVICE: dict[str, Any] = {
    "device": 0,
    "peak_allocated": 100 << 20,
    "peak_reserved": 200 << 20,
    "peak_used": 300 << 20,
    "retries": 0,
}
RESULT: dict[str, Any] = {
    "pid": 1,
    "rank": None,
    "outcome": "completed",
    "torch": "2",
    "arguments": [],
    "seconds": 1.0,
    "steps": 3,
    "devices": [DEVICE],
    "failures": [],
    "error": None,
    "recordings": [],
    "guesses": [],
    "unknown": [],
    "problems": [],
    "static_runtimes": [],
}
LEAVE = (
    "import json, os, sys, time\n"
    "def leave(result, name='1'):\n"
    "    path = os.path.join(os.environ['VRAM_PREDICT_FOLDER'], name)\n"
    "    open(path + '.part', 'w').write(json.dumps(result))\n"
    "    os.replace(path + '.part', path + '.json')\n"
)


def program(folder: Path, body: str, result: dict[str, Any] | None = None) -> str:
    """A script that leaves a result, then does what `body` says."""
    path = folder / "program.py"
    left = "" if result is None else f"leave(json.loads({json.dumps(result)!r}))\n"
    path.write_text(LEAVE + left + textwrap.dedent(body))
    return str(path)


FAILURE = {
    "device": 0,
    "size": 5 * GIB,
    "free": MIB,
    "allocated": 9 * GIB,
    "reserved": 12 * GIB,
    "steps": 2,
    "place": "train.py:9 step",
}
OUT_OF_MEMORY = {
    "type": "OutOfMemoryError",
    "message": "CUDA out of memory",
    "place": None,
    "out_of_memory": True,
}


def recorded(folder: Path, *, oom: bool = False) -> Job:
    """A job that holds 9 GiB at its peak, and reserves 12 GiB."""
    job = Job()
    weights = job.alloc(6 * GIB, line=3)
    job.free(job.alloc(3 * GIB, line=7))
    job.free(job.alloc(3 * GIB + 2 * MIB, line=8))
    if oom:
        job.out_of_memory(5 * GIB, MIB, line=9)
    else:
        job.free(weights)
    job.save(folder / "1.pickle")
    return job


def result(**changes: Any) -> dict[str, Any]:
    used = {
        **DEVICE,
        "peak_allocated": 9 * GIB,
        "peak_reserved": 12 * GIB,
        "peak_used": 13 * GIB,
    }
    return {**RESULT, "devices": [used], "recordings": ["1.pickle"], **changes}
