"""`vram run`: a program under it sees what it would see under Python, with vram configured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import vram
from vram.trace import Action

pytestmark = pytest.mark.fork


def run(
    *arguments: str, cwd: Path, command: str = "run", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vram", command, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=cwd,
        env={**os.environ, **environment},
    )


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


def test_a_script_sees_its_own_name_arguments_and_folder(tmp_path: Path) -> None:
    write(tmp_path / "sub", "neighbour.py", "word = 'found'")
    script = write(
        tmp_path / "sub", "script.py", "import sys, neighbour; print(__name__, neighbour.word, sys.argv[1:])"
    )
    ended = run(script, "--torch", "-m", "x", "--conf", "y", "-h", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "__main__ found ['--torch', '-m', 'x', '--conf', 'y', '-h']\n"


def test_a_module_is_run_with_all_that_follows_it(tmp_path: Path) -> None:
    write(tmp_path, "tool.py", "import sys; print(__name__, sys.argv[1:])")
    ended = run("-m", "tool", "-h", "--torch", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "__main__ ['-h', '--torch']\n"), ended.stderr


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_the_programs(tmp_path: Path, code: int) -> None:
    script = write(tmp_path, "script.py", f"import sys; sys.exit({code})")
    assert run(script, cwd=tmp_path).returncode == code


def test_an_error_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "def fail():\n    1 / 0\nfail()\n")
    under_vram = run(script, cwd=tmp_path)
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (under_vram.returncode, under_vram.stderr) == (plain.returncode, plain.stderr)


def test_an_error_of_vram_in_the_program_is_the_programs(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "import vram\nvram.Pool('host', limit='1MiB').malloc('2MiB')\n")
    ended = run(script, cwd=tmp_path)
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr and "script.py" in ended.stderr and "OutOfMemory" in ended.stderr


def test_spill_is_a_setting_of_its_own(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "import os; print(os.environ['VRAM_CONF'])")
    ended = run("--spill", "4GiB", "--conf", "stream_cache:9", script, cwd=tmp_path)
    assert ended.stdout.strip() == "stream_cache:9,spill:4GiB"
    refused = run("--spill", "much", script, cwd=tmp_path)
    assert refused.returncode == 2 and "--spill: spill cannot be 'much'" in refused.stderr


def test_settings_reach_the_program_and_its_children(tmp_path: Path) -> None:
    child = "import vram; print(vram.get_memory_manager().settings['stream_cache'])"
    script = write(
        tmp_path,
        "script.py",
        f"import subprocess, sys, vram\nsettings = vram.get_memory_manager().settings\n"
        f"print(settings['stream_cache'], settings['cross_stream'], flush=True)\n"
        f"subprocess.run([sys.executable, '-c', {child!r}])\n",
    )
    ended = run("--conf", "stream_cache:9", script, cwd=tmp_path, VRAM_CONF="cross_stream:wait")
    assert ended.stdout == "9 wait\n9\n", ended.stderr


def test_wrong_usage_ends_with_two_and_runs_nothing(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "print('ran')")
    for arguments in ((), ("--conf", "no_such_option:1", script), ("--unknown", script)):
        ended = run(*arguments, cwd=tmp_path)
        assert (ended.returncode, ended.stdout) == (2, ""), arguments


def test_without_pytorch_its_option_says_so(tmp_path: Path) -> None:
    write(tmp_path / "torch", "__init__.py", "raise ModuleNotFoundError('No module named torch')")
    script = write(tmp_path, "script.py", "print('ran')")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    ended = run("--torch", script, cwd=tmp_path, PYTHONPATH=path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "--torch needs PyTorch" in ended.stderr


@pytest.mark.parametrize("arguments", [["missing.py"], ["-m", "missing"], ["-m", "missing.part"]])
def test_a_program_that_is_not_there_is_one_line(tmp_path: Path, arguments: list[str]) -> None:
    ended = run(*arguments, cwd=tmp_path)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert " not found " in ended.stderr and arguments[-1] in ended.stderr


WRONG_PROGRAMS = {
    "folder": (["folder"], "folder is a folder without __main__.py; name a script in it"),
    "shell": (["train.sh"], "train.sh is a script for /bin/bash -e, not for Python"),
    "no first line": (["bare.sh"], "bare.sh is a script for the shell, not for Python"),
    "compiled": (["/bin/true"], "/bin/true is a compiled program, not a Python script"),
    "code": (["-c", "print(1)"], "code after -c is not supported; write it to a file"),
}


@pytest.mark.parametrize("name", WRONG_PROGRAMS)
@pytest.mark.parametrize("command", ["run", "predict"])
def test_what_python_cannot_run_is_one_clear_sentence(tmp_path: Path, command: str, name: str) -> None:
    if command == "predict" and name == "compiled":
        pytest.skip("vram predict runs any command")
    (tmp_path / "folder").mkdir()
    write(tmp_path, "train.sh", "#!/bin/bash -e\nif true; then python train.py; fi\n")
    write(tmp_path, "bare.sh", "exec python train.py\n")
    arguments, sentence = WRONG_PROGRAMS[name]
    ended = run(*arguments, cwd=tmp_path, command=command)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert sentence in " ".join(ended.stderr.replace("│", " ").split())


def test_a_script_that_the_shell_and_python_can_read_runs(tmp_path: Path) -> None:
    """Installers write such scripts where the path of the interpreter is long."""
    text = "#!/bin/sh\n'''exec' /a/long/path/python \"$0\" \"$@\"\n' '''\nprint('ran')\n"
    ended = run(write(tmp_path, "torchrun", text), cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "ran\n"), ended.stderr


def test_an_error_of_vram_in_the_program_keeps_its_traceback(tmp_path: Path) -> None:
    script = write(tmp_path, "wrong.py", "import vram; vram.Pool('host', nope=1)")
    ended = run(script, cwd=tmp_path)
    assert ended.returncode == 1 and "Traceback" in ended.stderr and "wrong.py" in ended.stderr


# ---- what is kept when memory runs out --------------------------------------------------------------------

RUNS_OUT = """
import vram
pool = vram.Pool("model:1GiB")
kept = [pool.allocate("300MiB", tag="weights") for _ in range(3)]
def ask():
    pool.allocate("200MiB")
