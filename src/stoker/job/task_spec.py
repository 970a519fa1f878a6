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

if TYPE_CHECKING:  # of rooms above too; see the import contract
    from pathlib import Path

    from stoker.data.sequences import Document
    from stoker.errors import Problem
    from stoker.job.conflicts.conflict_view import View
    from stoker.job.load_job import LoadedJob
    from stoker.job.own_model import OwnModel
    from stoker.job.resolved import ResolvedJob
    from stoker.job.rollout_sizes import RolloutSizes
    from stoker.job.schema import Job
    from stoker.models.objective import Objective
    from stoker.models.text import TextSide
    from stoker.models.tuning.virtual_tokens import Drawn
    from stoker.train.engine import Engine
    from stoker.train.language.batch_extras import BatchExtras
    from stoker.train.language.language_task import LanguageTask

B = TypeVar("B", bound=Block)

Head = Literal["tokens", "score"]
"""The head above the last hidden states: the logits of the next token, or one score."""

Rows = Literal["answers", "pairs", "judged"]
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
    data = "--answers YOUR.jsonl" if task_of(job).prompts else "YOUR.jsonl"
    return f"chat {run} --compare", f"eval {run} {data}", export_or_serve(job, run)


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task: its keys in a job, its samples, its objective, its metrics, its resident models and its exports.

    Attributes:
        name: as ``task:`` names it. A task's block has the same name.
        defaults: the values of ``auto`` keys that this task decides, by key, ``data.too_long`` for all sources.
        batch: default samples per optimizer step, or a function that computes them for a job.
        adapter_lr: default learning rate of adapters, and why.
        block: the type of the task's own block.
        resolved: the block once its ``auto`` values are decided; by default the same type.
        block_hint: the suggestion if the block is missing; empty if it may be, and its defaults then apply.
        reasons, examples: the reason of the default of a key of the block, and an example value; by key.
        checks: find problems in the block and with other keys; they are called if the block is present.
        own_model: the model of a task that trains no language model on rows of ``data``.
        runs_code: whether a job names code to import.
        chat: whether rows are conversations, which a chat template renders for training and for the trained model.
        prompts: whether rows are prompts, and the task learns from the model's own answers. An answer in a row is the
            expected one, for rewards.
        expected_check: of such tasks, where a job's rewards compare with it, a function that returns why they cannot
            for a row's; such rows, and those without one, are dropped. It can be pickled.
        rows: the kind of the data's rows, for a job.
        head: the model's output.
        names: other files, models and runs that a job names; `stoker submit` sends them and `stoker check` verifies
            that they exist.
        objective: the loss of a language model for a job; None for the cross entropy of each target.
        critic: the model trained to estimate the value of answers: `NO_CRITIC`, `SHARED_CRITIC`,
            or the name of a model or a run; see `stoker.models.critic`.
        critic_rate: learning rate of a critic that is a separate model, as a multiple of the job's.
        first_values: initial weights that the task adds to the model, by name, where random ones are not best.
        facts: further lines about a language model's run that are printed before it begins, by name.
        extras: extra inputs of a forward pass, for a job and the folder of its paths.
        samples: builds the task's samples, if they are not sequences of the corpus: called as
            `stoker.train.language.language_task.LanguageTask` is.
        target: the unit that the loss and the accuracy are averaged over, such as ``token``, ``pair`` or ``answer``.
        perplexity: whether exp(loss) is a perplexity.
        dropout: whether the dropout of the model's configuration is active in training.
        details: further results of `stoker eval`, from (task, engine, documents, names of their sources).
        grows: whether a finished run continues when rows are appended to its data.
        toy_keys: keys of the block with other values in the small copy of the job for `stoker verify`.
        resident: frozen models in memory with the trained one, whole in each process, for the planner.
        reads: forward passes without gradients for each that is trained on, for the planner.
        rollouts: rounds of answers that are sampled between steps, for the planner.
        roles: models in memory during training, by name, the trained model first.
        has_tables: whether its runs hold embedding tables, which a store can follow.
        exports: formats that a run can be exported to.
        next_commands: suggested commands for a finished run, without ``stoker``, given the job and the run.
    """

    name: str
    defaults: Callable[[Job], dict[str, Decided]]
    batch: int | Callable[[Job], int] = DEFAULT_BATCH
    adapter_lr: Decided = Decided(2e-4, "adapters start at zero and take ten times the learning rate of full tuning")
    block: type[Block] | None = None
    resolved: type[Block] | None = None
    block_hint: str = ""
    reasons: Mapping[str, str] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[Callable[[View], Iterator[Problem]], ...] = ()
    own_model: OwnModel | None = None
    runs_code: Callable[[Job], bool] = lambda _: False
    chat: bool = True
    prompts: bool = False
    expected_check: Callable[[Job], Callable[[Any], str] | None] = lambda _: None
    rows: Callable[[Job], Rows] = lambda _: "answers"
    head: Head = "tokens"
    names: Callable[[Job], Sequence[Named]] = lambda _: ()
    objective: Callable[[ResolvedJob], Objective] | None = None
    critic: Callable[[Job], str] = lambda _: NO_CRITIC
    critic_rate: Callable[[ResolvedJob], float] = lambda _: 1.0
    first_values: Callable[[LoadedJob, Path], Drawn] | None = None
    facts: Callable[[LoadedJob, Path], Mapping[str, str]] = lambda *_: {}
    extras: Callable[[LoadedJob, Path], BatchExtras] | None = None
    samples: Callable[[LoadedJob, Path, TextSide], Callable[..., LanguageTask]] | None = None
    target: str = "token"
    perplexity: bool = True
    dropout: bool = True
    details: Callable[[LanguageTask, Engine, Sequence[Document], Sequence[str]], dict[str, Any]] | None = None
    grows: Callable[[Job], bool] = lambda _: False
    toy_keys: Callable[[Job], dict[str, Any]] = lambda _: {}
    resident: Callable[[Job], int] = lambda _: 0
    reads: Callable[[Job], int] = lambda _: 0
    rollouts: Callable[[ResolvedJob], RolloutSizes | None] = lambda _: None
    roles: Callable[[Job], tuple[str, ...]] = lambda _: ("model",)
    has_tables: bool = False
    exports: tuple[str, ...] = ("adapter", "merged", "gguf")
    next_commands: Callable[[ResolvedJob, str], tuple[str, ...]] = _language_commands

    @property
    def text(self) -> bool:
        """Whether a language model is trained on rows of ``data``."""
        return self.own_model is None

    @property
    def sources(self) -> bool:
        """Whether a model of the task's own is trained on rows of ``data``."""
        return self.own_model is not None and self.own_model.sources

    def own_critic(self, job: Job) -> bool:
        """Returns whether the critic of a job is a separate model."""
        return self.critic(job) not in (NO_CRITIC, SHARED_CRITIC)


def _tasks() -> dict[str, TaskSpec]:
    package = import_module("stoker.train.tasks")
    found = [import_module(f"{package.__name__}.{m.name}").TASK for m in iter_modules(package.__path__)]
    return {task.name: task for task in sorted(found, key=lambda task: (not task.text, not task.sources, task.name))}


def task_of(job: Job) -> TaskSpec:
    """Returns the task of a job."""
    return TASKS[job.task]


def is_language(job: Job) -> bool:
    """Returns whether a job's model is a language model, which transformers and peft build."""
    return task_of(job).text


def unit_size_of(job: Job) -> int:
    """Returns the number of sequences of a row, which stay together: 2 where a row is a pair of answers."""
    return 2 if task_of(job).rows(job) == "pairs" else 1


def block_of_task(job: Job, kind: type[B]) -> B:
    """Returns the block of a job's task, of the type that the task has declared."""
    block = getattr(job, job.task)
    assert isinstance(block, kind)
    return block


TASKS: dict[str, TaskSpec] = _tasks()  # last: the files import names defined above
