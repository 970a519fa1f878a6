"""What a job needs on other machines: its sources, models and code, each with its digest."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import stoker
from stoker.data.file_digests import file_digest
from stoker.errors import Problem, UserError
from stoker.hardware.cache_folder import cache_folder
from stoker.job.load_job import LoadedJob
from stoker.job.paths import absolute, exists

OUTSIDE = "outside"  # folder of what does not lie below the folder in which the command is given
ARCHIVE = ".code.tar"  # Stoker's package
CODE = ".code"  # folder in which it is unpacked, on the nodes' PYTHONPATH
LEFT_OUT = ("__pycache__", ".git", ".venv", "*.pyc", ".*.partial")


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
    moved: dict[str, str]


def fingerprint_of(files: Iterable[SentFile]) -> str:
    """64 hexadecimal digits that change with any file's path or content."""
    digest = hashlib.blake2b(digest_size=32)
    for file in sorted(files, key=lambda file: file.path):
        digest.update(f"{file.path}\0{file.digest}\n".encode())
    return digest.hexdigest()


def needed_files(loaded: LoadedJob, base: Path, *, extra: Sequence[str], code: bool, problem: Any) -> Needed:
    """The files that a job names, by the keys that name them: sources, models, templates, modules.

    Hub ids, URLs and names of the catalogue are not sent: the nodes fetch them, or have them installed.

    Args:
        base: what relative paths begin at.
        extra: further files, folders or patterns.
        code: whether Stoker's own package is sent.
        problem: makes the problem of the n-th of ``extra``, of (n, message, suggestion).

    Raises:
        UserError: one of ``extra`` is not there, or a file cannot be read.
    """
    found: dict[str, Path] = {}
    moved: dict[str, str] = {}
    for key, value in named_paths(loaded, base):
        top = absolute(value, base)
        to = _below(top, base)
        for file in files_of(value, base):
            found[_joined(to, top, file)] = file
        if to != value:
            moved[key] = to
    for module in modules_of(loaded, base):
        for file in files_of(str(module), base):
            found[_below(file, base)] = file
    problems = []
    for index, pattern in enumerate(extra):
        files = files_of(pattern, base)
        if not files:
            problems.append(problem(index, f"there is no file {pattern}", "name a file, a folder or a pattern"))
        for file in files:
            found[_below(file, base)] = file
    if problems:
        raise UserError(*problems)
    return Needed((*([code_archive()] if code else []), *_sent(found)), moved)


def code_archive() -> SentFile:
    """Stoker's own package as an archive: the same bytes for the same code."""
    package = Path(stoker.__path__[0])
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for file in _below_folder(package):
            content = file.read_bytes()
            info = tarfile.TarInfo(f"stoker/{file.relative_to(package).as_posix()}")
            info.size, info.mode = len(content), 0o644
            archive.addfile(info, io.BytesIO(content))
    return SentFile.made(ARCHIVE, buffer.getvalue())


def named_paths(loaded: LoadedJob, base: Path) -> Iterator[tuple[str, str]]:
    """The keys of the job whose values are files or folders here, with those values."""
    from stoker.job.task_spec import task_of

    job = loaded.job
    values: dict[str, str | None] = {}
    if job.model is not None:
        values |= {"model.name": job.model.name, "model.tokenizer": job.model.tokenizer}
    for home, sources in (("data", job.data), ("evaluate.data", job.evaluate.data)):
        for index, source in enumerate(sources):
            values[f"{home}[{index}].path"] = source.path
            if isinstance(source.template, str):
                values[f"{home}[{index}].template"] = source.template
    values |= task_of(job).models(job)
    for key, value in values.items():
        if value and (exists(absolute(value, base)) or _is_pattern(value)):
            yield key, value


def modules_of(loaded: LoadedJob, base: Path) -> Iterator[Path]:
    """Python modules of the working folder that the job imports: ``package.module:name`` of any key."""
    from stoker.job.key_paths import leaves

    for _, value in leaves(loaded.job):
        for text in value if isinstance(value, list) else [value]:
            name = text.removeprefix("python:").partition(":")[0] if isinstance(text, str) and ":" in text else ""
            if not name or not all(part.isidentifier() for part in name.split(".")):
                continue
            top = base / name.split(".")[0]
            if top.is_dir() and any(top.glob("*.py")):
                yield top
            elif top.with_suffix(".py").is_file():
                yield top.with_suffix(".py")


def files_of(value: str, base: Path) -> list[Path]:
    """The files that a path or pattern means, of a folder all; none where there are none."""
    path = absolute(value, base)
    if exists(path):
        return _below_folder(path) if path.is_dir() else [path]
    if not _is_pattern(value):
        return []
    anchor = Path(path.anchor)
    return sorted(found for found in anchor.glob(str(path.relative_to(anchor))) if found.is_file())


def _is_pattern(value: str) -> bool:
    return any(mark in value for mark in "*?[") and "://" not in value


def _below_folder(folder: Path) -> list[Path]:
    """All files below a folder, in order, without caches of Python and repositories."""
    found = []
    for path in sorted(folder.iterdir()):
        if any(fnmatch(path.name, pattern) for pattern in LEFT_OUT):
            continue
        if path.is_dir():
            found += _below_folder(path)
        elif path.is_file():
            found.append(path)
    return found


def _below(path: Path, base: Path) -> str:
    """Where a path is put: the same place below the working folder, or else below `OUTSIDE`."""
    if path.is_relative_to(base):
        return path.relative_to(base).as_posix()
    around = hashlib.blake2b(str(path.parent).encode(), digest_size=4).hexdigest()
    return f"{OUTSIDE}/{around}/{path.name}"


def _joined(to: str, top: Path, file: Path) -> str:
    """A file's place, where its folder or pattern is put at ``to``."""
    if file == top:
        return to
    if file.is_relative_to(top):
        return f"{to}/{file.relative_to(top).as_posix()}"
    return f"{to.rpartition('/')[0]}/{file.name}".lstrip("/")


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
