"""A stage of a job file, as the document of a separate job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stoker.errors import Problem
from stoker.job.document.yaml_document import JobDocument, Mark
from stoker.job.keys.key_paths import KeyPath, dotted, parse_key
from stoker.job.load_job import STAGES, LoadedJob, check_document

FROM = "model.from"
# The keys that may name an earlier stage, and its required task; empty if any language model will do.
STAGE_KEYS = {FROM: "", "dpo.reference": "", "ppo.reward": "reward", "ppo.critic": "reward", "grpo.reward": "reward"}
MODELS = ("dpo.reference", "ppo.critic")  # keys of these that may also name a model
NAME = "[A-Za-z0-9][A-Za-z0-9_-]*"


@dataclass(frozen=True)
class Stage:
    """A stage of a job file.

    Attributes:
        document: the stage's own job. A model that an earlier stage trains is replaced by that stage's base model,
            which has the same shape and tokenizer and exists before training.
        own: paths that the stage wrote itself, without the list's.
        place: the stage's position in the file.
        needs: earlier stages by the key that names them.
        output: the run's folder.
        trained: values of the document after the earlier stages are trained, by path: runs, or for a model its name.
    """

    name: str
    index: int
    document: JobDocument
    own: frozenset[KeyPath]
    place: Mark
    needs: Mapping[str, str] = field(default_factory=dict)
    output: str = ""
    trained: Mapping[KeyPath, Any] = field(default_factory=dict)

    def load(self, trained: Mapping[str, str] | None = None) -> LoadedJob:
        """Returns the stage's job, checked and resolved.

        Args:
            trained: digests of the weights of the stages that it names, if it is to begin with them.

        Raises:
            JobError: with all problems; see `placed`.
        """
        document = self.document
        if trained is not None:
            values = dict(self.trained)
            if FROM in self.needs:
                model = values[("model",)]
                values[("model",)] = {**model, "name": weights_folder(model["name"], trained[self.needs[FROM]])}
            for path, value in values.items():
                document = with_value(document, path, value)
        return check_document(document)

    def placed(self, problems: Sequence[Problem]) -> list[Problem]:
        """Problems of the stage's job as problems of the file: with the stage's name, and its place where none is."""
        return [self.placed_one(problem) for problem in problems]

    def placed_one(self, problem: Problem) -> Problem:
        """Returns a problem of the stage's job as one of the file; see `placed`."""
        path = parse_key(problem.key) if problem.key else ()
        key, message = problem.key, f"stage {self.name}: {problem.message}"
        if path and any(path[:end] in self.own for end in range(1, len(path) + 1)):
            key = dotted((STAGES, self.index, *path))
        if path and path[:1] not in self.document.marks and problem.file == self.document.file:
            line, column = self.place.value
            return replace(problem, key=dotted((STAGES, self.index, *path)), message=message, line=line, column=column)
        return replace(problem, key=key, message=message)


def with_value(document: JobDocument, path: KeyPath, value: Any) -> JobDocument:
    """Returns the document with another value at a path of one or two keys; a block's keys have the block's
    position.
    """
    first, *rest = path
    data = {**document.data, first: {**document.data[first], rest[0]: value} if rest else value}
    marks = document.marks
    if isinstance(value, dict):
        mark = marks.get((*path, "from")) or marks[path]
        marks = {at: old for at, old in marks.items() if at[: len(path)] != path}
        marks |= {path: mark, **{(*path, key): mark for key in value}}
    return replace(document, data=data, marks=marks)


def weights_folder(run: str, digest: str, base: Path = Path()) -> str:
    """Returns the folder of a run's weights for later stages; its name depends on the weights.

    It is beside the run: later stages' runs need it when this run is renamed and started over. Earlier versions wrote
    it into the run; where it exists there, it is used, so that later stages' runs resume.
    """
    former = f"{run}/merged-{digest[:12]}"
    return former if (base / former).is_dir() else f"{run}.merged-{digest[:12]}"
