"""tests/peers/compare_peers.py compares suites, also one whose process crashes or hangs."""

from __future__ import annotations

import textwrap
from pathlib import Path

import compare_peers as peers
import pytest

SUITE = """
    import os, signal, time
    import pytest
    VRAM = os.environ["VRAM_PEER_ALLOCATOR"] == "vram"
    def test_passes(): pass
    def test_fails(): assert False
    def test_skips(): pytest.skip("as always")
    @pytest.mark.parametrize("size", [1, 2])
    def test_fails_with_vram(size): assert not VRAM or size == 1
    @pytest.fixture
    def torn():
        yield
        assert not VRAM
    def test_fails_at_its_end_with_vram(torn): pass
"""
CRASH = (
    SUITE
    + """
    def test_crashes_with_vram():
        if VRAM: os.kill(os.getpid(), signal.SIGSEGV)
    def test_after_the_crash(): pass
"""
)
HANG = """
    import os, time
    def test_hangs_with_vram():
        if os.environ["VRAM_PEER_ALLOCATOR"] == "vram": time.sleep(10**6)
"""


def part(folder: Path, text: str) -> peers.Part:
    path = folder / "test_fake.py"
    path.write_text(textwrap.dedent(text))
    return peers.Part("fake", path)


def both(made: peers.Part, seconds: float = 300.0) -> tuple[peers.Outcomes, peers.Outcomes]:
    return peers.run_part(made, "own"), peers.run_part(made, "vram", seconds)


def short(tests: list[str]) -> list[str]:
    return [test.rpartition("::")[2] for test in tests]


def test_a_test_that_fails_only_with_vram_is_found(tmp_path: Path) -> None:
    own, ours = both(part(tmp_path, SUITE))
    found = ["test_fails_at_its_end_with_vram", "test_fails_with_vram[2]"]
    assert short(peers.only_with_vram(own, ours)) == found
    assert sorted(own.values()) == ["failed", *["passed"] * 4, "skipped"]


def test_a_crash_fails_the_test_and_those_after_it(tmp_path: Path) -> None:
    own, ours = both(part(tmp_path, CRASH))
    found = short(peers.only_with_vram(own, ours))
    assert {"test_crashes_with_vram", "test_after_the_crash", peers.CRASHED} <= set(found)
    assert peers.CRASHED not in own


def test_a_hanging_file_ends_at_its_time_limit(tmp_path: Path) -> None:
    # However slow the machine, the test does not pass before the limit.
    ours = peers.run_part(part(tmp_path, HANG), "vram", seconds=5.0)
    assert ours[peers.CRASHED] == "failed"
    assert "passed" not in ours.values()


def test_a_file_that_cannot_be_imported_fails(tmp_path: Path) -> None:
    outcomes = peers.run_part(part(tmp_path, "import nothing_of_this_name"), "own")
    assert set(outcomes.values()) == {"failed"}


def test_exceptions_are_listed_and_do_not_fail() -> None:
    made = peers.Part("fake", Path("test_fake.py"))
    own = {"test_fake.py::test_one[a]": "passed", "test_fake.py::test_two": "passed"}
    ours = dict.fromkeys(own, "failed")
    different = peers.only_with_vram(own, ours)
    reasons = {"fake test_fake.py::test_one": "asserts the layout of segments"}
    assert peers.unexpected(made, different, reasons) == ["test_fake.py::test_two"]


def test_the_table_has_counts_and_differences() -> None:
    made = peers.Part("fake", Path("test_fake.py"))
    own = {"one": "passed", "two": "failed", "three": "skipped"}
    lines = peers.table([(made, own, {**own, "one": "failed"})])
    assert lines[1].split() == ["fake", "test_fake", "1", "1", "1", "0", "2", "1"]
    assert lines[2:] == ["FAILS ONLY WITH VRAM: fake test_fake: one"]


def test_an_empty_folder_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main([str(tmp_path), "--peer", "cupy"]) == 2
    assert "docs/internals/testing.md" in capsys.readouterr().err
