"""Resolves a source of rows: a file, a glob, a folder, a URL, a hub data set or a catalogue name, and a slice of it.

A path that exists takes precedence over a catalogue name, and a catalogue name over a hub id. Files are read in the
order of their paths, so a source gives the same rows in the same order everywhere. Files at a URL are read through this
machine's cache, while they are being downloaded.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

from stoker.data.files.candidate_files import candidate_files
from stoker.data.files.file_digests import file_digest
from stoker.data.files.readers import PARQUET, data_suffix, known_kinds, read_rows
from stoker.data.files.rows import Raw, Rejected
from stoker.data.offline import offline_corpora
from stoker.data.splits import ALL_ROWS, Slice, choose, parse_split, patterns, relative
from stoker.errors import Problem, UserError
from stoker.hardware.cache_folder import cache_folder
from stoker.job.blocks.source_block import LogFormat, SourceBlock
from stoker.job.paths import absolute, exists, nearest_name
from stoker.node_cache.hub import require_repository
from stoker.node_cache.object_cache import node_cache
from stoker.node_cache.prefetch import Prefetch
from stoker.node_cache.remote_file import DataFile, RemoteFile
from stoker.node_cache.urls import is_url, url_problem, without_secrets

LOG_FORMATS = get_args(LogFormat)
LARGEST_BLANK = 1 << 16  # bytes of a file that is read to see whether it has only blank lines
# Files in a data folder that are not data.
_NOT_DATA = re.compile(
    r"(readme|licen[cs]e).*|(notice|changelog|citation|requirements|dataset_infos?|state)\.\w+", re.I
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Source:
    """A resolved source.

    Attributes:
        name: its path in the job, with the split.
        files: its files in reading order.
        size_bytes: size of all files as they are stored, whatever the slice.
        root: the folder, or the URL, that the files' names are relative to.
        part: the slice of the rows that is used.
        corpus: the catalogue name, empty for files.
    """

    name: str
    files: tuple[DataFile, ...]
    size_bytes: int
    root: Path | str
    part: Slice = ALL_ROWS
    corpus: str = ""

    def rows(self) -> Iterator[Raw | Rejected]:
        """Yields the rows of all files in order, broken ones in their place, cut to the slice.

        A slice in percent or from the end counts the rows first, which reads the files twice.

        Raises:
            UserError: a file as a whole cannot be read.
        """
        total = sum(1 for _ in self.all_rows()) if self.part.needs_total else 0
        start, stop = self.part.bounds(total)
        yield from itertools.islice(self.all_rows(), start, stop)

    def all_rows(self) -> Iterator[Raw | Rejected]:
        here = [file for file in self.files if isinstance(file, Path)]
        if self.corpus:
            return offline_corpora.rows(self.corpus, here)
        away = [file for file in self.files if isinstance(file, RemoteFile)]
        # A source is of one kind. Threads start with the first row, and end with the generator.
        return _rows(away) if away else itertools.chain.from_iterable(map(read_rows, here))

    def fingerprint(self) -> str:
        """64 hexadecimal digits that change with the files' content, their names, or the slice."""
        digest = hashlib.blake2b(digest_size=32)
        for name, content in self.contents().items():
            digest.update(f"{name}\0{content}\n".encode())
        digest.update(f"{self.corpus}{self.part}".encode())
        return digest.hexdigest()

    def contents(self) -> dict[str, str]:
        """Returns each file's fingerprint (it changes with the content), by file name, in order."""
        names = [str(relative(file, self.root)) for file in self.files]
        return dict(zip(names, _contents(self.files), strict=True))


def _rows(files: Sequence[RemoteFile]) -> Iterator[Raw | Rejected]:
    """Yields the rows of files at URLs, and prefetches the next files meanwhile."""
    for file in Prefetch(files).in_turn():
        yield from read_rows(file)


