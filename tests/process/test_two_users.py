"""What another user can do to whoever uses vram: here the user nobody, against the user who runs the tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from two_users import NOBODY, as_nobody, needs_root

from vram.system.runtime import writable_by_others
from vram.torch import companion

pytestmark = [pytest.mark.fork, needs_root]


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user can reach."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="vram-two-users-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


# ---- code is loaded only from where nobody else can write --------------------------------------------------


def directory(path: Path, mode: int, user: int = 0, group: int = 0) -> Path:
    path.mkdir(parents=True)
    os.chown(path, user, group)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("mode", "user", "group", "safe"),
    [
        (0o755, 0, 0, True),
        (0o775, 0, 0, True),  # the group of this user alone
        (0o1777, 0, 0, True),  # as /tmp
        (0o777, 0, 0, False),
        (0o775, 0, 65534, False),
        (0o1777, 65534, 0, False),
        (0o755, 65534, 0, False),
    ],
)
def test_a_file_is_safe_if_nobody_else_can_replace_a_directory_above_it(
    public: Path, mode: int, user: int, group: int, safe: bool
) -> None:
    above = directory(public / "above", mode, user, group)
    own = directory(above / "vram", 0o700)
    (own / "library.so").write_text("own")
    why = writable_by_others(own / "library.so")
    assert (why == "") == safe, why
    assert safe or str(above) in why
    # The rule says what another user can do.
    replaced = as_nobody(lambda: (above / "vram").rename(above / "moved"))
    assert replaced <= (not safe)


@pytest.mark.parametrize("what", ["file", "directory"])
def test_what_another_user_made_or_can_write_is_not_safe(public: Path, what: str) -> None:
    own = directory(public / "vram", 0o700)
    file = own / "library.so"
    file.write_text("own")
    changed = file if what == "file" else own
    assert writable_by_others(file) == ""
    changed.chmod(0o777)
    assert "can be written by other users (mode 777)" in writable_by_others(file)
    changed.chmod(0o700)
    os.chown(changed, NOBODY.pw_uid, -1)
    assert f"{changed} belongs to user {NOBODY.pw_uid}" in writable_by_others(file)


def test_a_link_is_judged_by_where_it_leads(public: Path) -> None:
    theirs = directory(public / "theirs", 0o755, NOBODY.pw_uid)
    (public / "vram").symlink_to(theirs)
    assert "belongs to user" in writable_by_others(public / "vram")


def test_a_library_of_another_user_in_a_shared_cache_is_not_found(
    public: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared = directory(public / "cache", 0o1777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared))
    monkeypatch.setattr(companion, "_file_name", lambda _torch, _companion: "library.so")

    def plant() -> None:
        (shared / "vram").mkdir(mode=0o777)
        (shared / "vram" / "library.so").write_text("theirs")

    assert as_nobody(plant)
    assert companion._existing(None, companion.THROWER) is None
    used = companion.cache_directory()
    assert used != shared / "vram" and used == companion.cache_directory()
    assert writable_by_others(used) == ""
    assert f"belongs to user {NOBODY.pw_uid}. Set XDG_CACHE_HOME" in caplog.text


def test_a_file_of_another_user_in_the_own_cache_is_compiled_again(
    public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the directory was open to others for a while."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(public))
    monkeypatch.setattr(companion, "_file_name", lambda _torch, _companion: "library.so")
    monkeypatch.setattr(companion, "_command", lambda _torch, _companion: [])
    monkeypatch.setattr(companion, "_compile", lambda _command, target: target.write_text("own"))
    library = companion.cache_directory() / "library.so"
    library.write_text("theirs")
    os.chown(library, NOBODY.pw_uid, -1)
    assert companion._existing(None, companion.THROWER) is None
    assert companion.build_companion(None, companion.THROWER).read_text() == "own"
