"""What other allocators would have done: against what PyTorch really held in runs of the recorded jobs."""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from made_jobs import trace_of

import vram
from vram.errors import ConfigError
from vram.replay import POLICY_KINDS, Setting, compare, grid, replay, replay_stream, sweep
from vram.trace import Action, Lifetimes, Trace, lifetimes, open_trace

pytest.importorskip("vram._native")

TRACES = Path(__file__).resolve().parents[2] / "traces"
MIB = 1 << 20
# Peak reserved in MiB, as measured (traces/README.md): default, expandable segments, cudaMallocAsync.
MEASURED = {
    "gpt2_train": (14578, 13870, 14080),
    "llama_varlen_ckpt": (17864, 13850, 14208),
    "resnet_multiscale": (8846, 6650, 6880),
    "llm_serve": (2100, 1604, 1696),
    "multistream_prefetch": (4278, 2344, 2112),
}
COMPLETE = [name for name in MEASURED if name != "llm_serve"]


@cache
def recorded(name: str) -> Trace:
    return open_trace(TRACES / f"{name}.pickle.xz")


@cache
def program(name: str) -> Lifetimes:
    return lifetimes(recorded(name))


# --- against measured runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPLETE)
def test_torch_reproduces_the_recorded_run(name: str) -> None:
    trace = recorded(name)
    segments = [
        size for action, size in zip(trace.action, trace.size, strict=True) if action == Action.SEGMENT_ALLOC
    ]
    result = replay(program(name), "torch")
    assert list(result.segment_sizes) == segments
    assert result.peak_reserved == MEASURED[name][0] * MIB


def test_torch_is_near_where_the_beginning_is_missing() -> None:
    assert replay(program("llm_serve"), "torch").peak_reserved == pytest.approx(2100 * MIB, rel=0.01)


@pytest.mark.parametrize("name", MEASURED)
def test_expandable_segments_are_predicted_from_a_recording_without_them(name: str) -> None:
    peak = replay(program(name), "torch-expandable").peak_reserved
    assert peak == pytest.approx(MEASURED[name][1] * MIB, rel=0.01)


@pytest.mark.parametrize("name", MEASURED)
def test_the_drivers_pool_is_modelled_within_five_percent(name: str) -> None:
    assert replay(program(name), "cuda-async").peak_reserved == pytest.approx(
        MEASURED[name][2] * MIB, rel=0.05
    )


