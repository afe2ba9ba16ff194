"""The pytest plugin: the options `--vram…`, the markers `limit_vram` and `limit_vram_leaks`, and the fixture
`vram_pool`.

pytest loads it wherever vram is installed, so it imports nothing of vram until a test needs it. The pools
measure; this module decides when, and which values are too high.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vram.core.pool import Pool
    from vram.core.snapshot import Leak
    from vram.observe.measure import Stretch

MARKERS = (
    'limit_vram(size): fail if the test holds more than size, such as "2 GiB", on any device at once',
    "limit_vram_leaks(size, warmup=2): run the test warmup times, then once more; fail if that leaves more "
    "than size behind",
)
NAMES = ("vram_peak_bytes", "vram_kept_bytes", "vram_allocations")
"""Properties of a test's report, also in JUnit files."""
MOST_SHOWN = 10
"""Maximum number of tests in the report of a run, and of groups in that of a leak."""
NOTHING_SEEN = (
    "a memory limit saw no memory: the test allocated nothing from vram's pools. Memory of PyTorch, CuPy and "
    "Numba counts if they allocate from vram, as after vram.torch.install()"
)
_WARMING = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("vram", "memory of vram's pools")
    group.addoption("--vram", action="store_true", help="measure every test and report the highest peaks")
    group.addoption(
        "--vram-save", metavar="FILE", help="write the peak of every test as JSON, for --vram-compare"
    )
    group.addoption(
        "--vram-compare",
        metavar="FILE",
        help="compare the peaks with what --vram-save wrote on a base branch",
    )
    group.addoption(
        "--vram-fail-above",
        metavar="SIZE|PERCENT",
        help="with --vram-compare, fail if a test needs more by more than this, such as 64MiB or 5%%",
    )
    group.addoption(
        "--vram-device",
        metavar="NAME",
        help='device of the fixture vram_pool, such as "model:16GiB" (default: the default device)',
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and collect the numbers if they are requested."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if config.getoption("--vram-fail-above") and not config.getoption("--vram-compare"):
        raise pytest.UsageError("--vram-fail-above needs --vram-compare FILE")
    if _measures_all(config):
        config.pluginmanager.register(_Report(config), "vram-report")


def _measures_all(config: pytest.Config) -> bool:
    return any(config.getoption(name) for name in ("--vram", "--vram-save", "--vram-compare"))


@pytest.fixture
def vram_pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """A separate pool for the test that records the stack of each allocation."""
    from vram.core.pool import Pool

    with Pool(request.config.getoption("--vram-device"), stacks="python") as pool:
        yield pool


# ---- one test ---------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Measure the call of a test that requests it, without its fixtures."""
    limit = _marked(pyfuncitem, "limit_vram", _limit)
    leaks = _marked(pyfuncitem, "limit_vram_leaks", _leak_limit)
    wanted = limit is not None or leaks is not None or _measures_all(pyfuncitem.config)
    if not wanted or pyfuncitem.stash.get(_WARMING, False):
        return (yield)
    for _ in range(0 if leaks is None else leaks[1]):
        _warm_up(pyfuncitem)
    from vram.observe.measure import Stretch

    stretch = Stretch(leaks=leaks is not None)
    try:
        with stretch:
            result = yield
    finally:
        pyfuncitem.user_properties.extend(zip(NAMES, _numbers(stretch), strict=True))
    if (limit is not None or leaks is not None) and not any(stretch.allocations.values()):
        pyfuncitem.warn(pytest.PytestWarning(NOTHING_SEEN))
    if limit is not None:
        _require_peak(stretch, limit)
    if leaks is not None:
        _require_leaks(stretch, leaks[0])
    return result


def _warm_up(item: pytest.Function) -> None:
    """Call the test as pytest would, with any plugin, without measuring."""
    item.stash[_WARMING] = True
    try:
        item.ihook.pytest_pyfunc_call(pyfuncitem=item)
    finally:
        item.stash[_WARMING] = False


def _marked(item: pytest.Function, name: str, read: Callable[..., Any]) -> Any:
    marker = item.get_closest_marker(name)
    if marker is None:
        return None
    from vram.errors import ConfigError

    try:
        return read(*marker.args, **marker.kwargs)
    except (TypeError, ConfigError) as error:
        raise pytest.UsageError(f"{item.nodeid}: invalid use of the marker {name}: {error}") from error


def _limit(size: int | str) -> int:
    from vram.sizes import parse_size

    return parse_size(size)


def _leak_limit(size: int | str, *, warmup: Any = 2) -> tuple[int, int]:
    from vram.errors import ConfigError
    from vram.sizes import parse_size

    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
        raise ConfigError(f"warmup must be at least 0, not {warmup!r}")
    return parse_size(size), warmup


def _numbers(stretch: Stretch) -> tuple[int, int, int]:
    """Return the highest peak of any device, the bytes kept, and the number of allocations."""
    peak = max(stretch.peaks.values(), default=0)
    return peak, sum(stretch.kept.values()), sum(stretch.allocations.values())


def _require_peak(stretch: Stretch, limit: int) -> None:
    from vram.sizes import format_size

    for place, peak in stretch.peaks.items():
        if peak > limit:
            pytest.fail(
                f"the test held {format_size(peak)} on {place} at once, but limit_vram allows "
                f"{format_size(limit)}",
                pytrace=False,
            )


def _require_leaks(stretch: Stretch, limit: int) -> None:
    leaked = sum(leak.bytes for leak in stretch.left)
    if leaked > limit:
        pytest.fail("\n".join(_leak_lines(stretch.left, leaked, limit)), pytrace=False)


def _leak_lines(leaks: list[Leak], leaked: int, limit: int) -> Iterator[str]:
    from vram.sizes import format_count, format_size

    count = format_count(sum(leak.count for leak in leaks), "allocation")
    yield (
        f"the test left {format_size(leaked)} behind in {count}, but limit_vram_leaks allows "
        f"{format_size(limit)}"
    )
    for leak in leaks[:MOST_SHOWN]:
        label = f" tagged {leak.tag!r}" if leak.tag is not None else ""
        yield f"  {leak.count} × {format_size(leak.size)}{label}, allocated at"
        for stack in leak.stacks[:MOST_SHOWN] or ((),):
            yield from (f"    {frame.filename}:{frame.line} in {frame.name}" for frame in _of_test(stack))
            yield "" if stack else "    an unknown place"
    if len(leaks) > MOST_SHOWN:
        yield f"  and {len(leaks) - MOST_SHOWN} more groups"


def _of_test(stack: Any) -> Iterator[Any]:
    """Return the calls up to the test itself, without those of pytest."""
    for frame in stack:
        if "/_pytest/" in frame.filename or "/pluggy/" in frame.filename:
            return
        yield frame


# ---- the run ----------------------------------------------------------------------------------------------


class _Report:
    """The numbers of every test, from the process that ran it."""

    def __init__(self, config: pytest.Config) -> None:
        self._rows: list[tuple[int, int, int, str]] = []
        self._save = config.getoption("--vram-save")
        self._comparison = None
        if config.getoption("--vram-compare") and not hasattr(config, "workerinput"):
            self._comparison = _Comparison(
                config.getoption("--vram-compare"), config.getoption("--vram-fail-above")
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the numbers of a test's report."""
        found = dict(report.user_properties)
        if report.when == "call" and all(name in found for name in NAMES):
            peak, kept, allocations = (int(found[name]) for name in NAMES)  # type: ignore[call-overload]
            self._rows.append((peak, kept, allocations, report.nodeid))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the peaks, and fail a run that needs too much."""
        if hasattr(session.config, "workerinput"):
            return  # with pytest-xdist, the process that collects the reports does it
        peaks = {name: peak for peak, _, allocations, name in self._rows if allocations}
        if self._save:
            with open(self._save, "w", encoding="utf-8") as file:
                json.dump({"vram_peaks": peaks}, file, indent=1, sort_keys=True)
        if self._comparison is not None:
            self._comparison.judge(peaks)
            if self._comparison.failed and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the tests with the highest peaks."""
        from vram.sizes import format_size

        used = sorted((row for row in self._rows if row[2]), key=lambda row: (-row[0], row[3]))
        terminalreporter.section("vram")
        terminalreporter.line(f"{len(used)} of {len(self._rows)} tests allocated from vram's pools")
        if used:
            terminalreporter.line(f"{'peak':>12}{'kept':>12}{'allocations':>14}  test")
        for peak, kept, allocations, name in used[:MOST_SHOWN]:
            terminalreporter.line(f"{format_size(peak):>12}{format_size(kept):>12}{allocations:>14,}  {name}")
        if len(used) > MOST_SHOWN:
            terminalreporter.line(f"and {len(used) - MOST_SHOWN} more")
        if self._comparison is not None:
            for line in self._comparison.lines():
                terminalreporter.line(line)


class _Comparison:
    """The peaks of this run beside those that an earlier one wrote."""

    def __init__(self, path: str, limit: str | None) -> None:
        """Read the file and the limit; a problem with either is wrong usage."""
        from vram.errors import ConfigError
        from vram.sizes import GrowthLimit

        try:
            with open(path, encoding="utf-8") as file:
                self._before = {str(name): int(peak) for name, peak in json.load(file)["vram_peaks"].items()}
            self._limit = None if limit is None else GrowthLimit.parse(limit)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ConfigError) as error:
            raise pytest.UsageError(f"cannot compare with {path}: {error}") from error
        self._path = path
        self._rows: list[tuple[int, int, str, bool]] = []
        self.failed: list[str] = []

    def judge(self, peaks: dict[str, int]) -> None:
        """Compare tests that both runs have."""
        for name in sorted(peaks.keys() & self._before.keys()):
            before, after = self._before[name], peaks[name]
            bad = self._limit is not None and self._limit.exceeded(before, after)
            if before != after:
                self._rows.append((before, after, name, bad))
            if bad:
                self.failed.append(name)
        self._rows.sort(key=lambda row: row[0] - row[1])

    def lines(self) -> Iterator[str]:
        """The report: what changed, most growth first."""
        from vram.sizes import format_count, format_size

        if not self._rows:
            yield f"no test needs more or less than in {self._path}"
            return
        yield f"compared with {self._path}:"
        yield f"{'before':>12}{'after':>12}{'difference':>14}  test"
        for before, after, name, bad in self._rows[:MOST_SHOWN]:
            sign = "+" if after > before else ""
            change = f"{sign}{format_size(after - before)}"
            mark = "  TOO MUCH" if bad else ""
            yield f"{format_size(before):>12}{format_size(after):>12}{change:>14}  {name}{mark}"
        if len(self._rows) > MOST_SHOWN:
            yield f"and {len(self._rows) - MOST_SHOWN} more"
        if self.failed and self._limit is not None:
            yield f"{format_count(len(self.failed), 'test')} exceeded --vram-fail-above {self._limit.text}"
