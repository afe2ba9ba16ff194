"""`vram plan`: exit codes, the JSON contract, what a person reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import vram

TRACES = Path(__file__).resolve().parents[2] / "traces"
TRACE = str(TRACES / "gpt2_train.pickle.xz")
ROWS = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan_command(vram_command: Command) -> Command:
    return partial(vram_command, "plan")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "buffers.csv"
    path.write_text(ROWS)
    return path


def test_a_csv_is_planned_with_sizes_as_they_are(plan_command: Command, rows: Path) -> None:
    code, out, _ = plan_command(str(rows), "--capacity", "12", "--json")
    answer = json.loads(out)
    assert code == 0
    assert (answer["peak"], answer["lower_bound"], answer["ratio"]) == (12, 12, 1.0)
    assert answer["feasible"] is True
    assert isinstance(answer["method"], str)
    assert answer["seconds"] >= 0


def test_a_capacity_that_cannot_be_met_is_a_finding(plan_command: Command, rows: Path) -> None:
    code, out, _ = plan_command(str(rows), "--capacity", "11", "--json")
    assert code == 1
    assert json.loads(out)["feasible"] is False
    assert plan_command(str(rows), "--capacity", "11")[1].rstrip().endswith("no plan can fit")


def test_alignment_counts(plan_command: Command, rows: Path) -> None:
    assert json.loads(plan_command(str(rows), "--align", "512", "--json")[1])["peak"] == 3 * 512


def test_a_step_of_a_trace(plan_command: Command) -> None:
    code, out, _ = plan_command(TRACE, "--between", "step:2,step:3", "--json")
    assert code == 0
    assert json.loads(out)["ratio"] <= 1.002


def test_both_ends_belong_to_a_stretch(plan_command: Command) -> None:
    trace = vram.open(TRACE)
    steps = vram.trace.find_steps(trace)
    both = vram.plan(trace, between=range(steps.range(2).start, steps.range(3).stop))
    assert f" {len(both)} buffers need" in plan_command(TRACE, "--between", "step:2,step:3")[1]
    code, _, err = plan_command(TRACE, "--between", "step:3,step:2")
    assert code == 2 and "before it begins" in err


def test_a_person_reads_sizes_and_the_verdict(plan_command: Command, rows: Path) -> None:
    code, out, _ = plan_command(str(rows), "--capacity", "1KiB")
    assert code == 0
    assert "5 buffers need 12 B" in out
    assert "it fits into 1 KiB" in out


def test_the_picture_is_written(plan_command: Command, rows: Path, tmp_path: Path) -> None:
    assert plan_command(str(rows), "--svg", str(tmp_path / "out.svg"))[0] == 0
    assert (tmp_path / "out.svg").read_text().startswith("<svg")
    assert plan_command(str(rows), "--svg", str(tmp_path / "no" / "out.svg"))[0] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the first line must name id,lower,upper,size"),
        ("a,b,c\n1,2,3\n", "the first line must name"),
        ("id,lower,upper,size\nx,0,1\n", "line 2 is not an id"),
        ("id,lower,upper,size\nx,0,1,many\n", "line 2 is not an id"),
        ("id,lower,upper,size\nx,5,1,8\n", "the end must be larger"),
    ],
)
def test_a_bad_csv_is_one_line_and_code_2(plan_command: Command, rows: Path, text: str, message: str) -> None:
    rows.write_text(text)
    code, out, err = plan_command(str(rows))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_other_wrong_usage_is_code_2(plan_command: Command, rows: Path, tmp_path: Path) -> None:
    assert plan_command(str(tmp_path / "missing.csv"))[0] == 2
    assert plan_command(str(tmp_path / "missing.pickle"))[0] == 2
    assert plan_command(str(rows), "--between", "step:2,step:3")[0] == 2
    assert plan_command(TRACE, "--between", "nonsense")[0] == 2
    assert plan_command(TRACE, "--between", "step:2,step:99999")[0] == 2
    assert plan_command(TRACE, "--device", "7")[0] == 2
    assert plan_command(str(rows), "--time-limit", "-1")[0] == 2
