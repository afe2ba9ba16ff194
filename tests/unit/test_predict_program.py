"""Programs on a null GPU, without PyTorch: how they are found, run, ended, and what reaches them.

The programs write what a session inside them would write.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from made_results import RESULT, program

from vram.errors import ConfigError
from vram.predict import environment, find_gpu, null_environment, run
from vram.predict.inside.imports import _Finder, after_import
from vram.predict.program import Progress, execute, read_program

pytestmark = [pytest.mark.fork, pytest.mark.usefixtures("torch_with_cuda")]

# ---- finding it -------------------------------------------------------------------------------------------


def test_a_script_a_module_and_a_command(tmp_path: Path) -> None:
    script = program(tmp_path, "")
    assert read_program([script, "-x"]).command == (sys.executable, script, "-x")
    assert read_program(["-m", "timeit"]).command == (sys.executable, "-m", "timeit")
    found = read_program(["sh", "-c", "true"])
    assert os.path.isabs(found.command[0]) and found.command[1:] == ("-c", "true") and found.script is None


def test_a_command_beside_the_interpreter_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "pytest").touch(0o755)
    assert read_program(["pytest"]).command[0] == os.path.join(os.path.dirname(sys.executable), "pytest")


@pytest.mark.parametrize("words", [[], ["-m"], ["missing.py"], ["no-such-command"], ["/tmp"]])
def test_a_program_that_is_not_there(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        read_program(words)


# ---- its environment --------------------------------------------------------------------------------------


def test_the_environment_has_the_null_gpu_first() -> None:
    base = {"LD_PRELOAD": "/other.so", "PYTHONPATH": "/mine", "CUDA_VISIBLE_DEVICES": "-1", "X": "1"}
    found = null_environment(find_gpu("h200"), 2, base)
    assert found["LD_PRELOAD"].split(":") == [str(environment.LIBRARY), "/other.so"]
    assert found["PYTHONPATH"].split(":")[1:] == ["/mine"] and found["X"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in found and "devices=2" in found["VRAM_NULL_GPU"]
    assert null_environment(find_gpu("h200"), 2, found) == found


def test_kernels_of_a_null_gpu_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = null_environment(find_gpu("h200"), 1, {"TRITON_CACHE_DIR": "/mine"})
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_KERNEL_CACHE_PATH"):
        assert found[name].startswith(str(tmp_path)) and os.path.isdir(found[name])


def test_the_driver_that_triton_links_with_is_the_null_gpu(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "launcher.c", tmp_path / "launcher.so"
    source.write_text("int cuInit(unsigned); int launch(void) { return cuInit(0); }")
    folder = null_environment(find_gpu("h200"))["TRITON_LIBCUDA_PATH"]
    flags = ["-shared", "-fPIC", "-Wl,--no-undefined", f"-L{folder}", "-l:libcuda.so.1"]
    subprocess.run([compiler, str(source), *flags, "-o", str(library)], check=True)
    ended = run_on_null_gpu(f"import ctypes; print(ctypes.CDLL({str(library)!r}).launch())")
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr


def test_only_linux_has_null_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="needs Linux"):
        null_environment(find_gpu("h200"))


def test_pytorch_without_cuda_is_told_which_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('never imported')")
    version = tmp_path / "torch" / "version.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    version.write_text("__version__ = '2.11.0+cpu'\ncuda: Optional[str] = None\nhip = None\n")
    assert environment.cuda_of_torch() == ""
    with pytest.raises(ConfigError, match=r"without CUDA.*\+cu130.*pip install"):
        run([program(tmp_path, "")])
    version.write_text("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n")
    assert environment.cuda_of_torch() == "13.0"


# ---- inside it --------------------------------------------------------------------------------------------


def run_on_null_gpu(code: str, **more: str) -> subprocess.CompletedProcess[str]:
    variables = null_environment(find_gpu("h200"), 1, {**os.environ, **more})
    return subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=600, check=False
    )


WRONG = {
    "is not set": None,
    "has h200, which is not KEY=VALUE": "h200",
    "has memory=24GiB": "memory=24GiB",
    "has memory=-1": "memory=-1",
    "has devices=9999999999": "memory=1;devices=9999999999",
    "has too few or too many devices": "memory=1;devices=65",
    "has no setting memorry": "memorry=1",
    "has no memory=BYTES": "name=H200",
}


@pytest.mark.parametrize("why", WRONG)
def test_a_wrong_setting_of_the_null_gpu_is_one_line(why: str) -> None:
    code = f"import os\nos.environ.pop('VRAM_NULL_GPU')\nif {WRONG[why] is not None}: "
    code += f"os.environ['VRAM_NULL_GPU'] = {WRONG[why] or ''!r}\n"
    code += "import ctypes; ctypes.CDLL(None).cuDeviceGetCount(ctypes.byref(ctypes.c_int()))"
    ended = run_on_null_gpu(code)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr == f"vram: VRAM_NULL_GPU {why}; let vram run --null-gpu or vram predict set it\n"


def test_nothing_of_ours_can_be_imported_by_name() -> None:
    code = (
        "import importlib.util as u; print([n for n in ('session', 'values', 'imports') if u.find_spec(n)])"
    )
    ended = run_on_null_gpu(code)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[]\n", "")


def test_the_sitecustomize_of_the_user_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.mine = __file__")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    ended = run_on_null_gpu(
        "import sys, sitecustomize; print(sys.mine, sitecustomize.__file__)", PYTHONPATH=path
    )
    mine = str(tmp_path / "sitecustomize.py")
    assert ended.stdout.split() == [mine, mine], ended.stderr


def test_a_function_is_called_after_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "awaited_module.py").write_text("value = 7")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    seen: list[int] = []
    after_import("awaited_module", lambda module: seen.append(module.value))
    after_import("awaited_module", lambda module: seen.append(module.value + 1))
    assert seen == []
    import awaited_module  # type: ignore[import-not-found]  # noqa: F401

    assert seen == [7, 8]
    after_import("awaited_module", lambda module: seen.append(module.value + 2))
    assert seen == [7, 8, 9]
    del sys.modules["awaited_module"]


def test_two_that_await_a_module_both_learn_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "awaited_twice.py").write_text("value = 7")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    seen: list[str] = []
    for name in ("first", "second"):
        finder = _Finder()
        finder.awaited["awaited_twice"] = [lambda _module, name=name: seen.append(name)]  # type: ignore[misc]
        sys.meta_path.insert(0, finder)
    import awaited_twice  # type: ignore[import-not-found]  # noqa: F401

    assert sorted(seen) == ["first", "second"]
    del sys.modules["awaited_twice"]


# ---- running it -------------------------------------------------------------------------------------------


def test_what_a_program_leaves_is_the_prediction(tmp_path: Path) -> None:
    script = program(tmp_path, "print(sys.argv[1:])", RESULT)
    log = tmp_path / "log"
    with log.open("w") as file:
        found = run([script, "--lr", "1"], "h200", stdout=file)
    assert log.read_text() == "['--lr', '1']\n"
    assert found.fits and found.outcome == "completed" and found.steps == 3
    assert (found.peak_allocated, found.peak_reserved, found.peak_used) == (100 << 20, 200 << 20, 300 << 20)


def test_a_program_that_does_not_use_cuda_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did not use GPU memory"):
        run([program(tmp_path, "")])
    with pytest.raises(ConfigError, match="exit status 3 before it used GPU memory"):
        run([program(tmp_path, "sys.exit(3)")])


POOLS = """
    import vram
    kept = vram.Pool("cuda:1").allocate("64MiB")
    if os.fork() == 0:
        sys.exit()
    os.wait()
