"""`vram bench`, `vram info` and the script that makes tables of them: what a person and a machine read."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vram
from vram.bench import BENCHES

main = importlib.import_module("vram.cli").main
ROOT = Path(__file__).resolve().parents[2]

Command = Callable[..., tuple[int, str, str]]


# ---- vram bench -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(BENCHES))
def test_a_benchmark_prints_json(name: str, vram_command: Command) -> None:
    code, out, _ = vram_command("bench", name, "--device", "host", "--quick", "--json")
    document = json.loads(out)
    assert code == 0
    assert list(document) == ["bench", "machine", "tables", "left_out", "quick"]
    assert document["bench"] == name
    assert document["machine"]["device"]["name"] == "host"
    for table in document["tables"]:
        assert list(table) == ["title", "columns", "rows", "note"]
        assert all(list(column) == ["key", "title", "unit"] for column in table["columns"])
        assert table["rows"]


def test_a_benchmark_prints_the_machine_its_tables_and_what_is_left_out(vram_command: Command) -> None:
    code, out, _ = vram_command("bench", "hotpath", "--device", "host", "--quick")
    assert code == 0
    assert out.startswith("host: ")
    assert "Quick run" in out
    for expected in ("1000 x 64 KiB", "vram malloc, free", "two calls of a no-op builtin", "vram, C++"):
        assert expected in out
    assert "torch.empty: needs a CUDA device; this is host" in out


def test_every_benchmark_is_a_command_that_says_what_it_measures(vram_command: Command) -> None:
    code, out, _ = vram_command("bench", "--help")
    assert code == 0
    for name in BENCHES:
        assert name in out


def test_a_device_that_is_not_there_is_one_line(vram_command: Command) -> None:
    code, out, err = vram_command("bench", "hotpath", "--device", "cuda:77", "--quick")
    assert (code, out) == (2, "")
    assert "cuda:77" in err
    assert err.count("\n") == 1


# ---- vram info --------------------------------------------------------------------------------------------


def test_info_names_devices_libraries_and_settings(
    as_new: None, vram_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VRAM_CONF", "cross_stream:wait,limit:2GiB")
    code, out, _ = vram_command("info")
    assert code == 0
    assert vram.__version__ in out
    for device in vram.devices():
        assert device.name in out
    assert "cross_stream:wait,limit:2GiB" in out
    assert "2 GiB (set by VRAM_CONF)" in out
    assert "yes, of 2 MiB, 8 MiB, 32 MiB" in out


def test_info_prints_json(as_new: None, vram_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VRAM_CONF", "stream_cache:7")
    code, out, _ = vram_command("info", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["vram"] == vram.__version__
    assert [device["name"] for device in found["devices"]] == [device.name for device in vram.devices()]
    host = found["devices"][-1]
    assert host["kind"] == "host"
    assert 0 < host["free_bytes"] <= host["total_bytes"]
    assert found["settings"]["environment"] == {"VRAM_CONF": "stream_cache:7"}
    assert found["settings"]["options"]["stream_cache"] == 7
    assert found["settings"]["set"] == ["stream_cache"]
    assert "numpy" in found["packages"]


def test_info_says_why_a_device_has_no_pages(vram_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = importlib.import_module("vram.system.machine")
    monkeypatch.setattr(machine, "devices", lambda: [vram.Device.model("1GiB", pages=False)])
    code, out, _ = vram_command("info")
    assert code == 0
    assert "no, only plain segments: the device has no pages" in out


def test_info_imports_no_framework() -> None:
    heavy = ["numpy", "torch", "cupy", "numba", "rmm", "cuda"]
    code = (
        "import sys, vram.system.machine; vram.system.machine.info();"
        f"print(*[name for name in {heavy} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


@pytest.mark.gpu
def test_info_describes_the_gpu(vram_command: Command) -> None:
    found = json.loads(vram_command("info", "--json")[1])
    gpu = found["devices"][0]
    assert gpu["kind"] == "cuda"
    assert gpu["multiprocessors"] > 0
    assert gpu["async_engines"] > 0
    assert "." in gpu["driver_cuda"]


# ---- what stats() says of pages ---------------------------------------------------------------------------


def test_stats_say_whether_pages_are_mapped_and_why_not() -> None:
    with vram.Pool("host") as pool:
        assert pool.stats()["pages.enabled"] == 1
        assert pool.stats().pages == "mapped"
    with vram.Pool("host", pages=False) as pool:
        assert pool.stats()["pages.enabled"] == 0
        assert "option" in pool.stats().pages
    with vram.Pool(vram.Device.model("1GiB", pages=False)) as pool:
        assert pool.stats()["pages.enabled"] == 0
        assert pool.stats().pages == "plain segments: the device has no pages"


# ---- tables for the documentation -------------------------------------------------------------------------


def script(name: str) -> Any:
    """A script in benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tables() -> Any:
    return script("tables")


def test_json_of_a_run_becomes_markdown(tables: Any, vram_command: Command) -> None:
    report = json.loads(vram_command("bench", "threads", "--device", "host", "--quick", "--json")[1])
    text = tables.markdown(report)
    assert text.startswith("`vram bench threads --device host` on 20")
    assert "| threads | wall, ns | of one thread |" in text
    assert "not reliable enough to quote" in text


def test_the_document_has_a_place_for_every_benchmark(tables: Any) -> None:
    document = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for name in BENCHES:
        filled = tables.put_into(document, name, "| a table |")
        assert filled.count("| a table |") == 1
        assert tables.put_into(filled, name, "") == tables.put_into(document, name, "")
    with pytest.raises(SystemExit, match="no marks"):
        tables.put_into(document, "nonsense", "")


def test_the_command_starts_where_the_native_core_is_not_built() -> None:
    code = "import sys; sys.modules['vram._native'] = None; import vram.cli, vram.bench.report"
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# ---- the scripts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["arena", "record", "waits"])
def test_a_script_gives_a_report_as_vram_bench_does(name: str) -> None:
    report = script(name).run("host", quick=True)
    assert report.bench == name
    assert report.machine["device"]["name"] == "host"
    for table in report.tables:
        assert table.rows
        assert all(column.key in row for row in table.rows for column in table.columns)


SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "tables")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_a_command_with_the_options_of_vram_bench(name: str) -> None:
    module = script(name)
    assert module.__doc__
    assert list(inspect.signature(module.run).parameters)[:2] == ["device", "quick"]
    assert f"benchmarks/{name}.py" in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
