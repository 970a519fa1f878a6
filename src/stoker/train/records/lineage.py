"""Lineage of a stage's run, so that a change restarts only the stages that depend on it.

``lineage.json`` in the run's folder holds the job as written, with its defaults, and digests of what it reads: the
data, the model, templates, tokenizers and modules, whatever its task's block names, and the weights of earlier stages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stoker.checkpoint.dcp_store import Store, place_of
from stoker.checkpoint.storage import BASE, read_state
from stoker.data.files.file_digests import file_digest
from stoker.data.sources import open_source
from stoker.errors import UserError
from stoker.files import read_file
from stoker.hardware.cache_folder import cache_folder
from stoker.job.blocks.source_block import SourceBlock
from stoker.job.changed_keys import changes_run, differences
from stoker.job.imported_modules import modules_of, python_files
from stoker.job.keys.key_paths import flat, leaves
from stoker.job.load_job import LoadedJob, load_job
from stoker.job.paths import absolute, exists
from stoker.job.resolved import ResolvedJob
from stoker.job.stage import STAGE_KEYS, Stage
from stoker.job.task_spec import task_of
from stoker.models.model_folder import SETTINGS, TOKENIZER_FILES, weight_files
from stoker.models.model_source import find_model, require_model
from stoker.runs.find_run import find_run
from stoker.runs.run_folder import RunFolder
from stoker.train.records.resume_check import corrected_code

LENGTHS = ("steps", "epochs")
MORE_TEXT = ("merges.txt", "added_tokens.json", "chat_template.jinja")
TEXT_FILES = (*TOKENIZER_FILES, *SETTINGS, *MORE_TEXT)
VERSION = 2  # records without a version know only data, the model, files of the task's block, and stages


@dataclass(frozen=True)
class Lineage:
    """The inputs of a run.

    Attributes:
        job: leaves of the resolved job by dotted key, without those that name an earlier stage.
        inputs: content digests by input: ``data rows.jsonl``, ``model``, ``dpo.reference``, ``stage sft``.
        version: of the record; one of an earlier version lacks some kinds of inputs.
    """

    job: Mapping[str, Any]
    inputs: Mapping[str, str]
    version: int = VERSION

    def as_json(self) -> dict[str, Any]:
        """Returns the form that `read_lineage` reads."""
        return {"version": self.version, "job": dict(self.job), "inputs": dict(self.inputs)}


@dataclass(frozen=True)
class Standing:
    """State of a stage's run, which decides what is done with it.

    Attributes:
        state: ``none`` (start it), ``begun`` (resume it), ``done`` (skip it), ``changed`` (start it over).
        why: descriptions of what has changed, for an error.
    """

    state: Literal["none", "begun", "done", "changed"]
    why: tuple[str, ...] = ()


def lineage_of(stage: Stage, loaded: LoadedJob, weights: Mapping[str, str], base: Path) -> Lineage:
    """Returns the lineage that a stage's run would have now.

    Args:
        loaded: the stage's job.
        weights: digests of the earlier stages that it uses, by name; see `weights_digest`.

    Raises:
        UserError: a source or the model does not exist.
    """
    job = loaded.job
    job_leaves = {key: value for key, value in flat(job.model_dump(mode="json")).items() if not _is_link(key, stage)}
    inputs: dict[str, str] = {}
    others = [named for named in task_of(job).names(job) if named.key not in stage.needs]
    mixed = [SourceBlock(path=named.value) for named in others if named.kind == "source"]
    for block in (*job.data, *job.evaluate.data, *mixed):
        source = open_source(block, base)
        inputs[f"data {source.name}"] = source.fingerprint()
    if job.model is not None and "model.from" not in stage.needs:
        inputs |= _digests_of_model("model", job.model.name, base)
    for named in others:
        if named.is_model:
            inputs |= _digests_of_model_or_run(named.key, named.value, base)
    for file in _named_files(loaded, base):
        inputs[f"file {file.relative_to(base) if file.is_relative_to(base) else file}"] = _digest([file])
    inputs |= {f"stage {name}": digest for name, digest in weights.items()}
    return Lineage(job_leaves, inputs)


def _is_link(key: str, stage: Stage) -> bool:
    """Returns whether a key holds the path of an earlier stage, whose content is compared instead."""
    return any(key == ("model.name" if link == "model.from" else link) for link in stage.needs)


def standing_of(folder: RunFolder, now: Lineage, job: ResolvedJob) -> Standing:
    """Returns the state of a stage from its folder.

    Args:
        job: the stage's job as it is now. Keys without effect in it are not compared.
    """
    if not folder.events.is_file() and not folder.job.is_file():
        return Standing("none")
    before = read_lineage(folder)
    if before is None:
        return Standing("changed", (f"{folder.path} holds a run that no stage has made",))
    corrected = corrected_code({**before.inputs, **now.inputs}, folder)
    old, new = (
        {what: digest for what, digest in inputs.items() if what not in corrected}
        for inputs in (before.inputs, now.inputs)
    )
    changed = [f"{what} has changed" for what, digest in new.items() if old.get(what, digest) != digest]
    if before.version == now.version:  # else the run may have had it all along
        changed += [f"{what} is new" for what in new.keys() - old.keys()]
    changed += [f"{what} is no longer an input" for what in old.keys() - new.keys()]
    both = ({key: value for key, value in leaves.items() if changes_run(job, key)} for leaves in (before.job, now.job))
    changed += differences(*both)
    longer = False
    for key in LENGTHS:
        was, is_ = before.job.get(key), now.job.get(key)
        if was is not None and is_ is not None and is_ > was:
            longer = True
        elif was != is_:
            changed.append(f"{key} was {was} and is {is_}")
    if changed:
        return Standing("changed", tuple(changed))
    return Standing("done" if folder.is_done() and not longer else "begun")


def read_lineage(folder: RunFolder) -> Lineage | None:
    """Reads the lineage from a run's folder; returns None if it is missing or unreadable."""
    try:
        values = json.loads(read_file(folder.lineage))
        return Lineage(dict(values["job"]), dict(values["inputs"]), int(values.get("version", 1)))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def weights_digest(run: str, base: Path) -> str:
    """Returns 64 hexadecimal digits that change with the content of a run's last checkpoint.

    Raises:
        UserError: the run does not exist, or it has no checkpoint.
    """
    folder = RunFolder(base / run)
    job = load_job(folder.job).job
    store = Store(place_of(job.checkpoint.to, folder, base))
    steps = store.steps()
    if not steps:
        raise UserError(f"{folder.path} has no checkpoint")
    digest = hashlib.sha256()
    last = read_state(store.storage, steps[-1])
    before = [read_state(store.storage, last[BASE])] if BASE in last else []
    for name, file in (entry for state in (last, *before) for entry in sorted(state["files"].items())):
        digest.update(f"{name}\0{file['sha256']}\n".encode())
    return digest.hexdigest()


