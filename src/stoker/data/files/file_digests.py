"""Digests of files' contents, cached until a file changes, so that no file is hashed twice."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

LARGE = 2**30  # bytes; a larger file is known by its size and SAMPLES blocks: reading it takes minutes
SAMPLES = 64
BLOCK = 2**20


def file_digest(files: Sequence[Path], memo: Path) -> list[str]:
    """Returns the blake2b digest of each file's content.

    Args:
        memo: a JSON file of digests by real path, inode, size and times of change; written where it can be.

    Raises:
        OSError: a file cannot be read.
    """
    known = _read(memo)
    fresh = {}
    digests = []
    for file in files:
        real = file.resolve()
        stat = real.stat()
        key = f"{real}|{stat.st_ino}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}"
        if key not in known:
            known[key] = fresh[key] = _digest(real, stat.st_size)
        digests.append(known[key])
    if fresh:
        # Another process may add its own entries at the same time; an entry lost that way is hashed again.
        with contextlib.suppress(OSError):
            _write(memo, _read(memo) | fresh)
    return digests


def _digest(file: Path, size: int) -> str:
    with file.open("rb") as stream:
        if size <= LARGE:
            return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
        digest = hashlib.blake2b(str(size).encode(), digest_size=32)
        for sample in range(SAMPLES):
            stream.seek((size - BLOCK) * sample // (SAMPLES - 1))
            digest.update(stream.read(BLOCK))
        return digest.hexdigest()


def _read(memo: Path) -> dict[str, str]:
    try:
        content = json.loads(memo.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(memo: Path, known: dict[str, str]) -> None:
    memo.parent.mkdir(parents=True, exist_ok=True)
    fresh = memo.with_name(f".{memo.name}.{os.getpid()}")
    fresh.write_text(json.dumps(known, indent=0), encoding="utf-8")
    fresh.replace(memo)
