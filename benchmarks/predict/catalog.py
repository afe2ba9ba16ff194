"""The jobs that predictions are checked with: which script, which arguments, what is measured of each.

They were chosen for variety before any of them was predicted. Sizes are set so that most need 1 to 20 GiB.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ALLOCATORS = {"default": "", "expandable": "expandable_segments:True"}


@dataclass(frozen=True)
class Job:
    """A script of jobs/ with its arguments."""

    name: str
    arguments: tuple[str, ...]
    kind: str
    gib: int = 12
    """Bound on what it needs, so that jobs side by side fit on a GPU."""
    needs: tuple[str, ...] = ()
    """Packages besides PyTorch."""
    compiled: bool = False
    """Whether torch.compile runs, which takes a minute on few cores."""


def _workload(name: str, steps: int, kind: str, gib: int = 20) -> Job:
    return Job(name, ("workload.py", name, "--steps", str(steps)), kind, gib)


def _script(name: str, kind: str, **rest: object) -> Job:
    return Job(name, (f"{name}.py",), kind, **rest)  # type: ignore[arg-type]


def _timm(name: str) -> Job:
    return Job(f"timm_{name}", ("timm_model.py", name), "convolution", needs=("timm",))


JOBS = {
    job.name: job
    for job in (
        _workload("gpt2", 8, "transformer"),
        _workload("llama", 10, "transformer"),
        _workload("llama_recorded", 10, "transformer"),
        _workload("resnet", 10, "convolution"),
        _workload("experts", 10, "values decide"),
        _workload("decode", 4, "serving"),
        _workload("streams", 10, "transformer"),
        _script("unet", "convolution"),
        _script("vgg", "convolution"),
        _script("convnext", "convolution"),
        _script("mobilenet", "convolution"),
        _script("dcgan", "convolution"),
        _script("video", "convolution"),
        _script("segment", "convolution"),
        _script("exact", "convolution"),
        _script("diffusion", "convolution", gib=20),
        _script("multires", "convolution"),
        _script("tuned", "convolution"),
        _script("loader", "convolution"),
        _script("vit", "transformer"),
        _script("bert", "transformer"),
        _script("translate", "transformer"),
        _script("accumulate", "transformer"),
        _script("adapters", "transformer", gib=20),
        _script("beam", "serving"),
        _script("graphed", "graphs"),
        _script("compiled", "compiled", compiled=True),
        _script("compiled_conv", "compiled", compiled=True),
        _script("lstm", "recurrent"),
        _script("speech", "recurrent"),
        _script("fourier", "other libraries"),
        _script("linear_algebra", "other libraries"),
        _script("graph_network", "other libraries"),
        _script("recommender", "values decide"),
        _script("detect", "values decide"),
        _timm("resnet50"),
        _timm("efficientnet_b0"),
        _timm("swin_tiny_patch4_window7_224"),
        Job("hf_llama", ("hf_llama.py",), "transformer", needs=("transformers", "peft")),
        Job("hf_t5", ("hf_t5.py",), "transformer", needs=("transformers",)),
    )
}

CAPS = (0.98, 0.85, 0.6)
"""Limits on what the allocator reserves, as parts of the peak measured without one."""

ALONE = ("gpt2", "resnet", "unet", "lstm", "compiled", "linear_algebra", "vit", "fourier")
"""Jobs that also run with the GPU to themselves, to see what the device uses beyond the allocator."""

RECORDED = (
    *("vit", "dcgan", "lstm", "unet", "bert", "vgg", "resnet", "segment", "exact", "mobilenet", "video"),
    *("loader", "tuned", "speech", "fourier", "linear_algebra", "graphed", "detect", "diffusion"),
)
"""Jobs whose allocations are also recorded one by one, for RECORDED_STEPS steps."""
RECORDED_STEPS = 3

UNDER_VRAM = ("gpt2", "llama", "resnet", "decode", "streams", "unet", "convnext", "bert", "lstm", "beam")
"""Jobs that also run over vram.torch.install()."""


@dataclass(frozen=True)
class Search:
    """Looks for the largest batch size with which a job completes `steps` steps under a limit."""

    job: str
    most: int
    cap: int
    steps: int = 3


SEARCHES = (Search("vit", 128, 6 << 30), Search("unet", 32, 10 << 30), Search("bert", 96, 14 << 30))


def command(job: Job, result: Path, *watch: str, script: tuple[str, ...] = ()) -> list[str]:
    """Runs a job under watch.py, which writes what it saw to `result`."""
    path, *rest = job.arguments
    watcher = [sys.executable, str(HERE / "watch.py"), "--result", str(result), *watch]
    return [*watcher, str(HERE / "jobs" / path), *rest, *script]


def environment(base: Mapping[str, str], allocator: str, caches: Path) -> dict[str, str]:
    """The variables of a job's process: which allocator, and compiler caches that nobody filled before."""
    variables = {key: value for key, value in base.items() if "ALLOC_CONF" not in key}
    if ALLOCATORS[allocator]:
        variables["PYTORCH_ALLOC_CONF"] = variables["PYTORCH_CUDA_ALLOC_CONF"] = ALLOCATORS[allocator]
    return {
        **variables,
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "OMP_NUM_THREADS": "2",
    }
