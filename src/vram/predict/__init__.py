"""Will it fit? `run` runs a program on a null GPU, without a GPU, and predicts the memory that it needs.

The program runs unmodified in a process of its own, with a CUDA build of PyTorch. Kernels do nothing, but
every allocation is made by PyTorch's own allocator.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from vram.arguments import whole_number
from vram.errors import ConfigError

from .environment import null_environment, wheel_hint
from .gpus import Gpu, check_devices, find_gpu, gpus, read_gpu
from .prediction import Failure, Fit, Prediction, Use, failure_text
from .program import Ended, Program, Progress, execute, read_program
from .search import Found, Trial, best_of, place_of, search

__all__ = [
    "Failure",
    "Fit",
    "Found",
    "Gpu",
    "Prediction",
    "Progress",
    "Trial",
    "Use",
    "find",
    "find_gpu",
    "gpus",
    "null_environment",
    "run",
]

UNLIMITED = 4 << 40
"""The memory of the null GPU for a program that ran out of memory, in order to find out what it needs."""


def run(
    program: Sequence[str | os.PathLike[str]],
    gpu: str | Gpu | None = None,
    *,
    memory: int | str | None = None,
    gpus: int | None = None,
    steps: int | None = None,
    env: Mapping[str, str] | None = None,
    unlimited: bool = True,
    progress: Callable[[Progress], object] | None = None,
    **streams: Any,
) -> Prediction:
    """Run `program` on a null GPU and predict what it needs.

    `program` is a command: ["train.py", "--lr", "0.1"], ["-m", "package"] or ["torchrun", ...]. `gpu` is a
    name of `gpus()`, "h200:8" for eight of them, or a `Gpu`; `memory` replaces its memory and `gpus` their
    number. The program is stopped after `steps` steps of its optimizer or of `vram.step`. `env` is the
    environment (default: that of this process). A program that runs out of memory is run again on a GPU
    without a limit, unless `unlimited` is False. `stdout` and `stderr` are as for `subprocess.run`.
    """
    chosen, devices = _read(gpu, memory, gpus)
    found = read_program(program)
    options: dict[str, Any] = {"steps": steps, "environment": env, "progress": progress, **streams}
    prediction = _predict(found, chosen, devices, options)
    if unlimited and prediction.outcome == "out of memory":
        quiet = {**options, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        prediction.unlimited = _predict(found, chosen.with_memory(UNLIMITED), devices, quiet)
    return prediction


def find(
    program: Sequence[str | os.PathLike[str]],
    name: str,
    low: int,
    high: int,
    gpu: str | Gpu | None = None,
    *,
    memory: int | str | None = None,
    gpus: int | None = None,
    steps: int | None = None,
    env: Mapping[str, str] | None = None,
    progress: Callable[[Trial], object] | None = None,
) -> Found:
    """Find the largest value from `low` to `high` of a setting with which `program` fits, by bisection.

    `name` is an argument of the program, such as "batch_size", or "env:NAME" for an environment variable.
    `progress` is called after every trial. The other arguments are those of `run`. The program's output is
    not shown.
    """
    chosen, devices = _read(gpu, memory, gpus)
    low, high = whole_number(low, "low"), whole_number(high, "high", least=low)
    words = [os.fspath(word) for word in program]
    environment = dict(os.environ if env is None else env)
    place = place_of(name, words, environment)

    def attempt(value: int) -> Trial:
        told, variables = place.apply(words, environment, value)
        trial = _trial(value, told, chosen, gpus=devices, steps=steps, env=variables)
        if progress is not None:
            progress(trial)
        return trial

    trials = search(low, high, chosen.memory, attempt)
    return Found(" ".join(words), name, low, high, chosen, best_of(trials), tuple(trials))


def _trial(value: int, words: list[str], gpu: Gpu, **options: Any) -> Trial:
    """Run the program once, quietly. A failure for another reason than memory ends the search."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            done = run(words, gpu, unlimited=False, stdout=subprocess.DEVNULL, stderr=errors, **options)
        except ConfigError as error:
            raise ConfigError(f"{error}{_last_line(errors)}") from error
        if done.outcome == "interrupted":
            raise KeyboardInterrupt
        if done.outcome == "failed":
            command = " ".join(words)
            raise ConfigError(f"{command} {failure_text(done.status)}{_last_line(errors)}")
    return Trial(value, done.fits, done.peak_allocated, done.peak_reserved, done.peak_used)


def _last_line(errors: IO[str]) -> str:
    """What a program said last, for a message."""
    errors.seek(0)
    said = errors.read().strip().splitlines()
    return f": {said[-1]}" if said else ""


def _read(gpu: str | Gpu | None, memory: int | str | None, count: int | None) -> tuple[Gpu, int]:
    if isinstance(gpu, Gpu):
        chosen, devices = (gpu if memory is None else gpu.with_memory(memory)), 1
    else:
        chosen, devices = read_gpu(gpu, memory)
    return chosen, devices if count is None else check_devices(count)


def _predict(program: Program, gpu: Gpu, devices: int, options: dict[str, Any]) -> Prediction:
    """Run a program once. Its recordings are kept as long as the prediction."""
    folder = tempfile.mkdtemp(prefix="vram-predict-")
    try:
        ended = execute(program, folder, gpu, devices, **options)
        prediction = Prediction(program, gpu, devices, ended, folder)
        _require_result(prediction, ended)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(prediction, shutil.rmtree, folder, ignore_errors=True)
    return prediction


def _require_result(prediction: Prediction, ended: Ended) -> None:
    """Raise a ConfigError if there is nothing to predict, with the reason."""
    error = prediction.error
    if error is not None and "invalid device ordinal" in error["message"]:
        raise ConfigError(
            f"the program uses more GPUs than the {prediction.devices} that it was given; "
            f"pass --gpu {prediction.gpu.key}:8 or --gpus 8 for eight of them"
        )
    if prediction.uses:
        return
    if any(each["outcome"] == "no cuda" for each in ended.results):
        raise ConfigError(f"the program's PyTorch was built without CUDA. {wheel_hint()}")
    if ended.status != 0 and not ended.interrupted:
        raise ConfigError(f"the program {failure_text(ended.status)} before it used GPU memory")
    raise ConfigError(
        "the program did not use GPU memory, so there is nothing to predict. If it chooses the CPU itself, "
        "tell it to use CUDA; the null GPU looks like a real one to it"
    )
