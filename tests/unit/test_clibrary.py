"""Where the C interface is looked for, and what is said where a package came without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from vram.cli import main
from vram.errors import ConfigError
from vram.system import clibrary


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with the three files, in a folder with a blank in its name."""
    folder = tmp_path / "a b"
    for part in (clibrary.HEADER, clibrary.LIBRARY, clibrary.PKGCONFIG):
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        (folder / part).touch()
    monkeypatch.setattr(clibrary, "PACKAGE", folder)
    return folder


def test_flags_name_the_folders_of_the_package(package: Path) -> None:
    assert clibrary.compiler_flags(include=True, libs=False) == [f"-I{package}/include"]
    assert clibrary.compiler_flags(include=False, libs=True) == [
        f"-L{package}/lib",
        f"-Wl,-rpath,{package}/lib",
        "-lvram",
    ]


def test_the_command_prints_one_line_that_a_shell_can_read(package: Path) -> None:
    result = CliRunner().invoke(main, ["--include", "--libs"])
    quoted = f"'-I{package}/include' '-L{package}/lib' '-Wl,-rpath,{package}/lib' -lvram\n"
    assert (result.exit_code, result.output) == (0, quoted)
    assert CliRunner().invoke(main, ["--cflags"]).output == f"'-I{package}/include'\n"
    assert CliRunner().invoke(main, ["--pkgconfig"]).output == f"'{package}/lib/pkgconfig'\n"


@pytest.mark.parametrize(
    ("option", "part"),
    [("--include", clibrary.HEADER), ("--libs", clibrary.LIBRARY), ("--pkgconfig", clibrary.PKGCONFIG)],
)
def test_a_package_without_it_says_so(package: Path, option: str, part: Path) -> None:
    (package / part).unlink()
    result = CliRunner().invoke(main, [option])
    assert result.exit_code == 2
    assert "not part of this installation" in result.output
    with pytest.raises(ConfigError):
        clibrary.folder_of(part)
