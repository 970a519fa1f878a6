"""Record of the machine and software that a run used."""

from __future__ import annotations

import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from stoker.hardware.process_device import Device

COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
BRANCH = re.compile(r"refs/(?!.*\.\.)[\w./@+-]+")
PACKAGES = ("stoker", "torch", "transformers", "peft", "tokenizers", "safetensors", "numpy")


def environment(device: Device, facts: dict[str, str], data: dict[str, str]) -> dict[str, Any]:
    """Returns the facts that determine a run beside its job: versions, device, revision, data.

    Args:
        facts: facts printed before training starts.
        data: fingerprints of the sources by name.
    """
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "device": {
            "type": device.type,
            "name": device.name,
            "threads": torch.get_num_threads(),
        },
        "precision": {"chosen": device.precision, "why": device.why},
        "platform": platform.platform(),
        "git": git_revision(Path.cwd()),
        "command": sys.argv,
        "data": data,
        "facts": facts,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git_revision(folder: Path) -> str | None:
    """Returns the commit checked out in a folder; None outside of a repository.

    It is read from the repository's files, as git itself would run programs that the repository's configuration names.
    """
    try:
        repository = next(p / ".git" for p in (folder, *folder.parents) if (p / ".git").exists())
        if repository.is_file():  # a worktree, or a submodule
            repository = repository.parent / repository.read_text().strip().removeprefix("gitdir: ")
        head = (repository / "HEAD").read_text().strip()
        if head.startswith("ref: "):
            head = _commit_of(repository, head.removeprefix("ref: "))
    except (OSError, ValueError, StopIteration):
        return None
    return head if COMMIT.fullmatch(head) else None


def _commit_of(repository: Path, branch: str) -> str:
    """Returns the commit of a branch, such as ``refs/heads/main``; empty if it has none."""
    if not BRANCH.fullmatch(branch):
        return ""
    common = repository / "commondir"  # in a worktree: the branches are in its repository
    repository = repository / common.read_text().strip() if common.is_file() else repository
    if (repository / branch).is_file():
        return (repository / branch).read_text().strip()
    packed = (repository / "packed-refs").read_text().splitlines()
    return next((line.split()[0] for line in packed if line.endswith(f" {branch}")), "")
