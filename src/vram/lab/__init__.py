"""The lab: what people say about GPU memory, tested on the device at hand.

`run()` measures and judges; each experiment is a short function in one of the modules here. `markdown` turns
a run into a section of a document. Drawing in a terminal is for `vram.cli.lab`.
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
"""Every experiment by name, in the order they are run."""


@dataclass(frozen=True)
class Report:
    """One run of the lab: the machine and the results."""

    machine: dict[str, str]
    results: list[Result]

    @property
    def failed(self) -> list[Result]:
        """The experiments that could not be carried out."""
        return [result for result in self.results if result.failed]

    def to_json(self) -> dict[str, Any]:
        """The run as plain data."""
        return {"machine": self.machine, "experiments": [result.to_json() for result in self.results]}


def choose(names: Iterable[str] = ()) -> list[Experiment]:
    """The experiments of these names, all of them where none is named."""
    wanted = list(names)
    for name in wanted:
        if name not in EXPERIMENTS:
            near = difflib.get_close_matches(name, EXPERIMENTS, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"there is no experiment {name!r}.{hint} There are: {', '.join(EXPERIMENTS)}", name=name
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
    """Run experiments on a device (the default device where none is given) and judge each claim."""
    chosen = choose(names)
    bench = Bench(device, quick=quick)
    results = []
    for experiment in chosen:
        on_start(experiment)
        results.append(experiment.run(bench))
        on_result(results[-1])
    return Report(describe_machine(bench.device), results)


def describe_machine(device: Device) -> dict[str, str]:
    """What the numbers of a run depend on."""
    machine = machine_facts(device)
    facts = machine["device"]
    described = {"device": device.name, "hardware": facts["hardware"]}
    if device.kind == "cuda":
        described["driver"] = f"CUDA {facts['driver_cuda']}"
    else:
        described["hardware"] = f"{machine['processors']} × {facts['hardware']}"
        described["note"] = "Run on the host device, where memory is the machine's and streams are threads."
    return described | {"python": machine["python"], "date": machine["date"][:10]}