def test_the_ladder_fails_where_the_real_run_failed() -> None:
    result = replay(recorded("llama_varlen_ckpt"), "torch", capacity="13400MiB")
    assert result.oom is not None
    assert (result.oom["step"], round(result.oom["size"] / MIB)) == (8, 1994)
    assert (result.oom["allocated"] // MIB, result.oom["reserved"] // MIB) == (10121, 11602)


def test_the_ladder_saves_what_the_real_run_saved() -> None:
    result = replay(program("llama_varlen_ckpt"), "torch", capacity="14200MiB")
    assert (result.oom, result.retries, result.peak_reserved) == (None, 2, 13876 * MIB)


@pytest.mark.parametrize("name", ["oom_llama_varlen_ckpt_13400", "oom_gpt2_train_9000"])
def test_a_run_that_ended_out_of_memory_had_enough_up_to_there(name: str) -> None:
    capacity = int(name.rsplit("_", 1)[1]) * MIB
    assert replay(program(name), "torch", capacity=capacity).oom is None


@pytest.mark.parametrize("policy", sorted(POLICY_KINDS))
def test_every_policy_serves_every_request_and_holds_at_least_what_the_program_does(policy: str) -> None:
    result = replay(program("multistream_prefetch"), policy)
    assert result.oom is None
    assert result.peak_reserved >= result.peak_allocated >= 1990 * MIB


@pytest.mark.parametrize("policy", sorted(POLICY_KINDS))
def test_too_small_a_device_fails_under_every_policy(policy: str) -> None:
    result = replay(recorded("multistream_prefetch"), policy, capacity="1GiB")
    assert result.oom is not None
    assert result.oom["allocated"] + result.oom["size"] > 0.5 * (1 << 30)
    assert isinstance(result.oom["step"], int)


# --- what a recording implies -------------------------------------------------------------------------------


def test_of_what_was_live_before_the_beginning_the_last_freed_is_the_oldest() -> None:
    frees = [(Action.FREE_REQUESTED, address, address, 0) for address in (1024, 512, 2048)]
    assert list(lifetimes(trace_of(frees)).size[:3]) == [2048, 512, 1024]


@pytest.mark.parametrize(
    ("events", "emptied"),
    [
        ([(Action.SEGMENT_FREE, 0, 30, 5), (Action.SEGMENT_ALLOC, 0, 50, 5)], []),  # for the same request
        ([(Action.SEGMENT_FREE, 0, 30, 4), (Action.SEGMENT_ALLOC, 0, 50, 5)], [1]),
        ([(Action.SEGMENT_FREE, 0, 30, 0), (Action.ALLOC, 0, 5, 0)], [1]),
        ([(Action.SEGMENT_FREE, 0, 30, 0)], [1]),
        # Without stacks: 30 and 50 were more than it ever held, so it had run out; 30 and 20 were not.
        ([(Action.SEGMENT_FREE, 0, 30, 0), (Action.SEGMENT_ALLOC, 0, 50, 0)], []),
        (
            [
                (Action.SEGMENT_FREE, 0, 30, 0),
                (Action.SEGMENT_ALLOC, 0, 20, 0),
                (Action.SEGMENT_ALLOC, 1, 40, 0),
            ],
            [1],
        ),
        ([(Action.SEGMENT_FREE, 0, 30, 0), (Action.OOM, 0, 20, 0)], []),
    ],
)  # fmt: skip
def test_emptying_the_cache_is_told_from_making_room(
    events: list[tuple[Action, int, int, int]], emptied: list[int]
) -> None:
    assert list(lifetimes(trace_of([(Action.SEGMENT_ALLOC, 0, 30, 3), *events])).emptied) == emptied


# --- programs of one's own ----------------------------------------------------------------------------------


def made(*rows: tuple[int, int, int], completed: dict[int, int] | None = None, **more: Any) -> Lifetimes:
    """A program of (op, id, MiB) rows; `completed` gives the events at which delayed frees end, by row."""
    count = len(rows)
    ends = [(completed or {}).get(row, -1) for row in range(count)]
    return Lifetimes(
        allocations=count,
        carried=0,
        streams=1,
        op=array("B", [op for op, _, _ in rows]),
        id=array("I", [number for _, number, _ in rows]),
        size=array("Q", [size * MIB for _, _, size in rows]),
        stream=array("I", [0] * count),
        time_us=array("q", range(count)),
        completed_us=array("q", ends),
        completed_event=array("q", ends),
        event=array("q", range(count)),
        **more,
    )


def test_emptying_the_cache_is_part_of_the_program() -> None:
    rows = [(0, 0, 30), (1, 0, 30), (0, 1, 50)]
    assert replay(made(*rows), "torch").peak_reserved == 80 * MIB
    assert replay(made(*rows, emptied=array("q", [2])), "torch").peak_reserved == 50 * MIB


def test_memory_another_stream_uses_comes_back_at_the_recorded_event() -> None:
    rows = [(0, 0, 30), (1, 0, 30), (0, 1, 30), (0, 2, 30)]
    assert replay(made(*rows, completed={1: 3}), "torch").segment_sizes == (30 * MIB, 30 * MIB)


@pytest.mark.parametrize("policy", ["torch", "vram", "bfc"])
def test_a_program_in_pieces_is_the_same_program(policy: str) -> None:
    whole = program("multistream_prefetch")
    columns = ("op", "id", "size", "stream", "time_us", "completed_us", "completed_event", "event")
    pieces = (
        dataclasses.replace(whole, **{name: getattr(whole, name)[start : start + 100] for name in columns})
        for start in range(0, len(whole), 100)
    )
    streamed, once = replay_stream(pieces, policy), replay(whole, policy)
    unlike = {"events_per_second": 0.0, "segment_sizes": ()}
    assert dataclasses.replace(streamed, **unlike) == dataclasses.replace(once, **unlike)


def test_a_program_in_pieces_names_the_event_that_failed() -> None:
    pieces = [made((0, 0, 30)), dataclasses.replace(made((0, 1, 30)), event=array("q", [7]))]
    result = replay_stream(pieces, "torch", capacity="40MiB")
    assert result.oom == {
        "event": 7, "step": None, "size": 30 * MIB, "allocated": 30 * MIB, "reserved": 30 * MIB,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="no pieces"):
        replay_stream([], "torch")


def test_numbers_that_are_not_dense_are_refused() -> None:
    for changes in ({"id": array("I", [1 << 30])}, {"stream": array("I", [1 << 30])}):
        with pytest.raises(ValueError, match="out of range"):
            replay(dataclasses.replace(made((0, 0, 1)), **changes), "torch")


# --- settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "divisions"),
    [
        ("4", [4] * 16),
        ("[256:1,512:2,1024:4,>:8]", [1] * 9 + [2, 4] + [8] * 5),
        ("[64:8,>:0]", [8] * 7 + [0] * 9),
    ],
)
def test_divisions_are_read_as_pytorch_reads_them(value: str, divisions: list[int]) -> None:
    settings = POLICY_KINDS["torch"].read({"roundup_power2_divisions": value}, 0)
    assert settings == {"roundup_power2_divisions": divisions}


