"""`vram explain`, `summary`, `diff`, `leaks` and `merge`: exit codes, JSON, and what a person reads."""

from __future__ import annotations

import json
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_jobs import GIB, MIB, Job

TRACES = Path(__file__).resolve().parents[2] / "traces"
FRAGMENTED = str(TRACES / "oom_llama_varlen_ckpt_13400.pickle.xz")
DEMANDING = str(TRACES / "oom_gpt2_train_9000.pickle.xz")
TRAINING = str(TRACES / "resnet_multiscale.pickle.xz")


@pytest.fixture
def job(tmp_path: Path) -> str:
    """Three steps that each leave 4 MiB behind, in a file."""
    made = Job()
    for step in range(3):
        made.mark(f"step#{step}")
        made.alloc(4 * MIB, line=5)
        made.free(made.alloc(32 * MIB, line=6))
    return str(made.save(tmp_path / "job.pickle"))


# --- explain ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "verdict"), [(FRAGMENTED, "fragmentation"), (DEMANDING, "true-demand or fragmentation")]
)
def test_explain_gives_the_verdict_with_bytes_that_sum_to_the_device(
    path: str, verdict: str, vram_command: Any
) -> None:
    code, out, err = vram_command("explain", path, "--json")
    document = json.loads(out)
    assert (code, err, document["verdict"]) == (1, "", verdict)
    assert sum(document["bytes"].values()) == document["device"]
    assert document["at"]["kind"] == "oom" and document["request"]["size"] > GIB
    assert set(document["holders"]) == {"stack", "module", "tag", "stream", "step"}
    assert document["reserved"] - document["allocated"] == document["bytes"]["fragmentation"]
    assert document["remedies"]


def test_a_person_reads_the_reason_the_evidence_and_the_way_out(vram_command: Any) -> None:
    code, out, err = vram_command("explain", FRAGMENTED, "--capacity", "13400MiB")
    assert (code, err) == (1, "")
    assert out.startswith("Out of memory at event 52377 in step 8: failed to allocate 1.95 GiB on stream 0")
    assert "but 1.45 GiB of it were split up by blocks in use" in out
    assert "of a limit of 13.09 GiB" in out
    assert "fragmentation" in out and "free, but split up by blocks in use" in out
    assert "held by stack" in out and "workloads.py:24 lm_loss" in out
    assert "The largest free block is 266.3 MiB." in out
    titles = [line for line in out.splitlines() if line in ("Evidence", "Next steps")]
    assert titles == ["Evidence", "Next steps"]


def test_an_alternative_is_given_with_the_limit_it_needs(vram_command: Any) -> None:
    pytest.importorskip("vram._native")
    _, out, _ = vram_command("explain", DEMANDING)
    assert "; your limit was between 8.09 GiB and 9.59 GiB" in out and "may fit" in out
    assert "still runs out" not in out
    _, out, _ = vram_command("explain", DEMANDING, "--capacity", "9000MiB")
    assert "; your limit was 8.79 GiB" in out and "may fit" not in out
    assert out.count("does not fit") == 3


def test_shares_leave_out_what_the_job_could_not_use(vram_command: Any) -> None:
    _, out, _ = vram_command("explain", DEMANDING)
    assert "true-demand      7.89 GiB  97.5%  in use" in out
    assert "125.29 GiB         free on the device, but beyond the limit" in out


def test_whole_stacks_on_request(vram_command: Any) -> None:
    _, out, _ = vram_command("explain", DEMANDING)
    assert "workloads.py:246 <module>" not in out
    _, out, _ = vram_command("explain", DEMANDING, "--stack")
    assert out.count("  workloads.py:246 <module>") == 6  # the request and five holders
    assert "\n  transformers/models/gpt2/modeling_gpt2.py:185 forward\n" in out


def test_a_terminal_gets_colour_and_lines_that_break_between_words() -> None:
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "60"}
    command = [sys.executable, "-m", "vram", "explain", FRAGMENTED]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600).stdout
    assert shown.startswith("\x1b[1;31mOut of memory")
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    headline = plain.partition("Verdict")[0]
    assert max(map(len, headline.splitlines())) <= 60
    assert " ".join(headline.split()).endswith("with 9.88 GiB allocated and 11.33 GiB reserved.")