def _contents(files: Sequence[DataFile]) -> list[str]:
    """Returns each file's fingerprint: its digest, or the version that the origin of a URL reports.

    A file whose origin reports neither a tag nor a time is downloaded for its digest.
    """
    identities = {file: file.identity for file in files if isinstance(file, RemoteFile)}
    with ExitStack() as stack:
        here: dict[DataFile, Path] = {}
        for file in files:
            if isinstance(file, Path):
                here[file] = file
            elif not identities[file]:
                here[file], pin = file.fetch()
                stack.enter_context(pin)
        digests = dict(zip(here, file_digest(list(here.values()), cache_folder() / "fingerprints.json"), strict=True))
    return [digests.get(file) or identities[file] for file in files]  # type: ignore[index]  # one or the other


def source_problem(block: SourceBlock, base: Path) -> tuple[str, str] | None:
    """Checks a source without reading its rows or using the network.

    Args:
        base: the folder that relative paths start from.

    Returns:
        (message, suggestion) of a problem, or None.
    """
    try:
        split, _ = parse_split(block.split)
    except ValueError as error:
        return str(error), "write a name, a slice, or both: train, [:1000], train[10%:]"
    kind = _kind(block.path, base)
    if kind == "url":
        return url_problem(block.path)
    if kind == "file":
        return _file_problem(block.path, base, split, named=block.format in LOG_FORMATS)
    if kind == "catalogue" and split not in ("", "train"):
        return f"no split {split!r} in {block.path}", "the catalogue has no splits; take a slice: [90%:]"
    return offline_corpora.problem(block.path) if kind == "catalogue" else None


def request_source(block: SourceBlock, base: Path) -> None:
    """Requests the files of a source at a URL, or the description of a data set of the hub; others are not looked at.

    Raises:
        UserError: it does not exist.
        RunFailed: its store or the hub does not answer.
    """
    kind = _kind(block.path, base)
    if kind == "url":
        open_source(block, base)
    elif kind == "hub":
        require_repository(block.path, "dataset", hint=_nearest(absolute(block.path, base), base))


def open_source(block: SourceBlock, base: Path) -> Source:
    """Opens the source of a job's block.

    Args:
        base: the folder that relative paths start from.

    Raises:
        UserError: it does not exist, or has no readable file.
    """
    if problem := source_problem(block, base):
        raise UserError(Problem(*problem))
    split, part = parse_split(block.split)
    name = block.path + (f" {block.split}" if block.split else "")
    kind = _kind(block.path, base)
    if kind == "url":
        away, place = _remote_files(block.path, split)
        return Source(without_secrets(name), tuple(away), sum(file.size for file in away), place, part)
    if kind == "file":
        path = absolute(block.path, base)
        files = _data_files(candidate_files(block.path, base), path, named=block.format in LOG_FORMATS)
        root = _root(path, files)
        files = choose(files, root, split)
    elif kind == "catalogue":
        files = list(offline_corpora.files(block.path))
        root = _root(files[0], files)
    else:
        root, files = _download(block.path, split, _nearest(absolute(block.path, base), base))
    size = sum(file.stat().st_size for file in files)
    return Source(name, tuple(files), size, root, part, block.path if kind == "catalogue" else "")


def _kind(path: str, base: Path) -> Literal["url", "file", "catalogue", "hub"]:
    """Classifies a path: a URL by its form, an existing file first, the hub last."""
    if is_url(path):
        return "url"
    if exists(absolute(path, base)):
        return "file"
    if offline_corpora.corpus_named(path):
        return "catalogue"
    return "hub" if _HUB_ID.fullmatch(path) and not data_suffix(path) else "file"


def _remote_files(url: str, split: str) -> tuple[list[RemoteFile], str]:
    """Returns the data files of a URL, and the base of their names."""
    found = [RemoteFile(each) for each in node_cache().find(url)]
    one = len(found) == 1 and found[0].found.url == url
    files = [file for file in found if data_suffix(str(file)) and (one or not _NOT_DATA.fullmatch(file.name))]
    root = without_secrets(url).rstrip("/")
    if not all(str(file).startswith(f"{root}/") for file in files):
        folders = zip(*(str(file).split("/")[:-1] for file in files), strict=False)
        root = "/".join(names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, folders))
    chosen = choose(files, root, split)
    if problem := _choice_problem(without_secrets(url), None if one else len(found), files, split, chosen):
        raise UserError(Problem(*problem))
    return chosen, root


