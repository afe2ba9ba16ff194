"""`vram replay` and the function behind it: exit codes, the JSON contract, what a person reads."""

from __future__ import annotations

import importlib
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_jobs import Job, trace_of

import vram
from vram.analysis import explain
from vram.errors import ConfigError, DeviceError
from vram.replay import Setting
from vram.replay.sweep import collapsed, worthwhile
from vram.trace import Annotation, lifetimes, open_trace
from vram.trace.lifetimes import intended

engine = importlib.import_module("vram.replay")
main = importlib.import_module("vram.cli").main

TRACES = Path(__file__).resolve().parents[2] / "traces"
SMALL = str(TRACES / "oom_gpt2_train_9000.pickle.xz")
MIB = 1 << 20

POLICY_KEYS = [
    "policy", "peak_allocated", "peak_reserved", "ratio",
    "driver_calls", "driver_us", "retries", "events_per_second", "oom", "segment_sizes", "spill",
]  # fmt: skip


def native_can_replay() -> bool:
    try:
        return hasattr(importlib.import_module("vram._native"), "Replayer")
    except ImportError:
        return False


needs_native = pytest.mark.skipif(not native_can_replay(), reason="the native core has no replay")


def answer(**changes: Any) -> dict[str, Any]:
    plain = {"peak_allocated": 1000, "peak_reserved": 1010, "driver_calls": 3, "driver_us": 2500.0}
    return {**plain, "seconds": 0.001, "oom": None, **changes}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Let a fake of the native replay answer; returns the list of its calls."""

    def install(**changes: Any) -> list[Any]:
        runs: list[Any] = []

        def replayer(policy: str, settings: Any, capacity: int, lag_us: float, *_more: Any) -> Any:
            runs.append(SimpleNamespace(conf=settings, capacity=capacity, lag_us=lag_us))
            return SimpleNamespace(
                run=lambda *columns: None,
                result=lambda: answer(**changes),
                segment_sizes=list,
                spill_steps=list,
            )

        monkeypatch.setattr("vram.replay.run._native", lambda: SimpleNamespace(Replayer=replayer))
        monkeypatch.setattr("vram.cli.limited._call", lambda work, names: work())  # its calls are seen here
        return runs

    return install


OUT_OF_MEMORY = {"event": 1, "size": 5 * MIB, "allocated": 2 * MIB, "reserved": 3 * MIB}


# --- the command --------------------------------------------------------------------------------------------


def test_json_of_one_file_is_one_object(fake: Any, vram_command: Any) -> None:
    fake()
    code, out, err = vram_command("replay", SMALL, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert list(document) == ["trace", "policies", "recorded"]
    heading = {
        "source": SMALL,
        "device": 0,
        "events": 1152,
        "dropped": 0,
        "complete": True,
        "truncated": False,
    }
    assert document["trace"] == {**heading, "peak_allocated": 10_120_245_760}
    assert [list(policy) for policy in document["policies"]] == [POLICY_KEYS] * 4
    assert document["policies"][0]["ratio"] == 1.01
    assert document["policies"][0]["oom"] is None


def test_json_of_several_files_is_a_list(fake: Any, vram_command: Any) -> None:
    fake()
    code, out, _ = vram_command("replay", SMALL, SMALL, "--json", "--policy", "vram", "--policy", "vram")
    assert code == 0
    assert [len(document["policies"]) for document in json.loads(out)] == [2, 2]


def test_running_out_of_memory_is_a_finding(fake: Any, vram_command: Any) -> None:
    fake(oom=OUT_OF_MEMORY)
    code, out, _ = vram_command("replay", SMALL, "--json")
    assert code == 1
    expected = {"event": 3, "step": None, "size": 5 * MIB, "allocated": 2 * MIB, "reserved": 3 * MIB}
    assert json.loads(out)["policies"][0]["oom"] == expected


@needs_native
def test_pytorchs_allocators_and_vram_are_compared_by_default(vram_command: Any) -> None:
    code, out, _ = vram_command("replay", SMALL, "--json")
    document = json.loads(out)
    names = [policy["policy"] for policy in document["policies"]]
    assert (code, names) == (0, ["torch", "torch-expandable", "cuda-async", "vram"])
    assert document["recorded"] == "torch"
    code, out, _ = vram_command("replay", SMALL)
    rows = [line for line in out.splitlines() if line.rstrip().endswith("recorded")]
    assert len(rows) == 1 and "torch " in rows[0]
    assert "The limit of the recorded job was between 8.09 GiB and 9.59 GiB" in out
    assert "less memory than the recorded torch, for" in out and "more driver time" in out
    assert "To use it: vram run --torch" in out


def test_equal_needs_are_not_a_difference(fake: Any, vram_command: Any) -> None:
    fake()
    _, out, _ = vram_command("replay", SMALL)
    assert "vram needs as much memory as the recorded torch, for 0 µs" in out


@needs_native
def test_what_completes_where_the_recorded_allocator_does_not_is_said(vram_command: Any) -> None:
    _, out, _ = vram_command("replay", SMALL, "--capacity", "9.48GiB")
    assert "vram completes, unlike the recorded torch. To use it: vram run --torch" in out


@needs_native
def test_the_request_that_failed_is_part_of_the_job(vram_command: Any) -> None:
    needs = {each.setting: each.needs for each in explain(open_trace(SMALL)).remedies}
    code, out, _ = vram_command("replay", SMALL, "--json", "--capacity", str(needs["vram run --torch"]))
    assert code == 1
    ends = {each["policy"]: each["oom"] and each["oom"]["event"] for each in json.loads(out)["policies"]}
    assert ends == {"torch": 1151, "torch-expandable": 1151, "cuda-async": 1151, "vram": None}
    _, out, _ = vram_command("replay", SMALL)
    assert "The recording ends with a failed request for 1.53 GiB; the replays serve it." in out
    _, out, _ = vram_command("replay", SMALL, "--sweep", "--policy", "torch-expandable", "--json")
    smallest = {each["environment"]: each["smallest_capacity"] for each in json.loads(out)["sweep"]}
    expandable = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert smallest[expandable] == needs[expandable]
    _, out, _ = vram_command("replay", SMALL, "--sweep", "--policy", "torch-expandable")
    assert "The recording ends with a failed request for 1.53 GiB; the replays serve it." in out
    _, out, _ = vram_command("replay", str(TRACES / "gpt2_train.pickle.xz"))
    assert "failed request" not in out


@needs_native
def test_programs_of_vrams_pools_are_not_advised_to_set_up_pytorch(tmp_path: Path, vram_command: Any) -> None:
    path = str(tmp_path / "pool.vtrace")
    with vram.Pool(vram.Device.model("1GiB")) as pool, vram.record(pool, path):
        kept = [pool.allocate("3MiB") for _ in range(8)]
        del kept
    for words in ((), ("--sweep", "--policy", "vram", "--policy", "torch")):
        _, out, _ = vram_command("replay", path, *words)
        assert "torch" in out and "PYTORCH" not in out and "vram run --torch" not in out


@needs_native
def test_pytorchs_defaults_need_no_variable(vram_command: Any) -> None:
    assert Setting("torch", {}).environment == ""
    _, out, _ = vram_command("replay", str(TRACES / "gpt2_train.pickle.xz"), "--sweep", "--policy", "torch")
    assert "PYTORCH_CUDA_ALLOC_CONF=\n" not in out


@needs_native
def test_the_recorded_settings_are_replayed(tmp_path: Path, vram_command: Any) -> None:
    job = Job()
    job.alloc(4 * MIB)
    path = job.save(tmp_path / "job.pickle")
    snapshot = pickle.loads(path.read_bytes())
    snapshot["allocator_settings"] = {"expandable_segments": True, "max_split_size": 64 * MIB}
    path.write_bytes(pickle.dumps(snapshot))
    own = engine.recorded_setting(open_trace(path))
    assert (own.policy, own.conf) == ("torch-expandable", {"max_split_size_mb": "64"})
    code, out, _ = vram_command("replay", str(path), "--json")
    assert (code, json.loads(out)["recorded"]) == (0, "torch-expandable")
    code, out, _ = vram_command(
        "replay", str(path), "--json", "--conf", "torch-expandable=max_split_size_mb:32"
    )
    assert (code, json.loads(out)["recorded"]) == (0, None)


def test_a_setting_is_worthwhile_if_no_other_beats_it() -> None:
    points = [(1, 9), (2, 5), (2, 5), (3, 6), (9, 1), (1, 10)]
    assert worthwhile(points) == [True, True, True, False, True, False]


@needs_native
def test_settings_with_the_same_result_are_one_row(vram_command: Any) -> None:
    _, out, _ = vram_command("replay", SMALL, "--sweep", "--policy", "torch", "--policy", "cuda-async")
    ranked = engine.sweep(open_trace(SMALL), policies=["torch", "cuda-async"])
    rows = collapsed(ranked)
    assert sum(1 + len(others) for _, others in rows) == len(ranked) == 41
    assert len([line for line in out.splitlines() if re.match(r" *\d+ ", line)]) == len(rows) < 41
    assert sum("(recorded)" in line for line in out.splitlines()) == 1
    assert "defaults, and 3 more with the same result (recorded)" in out


def test_the_table_and_its_meaning(fake: Any, vram_command: Any) -> None:
    fake(peak_allocated=1000 * MIB, peak_reserved=1020 * MIB)
    code, out, err = vram_command("replay", SMALL, "--policy", "vram")
    assert (code, err) == (0, "")
    assert "oom_gpt2_train_9000.pickle.xz: 1152 events over 1.36 s" in out
    assert "1020 MiB" in out and "1.0200" in out
    assert "vram reserves 2.00% more device memory than the program allocates at its peak" in out
    _title, header, row, *_ = out.splitlines()
    assert len(header) <= 120
    assert (header.split()[0], row.split()[0]) == ("policy", "vram")


def test_a_person_reads_what_ran_out(fake: Any, vram_command: Any) -> None:
    fake(oom=OUT_OF_MEMORY)
    code, out, _ = vram_command("replay", SMALL, "--capacity", "4MiB")
    assert code == 1
    assert "runs out of memory at event 3: 5 MiB requested, 2 MiB allocated and 3 MiB reserved of" in out


def test_options_reach_the_policy(fake: Any, vram_command: Any) -> None:
    runs = fake()
    options = ["--capacity", "40GiB", "--conf", "cross_stream:wait, limit:2GiB,", "--lag", "2.5ms", "--json"]
    assert vram_command("replay", SMALL, *options)[0] == 0
    assert (runs[0].capacity, runs[0].lag_us) == (40 << 30, 2500.0)
    assert (runs[0].conf["cross_stream"], runs[0].conf["limit"]) == ("wait", 2 << 30)


@pytest.mark.parametrize(("text", "microseconds"), [("0", 0), ("250us", 250), ("5 ms", 5000), ("0.1s", 1e5)])
def test_lag_with_units(text: str, microseconds: float, fake: Any, vram_command: Any) -> None:
    runs = fake()
    assert vram_command("replay", SMALL, "--lag", text, "--json")[0] == 0
    assert runs[0].lag_us == microseconds


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [SMALL, "--policy", "magic"],
        [SMALL, "--capacity", "much"],
        [SMALL, "--lag", "5"],
        [SMALL, "--conf", "cross_stream"],
        [SMALL, "--unknown"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], fake: Any, vram_command: Any) -> None:
    fake()
    code, out, err = vram_command("replay", *arguments)
    assert (code, out) == (2, "")
    assert "Usage" in err


def test_a_bad_file_is_one_line_on_stderr(fake: Any, vram_command: Any, tmp_path: Path) -> None:
    fake()
    bad = tmp_path / "bad.pickle"
    bad.write_bytes(b"c\x1b[31mos\nsystem\n(tR.")
    code, out, err = vram_command("replay", str(bad), "--json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"vram: {bad}: the pickle asks for")
    assert "\x1b" not in err
    code, _, err = vram_command("replay", str(tmp_path / "nowhere"))
    assert (code, err) == (2, f"vram: cannot open {tmp_path / 'nowhere'}: No such file or directory\n")


def test_a_setting_the_pool_refuses_is_one_line_on_stderr(
    monkeypatch: pytest.MonkeyPatch, vram_command: Any
) -> None:
    def refuse() -> None:
        raise ConfigError("no setting 'colour'; there is limit")

    monkeypatch.setattr("vram.replay.run._native", refuse)
    assert vram_command("replay", SMALL) == (2, "", "vram: no setting 'colour'; there is limit\n")


def test_python_m_vram_is_the_command() -> None:
    command = [sys.executable, "-m", "vram", "replay", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "vram: cannot open /nowhere: No such file or directory\n"


# --- the function -------------------------------------------------------------------------------------------


def test_without_capacity_the_device_is_never_full(fake: Any) -> None:
    runs = fake()
    engine.replay(open_trace(SMALL))
    assert runs[0].capacity == engine.NEVER_FULL
    engine.replay(open_trace(SMALL), capacity="512MiB")
    assert runs[1].capacity == 512 * MIB


def test_speed_counts_recorded_events_up_to_the_last_one_run(fake: Any) -> None:
    trace = open_trace(SMALL)
    program = intended(trace)
    fake(seconds=0.5)
    assert engine.replay(trace).events_per_second == 2 * (program.event[-1] + 1)
    fake(seconds=0.5, oom={**OUT_OF_MEMORY, "event": 100})
    assert engine.replay(trace).events_per_second == 2 * (program.event[99] + 1)


def test_an_empty_program_has_ratio_one(fake: Any) -> None:
    fake(peak_allocated=0, peak_reserved=0, seconds=0.0)
    assert engine.replay(open_trace(SMALL)).ratio == 1.0


def test_unknown_policies_negative_lags_and_empty_devices_are_refused() -> None:
    trace = open_trace(SMALL)
    with pytest.raises(ConfigError, match=r"no policy 'magic'; there is .*torch, .*vram"):
        engine.replay(trace, "magic")
    with pytest.raises(ConfigError, match=r"lag_us must be a number from 0 .* not -1"):
        engine.replay(trace, lag_us=-1)
    with pytest.raises(ConfigError, match="a device of 0 bytes"):
        engine.replay(trace, capacity=0)


def test_a_missing_native_core_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vram._native", None)
    with pytest.raises(DeviceError, match="needs the native core, which is not built"):
        engine.replay(open_trace(SMALL))


# --- through the real pool ----------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("name", ["gpt2_train", "llama_varlen_ckpt", "resnet_multiscale", "llm_serve"])
def test_the_pool_reserves_hardly_more_than_the_program_holds(name: str, vram_command: Any) -> None:
    code, out, _ = vram_command("replay", str(TRACES / f"{name}.pickle.xz"), "--json", "--policy", "vram")
    document = json.loads(out)
    policy = document["policies"][0]
    assert code == 0
    assert policy["peak_allocated"] == document["trace"]["peak_allocated"]
    assert 1 <= policy["ratio"] <= 1.01


@needs_native
@pytest.mark.parametrize(("conf", "bound"), [("cross_stream:wait", 1.01), ("", 1.10)])
def test_streams_share_what_they_may(conf: str, bound: float, vram_command: Any) -> None:
    path = str(TRACES / "multistream_prefetch.pickle.xz")
    code, out, _ = vram_command("replay", path, "--json", "--policy", "vram", "--conf", conf)
    assert code == 0
    assert 1 <= json.loads(out)["policies"][0]["ratio"] <= bound


@needs_native
def test_too_small_a_device_runs_out(vram_command: Any) -> None:
    code, out, _ = vram_command(
        *("replay", str(TRACES / "gpt2_train.pickle.xz"), "--json"),
        *("--policy", "vram", "--capacity", "4GiB"),
    )
    failure = json.loads(out)["policies"][0]["oom"]
    assert code == 1
    assert failure["reserved"] <= 4 << 30 < failure["allocated"] + failure["size"]


# ---- spilling ----------------------------------------------------------------------------------------------


def steps_of_spill(*, keep: int, work: int, steps: int) -> Any:
    """A job that holds `keep` and in each of its steps allocates and frees `work` more; a second a step."""
    events, marks = [(0, 1 << 40, keep)], []
    for number in range(steps):
        marks.append((number, len(events)))
        events += [(0, 2 << 40, work), (1, 2 << 40, work), (2, 2 << 40, work)]
    trace = trace_of(events)
    for number, first in marks:
        for event in range(first, len(events)):
            trace.time_us[event] = (number + 1) * 1_000_000 + event
    annotations = tuple(
        Annotation("START", f"step#{number}", trace.time_us[first]) for number, first in marks
    )
    return replace(trace, annotations=annotations)


@needs_native
def test_what_spilling_would_move_is_predicted() -> None:
    """48 MiB are held and each step needs 32 more of a device of 64: 16 go once and are used in each."""
    trace = steps_of_spill(keep=48 * MIB, work=32 * MIB, steps=4)
    assert engine.replay(trace, capacity=64 * MIB).oom is not None
    result = engine.replay(trace, capacity=64 * MIB, spill="1GiB")
    spill = result.spill
    assert result.oom is None and result.peak_reserved <= 64 * MIB
    assert (spill.moved_out, spill.moved_back, spill.peak) == (16 * MIB, 0, 16 * MIB)
    assert (spill.swaps, spill.returns) == (1, 0)
    assert spill.read == 4 * 16 * MIB
    assert (spill.steps, spill.moved_in_step) == (4, 5 * 16 * MIB // 4)
    assert spill.held_us > spill.moved_out / 55e3  # the copy, and exchanging the pages
    assert spill.read_us == pytest.approx(spill.read / 50e3)
    assert spill.added_us == spill.held_us + spill.read_us
    assert spill.step_us == pytest.approx(4e6, rel=0.01)
    assert spill.slowdown == pytest.approx(1 + spill.added_us / spill.step_us)


@needs_native
def test_a_spilled_block_is_read_once_before_it_is_freed() -> None:
    rows = [(0, 1, 48 * MIB), (0, 2, 32 * MIB), (1, 1, 48 * MIB), (2, 1, 48 * MIB), (1, 2, 32 * MIB)]
    spill = engine.replay(trace_of(rows), capacity=64 * MIB, spill="1GiB").spill
    assert (spill.moved_out, spill.read, spill.steps) == (16 * MIB, 16 * MIB, 1)


@needs_native
def test_predicted_memory_returns_when_there_is_room() -> None:
    trace = steps_of_spill(keep=48 * MIB, work=32 * MIB, steps=1)
    rows = [  # afterwards the job works for five seconds with little memory
        *zip(trace.action, trace.address, trace.size, strict=True),
        *((action, 3, 2 * MIB) for _ in range(5) for action in (0, 1, 2)),
    ]
    later = trace_of(rows)
    for event in range(4, later.events):
        later.time_us[event] = event * 1_000_000
    spill = engine.replay(later, capacity=64 * MIB, spill="1GiB").spill
    assert (spill.moved_out, spill.moved_back, spill.returns) == (16 * MIB, 16 * MIB, 1)
    assert spill.read == 0  # it came back before it was needed


@needs_native
def test_spill_is_bounded_and_for_vram_alone() -> None:
    trace = steps_of_spill(keep=48 * MIB, work=32 * MIB, steps=2)
    assert engine.replay(trace, capacity=64 * MIB, spill=8 * MIB).oom is not None
    assert engine.replay(trace).spill is None
    assert engine.replay(trace, spill="1GiB").spill.moved_out == 0  # a device that is never full
    assert engine.replay(trace, capacity=64 * MIB, conf={"spill": "1GiB"}).spill.moved_out == 16 * MIB
    with pytest.raises(ConfigError, match="only vram spills"):
        engine.replay(trace, "torch", spill="1GiB")
    report = engine.compare(trace, ("torch", "vram"), capacity=64 * MIB, spill="1GiB")
    assert [result.oom is None for result in report.results] == [False, True]


@needs_native
@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
@pytest.mark.parametrize("name", ["gpt2_train", "llama_varlen_ckpt", "resnet_multiscale"])
def test_recorded_jobs_complete_with_spill_on_smaller_devices(name: str, share: float) -> None:
    program = lifetimes(open_trace(TRACES / f"{name}.pickle.xz"))
    needs = engine.replay(program).peak_reserved
    result = engine.replay(program, capacity=int(needs * share), spill=needs)
    assert result.oom is None and result.spill is not None
    assert result.spill.peak >= needs * (1 - share) * 0.9
    assert result.spill.moved_out >= result.spill.peak
    assert result.spill.slowdown > 1


@needs_native
def test_the_command_predicts_spilling(vram_command: Any) -> None:
    options = ["replay", SMALL, "--capacity", "7GiB", "--spill", "4GiB"]
    code, out, _ = vram_command(*options)
    assert code == 0
    assert re.search(r"Spilling moves [\d.]+ \wiB to host memory in \d+ swap", out), out
    assert "less device memory than the program allocates" in out
    code, out, _ = vram_command(*options, "--json")
    (policy,) = json.loads(out)["policies"]
    assert (code, policy["policy"]) == (0, "vram")
    assert policy["spill"]["moved_out"] > 0 and policy["spill"]["slowdown"] > 1
    code, out, _ = vram_command("replay", SMALL, "--capacity", "64GiB", "--spill", "4GiB")
    assert (code, "Nothing is spilled." in out) == (0, True)


@pytest.mark.parametrize(
    "options",
    [["--spill", "1GiB"], ["--sweep"], ["--capacity", "1GiB", "--policy", "torch"]],
)
def test_spill_needs_a_full_device_and_vram(options: list[str], vram_command: Any) -> None:
    code, _, err = vram_command("replay", SMALL, "--spill", "1GiB", *options)
    assert code == 2 and "spill" in err


@needs_native
def test_spill_moves_pages_wherever_it_is_set() -> None:
    trace = steps_of_spill(keep=48 * MIB, work=32 * MIB, steps=1)
    for conf, spill in (({"pages": "no", "spill": "1GiB"}, 0), ({"pages": False}, "1GiB")):
        with pytest.raises(ConfigError, match="no effect with pages off"):
            engine.replay(trace, capacity=64 * MIB, conf=conf, spill=spill)
    assert engine.replay(trace, capacity=1 << 30, conf={"pages": "no", "spill": 0}).oom is None


@pytest.mark.parametrize("value", ["0.5", "1.5", "lots"])
def test_spill_of_a_replay_is_the_option(value: str, vram_command: Any) -> None:
    code, _, err = vram_command("replay", SMALL, "--capacity", "1GiB", "--spill", value)
    assert code == 2 and "spill cannot be" in err


@needs_native
def test_the_command_does_not_advise_host_memory_for_what_never_fits(vram_command: Any) -> None:
    code, out, _ = vram_command("replay", SMALL, "--capacity", "7GiB", "--spill", "auto", "--json")
    assert (code, json.loads(out)["policies"][0]["oom"]) == (0, None)
    code, out, _ = vram_command("replay", SMALL, "--capacity", "6GiB", "--spill", "32MiB")
    assert code == 1 and "a larger --capacity, a larger --spill" in out
    code, out, _ = vram_command("replay", SMALL, "--capacity", "16MiB", "--spill", "64GiB")
    assert code == 1 and "larger --spill" not in out
