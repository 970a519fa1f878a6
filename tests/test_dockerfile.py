"""The Dockerfile names what is there: files of the build's context, extras, versions and the command."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from dockerfile import copied, instructions

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])


def only(keyword: str, start: str = "") -> str:
    """The arguments of the one instruction that begins so."""
    (found,) = (rest for word, rest in instructions(ROOT / "Dockerfile") if word == keyword and rest.startswith(start))
    return found


def test_what_is_copied_exists_and_the_context_has_it() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied(ROOT / "Dockerfile") == ["pyproject.toml", "README.md", "LICENSE", "src"]
    for name in copied(ROOT / "Dockerfile"):
        assert (ROOT / name).exists() and name in allowed


def test_the_extras_are_the_projects(project: dict[str, Any]) -> None:
    extras = only("ARG", "EXTRAS=").removeprefix("EXTRAS=").split(",")
    assert extras and set(extras) <= set(project["optional-dependencies"])


def test_the_bases_have_the_versions_that_the_project_needs(project: dict[str, Any]) -> None:
    text = (ROOT / "Dockerfile").read_text()
    pythons, torches = re.findall(r"python:([\d.]+)-", text), re.findall(r"pytorch/pytorch:([\d.]+)-", text)
    (torch,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "torch")
    assert pythons and all(SpecifierSet(project["requires-python"]).contains(version) for version in pythons)
    assert torches and all(torch.specifier.contains(version) for version in torches)


def test_the_command_is_the_projects(project: dict[str, Any]) -> None:
    (command,) = json.loads(only("ENTRYPOINT"))
    assert command in project["scripts"]


def test_it_runs_as_a_user_that_it_makes() -> None:
    uid = re.search(r"--uid (\d+)", only("RUN", "wheel="))
    assert uid is not None and only("USER") == uid[1] != "0"
