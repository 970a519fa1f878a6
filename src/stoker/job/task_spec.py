"""The declaration of a task, and all tasks by name: each is a file of ``stoker/train/tasks``.

The declaration is in this room because rooms below `stoker.train` need parts of it: the job its block and defaults,
the data its kind of rows, the planner its resident models, the export its formats. The files are found in their
folder instead of being imported by name. Every verb loads all of them, so they import torch and the rooms above inside
functions only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from stoker.job.block import Block
from stoker.job.resolution.batch_solver import DEFAULT_BATCH

if TYPE_CHECKING:
    from stoker.errors import Problem
    from stoker.job.conflicts.conflict_view import View
    from stoker.job.resolved import ResolvedJob
    from stoker.job.rollout_sizes import RolloutSizes
    from stoker.job.schema import Job
    from stoker.train.language.language_training import LanguageTraining  # of a package above; see the import contract
    from stoker.train.own_model import OwnModel  # the same

B = TypeVar("B", bound=Block)

Head = Literal["tokens", "score"]
"""The head above the last hidden states: the logits of the next token, or one score."""

RowKind = Literal["answers", "pairs", "judged"]
"""The kind of a data row: one answer, two answers (chosen and rejected), or one with a label, good or bad."""


NO_CRITIC, SHARED_CRITIC = "none", "shared"
"""No critic; a critic that shares the model's base."""


@dataclass(frozen=True)
class Named:
    """A file, model or run that a key of a task's block names, in addition to the job's model and data.

    Attributes:
        key: such as ``dpo.reference``.
        value: the key's value in the job.
        kind: ``model`` (a model or a run), ``reward_model`` (the same, which only training needs), ``source`` (rows of
            data), ``scorer`` (such as ``json_schema:FILE``; ``python:MODULE:FUNCTION`` names a module), ``secret`` (a
            file for its owner only), or ``address`` (``HOST:PORT`` of a server).
    """

    key: str
    value: str
    kind: Literal["model", "reward_model", "source", "scorer", "secret", "address"]

    @property
    def is_model(self) -> bool:
        """Whether it is a model or a run."""
        return self.kind in ("model", "reward_model")


@dataclass(frozen=True)
class Decided:
    """The value found for an ``auto``, and why it is that."""

    value: Any
    why: str


def export_or_serve(job: ResolvedJob, run: str) -> str:
    """Returns the suggested command that puts a language run to use: `serve` if no format can export it."""
    from stoker.job.keys.tune_keys import can_merge
    from stoker.job.resolution.batch_triangle import is_scratch

    if can_merge(job):
        return f"export {run} --format merged --to exported"
    assert job.model is not None
    has_base = not is_scratch(job) and not job.model.config  # one that whoever loads the adapter has too
    return f"export {run} --format adapter --to exported" if has_base else f"serve {run}"


def _language_commands(job: ResolvedJob, run: str) -> tuple[str, ...]:
    data = "--answers YOUR.jsonl" if task_of(job).rows.prompts else "YOUR.jsonl"
    return f"chat {run} --compare", f"eval {run} {data}", export_or_serve(job, run)


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """A task's own block of the job.

    Attributes:
        written: the type of the block as a job file has it.
        resolved: the block once its ``auto`` values are decided; by default the same type.
        hint: the suggestion if the block is missing; empty if it may be, and its defaults then apply.
        reasons, examples: the reason of the default of a key of the block, and an example value; by key.
        checks: find problems in the block and with other keys; they are called if the block is present.
        toy_keys: keys of the block with other values in the small copy of the job for `stoker verify`.
    """

    written: type[Block]
    resolved: type[Block] | None = None
    hint: str = ""
    reasons: Mapping[str, str] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[Callable[[View], Iterator[Problem]], ...] = ()
    toy_keys: Callable[[Job], dict[str, Any]] = lambda _: {}


