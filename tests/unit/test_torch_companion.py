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
from vram.torch.companion import SYMBOL, cache_directory, compile_companion, find_compiler, thrower

pytestmark = pytest.mark.fork

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
    library = [*find_compiler(), "-shared", "-fPIC", "-x", "c++", "/dev/null"]
    subprocess.run([*library, "-o", str(home / "lib/libc10.so")], check=True)
    return SimpleNamespace(__version__="2.0+test", __file__=str(home / "__init__.py"), _C=SimpleNamespace())


def test_it_is_compiled_once(torch: Any) -> None:
    path = compile_companion(torch)
    stamp = path.stat().st_mtime_ns
    assert compile_companion(torch) == path and path.stat().st_mtime_ns == stamp
    assert ctypes.CDLL(str(path))[SYMBOL]
    assert thrower(torch) != 0


def test_another_torch_gets_another(torch: Any) -> None:
    path = compile_companion(torch)
    torch.__version__ = "2.1"
    assert compile_companion(torch) != path


def test_several_at_once_leave_one_whole_library(torch: Any) -> None:
    with ThreadPoolExecutor(3) as executor:
        paths = set(executor.map(compile_companion, [torch] * 3))
    assert [*cache_directory().iterdir()] == [*paths]
    assert ctypes.CDLL(str(paths.pop()))[SYMBOL]


def test_a_failed_compilation_is_told_and_leaves_nothing(
    torch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    Path(torch.__file__).with_name("include").joinpath("c10/util/Exception.h").write_text("#error no such")
    with pytest.raises(DeviceError, match="no such"):
        compile_companion(torch)
    assert [*cache_directory().iterdir()] == []
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