def test_what_is_left_out_can_be_asked_for_as_it_is_written(vram_command: Any) -> None:
    _, out, _ = vram_command("explain", FRAGMENTED)
    hint = next(line for line in out.splitlines() if "vram summary" in line)
    code, out, err = vram_command(*shlex.split(hint.partition(": vram ")[2]))
    assert (code, err) == (0, "") and "live at the out-of-memory error, event 52377 in step 8\n" in out


def test_memory_without_a_stack_is_explained_where_other_memory_has_one(
    tmp_path: Path, vram_command: Any
) -> None:
    why = "Backward passes run on threads without Python frames"
    assert why in vram_command("explain", FRAGMENTED)[1]
    assert why not in vram_command("explain", DEMANDING)[1]  # it failed in its first forward pass


def test_without_an_out_of_memory_the_peak_is_explained(vram_command: Any) -> None:
    code, out, _ = vram_command("explain", TRAINING)
    assert code == 0
    assert out.startswith("No request failed in this recording. Its peak is at event 14789 in step 7: ")
    _, out, _ = vram_command("explain", DEMANDING, "--at", "peak")
    assert out.startswith("The peak is at event 1148: ")
    code, out, _ = vram_command("explain", TRAINING, "--at", "step:1", "--json")
    assert (code, json.loads(out)["at"]["kind"]) == (0, "event")


def test_names_in_a_file_cannot_talk_to_the_terminal(tmp_path: Path, vram_command: Any) -> None:
    made = Job()
    made.mark("forward\x1b[2J")
    made.alloc(MIB)
    made.mark("forward\x1b[2J", "END")
    made.alloc(MIB)
    made.events[1]["frames"][1]["filename"] = "train\x1b]0;gone\x07.py"
    path = str(made.save(tmp_path / "job.pickle"))
    for verb in ("explain", "summary"):
        code, out, _ = vram_command(verb, path)
        assert code == 0 and "\x1b" not in out and "\x07" not in out and "train?" in out


# --- summary, diff, leaks, merge ----------------------------------------------------------------------------


def test_summary_names_the_holders(job: str, vram_command: Any) -> None:
    code, out, err = vram_command("summary", job, "--by", "line")
    assert (code, err) == (0, "")
    assert out.startswith("job.pickle: 44 MiB live at the peak, event ")
    assert "train.py:6 step  32 MiB  72.7%       1" in out
    code, out, _ = vram_command("summary", job, "--by", "step", "--json")
    groups = json.loads(out)["groups"]
    assert (code, [group["key"] for group in groups]) == (0, [2, 0, 1])


def test_a_gap_fails_only_above_what_is_allowed(job: str, vram_command: Any) -> None:
    code, out, _ = vram_command("diff", job, job, "--fail-above", "0")
    assert code == 0 and "No difference when grouped by line." in out
    code, out, _ = vram_command("diff", job, DEMANDING, "--fail-above", "9GiB", "--json")
    document = json.loads(out)
    assert (code, document["failed"]) == (0, False)
    assert sum(group["gap"] for group in document["groups"]) == document["gap"] > 0
    code, out, _ = vram_command("diff", job, DEMANDING, "--fail-above", "64MiB")
    assert code == 1 and "The difference exceeds the limit of 64 MiB." in out
    assert "workloads.py:24 lm_loss" in out
    assert vram_command("diff", DEMANDING, job, "--fail-above", "64MiB")[0] == 0


def test_a_difference_is_limited_by_a_percentage_and_written_as_markdown(job: str, vram_command: Any) -> None:
    code, out, _ = vram_command("diff", job, DEMANDING, "--fail-above", "5%", "--markdown", "--top", "2")
    lines = out.splitlines()
    assert code == 1 and lines[0].startswith("### ❌ Peak GPU memory: +")
    assert lines[2].endswith("This is more than the limit of 5%.")
    assert lines[4:6] == ["| line | before | after | difference |", "|---|---:|---:|---:|"]
    assert lines[6].startswith("| `") and " more | | | " in lines[8] and len(lines) == 9
    code, out, _ = vram_command("diff", DEMANDING, job, "--fail-above", "5%", "--markdown")
    assert code == 0 and out.startswith("### ✅ Peak GPU memory: -")
    code, out, _ = vram_command("diff", job, job, "--markdown")
    assert code == 0 and out.splitlines()[0] == "### Peak GPU memory: 0 B (+0.0%)"
    code, _, err = vram_command("diff", job, job, "--fail-above", "-5%")
    assert code == 2 and "neither a size such as" in err


