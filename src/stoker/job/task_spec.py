"""What a task states of itself, and all tasks by name: each is a file of ``stoker/train/tasks``.

The declaration lies here because the rooms below `stoker.train` ask for parts of it: the job for a block and defaults,
the data for what a row is, the planner for what is held, the export for its formats. The files are found in their
folder instead of being imported by name. Every verb loads all of them, so they import torch and the rooms above inside
functions only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from stoker.job.batch_solver import DEFAULT_BATCH
from stoker.job.block import Block

if TYPE_CHECKING:  # of rooms above too; see the import contract
    from pathlib import Path

    from stoker.data.ranking.log_audit import LogAudit
    from stoker.data.sequences import Document
    from stoker.errors import Problem
    from stoker.hardware.cluster import Cluster
    from stoker.hardware.device import Device
    from stoker.job.conflict_view import View
    from stoker.job.load_job import LoadedJob
    from stoker.job.resolved import ResolvedJob
    from stoker.job.schema import Job
    from stoker.models.objective import Objective
    from stoker.models.text import TextSide
    from stoker.models.virtual_tokens import Drawn
    from stoker.parallel.mesh import Mesh
    from stoker.runs.run_folder import RunFolder
    from stoker.train.batch_extras import BatchExtras
    from stoker.train.engine import Engine
    from stoker.train.language_task import LanguageTask
    from stoker.train.prepared import Prepared
    from stoker.train.ranking.export_ranking import RankingExport
    from stoker.train.ranking.figures import RankingFigures
    from stoker.train.ranking.plan_ranking import RankingPlan

B = TypeVar("B", bound=Block)

Head = Literal["tokens", "score"]
"""What is above the last hidden states: the logits of the next token, or one score."""

Rows = Literal["answers", "pairs", "judged"]
"""What a row of data is: one answer, two of them (chosen and rejected), or one with a label, good or bad."""


NO_CRITIC, SHARED_CRITIC = "none", "shared"
"""There is none; it shares the model's base."""


@dataclass(frozen=True)
class Named:
    """What a key of a task's block names beside the model and the data of the job.

    Attributes:
        key: such as ``dpo.reference``.
        value: as the job has it.
        kind: ``model`` (a model or a run), ``run``, ``source`` (rows of data), or ``scorer`` (such as
            ``json_schema:FILE``; ``python:MODULE:FUNCTION`` names a module).
    """

    key: str
    value: str
    kind: Literal["model", "run", "source", "scorer"]


@dataclass(frozen=True)
class Decided:
    """The value found for an ``auto``, and why it is that."""

    value: Any
    why: str


