"""Tags: nested, restored, for this thread or task only, as a block or a decorator."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from waiting import PATIENCE

import vram
from vram.core.tags import current_tag


@pytest.fixture
def pool() -> vram.Pool:
    return vram.Pool("host")


def test_a_block_labels_what_is_allocated_inside(pool: vram.Pool) -> None:
    with vram.tag("outer") as outer:
        assert outer.name == current_tag() == pool.allocate(1).tag == "outer"
        with vram.tag("inner"):
            assert pool.allocate(1).tag == "inner"
            assert pool.allocate(1, tag="own").tag == "own"
        assert pool.allocate(1).tag == "outer"
    assert pool.allocate(1).tag is current_tag() is None


def test_raw_addresses_and_batches_are_labelled(pool: vram.Pool) -> None:
    with vram.tag("raw"):
        address = pool.malloc(1)
        batch = pool.allocate_batch([1, 2])
    assert pool.info(address)["tag"] == "raw" and {buffer.tag for buffer in batch} == {"raw"}
    pool.free(address)


def test_an_exception_restores_the_outer_tag() -> None:
    with pytest.raises(ZeroDivisionError), vram.tag("broken"):
        _ = 1 / 0
    assert current_tag() is None


def test_one_object_may_be_entered_again_and_by_many_threads() -> None:
    label, seen = vram.tag("shared"), []
    both = threading.Barrier(2, timeout=PATIENCE)

    def work() -> None:
        with label:
            both.wait()
            seen.append(current_tag())
        seen.append(current_tag())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, seen)) == ["None", "None", "shared", "shared"]
    with label, vram.tag("other"), label:
        assert current_tag() == "shared"
    assert current_tag() is None


def test_a_thread_does_not_see_the_tag_of_another() -> None:
    seen: list[str | None] = []
    with vram.tag("here"):
        thread = threading.Thread(target=lambda: seen.append(current_tag()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_tasks_have_their_own_tags(pool: vram.Pool) -> None:
    async def work(name: str) -> list[str | None]:
        with vram.tag(name):
            await asyncio.sleep(0)
            first = pool.allocate(1).tag
            await asyncio.sleep(0)
            return [first, pool.allocate(1).tag]

    async def main() -> list[list[str | None]]:
        return await asyncio.gather(*(work(name) for name in "abc"))

    assert asyncio.run(main()) == [["a", "a"], ["b", "b"], ["c", "c"]]


def test_functions_and_coroutines_are_decorated() -> None:
    @vram.tag("function")
    def function(value: int) -> tuple[int, str | None]:
        """Says."""
        return value, current_tag()

    @vram.tag("coroutine")
    async def coroutine() -> str | None:
        await asyncio.sleep(0)
        return current_tag()

    assert function(3) == (3, "function") and function.__doc__ == "Says."
    assert asyncio.run(coroutine()) == "coroutine"
    assert current_tag() is None


def test_bad_names_are_refused() -> None:
    with pytest.raises(TypeError, match="a tag must be a str, not int"):
        vram.tag(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must not be empty"):
        vram.tag("")
    with pytest.raises(ValueError, match="at most 1048576 bytes"):
        vram.tag("é" * (1 << 20))
    with pytest.raises(ValueError, match="surrogate"):
        vram.tag("\ud800")
    assert repr(vram.tag("x")) == "vram.tag('x')"


def test_tags_work_where_the_native_core_is_not_built() -> None:
    code = "import sys; sys.modules['vram._native'] = None; import vram\nwith vram.tag('x'): pass"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")


# ---- bounds -----------------------------------------------------------------------------------------------


def test_more_tags_than_are_kept_share_one_that_says_so() -> None:
    with vram.Pool(vram.Device.model("1GiB")) as pool:
        for number in range(70_000):
            pool.allocate(512, tag=f"tag {number}").free()
        kept = [pool.allocate(512, tag=name) for name in ("tag 7", "new", "newer")]
        assert [buffer.tag for buffer in kept] == ["tag 7", "(other tags)", "(other tags)"]
        stats = pool.stats()
        assert stats["tags"] == 65_536 and stats["tags.other"] == 70_000 - 65_535 + 2
        assert pool.suspend("never used", keep="discard") == 0 == pool.suspend("new", keep="discard")


@pytest.mark.fork
def test_stacks_that_are_not_kept_are_counted(tmp_path: Path) -> None:
    program = """
        import sys, vram
        pool = vram.Pool(vram.Device.model("1GiB"), stacks="python")
        for number in range(60_000):
            name = str(number)
            pool.allocate(512, tag=name).free()
            pool.allocate(512, tag=name).free()
            pool.allocate(512, tag=name).free()
            pool.allocate(512, tag=name).free()
            pool.allocate(512, tag=name).free()
        stats = pool.stats()
        assert (stats["stacks"], stats["stacks.lost"]) == (1 << 18, 300_000 - (1 << 18)), dict(stats)
        vram.record(pool, sys.argv[1]).close()
        assert vram.open(sys.argv[1]).settings["lost_stacks"] == stats["stacks.lost"]
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "run.vtrace")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