"""


def test_memory_of_other_libraries_than_pytorch_counts_and_that_of_a_parent_only_once(tmp_path: Path) -> None:
    found = run([program(tmp_path, POOLS)], "h200:2")
    assert [(use.device, use.reserved, use.recording) for use in found.uses] == [(1, 0, None)]
    assert found.peak_used >= 64 << 20 and found.peak_used - found.gpu.overhead < 128 << 20
    assert found.fits and found.holders() == []


ENDS = {
    "killed": ("os.kill(os.getpid(), 9)", -9),
    "crashed": ("import ctypes; ctypes.string_at(0)", -11),
    "left in C": ("import ctypes; ctypes.CDLL(None)._exit(3)", 3),
    "left": ("os._exit(3)", 3),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_a_process_used_survives_however_it_ends(tmp_path: Path, end: str) -> None:
    body, status = ENDS[end]
    allocate = "import vram\nkept = vram.Pool('cuda:0').allocate('64MiB')\n"
    found = run([program(tmp_path, allocate + body)], stderr=subprocess.DEVNULL)
    assert (found.outcome, found.status) == ("failed", status) and len(found.uses) == 1
    assert 64 << 20 <= found.peak_used - found.gpu.overhead < 128 << 20
    reported = not any("ended without a report" in note for note in found.notes)
    assert reported == (end == "left")


def test_a_process_that_is_killed_beside_others_counts(tmp_path: Path) -> None:
    body = """
        import vram
        killed = os.fork() == 0
        kept = vram.Pool("cuda:1" if killed else "cuda:0").allocate("64MiB" if killed else "32MiB")
        if killed:
            os.kill(os.getpid(), 9)
        os.wait()
        sys.exit(1)
    """
    found = run([program(tmp_path, body)], "h200:2")
    assert {use.device: (use.used - found.gpu.overhead) >> 25 for use in found.uses} == {0: 1, 1: 2}
    assert found.outcome == "failed" and sum("ended without a report" in note for note in found.notes) == 1


def test_a_program_that_is_not_python_has_a_prediction(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, command = tmp_path / "use.c", tmp_path / "use"
    source.write_text(
        "#include <stddef.h>\nint cuMemAlloc_v2(void**, size_t);\n"
        "int main(void) { void* p; return cuMemAlloc_v2(&p, (size_t)3 << 30); }"
    )
    folder = null_environment(find_gpu("h200"))["TRITON_LIBCUDA_PATH"]
    subprocess.run([compiler, str(source), f"-L{folder}", "-l:libcuda.so.1", "-o", str(command)], check=True)
    found = run([str(command)])
    assert found.outcome == "completed" and found.peak_used == found.gpu.overhead + (3 << 30)


REFUSED = """
    import ctypes
    size = ctypes.c_size_t(200 << 30)
    assert ctypes.CDLL(None).cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), size) == 2
