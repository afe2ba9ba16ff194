"""Hooks of the documentation site (mkdocs.yml): links, the page of commands, and a check of public names.

Links to files outside docs/ are relative, so that they work in a clone; on the site they lead to the
repository. A link to a file that does not exist stays as it is, and the strict build refuses it.
"""

from __future__ import annotations

import ast
import importlib.util
import posixpath
import re
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]*)")
MODULES = (
    *("vram", "vram.analysis", "vram.config", "vram.cuda_core", "vram.cupy", "vram.dask", "vram.errors"),
    *("vram.numba", "vram.predict", "vram.race", "vram.replay", "vram.torch", "vram.trace", "vram.web"),
)
"""The modules that users import; every name in their `__all__` has an entry in the reference."""
BESIDE_MODULES = {
    "vram.predict.gpus": "vram.predict.gpus.gpus",
    "vram.replay.sweep": "vram.replay.sweep.sweep",
    "vram.torch.watch": "vram.torch.watch.Watch",  # the function itself is described by hand
    "vram.trace.lifetimes": "vram.trace.lifetimes.lifetimes",
}
"""Entries of functions that have the name of a module beside them, which hides them from the reference."""


def on_files(files: Any, *, config: Any) -> Any:
    """Add the page of the command line, which is made from the commands of the installed package."""
    from mkdocs.structure.files import File  # type: ignore[import-not-found]

    spec = importlib.util.spec_from_file_location("command_line", ROOT / "docs/reference/command_line.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    files.append(File.generated(config, "reference/command-line.md", content=module.text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Point relative links that leave docs/ to the repository."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def replace(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        if path.startswith(("docs/", "..")) or not (ROOT / path).exists():
            return match[1]
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{config['repo_url']}/{kind}/main/{path}"

    return LINK.sub(replace, markdown)


def on_post_build(*, config: Any) -> None:
    """Fail if a public name is not in the reference, which shows only names that have a docstring."""
    shown = _inventory(Path(config["site_dir"]) / "objects.inv")
    missing = [name for module in MODULES for name in public_names(module) if entry(name) not in shown]
    if missing:
        raise SystemExit(f"these public names have no docstring, or no entry in docs/reference: {missing}")


def public_names(module: str) -> list[str]:
    """The names in `__all__` of a module with the module's own, without importing it."""
    path = ROOT / "src" / Path(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for statement in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            constants = (each for each in ast.walk(statement.value) if isinstance(each, ast.Constant))
            return [f"{module}.{each.value}" for each in constants if not str(each.value).startswith("_")]
    raise SystemExit(f"{source} has no __all__")


def entry(name: str) -> str:
    """The name under which the reference has a public name."""
    return BESIDE_MODULES.get(name, name)


def _inventory(path: Path) -> set[str]:
    """The names in a Sphinx inventory: four lines of text, then compressed ones that start with a name."""
    packed = path.read_bytes().split(b"\n", 4)[4]
    return {line.split(" ", 1)[0] for line in zlib.decompress(packed).decode().splitlines()}