for _ in range({times}):
    try:
        ask()
    except vram.OutOfMemory:
        pass
print("went on")
"""


def test_an_error_that_the_program_catches_is_explained_and_kept(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", RUNS_OUT.format(times=1))
    ended = run("--on-oom", "explain,snapshot", script, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "went on\n")
    assert f"memory ran out at {script}:6 in ask" in ended.stderr
    assert "failed to allocate 200 MiB" in ended.stderr and "'weights' (900 MiB)" in ended.stderr
    (kept,) = tmp_path.glob("vram-oom-*-1.vtrace")
    trace = vram.open(kept)
    assert [Action(action).name for action in trace.action].count("OOM") == 1
    explained = vram.analysis.explain(trace)
    assert explained.moment.kind == "oom" and explained.request is not None
    assert explained.request.size == 200 << 20
    assert sum(block.requested_size for segment in trace.segments for block in segment.blocks) == 900 << 20


def test_only_what_is_asked_for_is_kept_and_not_without_end(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", RUNS_OUT.format(times=9))
    ended = run("--on-oom", "explain", script, cwd=tmp_path)
    assert ended.stderr.count("memory ran out at") == 5 and "later ones are not" in ended.stderr
    assert list(tmp_path.glob("*.vtrace")) == []
    ended = run("--on-oom", "snapshot", script, cwd=tmp_path)
    assert "memory ran out" not in ended.stderr
    assert len(list(tmp_path.glob("vram-oom-*.vtrace"))) == 5


def test_a_pool_that_is_recorded_keeps_the_moment_there(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "script.py",
        "import vram\npool = vram.get_memory_manager().pool('host')\npool.limit = '1MiB'\n"
        "try: pool.malloc('2MiB')\nexcept vram.OutOfMemory: pass\n",
    )
    ended = run("--on-oom", "snapshot", "--record", "run.vtrace", script, cwd=tmp_path)
    assert ended.returncode == 0 and "run.vtrace has this moment" in ended.stderr
    assert list(tmp_path.glob("vram-oom*")) == []
    assert Action.OOM in vram.open(tmp_path / "run.vtrace").action


def test_a_kind_that_is_none_runs_nothing(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "print('ran')")
    for kinds in ("everything", "explain,everything", ","):
        ended = run("--on-oom", kinds, script, cwd=tmp_path)
        assert (ended.returncode, ended.stdout) == (2, "") and "explain, snapshot" in ended.stderr


def test_a_snapshot_that_cannot_be_written_does_not_harm_the_program(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "import os, pathlib\nos.mkdir('gone')\nos.chdir('gone')\n"
                   "pathlib.Path('../gone').rmdir()\n" + RUNS_OUT.format(times=1))  # fmt: skip
    ended = run("--on-oom", "snapshot", script, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "went on\n")
    assert "no snapshot was kept" in ended.stderr


def test_a_monitored_program_can_be_attached_to(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "script.py",
        "import os, sys, vram\nfrom vram.observe.monitor import attach\n"
        "pool = vram.Pool('model:1GiB')\nkept = pool.allocate('1MiB')\n"
        "with attach(os.getpid()) as client: print(client.status()['holders'][0]['stack'][0][1])\n",
    )
    ended = run("--monitor", script, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "4\n"), ended.stderr


# ---- reports and the page ---------------------------------------------------------------------------------

WORKS = """
import sys, vram
pool = vram.get_memory_manager().pool("host")
with vram.tag("from <the> script"):
    kept = [pool.allocate("1MiB") for _ in range(5)]
