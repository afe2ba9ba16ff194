"""Predict the jobs of catalog.py on a null GPU and compare with what a real GPU needed.

    python benchmarks/predict/compare.py [JOB…] [--parts peaks,caps,…] [--predicted FILE] [--again]

`--truth` is a file of measure.py, by default the one beside this script. What was predicted is kept in
`--predicted`, so that an interrupted run goes on where it stopped; `--again` predicts anew what is asked for,
and `--parts ""` only prints. Needs a CUDA build of PyTorch, but no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from catalog import ALLOCATORS, HERE, JOBS, SEARCHES, Job
from measure import Measurement, Room
from watch import unpack

from vram.bench.report import Column, Table, markdown
from vram.predict import find_gpu, null_environment

TRUTH = HERE / "truth-h200.json"
Known = dict[str, Any]
Task = tuple[tuple[str, ...], Callable[[], None]]


# ---- predicting -------------------------------------------------------------------------------------------


def tasks(predicting: Measurement, truth: Known, names: list[str], parts: list[str]) -> Iterator[Task]:
    """What can be predicted and compared: the place of the result, and the call that finds it."""
    for job in (JOBS[name] for name in names):
        measured = truth["jobs"].get(job.name, {})
        for allocator in ALLOCATORS:
            if "peaks" in parts and _completed(measured, allocator):
                yield ("jobs", job.name, allocator), partial(_peaks, predicting, job, allocator)
            if "recorded" in parts and _completed(measured, f"recorded {allocator}"):
                yield (
                    ("jobs", job.name, f"recorded {allocator}"),
                    partial(predicting.recorded, job, allocator),
                )
        if "vram" in parts and _completed(measured, "vram"):
            yield ("jobs", job.name, "vram"), partial(predicting.under_vram, job)
        for label, limit in measured.get("caps", {}).items() if "caps" in parts else ():
            allocator, part = label.split()
            run = partial(predicting.capped, job, allocator, limit["cap"], part)
            yield ("jobs", job.name, "caps", label), run
    for search in SEARCHES if "searches" in parts else ():
        if search.job in names and search.job in truth["searches"]:
            yield ("searches", search.job), partial(predicting.search, search)


def _peaks(predicting: Measurement, job: Job, allocator: str) -> None:
    predicting.note("jobs", job.name, allocator, value=predicting.run(job, allocator, gib=0))


def _known(predicted: Known, place: tuple[str, ...]) -> bool:
    for key in place:
        if key not in predicted:
            return False
        predicted = predicted[key]
    return True


def _completed(measured: Known, key: str) -> bool:
    return measured.get(key, {}).get("outcome") == "completed"


# ---- comparing --------------------------------------------------------------------------------------------


def error(predicted: Known | None, measured: Known | None, key: str) -> float | None:
    """How far off a prediction is, as a share of the truth; None where one of the two is missing."""
    if not predicted or not measured or predicted.get("outcome") != "completed":
        return None
    return predicted[key] / measured[key] - 1


def jobs_table(truth: Known, predicted: Known, names: list[str]) -> Table:
    """Errors of the peaks, a row per job."""
    rows = []
    for name in names:
        measured = truth["jobs"].get(name, {})
        if not _completed(measured, "default"):
            continue
        found = predicted["jobs"].get(name, {})
        row = {"job": name, "kind": JOBS[name].kind}
        row |= {key: measured["default"][key] for key in ("allocated", "reserved")}
        for allocator in (*ALLOCATORS, "vram"):
            for key in ("allocated", "reserved"):
                row[f"{allocator} {key}"] = percent(error(found.get(allocator), measured.get(allocator), key))
            if found.get(allocator, {}).get("outcome", "completed") != "completed":
                row[f"{allocator} reserved"] = found[allocator]["outcome"]
        row["limits"] = caps_right(measured.get("caps", {}), found.get("caps", {}))
        rows.append(row)
    columns = [
        Column("job", "job"),
        Column("kind", "kind"),
        Column("allocated", "allocated on the GPU", "bytes"),
        Column("default allocated", "predicted"),
        Column("reserved", "reserved on the GPU", "bytes"),
        Column("default reserved", "predicted"),
        Column("expandable reserved", "expandable segments"),
        Column("vram reserved", "over vram"),
        Column("limits", "outcomes under limits"),
    ]
    return Table("Peaks, and how far off predictions are", columns, rows)


def percent(value: float | None) -> str | None:
    if value is None:
        return None
    return "exact" if value == 0 else f"{100 * value:+.2f} %"


def caps_right(measured: Known, found: Known) -> str | None:
    """How many outcomes under limits are right; of the deaths, how many at the same step and request."""
    pairs = [(limit, found[label]) for label, limit in measured.items() if label in found]
    if not pairs:
        return None
    right = [pair for pair in pairs if pair[0]["outcome"] == pair[1]["outcome"]]
    died = [pair for pair in right if pair[0]["outcome"] == "out of memory"]
    same = sum(last_request(a) == last_request(b) for a, b in died)
    return f"{len(right)} of {len(pairs)}; {same} of {len(died)} the same request"


def last_request(run: Known) -> tuple[int, int] | None:
    """The step and size of the allocation at which a job died."""
    refused = run["out_of_memory"]
    return (refused[-1]["step"], refused[-1]["bytes"]) if refused else None


def summary_table(truth: Known, predicted: Known, names: list[str]) -> Table:
    """Median and worst error a kind of job."""
    kinds = ["all", *dict.fromkeys(JOBS[name].kind for name in names)]
    rows = []
    for kind in kinds:
        row: dict[str, Any] = {"kind": kind}
        for allocator in (*ALLOCATORS, "vram"):
            for key in ("allocated", "reserved"):
                errors = [
                    abs(found)
                    for name in names
                    if kind in ("all", JOBS[name].kind)
                    for found in [
                        error(
                            predicted["jobs"].get(name, {}).get(allocator),
                            truth["jobs"].get(name, {}).get(allocator),
                            key,
                        )
                    ]
                    if found is not None
                ]
                row["jobs"] = max(row.get("jobs", 0), len(errors))
                if errors:
                    middle, worst = statistics.median(errors), max(errors)
                    row[f"{allocator} {key}"] = f"{100 * middle:.2f} / {100 * worst:.2f} %"
        rows.append(row)
    columns = [Column("kind", "kind"), Column("jobs", "jobs", "count")]
    columns += [
        Column(f"{allocator} {key}", f"{key}, {allocator}")
        for allocator in (*ALLOCATORS, "vram")
        for key in ("allocated", "reserved")
    ]
    return Table("Median / worst error", columns, rows)


def searches_table(truth: Known, predicted: Known) -> Table:
    """The largest batch sizes."""
    rows = [
        {"job": name, "limit": measured["cap"], "truth": measured["best"], "found": found["best"]}
        for name, measured in truth["searches"].items()
        if (found := predicted["searches"].get(name))
    ]
    columns = [Column("job", "job"), Column("limit", "limit", "bytes")]
    columns += [Column("truth", "largest batch on the GPU", "count"), Column("found", "predicted", "count")]
    return Table("Largest batch size that completes", columns, rows)


def differences(truth: Known, predicted: Known, names: list[str]) -> Iterator[str]:
    """What a person who improves predictions wants to know: where each first goes wrong."""
    for name in names:
        measured, found = truth["jobs"].get(name, {}), predicted["jobs"].get(name, {})
        for allocator in (*ALLOCATORS, "vram"):
            if allocator not in found or not _completed(measured, allocator):
                continue
            if not _completed(found, allocator):
                failed = found[allocator]
                yield f"{name}, {allocator}: {failed['outcome']}: {failed.get('error', '')[-200:]}"
                continue
            pairs = zip(measured[allocator]["steps"], found[allocator]["steps"], strict=False)
            for step, (real, guess) in enumerate(pairs):
                if real != guess:
                    yield f"{name}, {allocator}: peaks after step {step}: {guess} instead of {real}"
                    break
            else:
                for key in ("allocated", "reserved"):
                    if measured[allocator][key] != found[allocator][key]:
                        yield f"{name}, {allocator}: {key} after the last step"
        for label, limit in measured.get("caps", {}).items():
            guess = found.get("caps", {}).get(label)
            if guess and (limit["outcome"], last_request(limit)) != (guess["outcome"], last_request(guess)):
                yield (
                    f"{name}, {label}: {guess['outcome']} {last_request(guess)} "
                    f"instead of {limit['outcome']} {last_request(limit)}"
                )
        for allocator in ALLOCATORS:
            key = f"recorded {allocator}"
            if "events" in measured.get(key, {}) and "events" in found.get(key, {}):
                yield f"{name}, {key}: {first_difference(measured[key], found[key])}"


def first_difference(measured: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """The event in which two recordings part."""
    real, guess = unpack(measured["events"]), unpack(found["events"])
    for number, (a, b) in enumerate(zip(real, guess, strict=False)):
        if a != b:
            return f"event {number} of {len(real)} is {b} instead of {a}"
    if len(real) != len(guess):
        return f"{len(guess)} events instead of {len(real)}, those of both alike"
    return f"all {len(real)} events alike"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("jobs", nargs="*", metavar="JOB")
    parser.add_argument("--truth", type=Path, default=TRUTH)
    parser.add_argument("--predicted", type=Path, default=Path("predicted.json"))
    parser.add_argument("--parts", default="peaks", help="of peaks, caps, recorded, vram, searches")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    truth = json.loads(options.truth.read_text())
    predicted = {"jobs": {}, "searches": {}}
    if options.predicted.exists():
        predicted = json.loads(options.predicted.read_text())
    names = options.jobs or list(JOBS)
    variables = null_environment(find_gpu(truth["device"]))
    predicting = Measurement(options.predicted, predicted, Room(10**6, options.parallel), 10**4, variables)
    wanted = tasks(predicting, truth, names, options.parts.split(","))
    with ThreadPoolExecutor(options.parallel) as pool:
        runs = [pool.submit(run) for place, run in wanted if options.again or not _known(predicted, place)]
    for run in runs:
        run.result()
    tables = (
        jobs_table(truth, predicted, names),
        summary_table(truth, predicted, names),
        searches_table(truth, predicted),
    )
    for table in tables:
        if table.rows:
            print(markdown(asdict(table)), end="\n\n")
    print(*differences(truth, predicted, names), sep="\n")


if __name__ == "__main__":
    main()
