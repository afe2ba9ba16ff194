"""The search for the largest value that fits: few trials, the right answer, the right place for the value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram.errors import ConfigError
from vram.predict import find_gpu
from vram.predict.search import Found, Trial, best_of, place_of, read_range, search

MEMORY = 1 << 40


def line(base: int, slope: int) -> Callable[[int], int]:
    return lambda value: base + slope * value


def trials_of(used: Callable[[int], int], low: int, high: int) -> list[Trial]:
    tried: list[int] = []

    def attempt(value: int) -> Trial:
        tried.append(value)
        fits = used(value) <= MEMORY
        return Trial(value, fits, 0, 0, used(value) if fits else used(low))

    found = search(low, high, MEMORY, attempt)
    assert sorted(tried) == [trial.value for trial in found] and len(set(tried)) == len(tried)
    return found


@given(low=st.integers(0, 1000), width=st.integers(0, 5000), limit=st.integers(-10, 7000))
def test_the_largest_value_that_fits_is_found(low: int, width: int, limit: int) -> None:
    found = trials_of(lambda value: 0 if value <= limit else MEMORY + 1, low, low + width)
    best = best_of(found)
    assert best == (None if limit < low else min(limit, low + width))


@given(st.integers(1, MEMORY // 4), st.integers(1, MEMORY // 4))
def test_it_takes_no_more_trials_than_twice_bisection(base: int, slope: int) -> None:
    found = trials_of(line(base, slope), 1, 512)
    assert best_of(found) in ((MEMORY - base) // slope, 512, None)
    assert len(found) <= 2 + 2 * 9


def test_memory_that_grows_evenly_needs_few_trials() -> None:
    found = trials_of(line(MEMORY // 10, MEMORY // 100_000), 1, 512_000)
    assert best_of(found) == 90_000 and len(found) <= 12


def test_where_nothing_fits_one_trial_is_enough() -> None:
    assert [trial.value for trial in trials_of(line(MEMORY, 1), 1, 512)] == [1]
    assert [trial.value for trial in trials_of(line(0, 1), 7, 7)] == [7]
    assert [trial.value for trial in trials_of(line(0, 1), 1, 512)] == [1, 512]


def test_ranges_are_read() -> None:
    assert read_range("batch_size=1..512") == ("batch_size", 1, 512)
    assert read_range(" env:BATCH = 2 .. 3 ") == ("env:BATCH", 2, 3)


@pytest.mark.parametrize(
    "wrong", ["", "batch_size", "=1..2", "b=1-2", "b=..2", "b=3..2", "b=1..2..3", "b=-1..2"]
)
def test_a_wrong_range_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError):
        read_range(wrong)


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("batch_size", ["x.py", "--batch-size", "8", "-v"], ["x.py", "--batch-size", "64", "-v"]),
        ("batch-size", ["x.py", "--batch_size", "8"], ["x.py", "--batch_size", "64"]),
        ("batch_size", ["x.py", "--batch-size=8"], ["x.py", "--batch-size=64"]),
        ("batch_size", ["x.py", "batch_size=8", "lr=1"], ["x.py", "batch_size=64", "lr=1"]),
        ("train.batch", ["-m", "x", "train.batch=8"], ["-m", "x", "train.batch=64"]),
        ("-b", ["x.py", "-b", "8"], ["x.py", "-b", "64"]),
        ("batch_size", ["x.py"], ["x.py", "--batch_size", "64"]),
        ("-b", ["x.py"], ["x.py", "-b", "64"]),
        ("batch_size", ["torchrun", "x.py", "--batch-size", "1"], ["torchrun", "x.py", "--batch-size", "64"]),
    ],
)
def test_an_argument_is_replaced_or_added(name: str, words: list[str], expected: list[str]) -> None:
    assert place_of(name, words, {}).apply(words, {}, 64) == (expected, {})


def test_a_variable_is_set() -> None:
    assert place_of("env:BATCH", ["x.py", "BATCH=3"], {}).apply(["x.py"], {"A": "1"}, 64) == (
        ["x.py"],
        {"A": "1", "BATCH": "64"},
    )
    assert place_of("BATCH", ["x.py"], {"BATCH": "1"}).variable == "BATCH"


@pytest.mark.parametrize(
    ("source", "option", "variable"),
    [
        ("parser.add_argument('--batch-size', type=int)", "--batch-size", None),
        ('parser.add_argument("-b", "--batch_size")', "--batch_size", None),
        ('size = int(os.environ["batch_size"])', None, "batch_size"),
        ('size = os.environ.get("batch_size", 1)', None, "batch_size"),
        ("size = os.getenv('batch_size')", None, "batch_size"),
        ("batch_size = 3", "--batch_size", None),
    ],
)
def test_the_script_says_how_it_is_spelled(
    tmp_path: Path, source: str, option: str | None, variable: str | None
) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    place = place_of("batch_size", ["torchrun", str(script)], {})
    assert (place.option, place.variable) == (option, variable)


def test_the_answer_is_a_sentence_and_a_table() -> None:
    trials = (Trial(1, True, 1, 2, 1 << 30), Trial(8, True, 1, 2, 2 << 30), Trial(9, False, 1, 2, 3))
    found = Found("x.py", "batch_size", 1, 512, find_gpu("t4"), 8, trials)
    assert "batch_size up to 8" in found.text and "12.56 GiB to spare" in found.text
    assert found.to_json()["best"] == 8 and len(found.to_json()["trials"]) == 3
    assert "<table>" in found._repr_html_() and "8" in repr(found)
    none = Found("x.py", "batch_size", 4, 512, find_gpu("t4"), None, trials[2:])
    assert "even with batch_size = 4" in none.text