def _language_commands(job: ResolvedJob, run: str) -> tuple[str, ...]:
    from stoker.job.tune_keys import merges

    form = "merged" if merges(job) else "adapter"
    return f"chat {run} --compare", f"eval {run} YOUR.jsonl", f"export {run} --format {form} --to exported"


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task: what a job of it may say, how its rows become samples, what is learnt, measured, held and exported.

    Attributes:
        name: as ``task:`` names it. A task with a block has it under this name.
        defaults: the values of ``auto`` keys that this task decides, by key, ``data.too_long`` for all sources.
        batch: default samples per optimizer step, or what gives it for a job.
        adapter_lr: default learning rate of adapters, and why.
        block: the keys of its own.
        resolved: the block once its ``auto`` values are decided; by default the same.
        block_hint: what to write where the block is missing; empty where it may be, and its defaults then hold.
        reasons, examples: why a key of the block has its default, and a value that it can have; by key.
        checks: find what is wrong in the block and beside it; they are called where the block is there.
        text: whether a language model is trained on rows of ``data``. Other tasks bring their model themselves.
        sources: of other tasks, whether they read rows of ``data``; else they bring their data, too.
        instead: of other tasks, what to write instead of a key that has no effect.
        runs_code: whether a job names code to import.
        chat: whether rows are conversations, so that a chat template writes them and asks the trained model.
        prompts: whether rows ask only, as the model's own answers are what it learns from. An answer in a row is what
            rewards may expect.
        rows: what a row of the data is, for a job.
        head: what the model computes.
        names: what else a job names, which `stoker submit` sends and `stoker check` looks for.
        objective: the loss of a language model for a job; None for the cross entropy of each target.
        critic: what is trained beside the model to estimate what answers will be worth: `NO_CRITIC`, `SHARED_CRITIC`,
            or the name of a model or a run; see `stoker.models.critic`.
        critic_rate: learning rate of a critic that is a model of its own, as a multiple of the job's.
        first_values: first weights of what the task adds to the model, by name, where it knows better ones than chance.
        extras: what the task adds to the inputs of a pass, for a job and the folder of its paths.
        samples: what makes the task's samples, where they are not sequences of the corpus: called as
            `stoker.train.language_task.LanguageTask` is.
        target: what the loss is the mean over, and the accuracy: ``token`` or ``document``.
        perplexity: whether exp(loss) is one.
        dropout: whether the dropout of the model's configuration is active in training.
        details: what `stoker eval` adds, of (task, engine, documents, names of their sources).
        grows: whether a finished run goes on where its data has more rows at the end.
        plan: predicts memory and exchange, of a task without a language model.
        prepare: makes model, data and samples, where `stoker.train.prepare` does not; the path is where relative ones
            begin.
        gate: of other tasks with sources, raises what is wrong with the data; called once, before processes start.
        audit: of such tasks, what `stoker data` shows.
        measure: what `stoker eval` gives for a run, where it is not a language model's loss: called with the run, the
            data (None for what is held out), its format, the checkpoint, the keys that may run code, and the path where
            relative ones begin.
        toy: (keys of the job's small copy, samples of an epoch) for `stoker verify`, where data is not rows of text.
        toy_keys: keys of the block that the small copy has other values of, where data is rows.
        resident: copies of the model held frozen beside the trained one, for the planner.
        reads: forward passes without gradients beside each that is trained on, for the planner.
        roles: what is resident while it trains, by name, the trained model first.
        has_tables: whether its runs hold tables of embeddings, which a store can follow.
        exports: formats that a run can be written in.
        export: what writes a run, where it is not a language model: called with the run, the target, the checkpoint,
            the keys that may run code, the path where relative ones begin, and how many versions of a store stay.
        next_commands: what can be done with a finished run: commands without ``stoker``, given the job and the run.
    """

    name: str
    defaults: Callable[[Job], dict[str, Decided]]
    batch: int | Callable[[Job], int] = DEFAULT_BATCH
    adapter_lr: Decided = Decided(2e-4, "adapters begin at zero and take ten times the rate of full tuning")
    block: type[Block] | None = None
    resolved: type[Block] | None = None
    block_hint: str = ""
    reasons: Mapping[str, str] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[Callable[[View], Iterator[Problem]], ...] = ()
    text: bool = True
    sources: bool = False
    instead: Mapping[str, str] = field(default_factory=dict)
    runs_code: Callable[[Job], bool] = lambda _: False
    chat: bool = True
    prompts: bool = False
    rows: Callable[[Job], Rows] = lambda _: "answers"
    head: Head = "tokens"
    names: Callable[[Job], Sequence[Named]] = lambda _: ()
    objective: Callable[[ResolvedJob], Objective] | None = None
    critic: Callable[[Job], str] = lambda _: NO_CRITIC
    critic_rate: Callable[[ResolvedJob], float] = lambda _: 1.0
    first_values: Callable[[LoadedJob, Path], Drawn] | None = None
    extras: Callable[[LoadedJob, Path], BatchExtras] | None = None
    samples: Callable[[LoadedJob, Path, TextSide], Callable[..., LanguageTask]] | None = None
    target: str = "token"
    perplexity: bool = True
    dropout: bool = True
    details: Callable[[LanguageTask, Engine, Sequence[Document], Sequence[str]], dict[str, Any]] | None = None
    prepare: Callable[[LoadedJob, Device, Mesh | None, Path], Prepared] | None = None
    grows: Callable[[Job], bool] = lambda _: False
    plan: Callable[[LoadedJob, Path, Cluster], RankingPlan] | None = None
    gate: Callable[[LoadedJob, Path], None] | None = None
    audit: Callable[[LoadedJob, Path], LogAudit] | None = None
    measure: Callable[[str, str | None, str, str, Sequence[str], Path], RankingFigures] | None = None
    toy: Callable[[LoadedJob], tuple[dict[str, Any], int]] | None = None
    toy_keys: Callable[[Job], dict[str, Any]] = lambda _: {}
    resident: Callable[[Job], int] = lambda _: 0
    reads: Callable[[Job], int] = lambda _: 0
    roles: Callable[[Job], tuple[str, ...]] = lambda _: ("model",)
    has_tables: bool = False
    exports: tuple[str, ...] = ("adapter", "merged", "gguf")
    export: Callable[[str, str, str, Sequence[str], Path, int], tuple[RunFolder, RankingExport]] | None = None
    next_commands: Callable[[ResolvedJob, str], tuple[str, ...]] = _language_commands

    def own_critic(self, job: Job) -> bool:
        """Whether the critic of a job is a model of its own."""
        return self.critic(job) not in (NO_CRITIC, SHARED_CRITIC)


def _tasks() -> dict[str, TaskSpec]:
    package = import_module("stoker.train.tasks")
    found = [import_module(f"{package.__name__}.{m.name}").TASK for m in iter_modules(package.__path__)]
    return {task.name: task for task in sorted(found, key=lambda task: (not task.text, not task.sources, task.name))}


def task_of(job: Job) -> TaskSpec:
    """The task of a job."""
    return TASKS[job.task]


def is_language(job: Job) -> bool:
    """Whether a job's model is a language model, which transformers and peft build."""
    return task_of(job).prepare is None


def together_of(job: Job) -> int:
    """Sequences of a row, which stay together: 2 where a row is a pair of answers."""
    return 2 if task_of(job).rows(job) == "pairs" else 1


def block_of_task(job: Job, kind: type[B]) -> B:
    """The block of a job's task, of the type that the task has declared."""
    block = getattr(job, job.task)
    assert isinstance(block, kind)
    return block


TASKS: dict[str, TaskSpec] = _tasks()  # last: the files import what is above