def _digests_of_model(key: str, name: str, base: Path) -> dict[str, str]:
    """Digests the content of a model's files; for a hub id or a model from scratch, returns its name.

    The files that records of version 1 do not know have digests of their own.
    """
    source = require_model(name, base)
    if source.kind in ("hub", "scratch"):
        return {key: f"{source.kind} {source.where}"}
    where = Path(source.where)
    if source.kind == "gguf":
        return {key: _digest([where])}
    settings = [where / file for file in ("config.json", *TOKENIZER_FILES, *SETTINGS)]
    digests = {key: _digest([*weight_files(where), *(path for path in settings if path.is_file())])}
    return digests | {f"{key} {file}": _digest([where / file]) for file in MORE_TEXT if (where / file).is_file()}


def _digests_of_model_or_run(key: str, name: str, base: Path) -> dict[str, str]:
    if find_model(name, base, or_run=True) is not None:
        return _digests_of_model(key, name, base)
    return {key: weights_digest(str(find_run(name, base).path), base)}


def _digest(files: list[Path]) -> str:
    digests = file_digest(files, cache_folder() / "fingerprints.json")
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _named_files(loaded: LoadedJob, base: Path) -> Iterator[Path]:
    """Yields the files of templates and of a separate tokenizer, the Python modules that the job names, and files below
    ``base`` that the task's block names: ``json_schema:form.json``, ``python:rewards:score``.
    """
    job = loaded.job
    templates = [absolute(s.template, base) for s in (*job.data, *job.evaluate.data) if isinstance(s.template, str)]
    tokenizer = [absolute(job.model.tokenizer, base)] if job.model is not None and job.model.tokenizer else []
    below = [folder / name for folder in tokenizer for name in TEXT_FILES]
    yield from (path for path in (*templates, *tokenizer, *below) if path.is_file())
    for module in modules_of(loaded, base):
        yield from python_files(module)
    block = getattr(job, job.task, None)
    values = [value for path, value in leaves(block) if f"{job.task}.{path[-1]}" not in STAGE_KEYS] if block else []
    texts = [text for value in values for text in (value if isinstance(value, list | dict) else [value])]
    parts = [part for text in texts if isinstance(text, str) for part in text.split(":") if part]
    files = (file for part in parts for file in (base / part, base / (part.replace(".", "/") + ".py")))
    yield from (file for file in files if exists(file) and file.is_file())
