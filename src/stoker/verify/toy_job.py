"""A job's small twin: the same family, the same kind of data, the same tuning and training, in seconds.

It is an ordinary job in its own folder (models in safetensors, rows, a job file for each run), so that verification
runs the training code itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from stoker.data.pack import best_fit
from stoker.job.document.job_to_yaml import scalar
from stoker.job.load_job import LoadedJob
from stoker.job.task_spec import SHARED_CRITIC, TASKS, RowKind, TaskSpec, task_of
from stoker.job.tokenizer_extension import Extension
from stoker.verify.layout_cases import Cell
from stoker.verify.toy_config import config_of, heads_of, shrunk
from stoker.verify.toy_keys import dropout_rates, train_keys, tune_keys
from stoker.verify.toy_model import write_model
from stoker.verify.toy_rows import KNOWN, REWARDS, TOKENS, forward_passes, rows_for, tokenizer, write_rows

SEQ_LEN = 70  # tokens: some micro-batches of a pipeline are longer than `stoker.train.distributed.LENGTHS`
FORMATS: dict[RowKind, str] = {"answers": "prompt", "pairs": "preference", "judged": "judged"}
SHORT = 16  # tokens, where a run takes many rows
MANY = 400  # rows
STEPS, FEW_STEPS = 5, 3  # of each run, and where a step takes many rows
DECAY_STEPS = 8  # of the schedule `wsd`, which decays in the last step
EVALUATION_TOKENS, EVALUATION_PASSES = 48, 7  # the number of passes has few divisors
WARMUP = 2  # steps
FAULTY_STEPS = 3  # steps of a run whose first two are not finite


@dataclass(frozen=True)
class LayoutVariant:
    """Variant of a run of the twin under a layout.

    Attributes:
        clip: largest gradient norm; 0 for none.
        by_steps: whether ``steps`` sets its length. With ``epochs`` its last batch is smaller.
        dropout: whether the job's dropout is active.
        faulty: whether its first two steps are not finite; one more step follows.
        parallel: keys that replace the layout's.
    """

    clip: float = 0.0
    by_steps: bool = False
    dropout: bool = False
    faulty: bool = False
    parallel: Mapping[str, Any] = field(default_factory=dict)


USUAL = LayoutVariant()


@dataclass(frozen=True)
class Twin:
    """A job's small twin.

    Attributes:
        folder: contains all of its files.
        base: the job's keys, except those that depend on the layout or the run.
        asked: optimizer steps of each of its runs; None for a quick default.
        config: configuration of the original model; None for a module.
        epoch: samples of a module's data; None if rows are written.
        clips: whether gradients are clipped.
        dropout: the job's dropout rates; None if only the module knows them.
        facts: changes beside the sizes, and their reasons, for people.
        kind: kind of a row.
    """

    folder: Path
    base: dict[str, Any]
    asked: int | None
    config: PreTrainedConfig | None
    epoch: int | None
    clips: bool
    dropout: frozenset[float] | None
    facts: tuple[str, ...]
    kind: RowKind = "answers"

    @property
    def task(self) -> TaskSpec:
        """The job's task."""
        return TASKS[self.base["task"]]

    def steps(self, cell: Cell) -> int:
        """Optimizer steps of each of its runs."""
        if self.asked or cell.batch["batch"] * STEPS > MANY:
            return self.asked or FEW_STEPS
        return DECAY_STEPS if self.base["train"]["schedule"] == "wsd" else STEPS

    def samples(self, cell: Cell) -> list[int]:
        """Returns the samples of each step of a run by epochs. The last step has fewer, so that some processes have
        none.
        """
        batch = cell.batch["batch"]
        least = 1 if self.config is not None else min(2, batch)  # batch norm needs more than one sample
        sizes = [batch] * (self.steps(cell) - 1) + [max(least, batch // 2 - 1)]
        if self.packs(cell) and sum(sizes) % 2 and batch > 2:  # with packing, an epoch ends at the end of a sequence
            sizes[-1] += 1
        return sizes

    def packs(self, cell: Cell) -> bool:
        """Returns whether a sample has several rows."""
        return bool({**self.base["train"], **cell.train}.get("pack"))

    def saves_at(self, cell: Cell) -> int:
        """Returns the step after which the run saves a checkpoint, is evaluated, and later resumes."""
        return max(1, self.steps(cell) // 2)

    def seq_len(self, cell: Cell) -> int:
        """Returns the tokens of the longest sequence."""
        return SEQ_LEN if cell.batch["batch"] * min(STEPS, self.steps(cell)) <= MANY else SHORT

    def job_file(
        self, cell: Cell, variant: LayoutVariant = USUAL, *, beside: Cell | None = None, output: Path | None = None
    ) -> Path:
        """Writes the twin under a layout as a job file, and its model and its rows where they are not there yet.

        Args:
            beside: the layout whose model is used, for the single-process run that it is compared with.
            output: the run's folder, if it resumes another run.

        Raises:
            UserError: no small model of this kind exists.
        """
        steps, every = self.steps(cell), self.saves_at(cell)
        train = {"clip": variant.clip, **self.base["train"], **cell.train, **cell.batch}
        warmup = min(WARMUP, steps - 2 if steps > 2 else steps - 1)
        if train["warmup"]:  # as a fraction if the job's is one, or if it begins again after steps on new rows
            counted = isinstance(train["warmup"], int) and not self.base.get("tune", {}).get("new_rows_first")
            train["warmup"] = warmup if counted else warmup / steps
        job: dict[str, Any] = {**self.base, "train": train, "evaluate": {"every": every}}
        job["checkpoint"] = {"every": every, "best": False, "keep": steps + 1}
        if steps > every + 1:  # a copy before the last step; more of them would gather what a layout keeps sharded
            job["checkpoint"]["memory"] = steps - 1
        if self.config is not None:
            job |= self._language_keys(cell, beside or cell, dropout=variant.dropout)
            job["evaluate"]["data"] = [self._source(self.held_out(cell))]
            train["seq_len"] = self.seq_len(cell)
            if self.task.rows.prompts:
                train["seq_len"] += job[self.task.name]["max_tokens"]  # after a prompt as long as a row
        by_steps = variant.by_steps or self.task.rows.prompts
        length = {"steps": steps} if by_steps else {"epochs": sum(self.samples(cell)) / self._epoch(cell)}
        if variant.faulty:
            length, job["faults"], job["evaluate"]["every"] = {"steps": FAULTY_STEPS}, {"not_finite": "skip"}, 1
        if parallel := {**cell.parallel, **variant.parallel}:
            job["parallel"] = parallel
        number = len(list(self.folder.glob("job-*.yaml")))
        job["output"] = str(output or self.folder / f"run-{number}")
        path = self.folder / f"job-{number}.yaml"
        path.write_text("".join(f"{key}: {scalar(value)}\n" for key, value in (length | job).items()), encoding="utf-8")
        return path

    def _language_keys(self, cell: Cell, model_of: Cell, *, dropout: bool) -> dict[str, Any]:
        """Returns the keys of a language model's job that depend on the layout: its model, its tuning and its rows.

        Args:
            model_of: the layout whose model is used.
        """
        model, tune = self._model_for(model_of, dropout=dropout), {**self.base["tune"], **cell.tune}
        if not dropout:
            tune.pop("dropout", None)
        keys: dict[str, Any] = {
            # The tokenizer is in another folder: beside a model, transformers would rebuild it as that family's own.
            "model": {"name": str(model), "tokenizer": str(self.folder / "tokenizer")},
            "tune": tune,
            "data": [self._source(path) for path in self.rows(cell)],
        }
        return keys | ({self.task.name: self._policy_block(cell, str(model))} if self.task.rows.prompts else {})

    def _policy_block(self, cell: Cell, model: str) -> dict[str, Any]:
        """Returns the block of a policy: two steps train on a round of answers, so that a run resumes within a
        round.
        """
        block = dict(self.base[self.task.name])
        answers, batch = block["answers"], cell.batch["batch"]
        block["prompts"] = 2 * batch // answers
        if "critic" in block and block["critic"] != SHARED_CRITIC:
            block["critic"] = model  # another model would need the twin's tokenizer
        return block

    def rows(self, cell: Cell) -> list[Path]:
        """Returns the training files, one per source; an epoch of them ends within the run."""
        seq_len, packed, epoch = self.seq_len(cell), self.packs(cell), self._epoch(cell)
        name = f"rows-{epoch}-{seq_len}{'-packed' * packed}"
        if not (found := sorted(self.folder.glob(f"{name}.?.jsonl"))):
            capacity = seq_len * (1 + (self.kind == "pairs"))
            count = (lambda lengths: len(best_fit(lengths, capacity))) if packed else len
            rows = rows_for(epoch, self.base["seed"], seq_len, self.task, self.kind, count=count)
            first = len(rows) // 3
            for number, part in enumerate(part for part in (rows[:first], rows[first:]) if part):
                found.append(self.folder / f"{name}.{number}.jsonl")
                write_rows(found[-1], part)
        return found

    def held_out(self, cell: Cell) -> Path:
        """Returns the evaluation file."""
        seq_len = self.seq_len(cell)
        path = self.folder / f"held-out-{seq_len}.jsonl"
        if not path.exists():
            count = partial(forward_passes, tokens=EVALUATION_TOKENS)
            write_rows(
                path, rows_for(EVALUATION_PASSES, self.base["seed"] + 1, seq_len, self.task, self.kind, count=count)
            )
        return path

    def _epoch(self, cell: Cell) -> int:
        """Returns the samples of an epoch; with packing, a run has one or two whole epochs."""
        if self.epoch is not None:
            return self.epoch
        total = sum(self.samples(cell))
        if self.packs(cell):
            return total if total % 2 else total // 2
        return total // 2 + 1

    def _source(self, path: Path) -> dict[str, str]:
        if not self.task.rows.chat:
            return {"path": str(path), "format": "text"}
        return {"path": str(path), "format": FORMATS[self.kind], "template": "none"}

    def _model_for(self, cell: Cell, *, dropout: bool) -> Path:
        assert self.config is not None
        config = shrunk(self.config, cell.shape, dropout=dropout)
        if self.base["tune"].get("new_rows_first"):
            config.get_text_config().vocab_size = KNOWN
        folder = self.folder / f"model-{hashlib.sha256(config.to_json_string().encode()).hexdigest()[:12]}"
        if not folder.exists():
            write_model(config, folder, self.base["seed"])
        return folder

    def describe(self, cell: Cell) -> str:
        """Describes the model: ``llama: width 64, 8 heads (2 of keys and values), vocabulary 131``."""
        if self.config is None:
            return f"{self.base[self.base['task']]['model']} itself"
        small = shrunk(self.config, cell.shape)
        count = heads_of(self.config.get_text_config(), cell.shape)
        heads = f"{count.query} heads" + (f" ({count.keys} of keys and values)" if count.keys != count.query else "")
        return f"{small.model_type}: width {small.hidden_size}, {heads}, vocabulary {small.vocab_size}"


def make_twin(
    loaded: LoadedJob, base: Path, folder: Path, *, steps: int | None = None, config: PreTrainedConfig | None = None
) -> Twin:
    """Creates the twin of a resolved job in a folder.

    Args:
        base: the folder that the job's relative paths refer to.
        steps: optimizer steps of each of its runs; None for a quick default.
        config: the configuration of the job's model, if already read.

    Raises:
        UserError: the model's configuration cannot be read.
    """
    job = loaded.job
    common: dict[str, Any] = {"task": job.task, "seed": job.seed, "train": train_keys(job)}
    made = partial(Twin, folder=folder, asked=steps, clips=job.train.clip > 0)
    spec = task_of(job)
    if spec.own_model is not None:
        own, samples, facts = spec.own_model.toy(loaded)
        return made(base=common | own, config=None, epoch=samples, dropout=None, facts=facts)
    if spec.block is not None:
        block = getattr(job, job.task).model_dump(exclude_none=True) | spec.block.toy_keys(job)
        common[job.task] = {key: value for key, value in block.items() if value is not None}
        common[job.task] |= {"rewards": REWARDS} if spec.rows.prompts else {}
    assert job.model is not None
    config = config or config_of(job.model, base)
    tune, facts = tune_keys(job)
    if spec.rows.prompts:
        facts += ("answers have few tokens, and are rewarded for their letters and their length",)
    tokenizer().save_pretrained(folder / "tokenizer")
    if job.tune.new_rows_first:
        pieces = tuple((2 + i, 3 + i) for i in range(TOKENS - KNOWN))
        Extension("a smaller one", "", "", KNOWN, pieces).write(folder / "tokenizer")
    common["train"]["pack"] = job.train.pack
    rates = dropout_rates(job, config) if spec.model.dropout else frozenset(filter(None, [job.tune.dropout]))
    return made(
        base=common | {"tune": tune}, config=config, epoch=None, dropout=rates, facts=facts, kind=spec.rows.kind(job)
    )
