"""The pytest plugin, by runs of pytest on small test files."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., pytest.RunResult]

PLUGIN = ("-p", "vram.views.pytest_plugin", "-p", "no:cacheprovider", "--strict-markers", "-W", "error")


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # those of others take long to load

    def run_file(source: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(test_it=source)
        return pytester.runpytest_subprocess(*PLUGIN, *arguments)

    return run_file


MODEL = """
import pytest, vram
DEVICE = vram.Device.model("1GiB")
pool = vram.Pool(DEVICE)
kept = []
"""


# ---- limit_vram -------------------------------------------------------------------------------------------


def test_a_test_within_its_limit_passes_and_one_beyond_fails(run: Run) -> None:
    result = run(
        MODEL
        + """
@pytest.mark.limit_vram("8 MiB")
def test_within():
    a = pool.allocate("4MiB")
    del a
    b = pool.allocate("4MiB")

@pytest.mark.limit_vram("8 MiB")
def test_beyond():
    a = pool.allocate("6MiB")
    b = pool.allocate("6MiB")

@pytest.mark.limit_vram("8 MiB")
def test_a_pool_of_its_own_counts():
    with vram.Pool(DEVICE) as own:
        own.allocate("16MiB")
"""
    )
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*the test held 12 MiB on model:* at once, but limit_vram allows 8 MiB*"])


def test_what_was_held_before_and_on_other_devices_does_not_count(run: Run) -> None:
    result = run(
        MODEL
        + """
@pytest.fixture(scope="module")
def weights():
    return pool.allocate("100MiB")

@pytest.mark.limit_vram("8 MiB")
def test_above_what_there_was(weights):
    pool.allocate("4MiB")

@pytest.mark.limit_vram("8 MiB")
def test_each_device_by_itself():
    with vram.Pool(vram.Device.model("1GiB")) as other:
        a, b = pool.allocate("6MiB"), other.allocate("6MiB")
        del a, b
"""
    )
    result.assert_outcomes(passed=2)


@pytest.mark.parametrize("marker", ["limit_vram('8 MiB')", "limit_vram_leaks(0)"])
def test_a_limit_that_saw_no_memory_warns(run: Run, marker: str) -> None:
    source = f"{MODEL}\n@pytest.mark.{marker}\ndef test_nothing():\n    pass\n"
    result = run(source, "-W", "default")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*a memory limit saw no memory: the test allocated nothing*"])


# ---- limit_vram_leaks -------------------------------------------------------------------------------------


def test_a_leak_fails_with_the_stack_that_leaked(run: Run) -> None:
    result = run(
        MODEL
        + """
def make():
    return pool.allocate("2MiB")

def step():
    kept.append(make())

@pytest.mark.limit_vram_leaks("1 MiB", warmup=2)
def test_leaks():
    with vram.tag("cache"):
        step()

@pytest.mark.limit_vram_leaks("3 MiB")
def test_allowed():
    step()
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*the test left 2 MiB behind in 1 allocation, but limit_vram_leaks allows 1 MiB*",
            "*1 × 2 MiB tagged 'cache', allocated at*",
            "*test_it.py:* in make*",
            "*test_it.py:* in step*",
            "*test_it.py:* in test_leaks*",
        ]
    )
    assert "/_pytest/" not in result.stdout.str()


def test_what_only_the_first_calls_keep_is_no_leak(run: Run) -> None:
    result = run(
        MODEL
        + """
calls = []

@pytest.mark.limit_vram_leaks(0, warmup=2)
def test_caches():
    calls.append(1)
    if len(calls) <= 2:
        kept.append(pool.allocate("2MiB"))
    cycle = [pool.allocate("4MiB")]
    cycle.append(cycle)  # garbage, not a leak

def test_it_ran_three_times():
    assert len(calls) == 3

@pytest.mark.limit_vram_leaks(0, warmup=1)
def test_too_little_warmup():
    calls.append(1)
    if len(calls) <= 5:
        kept.append(pool.allocate("2MiB"))
"""
    )
    result.assert_outcomes(passed=2, failed=1)


