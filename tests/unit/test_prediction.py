"""Predictions from recorded results: peaks, the verdict, other GPUs, holders, settings, saving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_jobs import GIB, MIB, Job
from made_results import FAILURE, OUT_OF_MEMORY, recorded, result

import vram
from vram.errors import ConfigError
from vram.predict import Prediction, find_gpu
from vram.predict.program import Ended, Program

PROGRAM = Program(("train.py", "--lr", "1"), ("python", "train.py"))


def predicted(
    folder: Path, *results: dict[str, Any], status: int = 0, gpu: str = "t4", interrupted: bool = False
) -> Prediction:
    ended = Ended(status, interrupted, 1.5, results or (result(),))
    return Prediction(PROGRAM, find_gpu(gpu), 1, ended, str(folder))


def test_a_program_that_fits(tmp_path: Path) -> None:
    recorded(tmp_path)
    found = predicted(tmp_path)
    assert found.fits and found.room == find_gpu("t4").memory - 13 * GIB
    assert found.text == "Fits NVIDIA Tesla T4 (14.56 GiB), with 1.56 GiB to spare."
    assert repr(found).startswith("<vram.predict.Prediction of train.py --lr 1: Fits")


def test_other_gpus_have_contexts_of_their_own(tmp_path: Path) -> None:
    recorded(tmp_path)
    found = predicted(tmp_path, gpu="h200")
    room = {each.gpu.key: each.room for each in found.table()}
    assert room["h200"] == found.room
    assert len(repr(found.table())) < 400 and "<td" in found.table()._repr_html_()
    context = find_gpu("h200").overhead - find_gpu("a100-80gb").overhead
    assert context and room["a100-80gb"] == find_gpu("a100-80gb").memory - found.peak_used + context


def test_other_gpus_fit_or_not_or_after_releasing_memory(tmp_path: Path) -> None:
    recorded(tmp_path)
    fits = {each.gpu.key: each for each in predicted(tmp_path).table()}
    assert fits["h200"].fits == "yes" and fits["h200"].room > 0
    assert fits["rtx-3060"].fits == "tight" and fits["rtx-3060"].room < 0  # 9 + 1 GiB are enough
    assert fits["rtx-4060"].fits == "no"
    assert [each.gpu.memory for each in predicted(tmp_path).table()] == sorted(
        (each.gpu.memory for each in fits.values()), reverse=True
    )


def test_who_holds_memory_at_the_peak(tmp_path: Path) -> None:
    recorded(tmp_path)
    groups = predicted(tmp_path).holders()
    assert [(group.label, group.bytes) for group in groups] == [
        ("train.py:3 step", 6 * GIB),
        ("train.py:8 step", 3 * GIB + 2 * MIB),
    ]


def test_places_are_seen_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = Job()
    job.alloc(64 * MIB, line=3)
    for event in job.events:
        event["frames"] = [{**frame, "filename": str(tmp_path / "my.py")} for frame in event["frames"][1:]]
    job.alloc(32 * MIB)
    job.events[-1]["frames"] = []
    job.save(tmp_path / "1.pickle")
    assert [group.label for group in predicted(tmp_path).holders()] == [
        "my.py:3 step",
        "(no Python stack)",
    ]


def test_what_other_allocators_need(tmp_path: Path) -> None:
    recorded(tmp_path)
    ranked = predicted(tmp_path).settings()
    needed = {(each.policy, *each.conf): each.smallest_capacity for each in ranked}
    assert needed["vram",] is not None and needed["vram",] < 10 * GIB
    assert {each.policy for each in ranked} == {"torch", "torch-expandable", "cuda-async", "vram"}


def test_a_request_that_failed_and_was_caught_is_not_needed(tmp_path: Path) -> None:
    recorded(tmp_path, oom=True)
    caught = predicted(tmp_path, result(failures=[FAILURE]))
    assert caught.outcome == "completed"
    assert all((each.smallest_capacity or 0) < 13 * GIB for each in caught.settings())
    failed = predicted(tmp_path, result(outcome="failed", failures=[FAILURE], error=OUT_OF_MEMORY), status=1)
    assert all((each.smallest_capacity or 0) >= 11 * GIB for each in failed.settings())


def test_a_comparison_that_fails_is_a_note_and_the_prediction_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_given: object, **_options: object) -> None:
        raise MemoryError("no memory for it")

    monkeypatch.setattr("vram.predict.prediction.sweep", failing)
    recorded(tmp_path)
    document = predicted(tmp_path).to_json()
    assert document["fits"] and document["settings"] == []
    assert any("no memory for it" in note for note in document["notes"])


def test_a_program_that_ran_out_of_memory(tmp_path: Path) -> None:
    recorded(tmp_path, oom=True)
    found = predicted(tmp_path, result(outcome="failed", failures=[FAILURE], error=OUT_OF_MEMORY), status=1)
    assert not found.fits and found.outcome == "out of memory"
    assert found.failure is not None and found.failure.size == 5 * GIB and not found.failure.caught
    assert "in step 3 at train.py:9 step, requesting 5 GiB with 12 GiB reserved" in found.text
    fits = {each.gpu.key: each.fits for each in found.table()}
    assert fits["t4"] == "no" and fits["rtx-3060"] == "no" and fits["h200"] == "unknown"
    assert found.holders()[0].bytes == 6 * GIB  # at that moment


def test_a_run_without_a_limit_says_what_is_needed(tmp_path: Path) -> None:
    recorded(tmp_path)
    found = predicted(tmp_path, result(outcome="failed", failures=[FAILURE], error=OUT_OF_MEMORY), status=1)
    used = {**result()["devices"][0], "peak_reserved": 20 * GIB, "peak_used": 21 * GIB}
    found.unlimited = predicted(tmp_path, result(devices=[used]), gpu="h200")
    fits = {each.gpu.key: each.fits for each in found.table()}
    assert fits["l4"] == "yes" and fits["t4"] == "no" and fits["rtx-4080"] == "tight"
    assert found.to_json()["unlimited"]["peak_used"] == 21 * GIB


def test_a_rank_that_was_ended_because_another_ran_out(tmp_path: Path) -> None:
    ranks = (
        result(rank=0, outcome="interrupted", recordings=[]),
        result(rank=1, outcome="failed", failures=[FAILURE], error=OUT_OF_MEMORY, recordings=[]),
    )
    found = predicted(tmp_path, *ranks, status=1)
    assert found.outcome == "out of memory" and found.failure is not None and found.failure.rank == 1


def test_an_error_that_only_the_launcher_reports(tmp_path: Path) -> None:
    worker = result(pid=2, failures=[FAILURE], recordings=[])
    launcher = result(pid=1, outcome="failed", devices=[], error=OUT_OF_MEMORY, recordings=[])
    found = predicted(tmp_path, launcher, worker, status=1)
    assert found.outcome == "out of memory" and found.failure is not None and found.failure.pid == 2


def test_an_error_that_the_program_caught_is_none(tmp_path: Path) -> None:
    recorded(tmp_path)
    found = predicted(tmp_path, result(failures=[FAILURE]))
    assert found.fits and found.failure is None and found.failures[0].caught
    assert found.to_json()["caught_failures"] == 1
    assert found.holders()[0].label == "train.py:3 step"


@pytest.mark.parametrize(
    ("status", "interrupted", "left", "outcome"),
    [
        (0, False, "completed", "completed"),
        (0, False, "stopped", "stopped"),
        (130, True, "interrupted", "interrupted"),
        (1, False, "failed", "failed"),
        (-11, False, "running", "failed"),
    ],
)
def test_how_it_ended(tmp_path: Path, status: int, interrupted: bool, left: str, outcome: str) -> None:
    recorded(tmp_path)
    found = predicted(tmp_path, result(outcome=left), status=status, interrupted=interrupted)
    assert found.outcome == outcome
    assert found.to_json()["fits"] is (None if outcome == "failed" else True)
    assert ("signal 11" in found.text) == (status == -11)
    assert bool(found.notes) == (left == "running")


def test_a_device_that_processes_share_holds_all_of_them(tmp_path: Path) -> None:
    found = predicted(tmp_path, result(pid=1, recordings=[]), result(pid=2, recordings=[]), gpu="h200")
    assert found.peak_used == 26 * GIB and found.peak_reserved == 12 * GIB
    assert any("share a device" in note for note in found.notes)


def test_the_recording_is_saved_and_opens(tmp_path: Path) -> None:
    recorded(tmp_path)
    (target,) = predicted(tmp_path).save(tmp_path / "kept.vtrace")
    trace = vram.open(target)
    assert trace.settings["device_total"] == find_gpu("t4").memory
    assert vram.analysis.explain(trace).capacity.bytes == find_gpu("t4").memory


def test_every_rank_is_saved(tmp_path: Path) -> None:
    recorded(tmp_path)
    found = predicted(tmp_path, result(rank=0), result(rank=1, pid=2))
    names = {path.name for path in found.save(tmp_path / "kept.vtrace")}
    assert names == {"kept.vtrace", "kept.rank-1.cuda-0.vtrace"}


def test_without_a_recording_the_peaks_are_still_known(tmp_path: Path) -> None:
    found = predicted(tmp_path)
    assert found.trace is None and found.holders() == [] and found.settings() == ()
    assert found.peak_reserved == 12 * GIB and found.smallest_memory == 13 * GIB
    with pytest.raises(ConfigError, match="no recording"):
        found.save(tmp_path / "kept.vtrace")


def test_guesses_and_unknown_functions_of_all_processes(tmp_path: Path) -> None:
    guess = {
        "kind": "read",
        "what": "x.item()",
        "where": "train.py:4",
        "count": 2,
        "value": 0,
        "assumed": "zero",
    }
    found = predicted(
        tmp_path,
        result(guesses=[guess], unknown=["cufftXt"], recordings=[]),
        result(pid=2, unknown=["cufftXt", "ncclNew"], recordings=[], problems=["the recording is not saved"]),
        result(pid=3, recordings=[], static_runtimes=["/x/extension.so"]),
    )
    assert found.guesses == [guess] and found.unknown == ["cufftXt", "ncclNew"]
    assert "the recording is not saved" in found.notes
    assert any(note.startswith("/x/extension.so contains the CUDA runtime") for note in found.notes)


def test_a_prediction_is_json_and_html(tmp_path: Path) -> None:
    recorded(tmp_path)
    found = predicted(tmp_path)
    plain = json.loads(json.dumps(found.to_json()))
    assert plain["fits"] is True and plain["peak_used"] == 13 * GIB and len(plain["gpus"]) >= 25
    page = found._repr_html_()
    assert "Fits NVIDIA Tesla T4" in page and "train.py:3 step" in page and "rtx" in page.lower()
