"""What the code and its tests import is installed because pyproject.toml asks for it, directly or through another."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, metadata, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
NOT_IN_TESTS = {"bench", "docs"}  # extras of other commands


def asked_for(extras: set[str]) -> set[str]:
    """The names of all that Stoker and these extras bring, through any number of packages."""
    found: set[tuple[str, str]] = set()
    waiting = [("stoker", extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        try:
            needs = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:  # an optional one that is not installed
            continue
        for need in needs:
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(need.name), each) for each in ("", *need.extras)]
    return {name for name, _ in found}


def top_modules(node: ast.AST) -> set[str]:
    """The top modules that a statement imports."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        names = [node.module]
    return {name.partition(".")[0] for name in names}


def imported() -> dict[str, Path]:
    """Top modules that files of src and tests import from elsewhere, each with one such file."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    own = {path.stem for path in [*files, *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]}
    own |= {path.name for folder in ("src", "benchmarks") for path in (ROOT / folder).iterdir()}
    found: dict[str, Path] = {}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for top in top_modules(node) - own - sys.stdlib_module_names:
                found.setdefault(top, path)
    return found


@pytest.mark.slow  # reads all source
def test_all_that_is_imported_is_asked_for() -> None:
    extras = set(metadata("stoker").get_all("Provides-Extra") or []) - NOT_IN_TESTS
    bringing, asked = packages_distributions(), asked_for(extras)
    assert {"torch", "httpx2", "pytest", "anyio"} <= asked
    missing = {
        f"{module} ({path.relative_to(ROOT)})"
        for module, path in imported().items()
        if module in bringing and not {canonicalize_name(name) for name in bringing[module]} & asked
    }
    assert not missing


@pytest.mark.slow  # reads the metadata of every package
@pytest.mark.parametrize(("extra", "module"), [("ui", "stoker.page.start_page"), ("serve", "stoker.serve.app")])
def test_an_extra_brings_what_its_command_imports(extra: str, module: str) -> None:
    asked = asked_for({extra})
    code = f"import sys, {module}; print(*(sys.modules[n].__file__ for n in sys.modules if n.startswith('stoker.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    tops = {
        top: path
        for path in done.stdout.split()
        for node in ast.parse(Path(path).read_text(encoding="utf-8")).body
        for top in top_modules(node) - sys.stdlib_module_names - {"stoker"}
    }
    bringing = packages_distributions()
    assert {"starlette", "prometheus_client"} <= tops.keys()
    assert not {
        top: path for top, path in tops.items() if not {canonicalize_name(name) for name in bringing[top]} & asked
    }
