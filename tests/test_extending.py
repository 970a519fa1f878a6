"""docs/extending.md: what it adds is written over a copy of the package, and its commands say what the page shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import stoker

pytestmark = pytest.mark.slow  # the commands of the page train, verify and export
PACKAGE = Path(stoker.__file__).parent
PAGE = PACKAGE.parents[1] / "docs" / "extending.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
# Runs commands as the command line does, one after the other, and writes (exit code, output) of each as JSON.
RUN = """
import contextlib, io, json, os, re, runpy, shlex, sys
from stoker.cli.main import main
found = []
for command in json.loads(sys.argv[1]):
    words = shlex.split(command)
    given = dict(word.split("=") for word in words if re.match("[A-Z_]+=", word))
    program, *words = words[len(given) :]
    os.environ.update(given)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        code = main(words) if program == "stoker" else runpy.run_path(words[0]) and 0
    for name in given:
        del os.environ[name]
    found.append((code, out.getvalue()))
with open("said.json", "w") as file:
    json.dump(found, file)
"""


@dataclass(frozen=True)
class Said:
    """A command of the page, what the page shows of it, and what it said."""

    command: str
    shown: list[str]
    code: int
    output: str


def changed(text: str, diff: str) -> str:
    """A text with the lines of a diff put in; ``@@`` is between changes."""
    for change in diff.split("@@\n"):
        lines = change.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        assert text.count(before) == 1, f"the package does not hold once: {before}"
        text = text.replace(before, "".join(line[1:] for line in lines if line[0] != "-"))
    return text


def write_block(path: Path, kind: str, text: str) -> None:
    """A whole file, or a diff of one that is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "diff":
        text = changed(path.read_text(), text)
    else:
        assert not path.exists(), path
    path.write_text(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's commands have run."""
    folder = tmp_path_factory.mktemp("extending")
    shutil.copytree(PACKAGE, folder / "src" / "stoker")
    return folder


@pytest.fixture(scope="module")
def said(folder: Path) -> list[Said]:
    commands: list[tuple[str, list[str]]] = []
    for kind, title, text in BLOCK.findall(PAGE.read_text()):
        if title:
            write_block(folder / title, kind, text)
        elif kind == "console":
            parts = text.removeprefix("$ ").split("\n$ ")
            commands += [(command, shown.splitlines()) for command, _, shown in (p.partition("\n") for p in parts)]
    arguments = [sys.executable, "-c", RUN, json.dumps([command for command, _ in commands])]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    subprocess.run(arguments, cwd=folder, env=environment, check=True)
    found = json.loads((folder / "said.json").read_text())
    return [Said(*command, *one) for command, one in zip(commands, found, strict=True)]


def test_the_commands_of_the_page_say_what_it_shows(said: list[Said]) -> None:
    assert len({command.command.partition("stoker ")[2].split(" ")[0] for command in said}) >= 7
    for one in said:
        assert one.code == 0, f"{one.command}: {one.output}"
        for line in one.shown:
            wanted = ".*".join(re.escape(part) for part in line.split("..."))
            assert re.search(f"^{wanted}$", one.output, re.MULTILINE), f"{one.command}: {line!r} not in {one.output}"


def test_a_new_task_learns_the_same_on_two_processes(said: list[Said], folder: Path) -> None:
    alone, two = (
        [json.loads(line)["loss"] for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("even", "two")
    )
    assert len(alone) == 3 and alone == pytest.approx(two, rel=1e-5)


def test_every_section_touches_at_most_two_files() -> None:
    sections = PAGE.read_text().split("\n## ")[1:]
    assert len(sections) == 6
    for section in sections:
        assert 1 <= len({title for _, title, _ in BLOCK.findall(section) if title.startswith("src/")}) <= 2
