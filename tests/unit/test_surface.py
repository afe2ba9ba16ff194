"""The public surface: what `vram` exports exists, says what it is for, and stays light to import."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import version

import pytest

import vram

EXPORTS = sorted(set(vram.__all__))
HEAVY = ["numpy", "pyarrow", "zstandard", "torch", "cupy", "numba", "rich", "rich_click", "click"]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=600
    )


def test_exports_are_listed_once() -> None:
    assert len(vram.__all__) == len(set(vram.__all__))


@pytest.mark.parametrize("name", EXPORTS)
def test_export_exists(name: str) -> None:
    assert hasattr(vram, name)


@pytest.mark.parametrize("name", [name for name in EXPORTS if not name.startswith("_")])
def test_export_has_a_docstring(name: str) -> None:
    exported = getattr(vram, name)
    assert (inspect.getdoc(exported) or "").strip()
    if inspect.isclass(exported):
        assert (exported.__doc__ or "").strip(), f"{name} only inherits a docstring"


@pytest.mark.parametrize("name", [name for name in EXPORTS if inspect.isclass(getattr(vram, name, None))])
def test_public_methods_have_docstrings(name: str) -> None:
    kind = getattr(vram, name)
    silent = [
        member
        for member, value in vars(kind).items()
        if not member.startswith("_")
        and (callable(value) or isinstance(value, property))
        and not (inspect.getdoc(getattr(kind, member)) or "").strip()
    ]
    assert silent == []


def test_all_names_are_offered_to_completion() -> None:
    assert set(EXPORTS) <= set(dir(vram))


def test_version_is_that_of_the_distribution() -> None:
    assert vram.__version__ == version("vram")


def test_import_is_light() -> None:
    result = run(f"import sys, vram, vram.trace; print(*[name for name in {HEAVY} if name in sys.modules])")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_predictions_leave_pytorch_to_the_program() -> None:
    result = run(f"import sys, vram.predict; print(*[name for name in {HEAVY} if name in sys.modules])")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_a_trace_opens_where_the_native_core_is_not_built() -> None:
    result = run("import sys; sys.modules['vram._native'] = None; import vram.errors, vram.sizes, vram.trace")
    assert result.returncode == 0, result.stderr


WITHOUT = "import sys; sys.modules.update(dict.fromkeys({missing!r})); import vram, inspect, pydoc\n"
FRAMEWORKS = ("cupy", "numba", "cuda", "cuda.core", "distributed", "torch")


@pytest.mark.parametrize(
    "missing",
    [FRAMEWORKS, ("vram._native",), (*FRAMEWORKS, "numpy", "pyarrow")],
    ids=["frameworks", "native core", "extras"],
)
def test_help_works_without_optional_parts(missing: tuple[str, ...]) -> None:
    code = "members = dict(inspect.getmembers(vram)); pydoc.render_doc(vram); print('open' in members)"
    result = run(WITHOUT.format(missing=missing) + code)
    assert (result.stdout, result.returncode) == ("True\n", 0), result.stderr


def test_a_module_whose_package_is_missing_says_what_to_install() -> None:
    lines = (
        "print(hasattr(vram, 'cupy'))",
        "try: vram.cupy",
        "except AttributeError as error: print(error)",
        "try: from vram import cupy",
        "except ImportError as error: print(error)",
    )
    result = run(WITHOUT.format(missing=FRAMEWORKS) + "\n".join(lines))
    first, attribute, imported = result.stdout.splitlines()
    assert first == "False"
    assert attribute.startswith("vram.cupy is not available: ")
    assert "Install CuPy" in attribute and "Install CuPy" in imported


def test_missing_name_is_an_attribute_error() -> None:
    missing = "no_such_name"
    with pytest.raises(AttributeError, match=missing):
        getattr(vram, missing)


@pytest.mark.parametrize("name", sorted(vars(vram)["_ELSEWHERE"]))
def test_a_name_that_is_elsewhere_is_an_error_that_says_where(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; use vram\.") as raised:
        getattr(vram, name)
    module, function = str(raised.value).split("use vram.")[1].split("(")[0].split(".")
    assert callable(getattr(getattr(vram, module), function))
