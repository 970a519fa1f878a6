"""Folders with models that were converted from other formats, cached by the content of the original files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from tempfile import mkdtemp

from safetensors import SafetensorError

from stoker.data.files.cache_lock import lock
from stoker.data.files.file_digests import file_digest
from stoker.errors import Problem, RunFailed, reason_of
from stoker.hardware.cache_folder import ADVICE, cache_folder


def converted_folder(kind: str, files: Sequence[Path], part: str, convert: Callable[[Path], None]) -> Path:
    """Returns the cached folder of a conversion; converts first if it is not in the cache.

    Args:
        kind: format and version; the version is raised whenever the same files would be converted differently.
        part: what of the model the folder has.
        convert: writes the model into an empty folder, which becomes visible when it is complete.

    Raises:
        RunFailed: the cache cannot be written, such as on a full disk.
    """
    digests = file_digest(files, cache_folder() / "fingerprints.json")
    digest = digests[0] if len(digests) == 1 else blake2b("\n".join(digests).encode()).hexdigest()
    folder = cache_folder() / kind / digest[:32] / part
    with lock(folder):
        if not folder.exists():
            temporary = Path(mkdtemp(dir=folder.parent, prefix=".partial-"))
            try:
                convert(temporary)
                temporary.rename(folder)
            except BaseException as error:
                shutil.rmtree(temporary, ignore_errors=True)
                if isinstance(error, OSError | SafetensorError):
                    message = f"the cache cannot be written: {reason_of(error)}"
                    raise RunFailed(Problem(message, ADVICE, file=str(folder.parent))) from error
                raise
    return folder
