"""The companion of PyTorch: compiled once, shared by processes that start together, refused in words.

A header and a library with PyTorch's names stand in for PyTorch; that the error is PyTorch's own is tested
with the real one.
"""

from __future__ import annotations

import ctypes
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vram.errors import DeviceError
from vram.system.compiler import find_compiler
from vram.torch.companion import (
    DIRECTORY_VARIABLE,
    THROWER,
    build_companion,
    cache_directory,
    identity,
    load_companion,
    thrower,
)

pytestmark = pytest.mark.fork

SYMBOL = "vram_torch_out_of_memory"

HEADER = """
#include <cstdint>
#include <stdexcept>
#include <string>
namespace c10 {
struct SourceLocation { const char* function; const char* file; std::uint32_t line; };
struct OutOfMemoryError : std::runtime_error {
  OutOfMemoryError(SourceLocation, std::string message) : std::runtime_error(message) {}
};
}
"""


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = tmp_path / "torch"
    (home / "include/c10/util").mkdir(parents=True)
    (home / "include/c10/util/Exception.h").write_text(HEADER)
    (home / "lib").mkdir()
    library = [*find_compiler(), "-shared", "-fPIC", "-Wl,--no-as-needed", "-x", "c++", "/dev/null"]
    subprocess.run([*library, "-o", str(home / "lib/libc10.so")], check=True)
    return SimpleNamespace(__version__="2.0+test", __file__=str(home / "__init__.py"), _C=SimpleNamespace())


def test_it_is_compiled_once(torch: Any) -> None:
    path = build_companion(torch, THROWER)
    stamp = path.stat().st_mtime_ns
    assert build_companion(torch, THROWER) == path and path.stat().st_mtime_ns == stamp
    assert ctypes.CDLL(str(path))[SYMBOL]
    assert thrower(torch) != 0


def test_another_torch_gets_another(torch: Any) -> None:
    path = build_companion(torch, THROWER)
    torch.__version__ = "2.1"
    assert build_companion(torch, THROWER) != path


def test_another_installation_of_the_same_torch_gets_another(torch: Any, tmp_path: Path) -> None:
    path = build_companion(torch, THROWER)
    ahead = build_companion(torch, THROWER, tmp_path / "image")
    moved = tmp_path / "elsewhere"
    Path(torch.__file__).parent.rename(moved)
    torch.__file__ = str(moved / "__init__.py")
    other = build_companion(torch, THROWER)
    assert other != path and str(moved).encode() in other.read_bytes()
    # One that was built ahead, for an image, may be used where PyTorch is at another place.
    assert build_companion(torch, THROWER, tmp_path / "image") == ahead


def test_one_that_was_built_ahead_needs_no_compiler(
    torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build_companion(torch, THROWER, tmp_path / "image")
    assert built.parent == tmp_path / "image"
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(built.parent))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert load_companion(torch, THROWER)[SYMBOL]
    assert [*cache_directory().glob("*.so")] == []


def test_one_for_another_torch_is_never_loaded(torch: Any) -> None:
    path = build_companion(torch, THROWER)
    path.write_bytes(path.read_bytes().replace(identity(torch, THROWER).encode(), b"?" * 8))
    with pytest.raises(DeviceError, match="another PyTorch"):
        load_companion(torch, THROWER)


def test_several_at_once_leave_one_whole_library(torch: Any) -> None:
    with ThreadPoolExecutor(3) as executor:
        paths = set(executor.map(build_companion, [torch] * 3, [THROWER] * 3))
    assert [*cache_directory().glob("*.so")] == [*paths]
    assert ctypes.CDLL(str(paths.pop()))[SYMBOL]


def test_a_failed_compilation_is_told_and_leaves_nothing(
    torch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    Path(torch.__file__).with_name("include").joinpath("c10/util/Exception.h").write_text("#error no such")
    with pytest.raises(DeviceError, match="no such"):
        build_companion(torch, THROWER)
    assert [*cache_directory().glob("*.so")] == []
    assert thrower(torch) == 0
    assert "RuntimeError" in caplog.text and "no such" in caplog.text


def test_without_a_compiler_it_says_which_were_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(DeviceError, match=r"c\+\+"):
        find_compiler()


def test_a_cache_that_cannot_be_written_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no/such")
    assert cache_directory().is_dir()
