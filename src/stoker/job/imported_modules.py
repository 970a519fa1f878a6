"""Python modules of the working folder that a job imports, and their files."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.job.keys.key_paths import leaves

if TYPE_CHECKING:
    from stoker.job.load_job import LoadedJob

LEFT_OUT = ("__pycache__", ".git", ".venv", "*.pyc", ".*.partial")


def modules_of(loaded: LoadedJob, base: Path) -> Iterator[Path]:
    """Python modules of the working folder that the job imports: ``package.module:name`` of any key."""
    for _, value in leaves(loaded.job):
        for text in value if isinstance(value, list | dict) else [value]:
            if isinstance(text, str) and (module := module_of(text, base)) is not None:
                yield module


def module_of(text: str, base: Path) -> Path | None:
    """Returns the file, or the folder of the package, that ``package.module:name`` is in; None if not in ``base``."""
    name = text.removeprefix("python:").partition(":")[0] if ":" in text else ""
    if not name or not all(part.isidentifier() for part in name.split(".")):
        return None
    top = base / name.split(".")[0]
    if top.is_dir() and any(top.glob("*.py")):
        return top
    return file if (file := top.with_suffix(".py")).is_file() else None


def python_files(module: Path) -> list[Path]:
    """Returns the Python files of a module or a package."""
    return [file for file in (below_folder(module) if module.is_dir() else [module]) if file.suffix == ".py"]


def below_folder(folder: Path) -> list[Path]:
    """Returns all files below a folder, sorted, without Python's caches and repositories."""
    found = []
    for path in sorted(folder.iterdir()):
        if any(fnmatch(path.name, pattern) for pattern in LEFT_OUT):
            continue
        if path.is_dir():
            found += below_folder(path)
        elif path.is_file():
            found.append(path)
    return found
