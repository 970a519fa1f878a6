"""What a run records of the machine and the software that it ran on."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from stoker.hardware.device import Device

PACKAGES = ("stoker", "torch", "transformers", "peft", "tokenizers", "safetensors", "numpy")


def environment(device: Device, facts: dict[str, str], data: dict[str, str]) -> dict[str, Any]:
    """What decides a run beside its job: versions, device, revision, data.

    Args:
        facts: what is printed before training starts.
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
        "git": _git_revision(),
        "command": sys.argv,
        "data": data,
        "facts": facts,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """The revision of the folder that the job is run from, with ``+changes`` where it is not clean."""
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+changes"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()
