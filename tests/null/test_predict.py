"""`vram.predict` with real PyTorch on a null GPU: what a prediction says about programs of all kinds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import vram
from vram.predict import Prediction, find, find_gpu, null_environment, run
from vram.predict.environment import cuda_of_torch

pytestmark = [
    pytest.mark.fork,
    pytest.mark.slow,
    pytest.mark.skipif(not cuda_of_torch(), reason="no CUDA build of PyTorch can be imported"),
]

MIB = 1 << 20
GIB = 1 << 30
CONTEXT = find_gpu("h200").overhead
TRAIN = """
    import argparse, torch
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    size = parser.parse_args().batch_size
    layers = torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024)
    net = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(3):
        net(torch.randn(size, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path: Path) -> Any:
    def write(text: str, name: str = "train.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def predict(*words: str, **options: Any) -> Prediction:
    return run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)


def test_a_training_run_has_the_peaks_that_pytorch_counts(script: Any, tmp_path: Path) -> None:
    said = tmp_path / "said"
    count = "[torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]"
    source = textwrap.dedent(TRAIN) + f"import json; open({str(said)!r}, 'w').write(json.dumps({count}))\n"
    found = predict(script(source))
    assert [found.peak_allocated, found.peak_reserved] == json.loads(said.read_text())
    assert found.fits and found.outcome == "completed" and found.steps == 3 and found.failures == ()
    assert found.peak_used == found.peak_reserved + found.gpu.overhead
    # Weights, gradients and two moments of AdamW: four times 8 392 704 + 1024 floats.
    assert found.peak_allocated > 4 * 4 * (2 * 1024 * 4096 + 4096 + 1024)


def test_the_recording_names_lines_and_opens_in_every_tool(script: Any, tmp_path: Path) -> None:
    path = script(TRAIN)
    found = predict(path)
    trace = found.trace
    assert trace is not None and trace.complete
    lines = [group.label for group in found.holders()]
    assert any(label.startswith(f"{path}:11 ") for label in lines)  # optimizer.step()
    assert {each.policy for each in found.settings()} >= {"torch", "vram"}
    (kept,) = found.save(tmp_path / "kept.vtrace")
    explained = vram.analysis.explain(vram.open(kept))
    assert explained.moment.kind == "peak" and explained.moment.step == 1


def test_peaks_that_the_program_resets_are_kept(script: Any) -> None:
    found = predict(
        script(
            """
            import torch
            large = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
            del large
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            small = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
            """
        )
    )
    assert found.peak_allocated == found.peak_reserved == 64 * MIB


def test_running_out_of_memory_says_where_and_what_is_needed(script: Any) -> None:
    path = script(
        """
        import torch
        kept = []
        def step():
            kept.append(torch.zeros(512 << 20, dtype=torch.uint8, device="cuda"))
        for _ in range(8):
            step()
        """
    )
    found = predict(path, memory=CONTEXT + 2816 * MIB)
    assert not found.fits and found.outcome == "out of memory" and found.failure is not None
    assert found.failure.size == 512 * MIB and found.failure.reserved == 5 * 512 * MIB
    assert found.failure.place == f"{path}:5 step"
    assert found.failure.free == 256 * MIB
    assert found.unlimited is not None and found.unlimited.peak_reserved == 4 * GIB


def test_out_of_memory_in_a_backward_pass_names_the_line_that_began_it(script: Any) -> None:
    path = script(
        """
        import torch
        net = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(8)]).cuda()
        y = net(torch.zeros(16, 4096, device="cuda")).sum()
        y.backward()
        """
    )
    found = predict(path, memory=CONTEXT + 768 * MIB, unlimited=False)
    assert found.failure is not None and found.failure.place == f"{path}:5 <module>"


def test_an_error_that_the_program_handles_does_not_count(script: Any) -> None:
    found = predict(
        script(
            """
            import torch
            size = 4 << 30
            while True:
                try:
                    kept = torch.zeros(size, dtype=torch.uint8, device="cuda")
                    break
                except torch.OutOfMemoryError:
                    size //= 2
            """
        ),
        memory=CONTEXT + 1280 * MIB,
    )
    assert found.fits and found.outcome == "completed" and found.peak_reserved == GIB
    assert [each.caught for each in found.failures] == [True, True]


@pytest.mark.parametrize("caught", [False, True])
def test_a_request_that_no_gpu_can_serve_is_compared_like_any_other(script: Any, caught: bool) -> None:
    request = "torch.empty(256 << 30, dtype=torch.uint8, device='cuda')"
    handled = f"try:\n    {request}\nexcept torch.OutOfMemoryError:\n    pass\n"
    begin = "import torch\nkept = torch.zeros(1 << 20, device='cuda')\n"
    found = predict(script(begin + (handled if caught else request)))
    assert found.outcome == ("completed" if caught else "out of memory")
    assert [each.size for each in found.failures] == [256 * GIB]
    settings = found.to_json()["settings"]
    assert {each["policy"] for each in settings} == {"torch", "torch-expandable", "cuda-async", "vram"}
    assert all((each["smallest_capacity"] < GIB) == caught for each in settings)


HALVES = """
    import json, sys, torch
    GIB = 1 << 30
    def zeros(size):
        return torch.zeros(size, dtype=torch.uint8, device="cuda")
    def attempt(batch):  # a failure leaves nothing behind that it held
        first = zeros(batch * GIB)
        second = zeros(batch * GIB)
        return batch
    def largest(batch):
        while True:
            try:
                return attempt(batch)
            except torch.OutOfMemoryError:
                batch //= 2
    def held_by_a_handler():  # nor do the arguments of what failed
        try:
            return torch.stack([zeros(3 * GIB), zeros(3 * GIB)])
        except torch.OutOfMemoryError:
            return torch.cuda.memory_allocated()
    found = [largest(16), held_by_a_handler(), torch.cuda.max_memory_allocated()]
    open(sys.argv[1], "w").write(json.dumps(found))
"""


def test_a_program_decides_the_same_under_a_prediction_as_without_one(script: Any, tmp_path: Path) -> None:
    gpu = find_gpu("h200").with_memory(CONTEXT + 9 * GIB)
    path, said = script(HALVES), tmp_path / "said"
    subprocess.run([sys.executable, path, said], env=null_environment(gpu), check=True)
    assert json.loads(said.read_text()) == [4, 0, 8 * GIB]
    found = run([path, said], gpu)
    assert json.loads(said.read_text()) == [4, 0, 8 * GIB]
    assert found.peak_allocated == 8 * GIB and [each.caught for each in found.failures] == [True] * 3


def test_a_program_that_leaves_at_once_has_its_whole_prediction(script: Any) -> None:
    text = "import os, torch\nkept = torch.zeros(64 << 20, device='cuda')\nos._exit(3)\n"
    found = predict(script(text))
    assert (found.outcome, found.status, found.notes) == ("failed", 3, [])
    assert found.peak_allocated == 256 * MIB and found.trace is not None


def test_a_request_that_is_refused_is_enough_for_a_prediction(script: Any) -> None:
    found = predict(script("import torch\ntorch.empty(200 << 30, dtype=torch.uint8, device='cuda')\n"))
    assert found.outcome == "out of memory" and found.failure is not None
    assert (found.failure.size, found.failure.reserved) == (200 * GIB, 0)
    assert found.unlimited is not None and found.unlimited.peak_reserved == 200 * GIB


def test_a_program_that_fails_has_its_traceback_and_what_was_known(script: Any, tmp_path: Path) -> None:
    path = script("import torch\nkept = torch.zeros(64 << 20, device='cuda')\nraise ValueError('mine')\n")
    with (tmp_path / "errors").open("w") as errors:
        found = run([path], stdout=subprocess.DEVNULL, stderr=errors)
    assert found.outcome == "failed" and found.status == 1 and found.peak_allocated == 256 * MIB
    assert found.error is not None and found.error["type"] == "ValueError"
    assert found.error["place"] == f"{path}:3 <module>"
    said = (tmp_path / "errors").read_text()
    assert said.startswith("Traceback") and said.endswith("ValueError: mine\n")


def test_a_failing_function_of_pytorch_has_only_calls_of_the_program_and_pytorch(
    script: Any, tmp_path: Path
) -> None:
    stderr = tmp_path / "stderr"
    text = """
        import torch
        def multiply(a, b):
            return a @ b
        multiply(torch.ones(2, 3, device="cuda"), torch.ones(2, 3, device="cuda"))
    """
    with open(stderr, "wb") as file:
        run([script(text)], stdout=subprocess.DEVNULL, stderr=file)
    said = stderr.read_text()
    assert "in multiply" in said and "cannot be multiplied" in said
    assert os.path.join("predict", "inside") not in said


FOREVER = """
    import torch
    net = torch.nn.Linear(100, 100).cuda()
    others = torch.nn.Linear(100, 100).cuda()
    first, second = (torch.optim.SGD(each.parameters(), 0.1) for each in (net, others))
    while True:
        for each, optimizer in ((net, first), (others, second)):
            each(torch.zeros(10, 100, device="cuda")).sum().backward()
            optimizer.step()
"""


def test_a_program_is_stopped_after_steps_of_its_first_optimizer(script: Any) -> None:
    found = predict(script(FOREVER), steps=4)
    assert (found.outcome, found.steps, found.fits) == ("stopped", 4, True)


def test_steps_of_vram_take_precedence(script: Any) -> None:
    found = predict(
        script(
            """
            import torch, vram
            kept = []
            for number in range(100):
                with vram.step(number):
                    kept.append(torch.zeros(1 << 20, device="cuda"))
            """
        ),
        steps=3,
    )
    assert (found.outcome, found.steps) == ("stopped", 3) and found.peak_allocated == 12 * MIB
    assert found.trace is not None and len(vram.trace.find_steps(found.trace)) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_gives_the_prediction_so_far(script: Any, number: signal.Signals) -> None:
    running = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "vram",
            "predict",
            "--json",
            script(FOREVER + "        print('.', flush=True)\n"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None and running.stderr.readline() == ".\n"
    running.send_signal(number)
    out, _ = running.communicate(timeout=600)
    found = json.loads(out)
    assert running.returncode == 0 and found["outcome"] == "interrupted" and found["steps"] >= 1


def test_workers_of_a_data_loader_are_no_processes_of_their_own(script: Any) -> None:
    found = predict(
        script(
            """
            import torch
            from torch.utils.data import DataLoader, TensorDataset
            samples = TensorDataset(torch.zeros(64, 10))
            batches = DataLoader(samples, batch_size=8, num_workers=2, pin_memory=True)
            net = torch.nn.Linear(10, 10).cuda()
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            for (batch,) in batches:
                net(batch.cuda(non_blocking=True)).sum().backward()
                optimizer.step()
            """
        )
    )
    assert len(found.uses) == 1 and found.steps == 8 and found.outcome == "completed"


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_every_process_that_used_a_gpu_has_a_result(script: Any, method: str) -> None:
    found = predict(
        script(
            f"""
            import torch, torch.multiprocessing as processes
            def work(number):
                torch.cuda.set_device(number)
                kept = torch.zeros((number + 1) << 25, dtype=torch.uint8, device="cuda")
            if __name__ == "__main__":
                context = processes.get_context("{method}")
                started = [context.Process(target=work, args=(number,)) for number in range(2)]
                for each in started: each.start()
                for each in started: each.join()
            """
        ),
        gpu="h200:2",
    )
    assert sorted((use.device, use.reserved) for use in found.uses) == [(0, 32 * MIB), (1, 64 * MIB)]
    assert found.largest is not None and found.largest.device == 1


def test_ranks_of_torchrun(script: Any) -> None:
    path = script(
        """
        import os, torch
        rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(rank)
        kept = torch.zeros((rank + 1) << 25, dtype=torch.uint8, device="cuda")
        """
    )
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", path]
    found = predict(*command, gpu="h200", gpus=2)
    assert [(use.rank, use.device, use.reserved) for use in found.uses] == [
        (0, 0, 32 * MIB),
        (1, 1, 64 * MIB),
    ]


def test_more_gpus_than_there_are_is_an_error(script: Any) -> None:
    with pytest.raises(vram.ConfigError, match=r"more GPUs than the 1 .*--gpus"):
        predict(script("import torch; torch.zeros(1, device='cuda:1')"))


def test_a_program_on_the_cpu_is_an_error(script: Any) -> None:
    with pytest.raises(vram.ConfigError, match="did not use GPU memory"):
        predict(script("import torch; torch.zeros(1)"))


def test_under_vram_its_own_recording_is_taken(script: Any) -> None:
    found = predict(script("import vram.torch\nvram.torch.install()\n" + textwrap.dedent(TRAIN)))
    assert found.fits and found.steps == 3 and found.trace is not None
    assert found.trace.complete and found.peak_reserved >= found.peak_allocated > 128 * MIB


def test_the_largest_batch_size_is_found_and_is_the_largest(script: Any) -> None:
    path = script(TRAIN.replace("randn(size,", "randn(1024 * size,"))
    options = {"memory": "1GiB", "steps": 1}
    found = find([path], "batch_size", 1, 30, **options)  # type: ignore[arg-type]
    assert found.best is not None and 1 < found.best < 30
    fits = {trial.value: trial.fits for trial in found.trials}
    assert fits[found.best] and not fits[found.best + 1]
    assert predict(path, "--batch-size", str(found.best), **options).fits


def test_code_that_pytorch_compiles_is_kept_apart_and_is_not_the_programs(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = script(
        """
        import torch
        compiled = torch.compile(lambda x: (x.sin() + 1) * x)
        kept = compiled(torch.zeros(1 << 24, device="cuda"))
        """
    )
    found = predict(path)
    assert found.outcome == "completed" and found.peak_allocated >= 128 * MIB
    assert {group.label.rpartition(":")[0] for group in found.holders()} == {path}
    assert not (tmp_path / "home" / ".triton").exists()
    assert list((tmp_path / "cache" / "vram" / "null-gpu" / "triton").iterdir())


LIMITED = """
import pytest, torch, vram.torch
vram.torch.install()
@pytest.mark.limit_vram("64MiB")
def test_fits():
    torch.zeros(4 << 20, device="cuda")
@pytest.mark.limit_vram("64MiB")
def test_needs_too_much():
    torch.zeros(64 << 20, device="cuda")
"""


def test_pytest_limits_memory_on_a_null_gpu(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(LIMITED)
    python = [sys.executable, "-m"]  # the pytest found first need not be that of this Python
    ended = subprocess.run(
        [*python, "vram", "run", "--null-gpu", "l4", "--", *python, "pytest", "-q", "test_mine.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 1 and "1 failed, 1 passed" in ended.stdout, ended.stdout + ended.stderr
    assert "the test held 256 MiB on cuda:0 at once, but limit_vram allows 64 MiB" in ended.stdout


def test_nothing_is_left_behind(script: Any, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    code = f"from vram.predict import run; run([{script(TRAIN)!r}])"
    environment = {**os.environ, "TMPDIR": str(folder)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=600)
    deadline = time.monotonic() + 60
    while os.listdir(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [name for name in os.listdir(folder) if name.startswith("vram")] == []
