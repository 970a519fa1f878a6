"""Reads the instructions of a Dockerfile."""

from __future__ import annotations

from pathlib import Path


def instructions(file: Path) -> list[tuple[str, str]]:
    """(keyword, arguments) of each instruction, with continued lines joined."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined]


def copied(file: Path) -> list[str]:
    """What is copied from the build's context."""
    found = (arguments.split() for keyword, arguments in instructions(file) if keyword == "COPY")
    return [name for words in found if not words[0].startswith("--from") for name in words[:-1]]
