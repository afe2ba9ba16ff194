"""Measure how much memory the pool reserves for recorded jobs, and the driver time that this costs.

Replays the recorded jobs through the real pool on a model device. The peers' figures were measured in real
runs of the same jobs with PyTorch's allocators on an H200.
"""

from __future__ import annotations

import time
from pathlib import Path

from vram.bench.report import Column, Report, Table
from vram.cli.bench import measuring_command
from vram.core.device import Device
from vram.replay import compare
from vram.trace import open_trace

TRACES = Path(__file__).resolve().parent.parent / "traces"
MIB = 1024 * 1024
ALLOCATORS = ("PyTorch", "expandable", "async")
# Peak reserved MiB of PyTorch's default, its expandable segments, cudaMallocAsync (traces/README.md).
PEERS = {
    "gpt2_train": (14578, 13870, 14080),
    "llama_varlen_ckpt": (17864, 13850, 14208),
    "resnet_multiscale": (8846, 6650, 6880),
    "llm_serve": (2100, 1604, 1696),
    "multistream_prefetch": (4278, 2344, 2112),
}


def replayed(name: str, conf: dict[str, object] | None = None) -> dict[str, object]:
    """Replay one job through the pool; `open_s` is the time to read the file."""
    start = time.perf_counter()
    trace = open_trace(TRACES / f"{name}.pickle.xz")
    opened = time.perf_counter() - start
    policy = compare(trace, ["vram"], conf=conf).to_json()["policies"][0]
    peak = policy["peak_allocated"]
    return {
        **policy,
        **{peer: reserved * MIB / peak for peer, reserved in zip(ALLOCATORS, PEERS[name], strict=True)},
        "job": name if not conf else f"{name} {conf}",
        "driver_share": policy["driver_us"] / trace.span_us,
        "open_s": opened,
    }


def run(device: str | None, *, quick: bool) -> Report:
    rows = [replayed(name) for name in (list(PEERS)[-1:] if quick else PEERS)]
    rows.append(replayed("multistream_prefetch", {"cross_stream": "wait"}))
    columns = [
        Column("job", "job"),
        Column("peak_allocated", "allocated", "bytes"),
        *(Column(peer, peer, "exact ratio") for peer in ALLOCATORS),
        Column("peak_reserved", "vram reserved", "bytes"),
        Column("ratio", "vram", "exact ratio"),
        Column("driver_share", "driver", "exact share"),
        Column("events_per_second", "events per second", "count"),
        Column("open_s", "open, s", "s"),
    ]
    title = "Peak reserved over allocated"
    return Report.of("waste", Device(device), [Table(title, columns, rows)], quick=quick)


if __name__ == "__main__":
    measuring_command("waste", __doc__, run)()