def test_a_leak_of_a_pool_that_the_test_made_counts(run: Run) -> None:
    result = run(
        MODEL
        + """
@pytest.mark.limit_vram_leaks("1 MiB")
def test_leaks():
    kept.append(vram.Pool(DEVICE).allocate("5MiB"))

@pytest.mark.limit_vram_leaks("1 MiB")
def test_drops():
    local = vram.Pool(DEVICE)
    local.allocate("5MiB")

@pytest.mark.limit_vram_leaks("1 MiB")
def test_closes():
    with vram.Pool(DEVICE) as local:
        kept.append(local.allocate("5MiB"))
"""
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*test_it.py:* in test_leaks*"])


def test_a_test_that_fails_by_itself_says_so_and_nothing_of_leaks(run: Run) -> None:
    result = run(
        MODEL
        + """
@pytest.mark.limit_vram_leaks(0)
@pytest.mark.limit_vram(1)
def test_fails():
    kept.append(pool.allocate("5MiB"))
    assert kept == "its own reason"
"""
    )
    result.assert_outcomes(failed=1)
    assert "its own reason" in result.stdout.str() and "behind" not in result.stdout.str()
    assert "at once" not in result.stdout.str()


@pytest.mark.parametrize(
    "marker",
    [
        "limit_vram()",
        "limit_vram('many')",
        "limit_vram_leaks(1, warmup=-1)",
        "limit_vram_leaks(1, warmups=1)",
    ],
)
def test_a_marker_used_wrongly_is_an_error(run: Run, marker: str) -> None:
    result = run(f"import pytest\n@pytest.mark.{marker}\ndef test_it(): pass\n")
    assert result.ret != 0
    result.stdout.fnmatch_lines([f"*invalid use of the marker {marker.partition('(')[0]}*"])


def test_markers_together_with_parameters_fixtures_and_classes(run: Run) -> None:
    result = run(
        MODEL
        + """
@pytest.mark.limit_vram_leaks("1 MiB", warmup=1)
class TestAll:
    @pytest.mark.parametrize("size", ["1KiB", "512KiB"])
    def test_one(self, size, vram_pool, tmp_path):
        assert tmp_path.exists()
        kept.append(vram_pool.allocate(size))
"""
    )
    result.assert_outcomes(passed=2)


# ---- the fixture and the report ---------------------------------------------------------------------------


def test_the_fixture_is_a_pool_that_knows_stacks(run: Run) -> None:
    result = run(
        """
found = []

def test_one(vram_pool):
    buffer = vram_pool.allocate("1MiB")
    assert vram_pool.device.name.startswith("model")
    assert vram_pool.leaks()[0].stacks[0][0].name == "test_one"
    found.append(vram_pool)

def test_two(vram_pool):
    assert found[0].closed and vram_pool is not found[0]
""",
        "--vram-device",
        "model:1GiB",
    )
    result.assert_outcomes(passed=2)


def test_the_report_has_the_tests_that_held_most(run: Run) -> None:
    result = run(
        MODEL
        + """
@pytest.mark.parametrize("size", range(1, 13))
def test_sizes(size):
    pool.allocate(size << 20)

def test_keeps():
    kept.append(pool.allocate("64MiB"))

def test_none():
    pass

def test_fails():
    pool.allocate("99MiB")
    assert False
""",
        "--vram",
    )
    result.assert_outcomes(passed=14, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*= vram =*",
            "14 of 15 tests allocated from vram's pools",
            "*peak*kept*allocations*test",
            "*99 MiB*1*test_it.py::test_fails",
            "*64 MiB*64 MiB*1*test_it.py::test_keeps",
            "*12 MiB*0 B*1*test_it.py::test_sizes?12?",
            "and 4 more",
        ]
    )


def test_a_run_that_does_not_ask_imports_nothing_of_vram(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "def test_it():\n"
        "    loaded = {name for name in sys.modules if name.partition('.')[0] == 'vram'}\n"
        "    assert loaded == {'vram', 'vram.views', 'vram.views.pytest_plugin'}\n"
        "    assert not {'numpy', 'rich', 'pyarrow'} & set(sys.modules)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *PLUGIN, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "= vram =" not in ended.stdout


def test_the_plugin_is_registered_with_pytest() -> None:
    project = ROOT / "pyproject.toml"
    points = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"]["pytest11"]
    # One name for both, so that `-p vram.views.pytest_plugin` beside the entry point does not load it twice.
    assert points == {"vram.views.pytest_plugin": "vram.views.pytest_plugin"}


def test_the_example_of_the_guide_does_what_it_says(run: Run) -> None:
    text = (ROOT / "docs" / "guide" / "testing.md").read_text(encoding="utf-8")
    example = text.split("```python\n")[1].split("```")[0]
    run(example, "--vram").assert_outcomes(passed=3)
    changed = example.replace("self.seen.clear()", "pass")
    assert changed != example
    result = run(changed)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*limit_vram_leaks allows 0 B*", "*test_it.py:* in Model.forward*"])


# ---- comparing with another run ---------------------------------------------------------------------------

STEP = (
    MODEL
    + """
def test_step():
    pool.allocate("{}MiB")

def test_nothing():
    pass
"""
)


def test_peaks_are_compared_with_those_of_a_base(run: Run, pytester: pytest.Pytester) -> None:
    saved = run(STEP.format(10), "--vram-save", "base.json")
    assert saved.ret == 0 and (pytester.path / "base.json").is_file()
    same = run(STEP.format(10), "--vram-compare", "base.json", "--vram-fail-above", "0%")
    assert same.ret == 0
    same.stdout.fnmatch_lines(["no test needs more or less than in base.json"])
    more = run(STEP.format(11), "--vram-compare", "base.json")
    assert more.ret == 0
    more.stdout.fnmatch_lines(["*10 MiB*11 MiB*+1 MiB*test_it.py::test_step"])
    for limit, status in (("10%", 0), ("1MiB", 0), ("9.9%", 1), ("512KiB", 1)):
        result = run(STEP.format(11), "--vram-compare", "base.json", "--vram-fail-above", limit)
        assert result.ret == status, limit
    result.stdout.fnmatch_lines(
        ["*test_it.py::test_step  TOO MUCH", "1 test exceeded --vram-fail-above 512 KiB"]
    )


def test_peaks_are_compared_under_xdist(run: Run) -> None:
    pytest.importorskip("xdist")
    assert run(STEP.format(10), "-p", "xdist", "-n", "1", "--vram-save", "base.json").ret == 0
    arguments = ("-p", "xdist", "-n", "1", "--vram-compare", "base.json", "--vram-fail-above", "5%")
    assert run(STEP.format(10), *arguments).ret == 0
    assert run(STEP.format(12), *arguments).ret == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--vram-fail-above", "5%"), "--vram-fail-above needs --vram-compare"),
        (("--vram-compare", "nowhere.json"), "cannot compare with nowhere.json"),
        (("--vram-compare", "test_it.py"), "cannot compare with test_it.py"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_wrong_usage(
    run: Run, arguments: tuple[str, ...], words: str
) -> None:
    result = run(STEP.format(1), *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{words}*"])