def test_leaks_of_all_steps_are_the_default(job: str, tmp_path: Path, vram_command: Any) -> None:
    code, out, _ = vram_command("leaks", job, "--json")
    assert (code, json.loads(out)) == (
        1,
        json.loads(vram_command("leaks", job, "--between", "step:0,step:2", "--json")[1]),
    )
    plain = Job()
    plain.alloc(4 * MIB)
    code, out, _ = vram_command("leaks", str(plain.save(tmp_path / "plain.pickle")), "--json")
    document = json.loads(out)
    assert (code, document["unit"], document["first"]) == (0, "slice", 0)


def test_leaks_are_a_finding(job: str, vram_command: Any) -> None:
    code, out, _ = vram_command("leaks", job, "--between", "step:0,step:2", "--json")
    document = json.loads(out)
    assert (code, document["leaked"], document["steps"]) == (1, 12 * MIB, 3)
    code, out, _ = vram_command("leaks", job, "--between", "step:0,step:2")
    assert code == 1 and "12 MiB likely leaked" in out and "100%" in out
    code, out, _ = vram_command("leaks", TRAINING, "--between", "step:2,step:9")
    assert code == 0 and "no leak is likely" in out


def test_without_steps_a_leak_is_in_doubt(vram_command: Any) -> None:
    """The first forward pass of a job: nothing that it holds is a leak."""
    _, out, _ = vram_command("leaks", DEMANDING, "--top", "1")
    title, doubt, *_ = out.splitlines()
    assert title.endswith("10 slices: 6.53 GiB may have leaked")
    assert doubt == (
        "The recording has no steps, so memory that a single step holds looks like a leak; "
        "mark steps with vram.step."
    )


@pytest.fixture
def without_history(tmp_path: Path) -> str:
    """A snapshot of a program that did not record its history."""
    made = Job()
    made.alloc(40 * MIB)
    return str(made.save(tmp_path / "now.pickle", since=len(made.events)))


def test_a_snapshot_without_a_history_is_described_as_such(without_history: str, vram_command: Any) -> None:
    _, out, _ = vram_command("summary", without_history)
    assert out.startswith("now.pickle: 40 MiB live at the end of the recording, which has no events\n")
    _, out, _ = vram_command("merge", without_history, "--json")
    assert json.loads(out)["ranks"][0]["peak_allocated"] == 40 * MIB


@pytest.mark.parametrize("verb", ["explain", "summary", "leaks", "replay", "replay --sweep", "plan"])
def test_an_empty_recording_is_refused(verb: str, tmp_path: Path, vram_command: Any) -> None:
    path = tmp_path / "empty.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}))
    code, out, err = vram_command(*verb.split(), str(path))
    assert (code, out) == (2, "") and "empty.pickle has no events; record them with" in err


def test_merge_writes_the_ranks_and_names_the_odd_one(job: str, tmp_path: Path, vram_command: Any) -> None:
    paths = []
    for rank in range(3):
        made = Job()
        made.mark("step#0")
        made.alloc(100 * MIB + (rank == 1) * 50 * MIB)
        paths.append(str(made.save(tmp_path / f"rank{rank}.pickle")))
    output = tmp_path / "run"
    code, out, err = vram_command("merge", *paths, "-o", str(output))
    assert (code, err) == (0, "")
    title, _header, first, *_ = out.splitlines()
    assert title == "3 ranks, 1 step in common: rank 1 differs most, +50.0% from the median"
    assert first.startswith("rank 1") and output.stat().st_size > 0
    code, out, _ = vram_command("merge", *paths, "--json")
    assert json.loads(out)["ranks"][0]["name"] == "rank 1"


# --- what all of them share ---------------------------------------------------------------------------------


@pytest.fixture
def two_devices(tmp_path: Path) -> str:
    """A snapshot of two devices, the second with a little less to tell."""
    first, second = Job(), Job()
    for size in (8, 8, 8):
        first.alloc(size * MIB)
    second.alloc(40 * MIB)
    snapshot = first.snapshot()
    snapshot["device_traces"].append(second.events)
    path = tmp_path / "two.pickle"
    path.write_bytes(pickle.dumps(snapshot, protocol=4))
    return str(path)


