"""C and C++ programs, built against the installed package as its users build theirs, and run."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from vram.system import clibrary

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).parent / "c"
GUIDE = ROOT / "docs" / "guide" / "c.md"
STRICT = ["-pedantic", "-Wall", "-Wextra", "-Werror"]
TIMEOUT = 600.0  # seconds; only a deadlock reaches it

HEADER = clibrary.PACKAGE / clibrary.HEADER
LIBRARY = clibrary.PACKAGE / clibrary.LIBRARY
TEXT = HEADER.read_text(encoding="utf-8") if HEADER.is_file() else ""
CODE = re.sub(r"/\*.*?\*/", "", TEXT, flags=re.DOTALL)
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

pytestmark = [
    pytest.mark.fork,
    pytest.mark.skipif(not LIBRARY.is_file(), reason=f"the C library is not installed: no {LIBRARY}"),
]
needs_valgrind = pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
needs_pkg_config = pytest.mark.skipif(
    shutil.which("pkg-config") is None, reason="pkg-config is not installed"
)


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a command that must end well; what it wrote."""
    ended = subprocess.run(
        list(map(str, command)),
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    said = f"{ended.stdout}{ended.stderr}"
    assert ended.returncode == 0, f"{shlex.join(map(str, command))}: exit code {ended.returncode}\n{said}"
    return said


def flags(*options: str) -> list[str]:
    return shlex.split(run(sys.executable, "-m", "vram", *options))


@pytest.fixture(scope="module")
def cc() -> str:
    return _compiler("CC", "cc", "gcc", "clang")


@pytest.fixture(scope="module")
def cxx() -> str:
    return _compiler("CXX", "c++", "g++", "clang++")


def _compiler(variable: str, *names: str) -> str:
    for name in filter(None, (os.environ.get(variable), *names)):
        if shutil.which(name):
            return name
    pytest.skip(f"no compiler: none of {', '.join(names)} is installed")


@pytest.fixture(scope="module")
def promises(cc: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C program that tries everything."""
    program = tmp_path_factory.mktemp("c") / "promises"
    build = ["-std=c99", *STRICT, "-g", "-pthread", SOURCES / "promises.c", "-o", program]
    run(cc, *build, *flags("--include", "--libs"))
    return program


# ---- building and running -------------------------------------------------------------------------------


def test_a_c_program_runs_without_python_in_its_environment(promises: Path, tmp_path: Path) -> None:
    assert run(promises, env={}, cwd=tmp_path) == f"vram {VERSION} on host: 0 broken\n"


def test_a_cpp_program_runs(cxx: str, tmp_path: Path) -> None:
    program = tmp_path / "promises"
    build = ["-std=c++17", *STRICT, "-pthread", SOURCES / "promises.cpp", "-o", program]
    run(cxx, *build, *flags("--include", "--libs"))
    assert run(program).startswith("sum 149985000")


@needs_valgrind
def test_valgrind_finds_nothing(promises: Path) -> None:
    # Without pages: it has no room for addresses worth many times the machine's memory.
    watch = ["-q", "--leak-check=full", "--errors-for-leak-kinds=definite,possible", "--error-exitcode=9"]
    assert run("valgrind", *watch, promises, "host", "plain") == f"vram {VERSION} on host: 0 broken\n"


def test_a_device_that_is_not_there_is_said(promises: Path) -> None:
    ended = subprocess.run(
        [promises, "cuda:63"], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert ended.returncode == 2
    assert ended.stdout.startswith("vram_device_open: device cuda:63 does not exist: ")


@needs_pkg_config
def test_pkg_config_finds_it_wherever_the_package_lies(cc: str, tmp_path: Path) -> None:
    package = tmp_path / "elsewhere" / "vram"
    for part in ("include", "lib"):
        shutil.copytree(clibrary.PACKAGE / part, package / part)
    env = {**os.environ, "PKG_CONFIG_PATH": str(package / "lib" / "pkgconfig")}
    assert run("pkg-config", "--modversion", "vram", env=env).strip() == VERSION
    found = shlex.split(run("pkg-config", "--cflags", "--libs", "vram", env=env))
    source = tmp_path / "program.c"
    source.write_text("#include <vram.h>\nint main(void) { return vram_version() != VRAM_VERSION; }\n")
    run(cc, *STRICT, source, "-o", tmp_path / "program", *found)
    run(tmp_path / "program", env={})
    assert str(package) in run("ldd", tmp_path / "program").replace("/lib/pkgconfig/../..", "")


@needs_pkg_config
def test_pkg_config_and_the_command_agree() -> None:
    (folder,) = flags("--pkgconfig")
    found = shlex.split(run("pkg-config", "--cflags", "--libs", "vram", env={"PKG_CONFIG_PATH": folder}))
    above = f"{folder}/../.."
    assert [flag.replace(above, str(clibrary.PACKAGE)) for flag in found] == flags("--cflags", "--libs")


# ---- the header and the library -------------------------------------------------------------------------


@pytest.mark.parametrize("standard", ["c99", "c11", "c++11", "c++17", "c++20"])
def test_the_header_stands_alone_in_every_standard(standard: str, cc: str, cxx: str, tmp_path: Path) -> None:
    source = tmp_path / ("alone.cpp" if "+" in standard else "alone.c")
    made = [
        name for name in re.findall(r"^} (vram_\w+);", TEXT, re.MULTILINE) if f"{name.upper()}_INIT" in TEXT
    ]
    assert len(made) == 8
    lines = [f"const {name} {name}_made = {name.upper()}_INIT;" for name in made]
    source.write_text("\n".join(["#include <vram.h>", "#include <vram.h>", *lines, ""]))
    warnings = [*STRICT, "-Wshadow", "-Wundef"]
    if "+" in standard:
        build = [cxx]
    else:
        build, warnings = [cc], [*warnings, "-Wstrict-prototypes", "-Wmissing-prototypes"]
    build += [f"-std={standard}", *warnings, *flags("--include")]
    run(*build, "-c", source, "-o", tmp_path / "alone.o")


def test_the_library_exports_what_the_header_declares_and_nothing_else() -> None:
    declared = set(re.findall(r"\b(vram_\w+)\(", CODE))
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    lines = run("nm", "-D", "--defined-only", LIBRARY).splitlines()
    exported = {line.split()[-1].split("@")[0] for line in lines if line.split()[-2] != "A"}
    assert exported == declared
    assert len(exported) > 40


def test_the_library_needs_no_python_and_carries_its_major_version() -> None:
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    dynamic = run("readelf", "-d", LIBRARY)
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert needed and not [name for name in needed if "python" in name or "cuda" in name]
    assert re.findall(r"SONAME.*\[(.*)\]", dynamic) == [LIBRARY.name]
    assert LIBRARY.name.endswith(f".so.{VERSION.split('.')[0]}")


def test_versions_agree() -> None:
    numbers = list(map(int, re.findall(r"#define VRAM_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", TEXT)))
    assert re.findall(r'#define VRAM_VERSION_TEXT "(.*)"', TEXT) == [VERSION]
    assert numbers == list(map(int, VERSION.split(".")))
    library = ctypes.CDLL(str(LIBRARY))  # beside the extension module, which has a core of its own
    assert library.vram_version() == numbers[0] * 10000 + numbers[1] * 100 + numbers[2]


def test_every_function_has_a_test() -> None:
    declared = set(re.findall(r"\b(vram_\w+)\(", CODE))
    tests = (ROOT / "native" / "tests" / "c_interface_test.cpp").read_text(encoding="utf-8")
    assert sorted(name for name in declared if f"{name}(" not in tests) == []


# ---- the guide ------------------------------------------------------------------------------------------


def c_blocks(text: str) -> list[tuple[str, str | None]]:
    """The programs of a page, each with the text it is said to print (a block right behind it), if any."""
    found = re.findall(r"^```c\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", text, re.MULTILINE | re.DOTALL)
    return [(code, said or None) for code, said in found]


@pytest.mark.parametrize(("code", "said"), c_blocks(GUIDE.read_text(encoding="utf-8")))
def test_the_programs_of_the_guide_run(code: str, said: str | None, cc: str, tmp_path: Path) -> None:
    source = tmp_path / "program.c"
    source.write_text(code, encoding="utf-8")
    run(cc, "-std=c99", *STRICT, source, "-o", tmp_path / "program", *flags("--include", "--libs"))
    # On the host, so that the numbers are those of the page whatever is installed.
    printed = run(tmp_path / "program", env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    if said is not None:
        assert printed == said


def test_the_guide_has_programs() -> None:
    assert len(c_blocks(GUIDE.read_text(encoding="utf-8"))) >= 2


@pytest.mark.parametrize("seed", range(3))
def test_extreme_arguments_are_refused_or_served(seed: int) -> None:
    said = run(sys.executable, SOURCES / "extremes.py", LIBRARY, HEADER, "20000", str(seed))
    statuses = {name: set(map(int, found)) for name, *found in map(str.split, said.splitlines())}
    assert (
        len(statuses) == len(re.findall(r"VRAM_API [^;]*?\(", CODE)) - 3
    )  # all but copy and fill, and the macro itself
    handled = {name for name in statuses if re.search(rf"{name}\(vram_(device|pool|arena|span)\*", CODE)}
    assert handled and all(3 in statuses[name] for name in handled)  # a bad handle
    assert all(statuses[name] - {3} for name in handled)  # and a good one


def test_every_status_has_a_name() -> None:
    library = ctypes.CDLL(str(LIBRARY))
    library.vram_status_name.restype = ctypes.c_char_p
    (enum,) = re.findall(r"typedef enum vram_status \{(.*?)\}", CODE, flags=re.DOTALL)
    statuses = {name.lower(): int(number) for name, number in re.findall(r"VRAM_(\w+) = (\d+)", enum)}
    assert statuses["deadlock"] == 11
    for name, number in statuses.items():
        assert library.vram_status_name(number).decode() == name
    assert library.vram_status_name(99) == b"unknown"
