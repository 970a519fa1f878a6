"""What the code and its tests import is installed because pyproject.toml asks for it, directly or through another."""

from __future__ import annotations

import ast
import sys
from importlib.metadata import PackageNotFoundError, metadata, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
NOT_IN_TESTS = {"bench", "docs"}  # extras of other commands


def asked_for() -> set[str]:
    """The names of all that Stoker's extras for `make test` bring, through any number of packages."""
    extras = set(metadata("stoker").get_all("Provides-Extra") or []) - NOT_IN_TESTS
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


def imported() -> dict[str, Path]:
    """Top modules that files of src and tests import from elsewhere, each with one such file."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    own = {path.stem for path in [*files, *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]}
    own |= {path.name for folder in ("src", "benchmarks") for path in (ROOT / folder).iterdir()}
    found: dict[str, Path] = {}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for top in {name.partition(".")[0] for name in names} - own - sys.stdlib_module_names:
                found.setdefault(top, path)
    return found


@pytest.mark.slow  # reads all source
def test_all_that_is_imported_is_asked_for() -> None:
    bringing, asked = packages_distributions(), asked_for()
    assert {"torch", "httpx2", "pytest", "anyio"} <= asked
    missing = {
        f"{module} ({path.relative_to(ROOT)})"
        for module, path in imported().items()
        if module in bringing and not {canonicalize_name(name) for name in bringing[module]} & asked
    }
    assert not missing
