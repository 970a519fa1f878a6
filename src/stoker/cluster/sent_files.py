"""What a job needs on other machines: its sources, models and code, each with its digest."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stoker
from stoker.cluster.named_files import NamedFiles, below_folder, files_of, named_files, place_below
from stoker.data.file_digests import file_digest
from stoker.errors import Problem, UserError
from stoker.hardware.cache_folder import cache_folder
from stoker.job.load_job import LoadedJob

ARCHIVE = ".code.tar"  # Stoker's package
CODE = ".code"  # folder in which it is unpacked, on the nodes' PYTHONPATH


@dataclass(frozen=True)
class SentFile:
    """A file that is sent.

    Attributes:
        path: below the folder of the submission, with ``/``.
        digest: blake2b of its content; of a file above 1 GiB, of its size and of blocks of it.
        size: bytes.
        source: the file here; None where ``content`` is given.
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
        """A file with this text."""
        content = text.encode() if isinstance(text, str) else text
        return cls(path, hashlib.blake2b(content, digest_size=32).hexdigest(), len(content), content=content)

    def read(self) -> bytes:
        """Its content."""
        if self.content is not None:
            return self.content
        assert self.source is not None
        return self.source.read_bytes()


@dataclass(frozen=True)
class Needed:
    """What the job names: files to send, and the values of keys that name them otherwise there.

    Attributes:
        files: without those of the job itself.
        moved: values of keys that lie outside of the working folder, by key: where they are below the submission's.
    """

    files: tuple[SentFile, ...]
    moved: dict[str, Any]


def fingerprint_of(files: Iterable[SentFile]) -> str:
    """64 hexadecimal digits that change with any file's path or content."""
    digest = hashlib.blake2b(digest_size=32)
    for file in sorted(files, key=lambda file: file.path):
        digest.update(f"{file.path}\0{file.digest}\n".encode())
    return digest.hexdigest()


def needed_files(
    loaded: LoadedJob, base: Path, *, extra: Sequence[str], code: bool, in_place: bool, problem: Any
) -> Needed:
    """The files that a job names, by the keys that name them: sources, models, runs, templates, rewards, modules.

    Hub ids, URLs and names of the catalogue are not sent: the nodes fetch them, or have them installed.

    Args:
        base: what relative paths begin at.
        extra: further files, folders or patterns.
        code: whether Stoker's own package is sent.
        in_place: whether the nodes see the files where they are.
        problem: makes the problem of the n-th of ``extra``, of (n, message, suggestion).

    Raises:
        UserError: one of ``extra`` or a run that the job names is not there, or a file cannot be read.
    """
    return all_needed(named_files(loaded, base), base, extra=extra, code=code, in_place=in_place, problem=problem)


def all_needed(
    named: NamedFiles, base: Path, *, extra: Sequence[str], code: bool, in_place: bool, problem: Any
) -> Needed:
    """What jobs name and what else is sent; see `needed_files`."""
    problems = []
    for index, pattern in enumerate(extra):
        files = files_of(pattern, base)
        if not files:
            problems.append(problem(index, f"there is no file {pattern}", "name a file, a folder or a pattern"))
        for file in files:
            named.found[place_below(file, base)] = file
    if problems:
        raise UserError(*problems)
    made = {} if in_place else named.made
    sent = _sent({to: file for to, file in named.found.items() if to not in made})
    written = (SentFile.made(to, text) for to, text in made.items())
    return Needed((*([code_archive()] if code else []), *sent, *written), named.moved)


def code_archive() -> SentFile:
    """Stoker's own package as an archive: the same bytes for the same code."""
    package = Path(stoker.__path__[0])
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for file in below_folder(package):
            content = file.read_bytes()
            info = tarfile.TarInfo(f"stoker/{file.relative_to(package).as_posix()}")
            info.size, info.mode = len(content), 0o644
            archive.addfile(info, io.BytesIO(content))
    return SentFile.made(ARCHIVE, buffer.getvalue())


def _sent(found: dict[str, Path]) -> Iterator[SentFile]:
    for to, file in found.items():
        if any(character in to for character in "\n\r\0"):
            raise UserError(Problem(f"{file!r} cannot be sent: its name has a line end", "rename it"))
    try:
        digests = file_digest(list(found.values()), cache_folder() / "fingerprints.json")
        for (to, file), digest in zip(found.items(), digests, strict=True):
            yield SentFile(to, digest, file.stat().st_size, file)
    except OSError as error:
        raise UserError(Problem(f"{error.filename} cannot be read: {error.strerror}")) from error