if len(sys.argv) > 1:
    raise SystemExit(int(sys.argv[1]))
"""


@pytest.fixture
def built() -> None:
    from vram.web.assets import built_page

    try:
        built_page()
    except vram.ConfigError as error:
        pytest.skip(str(error))


def test_a_report_is_written_when_the_program_has_ended(tmp_path: Path, built: None) -> None:
    script = write(tmp_path, "script.py", WORKS)
    ended = run("--record", "run.vtrace", "--report", "html", script, "3", cwd=tmp_path)
    assert ended.returncode == 3, ended.stderr
    assert "run.html" in ended.stderr
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "from \\u003cthe>" in page  # its data, in which nothing ends an element
    assert vram.open(tmp_path / "run.vtrace").complete


def test_a_report_needs_no_recording_of_its_own(tmp_path: Path, built: None) -> None:
    script = write(tmp_path, "script.py", WORKS + "import os; os.chdir('/'); 1 / 0\n")
    ended = run("--report", "mine.html", script, cwd=tmp_path)
    assert ended.returncode == 1 and "ZeroDivisionError" in ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.html", "script.py"]


def test_a_report_of_nothing_is_an_error_that_says_why(tmp_path: Path, built: None) -> None:
    script = write(tmp_path, "script.py", "print('ran')")
    ended = run("--report", "html", script, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "ran\n")
    assert ended.stderr.count("nothing was recorded: the program used neither PyTorch nor a pool") == 1
    script = write(tmp_path, "script.py", "raise SystemExit(3)")
    ended = run("--report", "html", script, cwd=tmp_path)
    assert ended.returncode == 3 and "no report: nothing was recorded" in ended.stderr


def test_a_recording_of_nothing_is_an_error_that_says_why(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "print('ran')")
    ended = run("--record", "run.vtrace", script, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "ran\n")
    assert "nothing was recorded: the program used neither PyTorch nor a pool" in ended.stderr
    script = write(tmp_path, "script.py", "raise SystemExit(3)")
    assert run("--record", "run.vtrace", script, cwd=tmp_path).returncode == 3


CPU_TORCH = """
class version:
    cuda = None