"""


def test_a_program_whose_only_request_is_refused_has_used_a_gpu(tmp_path: Path) -> None:
    found = run([program(tmp_path, REFUSED)])
    assert found.outcome == "completed" and found.peak_used == found.gpu.overhead
    found = run([program(tmp_path, REFUSED + "    os.kill(os.getpid(), 9)")])
    assert found.outcome == "failed" and found.peak_used == found.gpu.overhead
    assert "the last request that the device refused was 200 GiB" in found.notes[0]


def test_a_program_that_fails_later_has_a_prediction_up_to_there(tmp_path: Path) -> None:
    found = run([program(tmp_path, "sys.exit(3)", {**RESULT, "outcome": "failed"})])
    assert (found.outcome, found.status) == ("failed", 3) and "exit status 3" in found.text


def test_more_gpus_than_there_are(tmp_path: Path) -> None:
    error = {"type": "AcceleratorError", "message": "CUDA error: invalid device ordinal", "place": None}
    result = {**RESULT, "outcome": "failed", "error": {**error, "out_of_memory": False}}
    with pytest.raises(ConfigError, match="more GPUs than the 1"):
        run([program(tmp_path, "sys.exit(1)", result)])


def test_steps_and_the_environment_reach_the_program(tmp_path: Path) -> None:
    log = tmp_path / "log"
    body = f"open({str(log)!r}, 'w').write(os.environ['VRAM_PREDICT_STEPS'] + os.environ['MINE'])"
    run([program(tmp_path, body, RESULT)], steps=5, env={**os.environ, "MINE": "!"})
    assert log.read_text() == "5!"


def test_progress_is_told_while_the_program_runs(tmp_path: Path) -> None:
    told: list[Progress] = []
    stop = tmp_path / "stop"

    def progress(each: Progress) -> None:
        told.append(each)
        if each.steps:
            stop.touch()

    waits = f"while not os.path.exists({str(stop)!r}): time.sleep(0.01)"
    run([program(tmp_path, waits, RESULT)], progress=progress)
    assert (told[-1].steps, told[-1].reserved, told[-1].processes) == (3, 200 << 20, 1)


INTERRUPTIBLE = """
    import signal
    def end(number, frame):
        leave(json.loads({result!r}))
        sys.exit(130)
    signal.signal(signal.{name}, end)
    open({ready!r}, 'w').close()
    while True: time.sleep(0.05)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_program_with_the_prediction_so_far(tmp_path: Path, name: str) -> None:
    ready = tmp_path / "ready"
    result = json.dumps({**RESULT, "outcome": "interrupted"})
    script = program(tmp_path, INTERRUPTIBLE.format(result=result, name=name, ready=str(ready)))
    code = (
        "import os, signal\nfrom vram.predict import run\nsent = []\n"
        "def once(progress):\n"
        f"    if not sent and os.path.exists({str(ready)!r}):\n"
        f"        sent.append(os.kill(os.getpid(), signal.{name}))\n"
        f"found = run([{script!r}], progress=once)\nprint(found.outcome, found.fits, found.steps)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "interrupted True 3\n"), ended.stderr


def test_results_are_in_the_order_of_ranks(tmp_path: Path) -> None:
    left = "".join(
        f"leave({{**json.loads({json.dumps(RESULT)!r}), 'rank': {rank}, 'pid': {9 - rank}}}, '{9 - rank}')\n"
        for rank in (2, 0, 1)
    )
    script = program(tmp_path, left)
    folder = tmp_path / "results"
    folder.mkdir()
    ended = execute(read_program([script]), str(folder), find_gpu("h200"))
    assert [each["rank"] for each in ended.results] == [0, 1, 2]
