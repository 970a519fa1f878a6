"""The recorded facts of a run, and its git revision: read without running anything that the repository asks for."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from running import run

from stoker.train.records.recorded_environment import git_revision


def test_the_facts_of_a_run_name_an_evaluation_where_there_is_one(base: Path, sft: dict[str, Any]) -> None:
    for fraction, saves, held in (
        (0.0, "no evaluation", "0 sequences"),
        (0.025, "every step", "1 sequence"),
    ):
        job = {**sft, "steps": 1, "evaluate": {"fraction": fraction}, "output": str(fraction)}
        facts = json.loads(run(base, job).folder.environment.read_text())["facts"]
        assert facts["saves"].endswith(saves) and facts["data"].endswith(f"{held} held out")


def git(folder: Path, *words: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *own, *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "feature/new+one")
    (folder / "file").write_text("a")
    git(folder, "add", "file")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_the_commit_of_a_branch_a_tag_and_a_worktree(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "inner").mkdir()
    assert git_revision(repository / "inner") == git_revision(repository) == commit
    git(repository, "worktree", "add", "-q", "../tree", "-b", "other")
    assert git_revision(repository.parent / "tree") == commit
    git(repository, "pack-refs", "--all")
    assert git_revision(repository) == git_revision(repository.parent / "tree") == commit
    git(repository, "checkout", "-q", "--detach")
    assert git_revision(repository) == commit


def test_nothing_that_its_configuration_names_is_run(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = repository.parent / "ran"
    (repository / ".gitattributes").write_text("file filter=evil\n")
    with (repository / ".git" / "config").open("a") as file:
        file.write(f'[core]\nfsmonitor = "touch {mark}; false"\n[filter "evil"]\nclean = "touch {mark}"\n')
    (repository / "file").write_text("b")
    monkeypatch.chdir(repository)
    assert git_revision(repository) is not None and not mark.exists()


@pytest.mark.parametrize("head", ["", "ref: ../../secret", "ref: refs/heads/../../../secret", "ref: refs/heads/none"])
def test_what_is_no_repository_has_no_revision(head: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("f" * 40)
    (tmp_path / ".git" / "refs" / "heads").mkdir(parents=True)
    (tmp_path / ".git" / "HEAD").write_text(head)
    assert git_revision(tmp_path) is None