def _file_problem(name: str, base: Path, split: str, *, named: bool) -> tuple[str, str] | None:
    path = absolute(name, base)
    found = candidate_files(name, base)
    if not exists(path) and not found:
        what = f"no file fits {name}" if glob.has_magic(name) else f"no such file or folder: {name}"
        return what, _nearest(path, base)
    files = _data_files(found, path, named=named)
    chosen = choose(files, _root(path, files), split)
    if problem := _choice_problem(name, None if path.is_file() else len(found), files, split, chosen):
        return problem
    if all(file.is_file() and _is_blank(file) for file in chosen):
        return empty_source(name)
    return None


def _is_blank(file: Path) -> bool:
    """Returns whether a file is empty, or small with nothing but blank lines."""
    size = file.stat().st_size
    try:
        return size == 0 or (size <= LARGEST_BLANK and not file.read_bytes().strip())
    except OSError:  # reported where it is read
        return False


def empty_source(name: str) -> tuple[str, str]:
    """Returns (message, suggestion) about a source without rows."""
    return f"{name} is empty", "give a source that holds at least one row"


def _choice_problem(
    name: str, among: int | None, data: Sequence[DataFile], split: str, chosen: Sequence[DataFile]
) -> tuple[str, str] | None:
    """Returns why the files chosen for a source cannot be read.

    Args:
        among: number of files that its path matches; None if it names one file.
        data: those that hold data.
        chosen: those of the split.
    """
    if not data:
        what = "unknown kind of file" if among is None else f"no data file among {among} files"
        return f"{what}: {name}", known_kinds(name)
    if not chosen:
        return f"no file of split {split!r} in {name}", "the splits are found by the names of files and folders"
    if any(data_suffix(str(file)) in PARQUET for file in chosen) and find_spec("pyarrow") is None:
        return "reading .parquet needs pyarrow", "pip install 'stoker[parquet]'"
    if any(file.suffix.lower() == ".zst" for file in chosen) and find_spec("zstandard") is None:
        return "reading .zst needs zstandard", "pip install 'stoker[zstd]'"
    return None


def _data_files(found: list[Path], path: Path, *, named: bool = False) -> list[Path]:
    """Filters the files that can be read; a file that the job names itself is kept even if it is called README.md.

    Args:
        named: whether the job names their format, so that they need no suffix.
    """
    if named:
        return [p for p in found if path.is_file() or not _NOT_DATA.fullmatch(p.name)]
    if path.is_file():
        return [p for p in found if data_suffix(p)]
    return [p for p in found if data_suffix(p) and not _NOT_DATA.fullmatch(p.name)]


def _root(path: Path, files: list[Path]) -> Path:
    if path.is_dir():
        return path
    return Path(os.path.commonpath([file.parent for file in files])) if files else path.parent


def _nearest(path: Path, base: Path) -> str:
    """Returns the existing name most like a missing one, in its folder or in the catalogue."""
    folder = path.parent
    try:
        siblings = [p.name for p in folder.iterdir() if p.is_dir() or data_suffix(p)]
    except OSError:
        siblings = []
    if near := difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.6):
        return f"did you mean {os.path.relpath(folder / near[0], base)}?"
    wanted = os.path.relpath(path, base)
    if near := difflib.get_close_matches(wanted, offline_corpora.names(), n=1, cutoff=0.6):
        return f"did you mean {near[0]}, of the catalogue?"
    if similar := nearest_name(wanted, base):
        return f"did you mean {similar}?"
    return f"relative paths start from {base}" if path.is_relative_to(base) else ""


def _download(name: str, split: str, near: str) -> tuple[Path, list[Path]]:
    """Returns a hub data set's folder and the files of a split in it; requests that split's files first."""
    from huggingface_hub import snapshot_download

    require_repository(name, "dataset", hint=near)
    for allowed in patterns(split):
        try:
            folder = Path(snapshot_download(repo_id=name, repo_type="dataset", allow_patterns=allowed))
        except (OSError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                Problem(f"{name} is not a local file and cannot be fetched from the hub: {reason}", near)
            ) from error
        files = choose(_data_files(candidate_files(".", folder), folder), folder, split or "train")
        if files:
            return folder, files
    raise UserError(Problem(f"the hub's data set {name} has no data file of split {split or 'train'!r}"))