@pytest.mark.parametrize(
    "verb",
    ["explain", "summary", "leaks --between event:0,event:1", "replay", "replay --sweep --policy bfc",
     "convert --to folded", "diff", "merge"],
)  # fmt: skip
def test_every_verb_takes_a_device_and_names_the_recording(
    verb: str, two_devices: str, tmp_path: Path, vram_command: Any
) -> None:
    if verb.startswith("replay"):
        pytest.importorskip("vram._native")
    files = [two_devices, two_devices] if verb == "diff" else [two_devices]
    code, out, err = vram_command(*verb.split(), *files, "--device", "1", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    (named,) = [document.get("trace")] if "trace" in document else document["traces"][:1]
    assert (named["source"], named["device"], named["events"]) == (two_devices, 1, 2)


@pytest.mark.parametrize("columns", ["40", "80"])
def test_numbers_are_whole_on_a_narrow_terminal(
    columns: str, monkeypatch: pytest.MonkeyPatch, vram_command: Any
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    _, out, _ = vram_command("summary", DEMANDING, "--top", "2")
    assert "…" not in out and " 3.94 GiB  49.8%      48\n" in out
    _, out, _ = vram_command("merge", DEMANDING)
    assert "oom_gpt2" in out and " 8.09 GiB   +0.0%      0       1\n" in out


def test_in_a_pipe_a_row_is_a_line(vram_command: Any) -> None:
    _, out, _ = vram_command("leaks", TRAINING, "--between", "step:2,step:9", "--top", "100")
    _title, _header, *rows = out.splitlines()
    assert rows and all(row.split()[-1] in ("B", "KiB", "MiB") for row in rows)


def test_a_pipe_that_knows_few_letters_is_no_finding(job: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "vram", "summary", job]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert (done.returncode, done.stderr) == (0, "") and "train.py:6 step ? torch/nn" in done.stdout


# --- what goes wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain"],
        ["explain", TRAINING, "--capacity", "much"],
        ["summary", TRAINING, "--by", "colour"],
        ["diff", TRAINING],
        ["diff", TRAINING, TRAINING, "--by", "stack"],
        ["leaks"],
        ["summary", TRAINING, "--top", "0"],
        ["merge"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], vram_command: Any) -> None:
    code, out, err = vram_command(*arguments)
    assert (code, out) == (2, "") and "Usage" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain", "/nowhere"], "cannot open /nowhere: No such file or directory"),
        (["explain", "/dev/null"], "/dev/null is not a regular file"),
        (["explain", str(TRACES)], f"{TRACES} is a directory; name a recording in it"),
        (["explain", "JOB", "--at", "oom"], "has no out-of-memory error; use --at peak, or name an event"),
        (["explain", "JOB", "--at", "soon"], "'soon' is not a moment"),
        (["summary", "JOB", "--at", "999"], "there is no event 999"),
        (["leaks", "JOB", "--between", "step:0"], "is not a range"),
        (["leaks", "JOB", "--between", "step:0,step:9"], "there is no step 9"),
        (["merge", "JOB", "-o", "/nowhere/run"], "cannot write /nowhere/run"),
    ],
)
def test_a_refusal_is_one_line_on_stderr(
    arguments: list[str], words: str, job: str, vram_command: Any
) -> None:
    code, out, err = vram_command(*(job if argument == "JOB" else argument for argument in arguments))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("vram: ") and words in err


def test_a_missing_pyarrow_is_named_where_it_is_needed(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vram_command: Any
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, out, _ = vram_command("summary", job)
    assert code == 0 and "live at the peak, event" in out
    code, _, err = vram_command("merge", job, TRAINING, "-o", str(tmp_path / "ranks.parquet"))
    assert code == 2 and 'pip install "vram[trace]"' in err
    code, out, _ = vram_command("explain", job)
    assert code == 0 and "Its peak is at event" in out


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_leaves_is_no_finding(options: list[str]) -> None:
    """`vram summary … | head -1`: neither the code of a finding nor a traceback."""
    program = "import sys; from vram.cli import main; main(['summary', *sys.argv[1:]])"
    with subprocess.Popen(
        [sys.executable, "-c", program, TRAINING, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 128 + signal.SIGPIPE
