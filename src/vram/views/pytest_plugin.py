"""The pytest plugin: `--vram`, the markers `limit_vram` and `limit_vram_leaks`, and the fixture `vram_pool`.

pytest loads it wherever vram is installed, so it imports nothing of vram until a test needs it. The pools
measure; this module decides when, and which values are too high.
"""

from __future__ import annotations

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
        "--vram-device",
        metavar="NAME",
        help='device of the fixture vram_pool, such as "model:16GiB" (default: the default device)',
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and collect the numbers if they are requested."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if config.getoption("--vram"):
        config.pluginmanager.register(_Report(), "vram-report")


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
    wanted = limit is not None or leaks is not None or pyfuncitem.config.getoption("--vram")
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

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the numbers of a test's report."""
        found = dict(report.user_properties)
        if report.when == "call" and all(name in found for name in NAMES):
            peak, kept, allocations = (int(found[name]) for name in NAMES)  # type: ignore[call-overload]
            self._rows.append((peak, kept, allocations, report.nodeid))

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