@dataclass(frozen=True, kw_only=True)
class RowSpec:
    """The rows of ``data``.

    Attributes:
        kind: the kind of the rows, for a job.
        chat: whether rows are conversations, which a chat template renders for training and for the trained model.
        prompts: whether rows are prompts, and the task learns from the model's own answers. An answer in a row is the
            expected one, for rewards.
        expected_check: of such tasks, where a job's rewards compare with it, a function that returns why they cannot
            for a row's; such rows, and those without one, are dropped. It can be pickled.
    """

    kind: Callable[[Job], RowKind] = lambda _: "answers"
    chat: bool = True
    prompts: bool = False
    expected_check: Callable[[Job], Callable[[Any], str] | None] = lambda _: None


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The language model that is built for a job.

    Attributes:
        head: the model's output.
        dropout: whether the dropout of the model's configuration is active in training.
        critic: the model trained to estimate the value of answers: `NO_CRITIC`, `SHARED_CRITIC`,
            or the name of a model or a run; see `stoker.models.critic`.
        critic_rate: learning rate of a critic that is a separate model, as a multiple of the job's.
    """

    head: Head = "tokens"
    dropout: bool = True
    critic: Callable[[Job], str] = lambda _: NO_CRITIC
    critic_rate: Callable[[ResolvedJob], float] = lambda _: 1.0

    def own_critic(self, job: Job) -> bool:
        """Returns whether the critic of a job is a separate model."""
        return self.critic(job) not in (NO_CRITIC, SHARED_CRITIC)


@dataclass(frozen=True, kw_only=True)
class WorkSpec:
    """The memory and the passes beside those of the trained model's tokens, for the planner.

    Attributes:
        roles: models in memory during training, by name, the trained model first.
        resident: frozen models in memory with the trained one, whole in each process.
        reads: forward passes without gradients for each that is trained on.
        rollouts: rounds of answers that are sampled between steps.
    """

    roles: Callable[[Job], tuple[str, ...]] = lambda _: ("model",)
    resident: Callable[[Job], int] = lambda _: 0
    reads: Callable[[Job], int] = lambda _: 0
    rollouts: Callable[[ResolvedJob], RolloutSizes | None] = lambda _: None


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task: its keys in a job, its rows, its model and its training.

    Attributes:
        name: as ``task:`` names it. A task's block has the same name.
        defaults: the values of ``auto`` keys that this task decides, by key, ``data.too_long`` for all sources.
        batch: default samples per optimizer step, or a function that computes them for a job.
        adapter_lr: default learning rate of adapters, and why.
        block: the task's own block of the job, if it has one.
        names: other files, models and runs that a job names; `stoker submit` sends them and `stoker check` verifies
            that they exist.
        runs_code: whether a job names code to import.
        rows: the rows of ``data``.
        model: the language model.
        work: what the planner counts.
        language: the training of a language model. A task has either this or `own_model`.
        own_model: the model of a task that trains no language model.
        ranks: whether that model ranks: it has embedding tables, and its rows of ``data`` are a click log.
        grows: whether a finished run continues when rows are appended to its data.
        exports: formats that a run can be exported to.
        next_commands: suggested commands for a finished run, without ``stoker``, given the job and the run.
    """

    name: str
    defaults: Callable[[Job], dict[str, Decided]]
    batch: int | Callable[[Job], int] = DEFAULT_BATCH
    adapter_lr: Decided = Decided(2e-4, "adapters start at zero and take ten times the learning rate of full tuning")
    block: BlockSpec | None = None
    names: Callable[[Job], Sequence[Named]] = lambda _: ()
    runs_code: Callable[[Job], bool] = lambda _: False
    rows: RowSpec = RowSpec()
    model: ModelSpec = ModelSpec()
    work: WorkSpec = WorkSpec()
    language: LanguageTraining | None = None
    own_model: OwnModel | None = None
    ranks: bool = False
    grows: Callable[[Job], bool] = lambda _: False
    exports: tuple[str, ...] = ("adapter", "merged", "gguf")
    next_commands: Callable[[ResolvedJob, str], tuple[str, ...]] = _language_commands

    def __post_init__(self) -> None:
        assert (self.language is None) != (self.own_model is None)

    @property
    def text(self) -> bool:
        """Whether a language model is trained on rows of ``data``."""
        return self.language is not None


def _tasks() -> dict[str, TaskSpec]:
    package = import_module("stoker.train.tasks")
    found = [import_module(f"{package.__name__}.{m.name}").TASK for m in iter_modules(package.__path__)]
    return {task.name: task for task in sorted(found, key=lambda task: (not task.text, not task.ranks, task.name))}


def task_of(job: Job) -> TaskSpec:
    """Returns the task of a job."""
    return TASKS[job.task]


def is_language(job: Job) -> bool:
    """Returns whether a job's model is a language model, which transformers and peft build."""
    return task_of(job).text


def training_of(job: Job) -> LanguageTraining:
    """Returns the training of a job whose task trains a language model."""
    training = task_of(job).language
    assert training is not None
    return training


def unit_size_of(job: Job) -> int:
    """Returns the number of sequences of a row, which stay together: 2 where a row is a pair of answers."""
    return 2 if task_of(job).rows.kind(job) == "pairs" else 1


def block_of_task(job: Job, kind: type[B]) -> B:
    """Returns the block of a job's task, of the type that the task has declared."""
    block = getattr(job, job.task)
    assert isinstance(block, kind)
    return block


TASKS: dict[str, TaskSpec] = _tasks()  # last: the files import names defined above
