"""SHA-256 of the files of an exported folder: a file that was damaged or exchanged later is not served."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stoker.online_store.row_backends import StoreError, open_inside

KEY = "sha256"  # of a manifest: digests by file name


def digests_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns the digests of files, each of which is read once."""
    found = {}
    for name in names:
        with open_inside(folder, name) as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Checks that all files of an export are as they were written. Older exports have no digests.

    Raises:
        StoreError: a file is missing, has other contents, or is outside of the folder.
    """
    written = manifest.get(KEY, {})
    if not isinstance(written, dict):
        raise StoreError(f"{folder / 'manifest.json'} is damaged: {KEY} is not a list of files and their digests")
    for name, digest in written.items():
        (found,) = digests_of(folder, [name]).values()
        if found != digest:
            raise StoreError(f"{folder / name} has other contents than were exported: export the run again")
