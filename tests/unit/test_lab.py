"""The lab: verdicts follow the numbers, the host runs what it can, the command says it in three ways."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

import vram
from vram import lab
from vram.errors import ConfigError
from vram.lab import EXPERIMENTS, Bench, Experiment, Observation, Quantity, Table
from vram.lab.allocators import driver_pool, naive_pool, served
from vram.lab.experiment import listed
from vram.lab.kernels import BlockRun
from vram.lab.markdown import markdown
from vram.lab.stream_order import _most_at_once, _side_by_side

main = importlib.import_module("vram.cli").main

ON_HOST = [name for name, each in EXPERIMENTS.items() if not each.needs_gpu]
NEED_GPU = [name for name, each in EXPERIMENTS.items() if each.needs_gpu]
VERDICTS = {"holds", "does not hold", "depends"}
# What the host must find, however busy the machine: these are about contents alone, not about who is first.
SURE = {"same-stream": "holds", "two-addresses": "holds"}


def seen(table: Table | None = None, **numbers: float) -> Observation:
    return Observation({name: Quantity(value, "") for name, value in numbers.items()}, table)


def rows(columns: str, *entries: tuple[Any, ...]) -> Table:
    return Table(tuple(columns.split(", ")), list(entries))


# ---- verdicts ----------------------------------------------------------------------------------------------


def synchronous(usable: int, back: int) -> Observation:
    return seen(kernel_ms=50, malloc_ms=0.1, usable_at_return=usable, free_ms=48, given_back_at_return=back)


def waits(*who: bool) -> Observation:
    return seen(rows("call, waits", *((f"call{index}", each) for index, each in enumerate(who))))


def chain(with_malloc: float) -> Observation:
    times = {"chain_with_malloc_ms": with_malloc, "chain_with_malloc_and_free_ms": 40}
    launches = {"launch_us": 5, "launch_beside_malloc_us": 6}
    return seen(chain_alone_ms=30, mallocs=64, **times, **launches)


def copies(pageable: float, pinned: float) -> Observation:
    ways = ("upload", "download")
    calls = {f"pageable_{way}_call_ms": pageable for way in ways} | {
        f"pinned_{way}_call_ms": pinned for way in ways
    }
    speeds = {f"{kind}_{way}_gb_s": 7.0 for kind in ("pageable", "pinned") for way in ways}
    return seen(kernel_ms=50, **calls, **speeds)


def together(ms: float) -> Observation:
    return seen(upload_ms=5, download_ms=5, compute_ms=5, together_ms=ms, copy_engines=3)


def chunks(smallest: float, middle: float, whole: float) -> Observation:
    return seen(rows("chunk, ms", ("128 KiB", smallest), ("8 MiB", middle), ("128 MiB", whole)), ideal_ms=5)


def threshold(ms: float, kept: float) -> Observation:
    times = {"batch_at_0_ms": ms, "batch_unlimited_ms": 1}
    return seen(reserved_at_0=kept, reserved_unlimited=512 << 20, **times)


def mark(set_status: int, reset_status: int, after: int) -> Observation:
    statuses = {"status_of_setting": set_status, "status_of_resetting": reset_status}
    return seen(high_before=64 << 20, high_after_reset=after, **statuses)


def trims(wrong: int, *after: float) -> Observation:
    entries = [("vram", "8 of 8 MiB", 32, 64, each) for each in after]
    return seen(rows("pool, blocks, live MiB, reserved MiB, after MiB", *entries), wrong_words=wrong)


def fragments(*served: bool, free: float = 128) -> Observation:
    entries = [(f"pool{index}", "every other", free, each) for index, each in enumerate(served)]
    return seen(rows("allocator, freed, free MiB, served", *entries), request_mib=64)


def reuses(addresses: int, wrong: int) -> Observation:
    return seen(
        rows(
            "pool, rounds, addresses, wrong words, queued ms, done ms",
            ("vram", 10, addresses, wrong, 1.0, 50.0),
        )
    )


def races(bare: tuple[int, ...], protected: tuple[int, ...]) -> Observation:
    entries = [("naive", "used", "nothing", wrong) for wrong in bare]
    entries += [("vram", "used", "record_stream", wrong) for wrong in protected]
    return seen(rows("pool, case, protected by, wrong words", *entries), words=1024)


def recorded(without: float, with_it: float) -> Observation:
    times = {"reuse_without_ms": without, "reuse_with_ms": with_it, "growth_ms": 0.1}
    return seen(kernel_ms=50, extra_mib=8, **times)


def at_once(shared: int, full: int) -> Observation:
    kernels = {"kernels_launched": 160, "kernels_at_once": 128}
    return seen(multiprocessors=132, shared_multiprocessors=shared, shared_when_full=full, **kernels)


def grown(in_place: float, copied: float, wrong: int = 0) -> Observation:
    sizes = {"from_mib": 1024, "to_mib": 1280, "copy_peak_mib": 2304}
    return seen(in_place_ms=in_place, copy_ms=copied, wrong_words=wrong, **sizes)


def aliases(second: int, first: int) -> Observation:
    return seen(words=100, wrong_words_second=second, wrong_words_first=first)


def captured(*allowed: bool) -> Observation:
    return seen(rows("call, allowed", *((f"call{index}", each) for index, each in enumerate(allowed))))


JUDGED = {
    "malloc-synchronous": [
        (synchronous(1, 1), "holds"), (synchronous(0, 0), "does not hold"), (synchronous(1, 0), "depends"),
    ],
    "who-waits": [
        (waits(True, True), "holds"), (waits(False, False), "does not hold"), (waits(True, False), "depends"),
    ],
    "malloc-stalls": [(chain(60), "holds"), (chain(30.5), "does not hold"), (chain(35), "depends")],
    "pinned-copies": [
        (copies(48, 0.1), "holds"), (copies(48, 48), "does not hold"), (copies(0.1, 0.1), "depends"),
    ],
    "overlap": [(together(5.5), "holds"), (together(14.5), "does not hold"), (together(10), "depends")],
    "chunk-size": [
        (chunks(5, 7, 10), "holds"), (chunks(20, 12, 10), "does not hold"), (chunks(20, 6, 10), "depends"),
    ],
    "release-threshold": [
        (threshold(8, 0), "holds"), (threshold(1, 512 << 20), "does not hold"), (threshold(1, 0), "depends"),
    ],
    "high-water-mark": [
        (mark(1, 0, 0), "holds"), (mark(0, 0, 0), "does not hold"), (mark(1, 1, 64 << 20), "depends"),
    ],
    "trim": [
        (trims(0, 32, 32), "holds"), (trims(0, 64, 64), "does not hold"), (trims(0, 32, 64), "depends"),
        (trims(5, 32, 32), "does not hold"),
    ],
    "fragmentation": [
        (fragments(False, False), "holds"), (fragments(True, True), "does not hold"),
        (fragments(True, False), "depends"),
    ],
    "same-stream": [(reuses(1, 0), "holds"), (reuses(1, 9), "does not hold"), (reuses(10, 0), "depends")],
    "cross-stream": [
        (races((9, 9), (0, 0)), "holds"), (races((9, 9), (0, 1)), "does not hold"),
        (races((0, 9), (0, 0)), "depends"), (races((0, 0), (0, 0)), "does not hold"),
    ],
    "record-stream": [
        (recorded(0.1, 48), "holds"), (recorded(0.1, 0.1), "does not hold"), (recorded(4, 20), "depends"),
    ],
    "kernels-at-once": [
        (at_once(132, 0), "holds"), (at_once(0, 0), "does not hold"), (at_once(132, 132), "depends"),
    ],
    "grow-in-place": [
        (grown(1, 10), "holds"), (grown(10, 1), "does not hold"), (grown(10, 12), "depends"),
        (grown(1, 10, wrong=1), "does not hold"),
    ],
    "two-addresses": [
        (aliases(0, 0), "holds"), (aliases(100, 100), "does not hold"), (aliases(0, 100), "depends"),
    ],
    "capture": [
        (captured(False, False), "holds"), (captured(True, True), "does not hold"),
        (captured(True, False), "depends"),
    ],
}  # fmt: skip


def test_every_experiment_is_judged_here_in_all_ways() -> None:
    assert JUDGED.keys() == EXPERIMENTS.keys()
    assert all({verdict for _, verdict in cases} == VERDICTS for cases in JUDGED.values())


@pytest.mark.parametrize(
    ("name", "observation", "verdict"),
    [(name, observation, verdict) for name, cases in JUDGED.items() for observation, verdict in cases],
)
def test_the_verdict_follows_the_numbers(name: str, observation: Observation, verdict: str) -> None:
    found, sentence = EXPERIMENTS[name].judge(observation)
    assert found == verdict
    assert sentence.endswith(".")


def test_who_fails_with_less_free_than_asked_is_not_counted() -> None:
    assert "pool0" not in EXPERIMENTS["fragmentation"].judge(fragments(False, free=32))[1]


# ---- on the host -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report() -> lab.Report:
    """One quick run of everything on the host device."""
    return lab.run(device="host", quick=True)


@pytest.mark.parametrize("name", ON_HOST)
def test_the_host_gives_a_verdict_from_finite_numbers(name: str, report: lab.Report) -> None:
    result = next(each for each in report.results if each.experiment.name == name)
    assert (result.failed, result.skipped) == ("", "")
    assert result.verdict in VERDICTS
    assert result.verdict == SURE.get(name, result.verdict)
    numbers = [quantity.value for quantity in result.observation.numbers.values()]
    numbers += [
        cell for row in result.observation.rows() for cell in row.values() if not isinstance(cell, str)
    ]
    assert numbers
    assert all(math.isfinite(number) and number >= 0 for number in numbers)
    assert all(quantity.unit for quantity in result.observation.numbers.values())


def test_what_is_protected_reads_no_foreign_data(report: lab.Report) -> None:
    """Whether what is not protected does is a race, which a busy machine may decide either way."""
    result = next(each for each in report.results if each.experiment.name == "cross-stream")
    protected = [row for row in result.observation.rows() if row["protected by"] != "nothing"]
    assert len(protected) == 6
    assert [row["wrong words"] for row in protected] == [0] * 6


@pytest.mark.parametrize("name", NEED_GPU)
def test_what_needs_a_gpu_says_so(name: str, report: lab.Report) -> None:
    result = next(each for each in report.results if each.experiment.name == name)
    assert (result.skipped, result.verdict) == ("needs a GPU", None)


def test_the_report_says_that_it_is_of_the_host(report: lab.Report) -> None:
    assert report.machine["device"] == "host"
    assert "streams are threads" in report.machine["note"]
    assert report.failed == []


def test_the_host_is_left_as_it_was(report: lab.Report) -> None:
    backend: Any = lab.Bench("host").backend
    assert backend.check() is None


def test_pages_serve_where_plain_segments_are_fragmented(report: lab.Report) -> None:
    result = next(each for each in report.results if each.experiment.name == "fragmentation")
    served = {(row["allocator"], row["freed"]): row["served"] for row in result.observation.rows()}
    assert served["vram with pages", "every other 8 MiB"] is True


def test_the_experiments_on_the_drivers_pools_run_on_a_models() -> None:
    bench = Bench("host", quick=True)
    bench.device = vram.Device.model("1GiB")  # which runs no kernels, but has driver pools
    water = EXPERIMENTS["high-water-mark"]
    assert water.judge(water.measure(bench))[0] == "holds"
    with driver_pool(bench, 64 << 20) as pool, vram.Stream(bench.device) as stream:
        address = pool.malloc(64 << 20, stream)
        assert not served(lambda: pool.malloc(64 << 20, stream))
        pool.free(address, stream)
        pool.trim()
        assert pool.reserved() == 0


def test_an_experiment_that_breaks_is_reported_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(bench: Bench) -> Observation:
        raise ZeroDivisionError("no numbers")

    bad = Experiment("broken", "It works.", "", broken, EXPERIMENTS["trim"].judge)
    monkeypatch.setitem(lab.EXPERIMENTS, "broken", bad)
    report = lab.run(["broken", "two-addresses"], "host", quick=True)
    assert [result.failed for result in report.results] == ["ZeroDivisionError: no numbers", ""]
    assert report.results[1].verdict == "holds"


def test_the_naive_pool_hands_out_what_was_freed_last() -> None:
    bench = Bench("host", quick=True)
    with naive_pool(bench, 4096) as allocator, bench.streams(2) as (first, second):
        address = allocator.malloc(4096, first)
        allocator.free(address, first)
        assert allocator.malloc(4096, second) == address


# ---- helpers -----------------------------------------------------------------------------------------------


def test_kernels_that_ran_at_once_are_counted() -> None:
    places = [BlockRun(0, 0, 10), BlockRun(1, 5, 15), BlockRun(2, 10, 20), BlockRun(3, 30, 40)]
    assert _most_at_once(places) == 2


def test_sharing_a_multiprocessor_takes_the_same_one_at_the_same_time() -> None:
    one = [BlockRun(0, 0, 10), BlockRun(1, 0, 10), BlockRun(2, 0, 10)]
    two = [BlockRun(0, 2, 12), BlockRun(1, 9, 19), BlockRun(3, 0, 10)]
    assert _side_by_side(one, two, 5) == {0}


def test_lists_read_as_people_write_them() -> None:
    assert [listed(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "none", "a", "a and b", "a, b and c",
    ]  # fmt: skip


# ---- the command -------------------------------------------------------------------------------------------


def test_json_has_claim_numbers_and_verdict(vram_command: Any) -> None:
    code, out, err = vram_command("lab", "two-addresses", "capture", "--device", "host", "--quick", "--json")
    document = json.loads(out)
    first, second = document["experiments"]
    assert code == 0
    assert document["machine"]["device"] == "host"
    assert first["claim"] == EXPERIMENTS["two-addresses"].claim
    assert first["verdict"] == "holds"
    assert first["measured"]["wrong_words_first"] == {"value": 0, "unit": "words"}
    assert (second["verdict"], second["skipped"]) == (None, "needs a GPU")
    assert "1/2 two-addresses" in err


def test_a_person_reads_claim_verdict_and_numbers(vram_command: Any) -> None:
    code, out, _ = vram_command("lab", "two-addresses", "capture", "--device", "host", "--quick")
    assert code == 0
    assert "streams are threads" in out
    assert EXPERIMENTS["two-addresses"].claim in out
    assert "holds: After writing through either address" in out
    assert "needs a GPU" in out


def test_list_names_every_experiment_and_runs_none(vram_command: Any) -> None:
    code, out, err = vram_command("lab", "--list")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines() if line.split()[0] in EXPERIMENTS] == [*EXPERIMENTS]
    code, out, _ = vram_command("lab", "--list", "--json")
    assert [each["name"] for each in json.loads(out)] == [*EXPERIMENTS]
    assert all(each["why"] for each in json.loads(out))


def test_an_unknown_name_is_an_error_that_names_the_valid_ones(vram_command: Any) -> None:
    code, out, err = vram_command("lab", "fragmentatoin", "--device", "host")
    assert (code, out) == (2, "")
    assert "Did you mean fragmentation?" in err
    assert all(name in err for name in EXPERIMENTS)
    with pytest.raises(ConfigError, match="unknown experiment"):
        lab.choose(["nothing-like-it"])


def test_a_failed_experiment_is_a_finding(vram_command: Any, tmp_path: Path) -> None:
    broken = {"name": "trim", "claim": "c.", "why": "w.", "verdict": None, "sentence": "", "measured": {}}
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"machine": {"device": "x"}, "experiments": [broken | {"failed": "boom"}]}))
    code, out, _ = vram_command("lab", "--from", str(path))
    assert code == 1
    assert "failed: boom" in out


def test_the_json_of_a_run_becomes_a_section_of_a_page(
    vram_command: Any, report: lab.Report, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(report.to_json()), encoding="utf-8")
    code, out, _ = vram_command("lab", "--from", str(path), "--markdown")
    assert code == 0
    assert out == markdown(report.to_json())
    for name in ON_HOST:
        assert f"[{name}](#{name})" in out
        assert f"\n### {name}\n" in out
    assert "### capture" not in out
    tables = [line for line in out.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)


def test_a_file_that_is_no_run_is_refused(vram_command: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("[]")
    code, _, err = vram_command("lab", "--from", str(path))
    assert code == 2
    assert "is not the output of" in err
