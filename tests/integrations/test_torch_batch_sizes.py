"""Libraries that search for the largest batch that fits: they must recognise vram's out-of-memory errors.

Each program runs with vram and with PyTorch's own allocator, under the same limit. The search must succeed in
both, and vram must find at least as large a batch.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from torch_programs import INSTALL, WITHOUT, output, run, told

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.fork,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
]

NO_COMPILER = {"CXX": "", "PATH": "/nonexistent", "XDG_CACHE_HOME": "/nonexistent"}
"""Makes install() use PyTorch's pluggable allocator."""

LIMITED = """
    import json
    torch.cuda.set_per_process_memory_fraction((1 << 30) / torch.cuda.mem_get_info()[1])
    tried = []
    def loss_of(layer, batch):  # 4 MiB a sample, three times
        tried.append(len(batch))
        return (layer(batch) * torch.ones(len(batch), 1 << 20, device=batch.device)).square().mean()
"""
FOUND = """
    print(json.dumps({"found": found, "tried": tried, "live": torch.cuda.memory_allocated()}))
"""

ACCELERATE = """
    from accelerate.utils import find_executable_batch_size
    layer = torch.nn.Linear(16, 1).cuda()
    @find_executable_batch_size(starting_batch_size=128)
    def train(batch_size):
        loss_of(layer, torch.ones(batch_size, 16, device="cuda")).backward()
        return batch_size
    found = train()
"""

LIGHTNING = """
    import sys
    import lightning
    from lightning.pytorch.tuner import Tuner
    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.batch_size = 4
            self.layer = torch.nn.Linear(16, 1)
        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.ones(4096, 16), batch_size=self.batch_size)
        def training_step(self, batch, index):
            return loss_of(self.layer, batch)
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)
    trainer = lightning.Trainer(
        accelerator="gpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[1],
    )
    found = Tuner(trainer).scale_batch_size(Model(), mode=sys.argv[2], steps_per_trial=1)
"""

TRANSFORMERS = """
    import sys
    from transformers import Trainer, TrainingArguments
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(16, 1)
        def forward(self, x, labels=None):
            return {"loss": loss_of(self.layer, x)}
    settings = TrainingArguments(
        sys.argv[1], auto_find_batch_size=True, per_device_train_batch_size=128, max_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True,
    )
    samples = [{"x": torch.ones(16), "labels": torch.tensor(0)}] * 256
    trainer = Trainer(Model(), settings, train_dataset=samples)
    trainer.train()
    found = trainer._train_batch_size
"""


def assert_found(ours: Any, own: Any) -> None:
    assert max(ours["tried"]) > ours["found"], "no batch was too large, so nothing was tested"
    assert ours["found"] >= own["found"]


def needs(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@needs("accelerate")
def test_accelerate_finds_a_batch_size() -> None:
    ours, own = (told(start, LIMITED, ACCELERATE, FOUND) for start in (INSTALL, WITHOUT))
    assert_found(ours, own)
    assert ours["live"] <= own["live"] + (1 << 20), "a failed attempt left memory behind"


@needs("accelerate")
def test_accelerate_finds_a_batch_size_without_a_compiler() -> None:
    ours = told(INSTALL, LIMITED, ACCELERATE, FOUND, **NO_COMPILER)
    assert max(ours["tried"]) > ours["found"] > 1


@needs("lightning", "torchmetrics", "lightning_utilities")
@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_lightning_finds_a_batch_size(mode: str, tmp_path: Any) -> None:
    arguments = (str(tmp_path), mode)
    ours, own = (told(start, LIMITED, LIGHTNING, FOUND, arguments=arguments) for start in (INSTALL, WITHOUT))
    assert_found(ours, own)


@needs("accelerate", "transformers")
def test_transformers_finds_a_batch_size(tmp_path: Any) -> None:
    arguments = (str(tmp_path),)
    ours, own = (
        told(start, LIMITED, TRANSFORMERS, FOUND, arguments=arguments) for start in (INSTALL, WITHOUT)
    )
    assert_found(ours, own)


# ---- the text ---------------------------------------------------------------------------------------------

TOO_LARGE = """
    import re
    def text_of(error):
        # PyTorch lists processes where it can ask for them, and ends with advice about its own settings.
        first = str(error).partition("\\n")[0].partition(" If reserved but unallocated")[0]
        who = r"(Process \\d+|Including non-PyTorch memory, this process)"
        return re.sub(who + r" has [\\d.]+ .iB memory in use[.] ", "", first)
    kept = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    for fraction in (None, 0.01):
        if fraction is not None:
            torch.cuda.set_per_process_memory_fraction(fraction)
        for size in (1 << 50, 200 << 30):
            try:
                torch.empty(size, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError as error:
                # How much is free depends on what else uses the GPU.
                print(re.sub(r"of which [\\d.]+ .iB is free", "of which some is free", text_of(error)))
"""


def test_the_first_line_is_the_text_of_pytorch() -> None:
    lines = output(INSTALL, TOO_LARGE).splitlines()
    assert lines == output(WITHOUT, TOO_LARGE).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith(
        "CUDA out of memory. Tried to allocate 1048576.00 GiB. GPU 0 has a total capacity of "
    )
    assert " allowed; Of the allocated memory 64.00 MiB is allocated by PyTorch" in lines[2]


@pytest.mark.parametrize("environment", [{}, NO_COMPILER], ids=["compiled", "pluggable"])
def test_an_explanation_follows_the_text_of_pytorch(environment: dict[str, str]) -> None:
    program = """
        try:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        except RuntimeError as error:
            print(error)
    """
    text = output(INSTALL, program, **environment)
    assert text.startswith(
        "CUDA out of memory. Tried to allocate 1048576.00 GiB. GPU 0 has a total capacity of "
    )
    assert "What would help" in text


def test_the_text_is_one_argument_of_the_error() -> None:
    ended = run(
        INSTALL,
        """
        try:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            assert len(error.args) == 1 and isinstance(error, RuntimeError)
        else:
            raise AssertionError
        """,
    )
    assert ended.returncode == 0, ended.stderr