@pytest.mark.parametrize(
    ("policy", "conf", "message"),
    [
        ("torch", {"max_split_size_mb": "3"}, "whole MiB of at least 20"),
        ("torch", {"roundup_power2_divisions": "[256:3]"}, "powers of two"),
        ("torch", {"garbage_collection_threshold": "2"}, "above 0 and at most 1"),
        ("torch", {"limit": "1GiB"}, "policy torch has no setting 'limit'; it takes garbage_coll"),
        ("cuda-async", {"limit": "1GiB"}, "it has none"),
        ("bfc", {"allow_growth": "maybe"}, "true or false"),
    ],
)
def test_wrong_settings_are_refused_with_what_is_right(
    policy: str, conf: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replay(made((0, 0, 1)), policy, conf=conf)


def test_settings_by_policy_reach_theirs_alone() -> None:
    trace = recorded("oom_gpt2_train_9000")
    conf = {"torch": {"max_split_size_mb": "64"}, "vram": {"max_page": "2MiB"}}
    tuned = compare(trace, ["torch", "vram"], conf=conf).results
    alone = replay(trace, "torch", conf=conf["torch"])
    assert tuned[0].peak_reserved == alone.peak_reserved
    with pytest.raises(ConfigError, match="settings by policy, and 'limit' beside them"):
        compare(trace, ["vram"], conf={**conf, "limit": "1GiB"})


# --- sweeps -------------------------------------------------------------------------------------------------

FEW = (
    Setting("torch", {}),
    Setting("torch", {"max_split_size_mb": "64"}),
    Setting("torch-expandable", {}),
    Setting("vram", {}),
)


def test_the_grid_begins_with_each_policys_defaults() -> None:
    settings = grid()
    assert {setting.policy for setting in settings} == set(POLICY_KINDS)
    for policy in POLICY_KINDS:
        assert next(setting for setting in settings if setting.policy == policy).conf == {}
    assert len({(each.policy, *each.conf.items()) for each in settings}) == len(settings) >= 50


def test_a_sweep_ranks_by_the_smallest_device_that_would_have_sufficed() -> None:
    told: list[tuple[int, int]] = []
    job = program("llama_varlen_ckpt")
    ranked = sweep(job, FEW, progress=lambda done, count: told.append((done, count)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [each.rank for each in ranked] == [1, 2, 3, 4]
    needed = [each.smallest_capacity or 0 for each in ranked]
    assert needed == sorted(needed) and needed[0] > 0
    worst = next(each for each in ranked if each.policy == "torch" and not each.conf)
    assert worst.smallest_capacity is not None and worst.peak_reserved == 17864 * MIB
    assert replay(job, "torch", capacity=worst.smallest_capacity).oom is None
    assert replay(job, "torch", capacity=worst.smallest_capacity - 2 * MIB).oom is not None


def test_several_at_once_find_the_same() -> None:
    job = program("multistream_prefetch")
    assert sweep(job, FEW, jobs=3) == sweep(job, FEW)


def test_suggestions_are_lines_to_paste() -> None:
    ranked = vram.suggest(recorded("multistream_prefetch"), policies=["torch-expandable", "cuda-async"])
    lines = {each.environment for each in ranked}
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in lines
    assert "PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync" in lines
    assert vram.suggest(recorded("multistream_prefetch"), policies=["torch"], capacity="1GiB") == ()


def test_rmm_is_set_by_a_line_of_python() -> None:
    line = Setting("rmm-pool", {"initial_pool_size": "1GiB"}).environment
    assert "rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=1073741824)" in line


@pytest.mark.parametrize("executor", ["spark", "dask:tcp"])
def test_an_unknown_executor_is_refused(executor: str) -> None:
    with pytest.raises(ConfigError, match="there is dask, or dask=ADDRESS"):
        sweep(made((0, 0, 1)), FEW, executor=executor)
    with pytest.raises(ConfigError, match="jobs must be an integer from 1"):
        sweep(made((0, 0, 1)), FEW, jobs=0)


@pytest.mark.parametrize("executor", [b"dask", [], object(), int])
def test_what_is_no_dask_client_is_refused(executor: object) -> None:
    with pytest.raises(ConfigError, match="executor takes dask, dask=ADDRESS or a Dask client, not"):
        sweep(made((0, 0, 1)), FEW, executor=executor)


# --- the command --------------------------------------------------------------------------------------------

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def replay_command(capsys: pytest.CaptureFixture[str]) -> Command:
    from vram.cli import main

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["replay", str(TRACES / "multistream_prefetch.pickle.xz"), *arguments], prog_name="vram")
        captured = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), captured.out, captured.err

    return run


def test_several_policies_side_by_side(replay_command: Command) -> None:
    policies = ["--policy", "torch", "--policy", "torch-expandable", "--json"]
    code, out, err = replay_command(*policies, "--conf", "torch=roundup_power2_divisions:[64:4,>:8]")
    results = json.loads(out)["policies"]
    assert (code, err) == (0, "")
    assert [result["policy"] for result in results] == ["torch", "torch-expandable"]
    assert results[1]["peak_reserved"] == 2344 * MIB
    assert results[0]["peak_reserved"] != 4278 * MIB


def test_a_sweep_prints_the_ranking_and_the_line_to_paste(replay_command: Command) -> None:
    code, out, err = replay_command("--sweep", "--policy", "torch-expandable", "--policy", "vram", "-j", "2")
    assert (code, err) == (0, "")
    assert "smallest device" in out
    assert "is enough with" in out and "vram run --torch" in out
    code, out, _ = replay_command("--sweep", "--policy", "cuda-async", "--json", "--capacity", "1GiB")
    (only,) = json.loads(out)["sweep"]
    assert (code, only["smallest_capacity"], only["rank"]) == (1, None, 1)


def test_a_terminal_shows_how_far_a_long_sweep_is(
    replay_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vram.cli.console.SHOWN_AFTER_S", 0.0)
    assert replay_command("--sweep", "--policy", "cuda-async")[2] == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # has a pipe taken for a terminal
    assert "settings" in replay_command("--sweep", "--policy", "cuda-async")[2]


@pytest.mark.parametrize("arguments", [["--sweep", "--conf", "a:1"], ["-j", "2"], ["--executor", "dask"]])
def test_options_that_contradict_are_wrong_usage(arguments: list[str], replay_command: Command) -> None:
    code, out, err = replay_command(*arguments)
    assert (code, out) == (2, "") and "Usage" in err
