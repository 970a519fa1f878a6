"""The files that a job needs on other machines: its sources, models and code, each with its digest."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import stoker
from stoker.cluster.chosen_target import ChosenTarget
from stoker.cluster.named_files import NamedFiles, below_folder, files_of, place_below
from stoker.data.files.file_digests import file_digest
from stoker.errors import Problem, UserError
from stoker.hardware.cache_folder import cache_folder
from stoker.job.targets.shared_keys import TargetKeys

ARCHIVE = ".code.tar"  # Stoker's package
CODE = ".code"  # folder where it is unpacked, on the nodes' PYTHONPATH
STAYS = ("page",)  # rooms of the package that no node needs


@dataclass(frozen=True)
class SentFile:
    """A file that is sent.

    Attributes:
        path: below the folder of the submission, with ``/``.
        digest: blake2b of its content; of a file above 1 GiB, of its size and of blocks of it.
        size: bytes.
        source: the file here; None if ``content`` is given.
        content: of a file that is made here.
        in_place: whether the nodes see it where it is, so that it counts in the fingerprint and is not sent.
    """

    path: str
    digest: str
    size: int
    source: Path | None = None
    content: bytes | None = None
    in_place: bool = False

    @classmethod
    def made(cls, path: str, text: str | bytes) -> SentFile:
        """Creates a file with this text."""
        content = text.encode() if isinstance(text, str) else text
        return cls(path, hashlib.blake2b(content, digest_size=32).hexdigest(), len(content), content=content)

    @property
    def summary(self) -> str:
        """Path, size and the digest's first characters, for a preview."""
        return f"{self.path}  {self.size} bytes  {self.digest[:16]}"

    def read(self) -> bytes:
        """Returns the content of the file."""
        if self.content is not None:
            return self.content
        assert self.source is not None
        return self.source.read_bytes()


def needed_files(named: NamedFiles, base: Path, chosen: ChosenTarget) -> tuple[SentFile, ...]:
    """Returns the files that jobs name, and those of the target's key `send`.

    Hub ids, URLs and names of the catalogue are not sent: the nodes fetch them, or have them installed.

    Args:
        base: the folder that relative paths start from.

    Raises:
        UserError: what `send` names is not there, or a file cannot be read.
    """
    keys = chosen.block
    assert isinstance(keys, TargetKeys)
    problems = []
    for index, pattern in enumerate(keys.send):
        files = files_of(pattern, base)
        if not files:
            hint = "name a file, a folder or a pattern"
            problems.append(chosen.problem(f"send[{index}]", f"there is no file {pattern}", hint))
        for file in files:
            named.found[place_below(file, base)] = file
    if problems:
        raise UserError(*problems)
    for path in named.private:  # also where `send` names it
        named.found.pop(path, None)
    code = [code_archive()] if keys.code else []
    if keys.in_place:
        return (*code, *(replace(file, in_place=True) for file in _sent(named.found)))
    sent = _sent({to: file for to, file in named.found.items() if to not in named.made})
    return (*code, *sent, *(SentFile.made(to, text) for to, text in named.made.items()))


def code_archive() -> SentFile:
    """Stoker's own package without its page as an archive: the same bytes for the same code."""
    package = Path(stoker.__path__[0])
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for file in below_folder(package):
            if file.relative_to(package).parts[0] in STAYS:
                continue
            content = file.read_bytes()
            info = tarfile.TarInfo(f"stoker/{file.relative_to(package).as_posix()}")
            info.size, info.mode = len(content), 0o644
            archive.addfile(info, io.BytesIO(content))
    return SentFile.made(ARCHIVE, buffer.getvalue())


def _sent(found: dict[str, Path]) -> Iterator[SentFile]:
    for to, file in found.items():
        if any(character in to for character in "\n\r\0"):
            raise UserError(Problem(f"{str(file)!r} cannot be sent: its name has a line end", "rename it"))
        if os.fsencode(to).decode(errors="replace") != to:
            raise UserError(Problem(f"{str(file)!r} cannot be sent: its name is not UTF-8", "rename it"))
    try:
        digests = file_digest(list(found.values()), cache_folder() / "fingerprints.json")
        for (to, file), digest in zip(found.items(), digests, strict=True):
            yield SentFile(to, digest, file.stat().st_size, file)
    except OSError as error:
        raise UserError(Problem(f"{error.filename} cannot be read: {error.strerror}")) from error
