"""The local files that a job names, and their paths on the nodes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from stoker.cluster.private_files import PrivateFile
from stoker.data.files.candidate_files import candidate_files
from stoker.errors import Problem, UserError
from stoker.job.document.job_to_yaml import dump_job
from stoker.job.document.overrides import apply_overrides
from stoker.job.imported_modules import below_folder, modules_of
from stoker.job.inputs import SCHEMA, by_source_key, schema_file
from stoker.job.load_job import LoadedJob, check_document, load_job
from stoker.job.paths import absolute, exists
from stoker.job.task_spec import Named, task_of
from stoker.runs.find_run import find_run

OUTSIDE = "outside"  # folder of files from outside the working folder


@dataclass
class NamedFiles:
    """The local files that a job needs.

    Attributes:
        base: the folder that relative paths start from.
        found: files by their path below the submission's folder.
        made: generated texts by such a path: jobs of runs, with the paths on the nodes.
        moved: values of the job's keys that differ on the nodes, by key.
        private: secrets, which are in none of the others, by their path.
    """

    base: Path
    found: dict[str, Path] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)
    moved: dict[str, Any] = field(default_factory=dict)
    private: dict[str, PrivateFile] = field(default_factory=dict)

    def add(self, value: str) -> str:
        """Adds the files that a path or pattern matches; returns their name on the nodes."""
        top, pattern = _fixed_part(value, self.base)
        if not pattern and not exists(top):
            return value
        to = place_below(top, self.base)
        files = files_of(value, self.base)
        self.found |= {str(PurePosixPath(to, file.relative_to(top))): file for file in files}
        return str(PurePosixPath(to, pattern))

    def add_private(self, key: str, value: str) -> str:
        """Adds a secret; returns as `add` does. An absolute path is one on the nodes where there is none here."""
        source = absolute(value, self.base)
        if not source.is_file():
            return value
        to = place_below(source, self.base)
        self.private[to] = PrivateFile(key, value, to, source)
        return to

    def add_run(self, value: str) -> str:
        """Adds the newest checkpoint of a run, its job, and the model that this names; returns as `add` does.

        Raises:
            UserError: there is no such run, or it has no checkpoint.
        """
        from stoker.checkpoint.dcp_store import place_of
        from stoker.checkpoint.storage import storage_of

        folder = find_run(value, self.base)
        home, run = place_below(folder.path, self.base), load_job(folder.job)
        for file in (folder.job, folder.events):
            self.found[f"{home}/{file.name}"] = file
        moved = {key: to for key, old in _model_paths(run) if (to := self.add(old)) != old}
        place = place_of(run.job.checkpoint.to, folder, self.base)
        steps = storage_of(place).steps()
        if not steps:
            raise UserError(f"{folder.path} has no checkpoint yet")
        if isinstance(place, Path):
            to = place_below(place, self.base) if run.job.checkpoint.to else f"{home}/{place.name}"
            newest = Path(storage_of(place).path(steps[-1]))
            self.found |= {f"{to}/{newest.name}/{f.relative_to(newest)}": f for f in below_folder(newest)}
            if run.job.checkpoint.to not in (None, to):
                moved["checkpoint.to"] = to
        if moved:
            self.made[f"{home}/{folder.job.name}"] = dump_job(with_paths(run, moved).job)
        return value if _is_below(folder.path, self.base) else home


def named_files(loaded: LoadedJob, base: Path, *, without: Collection[str] = ()) -> NamedFiles:
    """Returns the files that a job names.

    Args:
        without: keys that name files that do not exist yet, such as earlier stages' runs.

    Raises:
        UserError: a run that it names does not exist.
    """
    files = NamedFiles(base)
    for key, value in [*_model_paths(loaded), *_source_paths(loaded)]:
        if key not in without and (to := files.add(value)) != value:
            files.moved[key] = to
    for key, names in _by_key(task_of(loaded.job).names(loaded.job)).items():
        if key in without:
            continue
        moved = {name.value: to for name in names if (to := _add_named(files, loaded, name)) != name.value}
        if moved:
            files.moved[key] = _replaced(_at(loaded.job, key), moved)
    for module in modules_of(loaded, base):
        files.found |= {place_below(file, base): file for file in files_of(str(module), base)}
    return files


def with_paths(loaded: LoadedJob, moved: Mapping[str, Any]) -> LoadedJob:
    """Returns the job with other values of some keys, such as paths on the nodes."""
    if not moved:
        return loaded
    overrides = [f"{key}={json.dumps(value)}" for key, value in moved.items()]
    document, problems = apply_overrides(loaded.document, overrides)
    if problems:
        raise UserError(*(Problem(f"{p.message}", p.suggestion) for p in problems))
    return check_document(document)


def _add_named(files: NamedFiles, loaded: LoadedJob, named: Named) -> str:
    from stoker.models.model_source import find_model

    if named.kind == "address":
        return named.value
    if named.kind == "source":
        return files.add(named.value)
    if named.kind == "secret":
        return files.add_private(named.key, named.value)
    if named.kind == "scorer":
        schema = schema_file(named.value)
        return f"{SCHEMA}{files.add(schema)}" if schema else named.value
    if named.is_model and find_model(named.value, files.base, or_run=True) is not None:
        return files.add(named.value)
    with loaded.errors_at(named.key):
        return files.add_run(named.value)


def _by_key(names: Sequence[Named]) -> dict[str, list[Named]]:
    found: dict[str, list[Named]] = {}
    for named in names:
        found.setdefault(named.key, []).append(named)
    return found


def _at(job: Any, key: str) -> Any:
    for name in key.split("."):
        job = getattr(job, name)
    return job


def _replaced(value: Any, moved: dict[str, str]) -> Any:
    """Replaces some strings in a string, a list of strings, or the keys of a mapping."""
    if isinstance(value, dict):
        return {moved.get(name, name): weight for name, weight in value.items()}
    return [moved.get(name, name) for name in value] if isinstance(value, list) else moved[value]


def _model_paths(loaded: LoadedJob) -> Iterator[tuple[str, str]]:
    """Yields the keys with paths that are needed to open the model, and their values."""
    job = loaded.job
    if job.model is not None:
        yield "model.name", job.model.name
        if job.model.tokenizer:
            yield "model.tokenizer", job.model.tokenizer
    for key, source in by_source_key(job.data, job.evaluate.data).items():
        if isinstance(source.template, str):
            yield f"{key}.template", source.template


def _source_paths(loaded: LoadedJob) -> Iterator[tuple[str, str]]:
    for key, source in by_source_key(loaded.job.data, loaded.job.evaluate.data).items():
        if source.path:
            yield f"{key}.path", source.path


def files_of(value: str, base: Path) -> list[Path]:
    """Returns the files of a path or pattern, and all files of a folder; none if nothing matches."""
    path, pattern = _fixed_part(value, base)
    if pattern:
        return candidate_files(value, base)
    if not exists(path):
        return []
    return below_folder(path) if path.is_dir() else [path]


def place_below(path: Path, base: Path) -> str:
    """Returns a file's path on the nodes: the same place below the working folder, or else below `OUTSIDE`."""
    plain = Path(os.path.normpath(path))
    if _is_below(path, base):
        return plain.relative_to(base).as_posix()
    around = hashlib.blake2b(os.fsencode(plain.parent), digest_size=4).hexdigest()
    return f"{OUTSIDE}/{around}/{plain.name}"


def _is_below(path: Path, base: Path) -> bool:
    return Path(os.path.normpath(path)).is_relative_to(base)


def _fixed_part(value: str, base: Path) -> tuple[Path, str]:
    """Splits a path before its first part with a wildcard; the pattern is empty without one, or if the path exists."""
    path = absolute(value, base)
    if "://" in value or exists(path):
        return path, ""
    parts = Path(value).parts
    first = next((index for index, part in enumerate(parts) if any(mark in part for mark in "*?[")), len(parts))
    fixed, pattern = Path(*parts[:first]), Path(*parts[first:])
    return (absolute(str(fixed), base), str(pattern)) if parts[first:] else (path, "")
