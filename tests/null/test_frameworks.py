"""Frameworks as their users run them, on a null GPU: plain, with vram and recorded, and predicted.

The peaks and the decisions are the same, except that more fits with vram where memory is short.

The programs of a file run one after the other in one process, because imports of frameworks take the time.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vram
from vram.analysis.memory import memory_at
from vram.analysis.moments import find_moment
from vram.predict import Gpu, find_gpu, null_environment, run
from vram.predict.environment import cuda_of_torch

FRAMEWORKS = ("accelerate", "lightning", "transformers")
pytestmark = [
    pytest.mark.fork,
    pytest.mark.slow,
    pytest.mark.skipif(not cuda_of_torch(), reason="no CUDA build of PyTorch can be imported"),
]

TIMEOUT_SECONDS = 600
ROOM = 320 << 20
"""Bytes beside the context, so that the first batch is too large."""
BEGIN = """
import gc, json, os, sys, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(512, 4096), torch.nn.Linear(4096, 512)
    def forward(self, x, labels=None):
        return {"loss": (x + self.down(self.up(x).relu())).square().mean()}

def tell(path, *programs):
    told = {}
    for program in programs:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        told[program.__name__] = [program(), torch.cuda.max_memory_allocated()]
    with open(path, "w") as file:
        json.dump(told, file)
"""
ONE_GPU = """
FIRST_BATCH = 5000

def accelerate():
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size
    accelerator, tried = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2), []
    @find_executable_batch_size(starting_batch_size=FIRST_BATCH)
    def train(batch_size):
        tried.append(batch_size)
        accelerator.free_memory()
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters())
        batches = torch.utils.data.DataLoader(torch.ones(2 * batch_size, 512), batch_size=batch_size)
        net, optimizer, batches = accelerator.prepare(net, optimizer, batches)
        for batch in batches:
            with accelerator.accumulate(net):
                accelerator.backward(net(batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
    train()
    return tried

def transformers():
    from transformers import Trainer, TrainingArguments
    settings = TrainingArguments(
        sys.argv[2], auto_find_batch_size=True, per_device_train_batch_size=FIRST_BATCH, max_steps=2,
        save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=1,
    )
    samples = [{"x": torch.ones(512), "labels": torch.tensor(0)}] * FIRST_BATCH
    trainer = Trainer(Net(), settings, train_dataset=samples)
    trainer.train()
    return [trainer._train_batch_size, trainer.state.global_step]

def lightning():
    import lightning
    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()
        def training_step(self, batch, index):
            return self.net(batch)["loss"]
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())
    trainer = lightning.Trainer(
        accelerator="gpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[2],
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(256, 512), batch_size=64))
    return trainer.global_step

tell(sys.argv[1], accelerate, transformers, lightning)
"""
TWO_RANKS = """
import torch.distributed as dist
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")

def layers():  # 96 MiB of weights are more than the null GPU remembers of what the host copies
    return torch.nn.ModuleList([Net() for _ in range(6)]).cuda()

class Sum(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers
    def forward(self, x):
        return sum(each(x)["loss"] for each in self.layers)

def train(model):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(64, 512, device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(each.numel() for each in model.parameters())

def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    model, mesh = layers(), init_device_mesh("cuda", (2,))
    for each in model:
        parallelize_module(each, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return train(Sum(model))

def fully_sharded():
    from torch.distributed.fsdp import fully_shard
    model = layers()
    for each in model:
        fully_shard(each)
    return train(fully_shard(Sum(model)))

def data_parallel():
    model = torch.nn.parallel.DistributedDataParallel(Sum(layers()), device_ids=[rank])
    return train(model)

tell(f"{sys.argv[1]}.{rank}", tensor_parallel, fully_sharded, data_parallel)
dist.destroy_process_group()
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def call(gpu: Gpu, devices: int, *words: str) -> None:
    """Run a Python command on null GPUs."""
    ended = subprocess.run(
        [sys.executable, *words],
        env=null_environment(gpu, devices),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]


def told(folder: Path) -> list[dict[str, list[Any]]]:
    """What the programs of each process have told since the last call."""
    paths = sorted(folder.glob("told*"))
    found = [json.loads(path.read_text()) for path in paths]
    for path in paths:
        path.unlink()
    return found


def peak(told: dict[str, list[Any]]) -> int:
    return max(peak for _decision, peak in told.values())


def recorded_peak(path: Path) -> int:
    trace = vram.open(path)
    return memory_at(trace, find_moment(trace, "peak").event).allocated


def words(folder: Path, text: str) -> tuple[str, str, str]:
    """A script, the file for what it tells, and a folder for what frameworks write."""
    script = folder / "train.py"
    script.write_text(BEGIN + text)
    return str(script), str(folder / "told"), str(folder / "output")


def test_accelerate_transformers_and_lightning_decide_the_same(tmp_path: Path) -> None:
    missing = [name for name in FRAMEWORKS if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    gpu = find_gpu("h200")
    gpu = gpu.with_memory(gpu.overhead + ROOM)
    program, recording = words(tmp_path, ONE_GPU), tmp_path / "run.vtrace"
    call(gpu, 1, *program)
    (plain,) = told(tmp_path)
    assert len(plain["accelerate"][0]) > 1, "the first batch fits, so nothing was decided"

    call(gpu, 1, "-m", "vram", "run", "--torch", "--record", str(recording), *program)
    (under,) = told(tmp_path)
    # With vram less memory is fragmented, so a larger batch may fit; nothing else differs.
    assert under["accelerate"][0][-1] >= plain["accelerate"][0][-1]
    assert under["transformers"][0][0] >= plain["transformers"][0][0]
    assert under["lightning"] == plain["lightning"]
    assert recorded_peak(recording) == peak(under)

    found = run(program, gpu, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert told(tmp_path) == [plain] and found.fits and found.peak_allocated == peak(plain)


def test_two_ranks_need_the_same(tmp_path: Path) -> None:
    gpu, program, recording = find_gpu("h200"), words(tmp_path, TWO_RANKS), tmp_path / "run.vtrace"
    call(gpu, 2, *TORCHRUN, *program)
    plain = told(tmp_path)
    assert len(plain) == 2 and plain[0] == plain[1]

    under = ("--no-python", sys.executable, "-m", "vram", "run", "--torch", "--record", str(recording))
    call(gpu, 2, *TORCHRUN, *under, *program)
    assert told(tmp_path) == plain
    assert recorded_peak(tmp_path / "run.rank-1.vtrace") == peak(plain[1])

    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    found = run([*TORCHRUN, *program], gpu, gpus=2, **quiet)
    assert told(tmp_path) == plain
    assert [(use.rank, use.device, use.allocated) for use in found.uses] == [
        (rank, rank, peak(plain[rank])) for rank in range(2)
    ]