class cuda:
    is_initialized = staticmethod(lambda: False)
    _lazy_call = staticmethod(lambda function: None)
__version__ = "9.9+cpu"
"""


def test_a_pytorch_without_cuda_is_named_as_the_reason(tmp_path: Path) -> None:
    write(tmp_path, "torch.py", CPU_TORCH)
    ended = run("--record", "run.vtrace", write(tmp_path, "script.py", "import torch"), cwd=tmp_path)
    assert ended.returncode == 2
    assert "this PyTorch (9.9+cpu) is built without CUDA" in ended.stderr


def test_on_a_pytorch_without_cuda_vram_says_what_can_be_done(tmp_path: Path) -> None:
    write(tmp_path, "torch.py", CPU_TORCH)
    ended = run(
        "--torch", write(tmp_path, "script.py", "import torch"), cwd=tmp_path, PYTHONPATH=path(tmp_path)
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    for words in ("this PyTorch (9.9+cpu) is built without CUDA", *WAYS):
        assert words in ended.stderr
    script = write(tmp_path, "script.py", "import vram.torch; vram.torch.watch('run.vtrace')")
    ended = run(script, cwd=tmp_path)
    assert ended.returncode == 1 and "AttributeError" not in ended.stderr
    assert "DeviceError: this PyTorch (9.9+cpu) is built without CUDA" in ended.stderr
    assert all(words in ended.stderr for words in WAYS)


def test_without_pytorch_vram_says_what_can_be_done(tmp_path: Path) -> None:
    write(tmp_path, "torch.py", "raise ImportError('not here')")
    ended = run("--torch", write(tmp_path, "script.py", ""), cwd=tmp_path, PYTHONPATH=path(tmp_path))
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "--torch needs PyTorch" in ended.stderr and all(words in ended.stderr for words in WAYS)


def test_without_pytorch_watching_it_says_what_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="Install PyTorch first") as raised:
        vram.torch.watch("run.vtrace")
    assert all(words in str(raised.value) for words in WAYS)


WAYS = ("vram demo", "vram explain", "vram predict")


def path(folder: Path) -> str:
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.parametrize("end", ["", "raise SystemExit", "raise SystemExit(3)"])
def test_what_a_program_keeps_to_its_end_is_recorded_as_kept(end: str, tmp_path: Path) -> None:
    """Otherwise nothing that it holds would ever look like a leak."""
    text = f"""
import vram
pool = vram.get_memory_manager().pool("model:1GiB")
kept = []
for number in range(8):
    with vram.step(number):
        kept.append(pool.allocate("2MiB"))
{end}
"""
    run("--record", "run.vtrace", write(tmp_path, "script.py", text), cwd=tmp_path)
    leaks = vram.analysis.find_leaks(vram.open(tmp_path / "run.vtrace"))
    assert [row["bytes"] for row in leaks.likely] == [8 * 2 << 20]


def test_what_a_last_thread_allocates_is_recorded(tmp_path: Path) -> None:
    text = (
        "import threading, time, vram\n"
        "def work():\n"
        "    time.sleep(0.5)\n"
        "    vram.get_memory_manager().pool('host').allocate('1MiB')\n"
        "threading.Thread(target=work).start()\n"
    )
    ended = run("--record", "run.vtrace", write(tmp_path, "script.py", text), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert vram.open(tmp_path / "run.vtrace").events


def test_a_report_of_another_kind_runs_nothing(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "print('ran')")
    ended = run("--report", "pdf", script, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")


def test_the_page_of_a_program_has_an_address(tmp_path: Path, built: None) -> None:
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    script = write(
        tmp_path,
        "script.py",
        "import urllib.request, vram\n"
        "url = vram.monitor().page.url.partition('#')[0]\n"
        "print(urllib.request.urlopen(url, timeout=120).status)\n",
    )
    ended = run("--web", script, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "200\n"), ended.stderr
    assert "vram: http://127.0.0.1:" in ended.stderr and "#token=" in ended.stderr
