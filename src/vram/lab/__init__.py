"""The lab: common claims about GPU memory, tested on this machine.

`run()` measures and judges. Each experiment is a short function in one of the modules here. `markdown` turns
a run into a section of a document; `vram.cli.lab` prints it in a terminal.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from vram.core.device import Device
from vram.errors import ConfigError
from vram.system.machine import describe_machine as machine_facts

from . import copies, pages, pools, stream_order, waiting
from .experiment import Bench, Experiment, Observation, Quantity, Result, Table

__all__ = [
    "EXPERIMENTS",
    "Bench",
    "Experiment",
    "Observation",
    "Quantity",
    "Report",
    "Result",
    "Table",
    "choose",
    "run",
]


EXPERIMENTS = {
    each.name: each
    for each in (
        waiting.malloc_synchronous,
        waiting.who_waits,
        waiting.malloc_stalls,
        copies.pinned_copies,
        copies.overlap,
        copies.chunk_size,
        pools.release_threshold,
        pools.high_water_mark,
        pools.trim,
        pools.fragmentation,
        stream_order.same_stream,
        stream_order.cross_stream,
        stream_order.record_stream,
        stream_order.kernels_at_once,
        pages.grow_in_place,
        pages.two_addresses,
        waiting.capture,
    )
}
"""All experiments by name, in the order in which they run."""


@dataclass(frozen=True)
class Report:
    """One run of the lab: the machine and the results."""

    machine: dict[str, str]
    results: list[Result]

    @property
    def failed(self) -> list[Result]:
        """The experiments that failed to run."""
        return [result for result in self.results if result.failed]

    def to_json(self) -> dict[str, Any]:
        """Return the run as plain data."""
        return {"machine": self.machine, "experiments": [result.to_json() for result in self.results]}


def choose(names: Iterable[str] = ()) -> list[Experiment]:
    """Return the experiments with these names, or all of them if no name is given."""
    wanted = list(names)
    for name in wanted:
        if name not in EXPERIMENTS:
            near = difflib.get_close_matches(name, EXPERIMENTS, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"unknown experiment {name!r}.{hint} Valid names: {', '.join(EXPERIMENTS)}", name=name
            )
    return [EXPERIMENTS[name] for name in wanted] if wanted else list(EXPERIMENTS.values())


def run(
    names: Iterable[str] = (),
    device: str | Device | None = None,
    *,
    quick: bool = False,
    on_start: Callable[[Experiment], object] = lambda experiment: None,
    on_result: Callable[[Result], object] = lambda result: None,
) -> Report:
    """Run experiments on a device (default: the default device) and judge each claim."""
    chosen = choose(names)
    bench = Bench(device, quick=quick)
    results = []
    for experiment in chosen:
        on_start(experiment)
        results.append(experiment.run(bench))
        on_result(results[-1])
    return Report(describe_machine(bench.device), results)


def describe_machine(device: Device) -> dict[str, str]:
    """Describe the machine that the numbers of a run depend on."""
    machine = machine_facts(device)
    facts = machine["device"]
    described = {"device": device.name, "hardware": facts["hardware"]}
    if device.kind == "cuda":
        described["driver"] = f"CUDA {facts['driver_cuda']}"
    else:
        described["hardware"] = f"{machine['processors']} × {facts['hardware']}"
        described["note"] = "Run on the host device: memory is host memory, and streams are threads."
    return described | {"python": machine["python"], "date": machine["date"][:10]}
