"""The documentation site, as far as it can be checked without building it (`make docs` is strict)."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
GENERATED = {"reference/command-line.md"}
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"([\w./-]+\.md)$", text[text.index("\nnav:") :], re.MULTILINE))
    assert listed == {str(page.relative_to(DOCS)) for page in PAGES} | GENERATED


@pytest.mark.parametrize(
    "page", [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))], ids=str
)
def test_links_lead_to_files(page: Path) -> None:
    links = {link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link}
    links = {link for link in links if not link.endswith(".png")}  # `make docs` checks those
    assert [link for link in sorted(links) if not (page.parent / link).exists()] == []


def test_public_names_have_an_entry_in_the_reference() -> None:
    """By module; the strict build checks each name."""
    hooks = load(DOCS / "site_hooks.py")
    text = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
    shown |= {f"vram.{name.rpartition('.')[2]}" for name in shown}  # the facade has it too
    for module in set(hooks.MODULES) - shown:
        names = {hooks.entry(name) for name in hooks.public_names(module)} - set(hooks.MODULES)
        assert {name for name in names if not {name, f"vram.{name.rpartition('.')[2]}"} & shown} == set()


def test_the_page_of_commands_has_every_command_and_option() -> None:
    from vram.cli import COMMANDS

    text = load(DOCS / "reference" / "command_line.py").text()
    assert all(f"### vram {name}\n" in text for name in COMMANDS)
    assert "`--fail-above SIZE\\|PERCENT`" in text


def test_the_repository_is_named_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project["urls"]["Repository"]
    owner_and_name = repository.removeprefix("https://github.com/")
    for path, expected in [
        ("mkdocs.yml", f"repo_url: {repository}"),
        ("CITATION.cff", f"repository-code: {repository}"),
        ("docs/tutorials/ci.md", f"uses: {owner_and_name}@"),
    ]:
        assert expected in (ROOT / path).read_text(encoding="utf-8"), path
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {project['version']}\n" in citation
