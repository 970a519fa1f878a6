"""Resolves every ``auto`` that depends on neither the machine nor the model, and records each value's origin."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from stoker.job.document.yaml_document import JobDocument
from stoker.job.inputs import by_source_key
from stoker.job.keys.key_paths import TARGET, KeyPath, dotted, leaves, parse_key
from stoker.job.keys.tune_keys import VIRTUAL
from stoker.job.resolution.batch_triangle import DEFAULT_SCHEDULE, data_parallel_of, is_scratch, seq_len_of, triangle_of
from stoker.job.resolution.default_reasons import OF_TARGET, REASONS, UNDECIDED
from stoker.job.resolution.island_count import islands_of, reason_for
from stoker.job.resolved import ResolvedJob
from stoker.job.schema import Job
from stoker.job.task_spec import Decided, task_of

VIRTUAL_LR = {"prompt": 3e-2, "p-tuning": 1e-3, "prefix": 1e-3}
HELD_OUT = 0.05
EVALUATED = 256  # sequences: enough to distinguish models, few enough to wait for
MOST_BETWEEN_CHECKPOINTS = 500  # steps, so that a crash costs little


@dataclass(frozen=True)
class Origin:
    """The origin of a value.

    Attributes:
        source: the job file, an override on the command line, or Stoker's default.
        where: ``job.yaml:3:5`` or the override's text; empty for a key that was not written.
        why: the reason of a default; empty for a value that was written.
    """

    source: Literal["file", "override", "default"]
    where: str
    why: str


def resolve(job: Job, document: JobDocument) -> tuple[ResolvedJob, dict[str, Origin]]:
    """Returns the job with its ``auto`` values decided, and the origin of every leaf by dotted key.

    Raises BatchError where the batch triangle has no solution.
    """
    task = task_of(job)
    if task.block and getattr(job, task.name) is None:
        job = job.model_copy(update={task.name: task.block.written()})
    decided = {
        key: value for key, value in _decisions(job, document.file, document.nodes).items() if _is_open(job, key)
    }
    data = job.model_dump()
    for key, decision in decided.items():
        *parents, last = parse_key(key)
        block: Any = data
        for part in parents:
            block = block[part]
        block[last] = decision.value
    resolved = ResolvedJob.model_validate(data)
    origins = {dotted(path): _origin(path, value, decided, document) for path, value in leaves(resolved)}
    return resolved, origins


def _is_open(job: Job, key: str) -> bool:
    value: Any = job
    for part in parse_key(key):
        value = value[part] if isinstance(part, int) else getattr(value, part)
    return value in ("auto", None) or (key == "model.quantise" and value == "none")


def _origin(path: KeyPath, value: Any, decided: dict[str, Decided], document: JobDocument) -> Origin:
    key = dotted(path)
    schema_key = dotted(tuple(part for part in path if isinstance(part, str)))
    if path[:2] == ("evaluate", "data") and len(path) > 2:
        schema_key = schema_key.removeprefix("evaluate.")  # a source, as those of `data`
    mark, where = document.marks.get(path), document.where(path)
    if key in decided:
        return Origin("default", where, ("auto: " if mark else "") + decided[key].why)
    if value == "auto" and schema_key in UNDECIDED:  # elsewhere it is a name like any other
        return Origin("default", where, UNDECIDED[schema_key])
    if mark is None:
        return Origin("default", "", OF_TARGET if path[0] == TARGET and len(path) > 1 else REASONS[schema_key])
    return Origin("override" if mark.override else "file", where, "")


def _decisions(job: Job, file: str, nodes: int | None) -> dict[str, Decided]:
    """Resolves each ``auto`` key of this job; decisions on keys that were written are ignored."""
    own = task_of(job).defaults(job)
    found = {**_sequences(job), **_batch(job), **_layout(job, nodes), **_length(job), **own, **_tuned(job)}
    too_long = found.pop("data.too_long")
    found |= {f"{key}.too_long": too_long for key in by_source_key(job.data, job.evaluate.data)}
    if job.output is None:
        found["output"] = Decided(f"runs/{Path(file).stem or 'job'}", "runs/ and the name of the job file")
    if job.tune.method == "qlora" and job.model is not None:
        found["model.quantise"] = Decided("4bit", "tune: qlora holds the base in 4 bits")
    if job.tune.deep:
        found["train.lr"] = replace(found["train.lr"], value=1e-2)
    found["tune.alpha"] = Decided(2.0 * job.tune.rank, f"twice the rank ({job.tune.rank})")
    return found


def _tuned(job: Job) -> dict[str, Decided]:
    """Returns the learning rate and the weight decay of adapters and virtual tokens."""
    method = job.tune.method
    if method in VIRTUAL:
        lr = Decided(VIRTUAL_LR[method], "virtual tokens are few and far from where they end")
        return {"train.lr": lr, "train.weight_decay": Decided(0.0, "virtual tokens are not drawn to zero")}
    if method == "full":
        return {}
    return {"train.lr": task_of(job).adapter_lr, "train.weight_decay": Decided(0.01, "AdamW's usual decay when tuning")}


def _sequences(job: Job) -> dict[str, Decided]:
    """Returns the defaults that language tasks share; a task overrides them where it differs."""
    task = task_of(job)
    unused = f"not used in task: {task.name}"
    length = (
        "what the catalogue's from-scratch models hold"
        if is_scratch(job)
        else "fits most instructions; lowered to the model's own context if that is shorter"
    )
    return {
        "train.seq_len": Decided(seq_len_of(job), length if task.text else unused),
        "train.pack": Decided(False, "one row a sequence unless asked for" if task.text else unused),
        "train.eps": Decided(1e-8, "AdamW's usual choice"),
        "train.beta2": Decided(0.999, "AdamW's usual choice"),
        "train.warmup": Decided(0.03, "the first 3% of the steps"),
        "train.weight_decay": Decided(0.01, "AdamW's usual decay when tuning"),
        "data.too_long": Decided("cut", "an answer keeps its beginning; what is cut is counted"),
    }


def _batch(job: Job) -> dict[str, Decided]:
    solved = triangle_of(job)
    train, parts = job.train, job.parallel
    written = [corner != "auto" for corner in (train.batch, train.micro_batch, train.accumulation)]
    asked = any(written[1:])
    factors = f"{solved.micro_batch} x {solved.accumulation} x {solved.data_parallel}"
    batch = f"micro_batch x accumulation x parallel.data = {factors}" if asked else f"the default of task {job.task}"
    quotient = f"of {solved.batch} / ({solved.batch // solved.micro_batch})"
    micro = (
        f"batch / (accumulation x parallel.data): {quotient}"
        if written[2]
        else f"the largest part of {solved.batch // solved.data_parallel} that holds at most 8192 tokens"
    )
    if parts.pipeline > 1 and not written[2]:
        micro = f"leaves the pipeline {solved.accumulation} micro-batches a step, to keep its stages busy"
    if not task_of(job).text and not written[2]:
        micro = "the whole batch of a process at once"
    one_pass = solved.micro_batch * solved.data_parallel
    accumulation = f"batch / (micro_batch x parallel.data) = {solved.batch} / {one_pass}"
    processes = "one process"
    if data_parallel_of(job) is not None and parts.devices != "auto":
        others = parts.tensor * parts.pipeline * parts.context
        processes = f"devices / (tensor x pipeline x context) = {len(parts.devices)} / {others}"
    elif all(written):
        product = solved.micro_batch * solved.accumulation
        processes = f"batch / (micro_batch x accumulation) = {solved.batch} / {product}"
    return {
        "train.batch": Decided(solved.batch, batch),
        "train.micro_batch": Decided(solved.micro_batch, micro),
        "train.accumulation": Decided(solved.accumulation, accumulation),
        "parallel.data": Decided(solved.data_parallel, processes),
    }


def _layout(job: Job, nodes: int | None) -> dict[str, Decided]:
    parts, data = job.parallel, triangle_of(job).data_parallel
    sequence = "divides what `tensor` leaves whole, for no more traffic"
    shard_size = Decided(data, f"one copy, spread over all {data}")
    if parts.shard == "none":
        shard_size = Decided(1, "nothing is sharded")

    def along(axis: str, value: Any, why: str) -> Decided:
        return Decided(value, why if getattr(parts, axis) > 1 else f"not used: `{axis}` is one")

    copies = data // (shard_size.value if parts.shard_size == "auto" else parts.shard_size)
    islands = Decided(islands_of(copies, nodes or 1), reason_for(copies, nodes))
    if parts.sync.every == 1:
        islands = Decided(1, "gradients are summed in every step")
    return {
        "parallel.shard_size": shard_size,
        "parallel.sequence": along("tensor", parts.tensor > 1, sequence),
        "parallel.schedule": along("pipeline", DEFAULT_SCHEDULE, "holds the fewest activations"),
        "parallel.context_by": along("context", "gather", "works with any number of heads"),
        "parallel.expert": Decided(parts.tensor, "experts are spread over the processes of `tensor`"),
        "parallel.sync.islands": islands,
    }


def intervals(steps: int, sync_every: int) -> tuple[int, int]:
    """Default steps between evaluations, and between checkpoints, in a run of ``steps``.

    Args:
        sync_every: `parallel.sync.every`: islands are evaluated when they are alike.
    """
    evaluate = max(1, steps // 10)
    return -(-evaluate // sync_every) * sync_every, min(MOST_BETWEEN_CHECKPOINTS, max(1, steps // 5))


def _length(job: Job) -> dict[str, Decided]:
    found: dict[str, Decided] = {}
    if job.steps is None and job.epochs is None:
        found["epochs"] = Decided(1.0, "one pass over the data unless steps or epochs are given")
    if job.steps is not None:
        apart = job.parallel.sync.every
        evaluate, save = intervals(job.steps, apart)
        rounded = f", up to a multiple of `sync.every: {apart}`" if apart > 1 else ""
        found["evaluate.every"] = Decided(evaluate, f"a tenth of the {job.steps} steps{rounded}")
        limit = f", but no more than {save}, so that a crash costs little" if save == MOST_BETWEEN_CHECKPOINTS else ""
        found["checkpoint.every"] = Decided(save, f"a fifth of the {job.steps} steps{limit}")
    if job.evaluate.data:
        found["evaluate.fraction"] = Decided(0.0, "evaluate.data is given")
        found["evaluate.rows"] = Decided("all", "evaluate.data is used whole")
    else:
        found["evaluate.fraction"] = Decided(HELD_OUT, "one row in twenty is held out, so that the loss can be trusted")
        found["evaluate.rows"] = Decided(EVALUATED, "enough to distinguish models, and fast")
    return found
