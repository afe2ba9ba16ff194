"""How much memory does the pool hold for what a real job needs, and what does the driver charge for it?

Replays the recorded jobs through the real pool on a model device, beside what PyTorch's allocators were
measured to hold in real runs of the same jobs on an H200. `--json` for machines.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from vram.replay import compare
from vram.trace import open_trace

TRACES = Path(__file__).resolve().parent.parent / "traces"
MIB = 1024 * 1024
# Peak reserved MiB, measured: PyTorch's default, its expandable segments, cudaMallocAsync (traces/README.md).
PEERS = {
    "gpt2_train": (14578, 13870, 14080),
    "llama_varlen_ckpt": (17864, 13850, 14208),
    "resnet_multiscale": (8846, 6650, 6880),
    "llm_serve": (2100, 1604, 1696),
    "multistream_prefetch": (4278, 2344, 2112),
}


def replayed(name: str, conf: dict[str, object] | None = None) -> dict[str, object]:
    """One job through the pool; `open_seconds` is reading the file."""
    start = time.perf_counter()
    trace = open_trace(TRACES / f"{name}.pickle.xz")
    opened = time.perf_counter() - start
    report = compare(trace, ["vram"], conf=conf)
    total = time.perf_counter() - start
    result = report.to_json()
    result["job"] = name if not conf else f"{name} {conf}"
    result["open_seconds"] = opened
    result["total_seconds"] = total
    result["span_us"] = trace.span_us
    return result


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [replayed(name) for name in PEERS]
    rows.append(replayed("multistream_prefetch", {"cross_stream": "wait"}))
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(
        f"{'job':<48}{'allocated':>10}{'default':>9}{'expand.':>9}{'async':>9}{'vram':>9}{'ratio':>8}"
        f"{'driver':>9}{'events/s':>10}{'open':>7}"
    )
    for row in rows:
        policy = row["policies"][0]  # type: ignore[index]
        peers = PEERS[str(row["job"]).split()[0]]
        peak = policy["peak_allocated"] / MIB
        share = policy["driver_us"] / row["span_us"]  # type: ignore[operator]
        print(
            f"{row['job']:<48}{peak:>10.0f}"
            + "".join(f"{peer / peak:>9.3f}" for peer in peers)
            + f"{policy['peak_reserved'] / MIB:>9.0f}{policy['ratio']:>8.4f}{share:>9.2%}"
            f"{policy['events_per_second'] / 1e6:>9.1f}M{row['open_seconds']:>6.1f}s"
        )


if __name__ == "__main__":
    main()
