"""Checks for keys that are each valid but exclude each other, and for impossible numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stoker.errors import Problem
from stoker.job.conflicts.conflict_view import CannotTellError, View
from stoker.job.conflicts.layout_conflicts import AXIS_KEYS, LAYOUT_CHECKS
from stoker.job.conflicts.model_conflicts import MODEL_CHECKS
from stoker.job.conflicts.optimizer_conflicts import OPTIMIZER_CHECKS, SETTINGS, SETTINGS_OF
from stoker.job.conflicts.sync_conflicts import SYNC_CHECKS
from stoker.job.conflicts.text_conflicts import TEXT_CHECKS, TEXT_KEYS
from stoker.job.conflicts.tune_conflicts import TUNE_CHECKS
from stoker.job.keys.key_paths import TARGET, KeyPath, dotted, field_at, parse_key
from stoker.job.keys.tune_keys import VIRTUAL, keys_of
from stoker.job.resolution.batch_solver import BatchError
from stoker.job.resolution.batch_triangle import TRIANGLE, triangle_of
from stoker.job.schema import Job
from stoker.job.targets import KINDS, TargetBlock, chosen_block
from stoker.job.task_spec import TASKS

LANGUAGE = ("train.seq_len", "train.pack", "train.router_aux_loss", "train.float8")
WITHOUT_TEXT = ("model", *LANGUAGE, "evaluate.samples", "tune", "mix")
STORES = ("lmdb", "redis", "rediss", "unix")  # schemes of stores of tables
WITHOUT_SOURCES = ("data", "evaluate.data")
HELD_OUT_KEYS = ("evaluate.fraction", "evaluate.rows")  # have a value in every job, also where they have no effect


def conflicts(view: View) -> list[Problem]:
    """Returns every conflict that can be determined, unordered."""
    problems: list[Problem] = []
    for check in CHECKS:
        try:
            problems.extend(check(view))
        except CannotTellError:
            continue
    return problems


def _steps_and_epochs(view: View) -> Iterator[Problem]:
    if view.given("steps") and view.given("epochs"):
        message = "`steps` and `epochs` both set the length of the training"
        hint = "keep one; on the command line, `steps=` or `stages.NAME.steps=` removes it"
        yield from view.at_each(["steps", "epochs"], message, hint)


def _needs_model(view: View) -> Iterator[Problem]:
    task = view.task
    if task.text and view.value("model") is None:
        yield view.document.problem(("model",), f"`task: {task.name}` needs a model", "write `model: smollm2-135m`")


def _needs_data(view: View) -> Iterator[Problem]:
    task = view.task
    if (task.text or task.ranks) and not view.value("data"):
        yield view.document.problem(("data",), f"`task: {task.name}` needs data", "write `data: my.jsonl`")


def _nodes(view: View) -> Iterator[Problem]:
    nodes = view.value("faults.nodes")
    if nodes is not None and nodes.min > nodes.max:
        message = f"`min` is {nodes.min}, and `max` is {nodes.max}"
        yield from view.at_each(["faults.nodes.min", "faults.nodes.max"], message, "write the smaller one as `min`")


def _window(view: View) -> Iterator[Problem]:
    view.value("faults")  # raises where it is invalid
    if not _goes_back(view.job) and view.differs("faults.window") and not view.is_recorded("faults.window"):
        message = "`faults.window` has no effect without `spike` or `not_finite: roll-back`"
        yield from view.at_each(["faults.window"], message, "also write `spike: 10`, or remove it")


def _goes_back(job: Job) -> bool:
    return job.faults.spike > 0 or job.faults.not_finite == "roll-back"


def _task_blocks(view: View) -> Iterator[Problem]:
    chosen = view.task
    if chosen.block and chosen.block.hint and view.value(chosen.name) is None:
        message = f"`task: {chosen.name}` needs the block `{chosen.name}`"
        yield view.document.problem((chosen.name,), message, chosen.block.hint)
    for name, task in TASKS.items():
        if task.block and task is not chosen and view.value(name) is not None:
            message = f"`{name}` has no effect in `task: {chosen.name}`"
            yield from view.at_each([name, "task"], message, f"remove it or write `task: {name}`")


def _without_text(view: View) -> Iterator[Problem]:
    task = view.task
    if task.own_model is None:
        return
    instead = task.own_model.instead
    for key in (*WITHOUT_TEXT, *(() if task.ranks else WITHOUT_SOURCES)):
        if view.given(key) and view.document.at(parse_key(key)) not in ({}, []):
            message = f"`{key}` has no effect in `task: {task.name}`"
            yield from view.at_each([key], message, instead.get(key, "remove it"))


def _score_head(view: View) -> Iterator[Problem]:
    """Yields problems of a head with one score, which only full tuning and adapters on layers can train."""
    method = view.value("tune.method")
    if view.task.model.head == "score" and method in VIRTUAL:
        message = f"`tune: {method}` trains only virtual tokens, and `task: {view.task.name}` needs a trained head"
        yield from view.at_each(["tune.method", "task"], message, "write `tune: lora` or `tune: full`")
    if view.task.model.head == "score" and view.value("evaluate.samples"):
        message = f"`task: {view.task.name}` scores answers and writes none"
        yield from view.at_each(["evaluate.samples", "task"], message, "remove `evaluate.samples`")


def _checks_of_tasks(view: View) -> Iterator[Problem]:
    """Runs each task's checks of its block, also of a block that has no effect."""
    for name, task in TASKS.items():
        if task.block and view.value(name) is not None:
            for check in task.block.checks:
                yield from check(view)


def _weights(view: View) -> Iterator[Problem]:
    sources = view.value("data") or []
    weighted = [index for index in range(len(sources)) if view.value(f"data[{index}].weight") is not None]
    bare = [index for index in range(len(sources)) if index not in weighted]
    if weighted and bare:
        for index in bare:
            yield view.document.problem(
                ("data", index),
                f"`data[{index}]` has no `weight`, and others have",
                "give all sources a weight, or none",
            )
    if weighted and view.given("mix.temperature"):
        keys = ["mix.temperature", *(f"data[{index}].weight" for index in weighted)]
        yield from view.at_each(keys, "`mix.temperature` and weights both set the mixing", "keep one of them")


def _two_evaluations(view: View) -> Iterator[Problem]:
    if view.value("evaluate.data"):
        yield from two_evaluations(view, "evaluate.data")


def two_evaluations(view: View, held_out: str) -> Iterator[Problem]:
    """Yields the problem of a key that names held-out data together with a fraction to hold out."""
    fraction = view.value("evaluate.fraction")
    if view.given("evaluate.fraction") and fraction > 0:
        message = f"`{held_out}` and `evaluate.fraction` both set the evaluation data"
        yield from view.at_each([held_out, "evaluate.fraction"], message, "keep one of them")


def _samples(view: View) -> Iterator[Problem]:
    nothing_held_out = view.value("evaluate.fraction") == 0 and not view.value("evaluate.data")
    if view.task.text and view.value("evaluate.samples") and nothing_held_out:
        message = "`evaluate.samples` answers held-out prompts, and nothing is held out"
        hint = "remove `fraction: 0`, or name held-out sources in `evaluate.data`"
        yield from view.at_each(["evaluate.samples", "evaluate.fraction"], message, hint)


def _warmup(view: View) -> Iterator[Problem]:
    warmup, steps = view.value("train.warmup"), view.value("steps")
    if steps is not None and isinstance(warmup, int) and warmup >= steps:
        message = f"`train.warmup` of {warmup} steps never ends within `steps: {steps}`"
        yield from view.at_each(
            ["train.warmup", "steps"], message, f"write at most {steps - 1}, or a fraction such as 0.1"
        )


def _batch(view: View) -> Iterator[Problem]:
    for key in TRIANGLE:
        view.value(key)
    corners = ("train.batch", "train.micro_batch", "train.accumulation", "parallel.data", "parallel.devices")
    written = [key for key in (*corners, "parallel.pipeline", "parallel.schedule") if view.given(key)]
    try:
        triangle_of(view.job)
    except BatchError as error:
        yield from view.at_each(written, error.message, error.suggestion)


def _one_target(view: View) -> Iterator[Problem]:
    """Yields a problem if ``target`` does not have exactly one block."""
    target = view.value(TARGET)
    if not isinstance(target, TargetBlock) or chosen_block(target) is not None:
        return
    written = [f"{TARGET}.{kind}" for kind in KINDS if getattr(target, kind) is not None]
    if written:
        yield from view.at_each(written, "`target` has several blocks, and a job runs in one place", "keep one of them")
    elif not any(kind in KINDS for kind in view.document.data[TARGET]):  # else its unknown keys are reported
        yield view.document.problem((TARGET,), "`target` has no block", f"write one of {', '.join(KINDS)} below it")


def _increments(view: View) -> Iterator[Problem]:
    """Yields a problem of checkpoints of changed rows in tasks without tables."""
    if view.value("checkpoint.full_every") != 1 and not view.task.ranks:
        message = f"`checkpoint.full_every` is about rows of tables, and `task: {view.task.name}` has none"
        yield from view.at_each(["checkpoint.full_every", "task"], message, "remove it, or write `task: ranking`")


def _sync(view: View) -> Iterator[Problem]:
    """Yields problems of ``export.sync``, such as a task without tables or two update intervals."""
    sync = view.value("export.sync")
    if sync is None:
        return
    if not view.task.ranks:
        message = f"`export.sync` sends rows of tables, and `task: {view.task.name}` has none"
        yield from view.at_each(["export.sync", "task"], message, "remove it, or write `task: ranking`")
    elif view.value("ranking.servers") is not None:
        message = "`export.sync` sends what the processes that train hold, and `ranking.servers` hold the rows"
        yield from view.at_each(["export.sync", "ranking.servers"], message, "keep one of them")
    if sync.every_seconds is not None and sync.every_steps is not None:
        message = "`every_seconds` and `every_steps` both set when the store is updated"
        yield from view.at_each(["export.sync.every_seconds", "export.sync.every_steps"], message, "keep one")
    if sync.to.partition("://")[0] not in STORES or "://" not in sync.to:
        message = f"{sync.to}: this is not a store with versions"
        yield from view.at_each(["export.sync.to"], message, "write lmdb://PATH or redis://HOST:PORT/DB")


CHECKS: tuple[Callable[[View], Iterator[Problem]], ...] = (
    _steps_and_epochs, _needs_model, _needs_data, _task_blocks, _without_text, _checks_of_tasks, _score_head,
    _weights, _two_evaluations, _samples, _warmup, _batch, _nodes, _window, _one_target,
    _increments, _sync,
    *OPTIMIZER_CHECKS, *TEXT_CHECKS, *MODEL_CHECKS, *TUNE_CHECKS, *LAYOUT_CHECKS, *SYNC_CHECKS,
)  # fmt: skip


IDLE: dict[KeyPath, Callable[[Job], bool]] = {
    ("evaluate", "data", "weight"): lambda _: True,
    ("evaluate", "data", "stream"): lambda _: True,
    ("faults", "window"): lambda job: not _goes_back(job),
    ("tune", "width"): lambda job: job.tune.method == "prefix" and not job.tune.projection,
    ("ranking", "table", "dtype"): lambda job: job.train.precision == "fp64",
}
"""Keys that have no effect beside some values of others."""


def has_effect(job: Job, path: KeyPath) -> bool:
    """Returns whether a key affects this job: an adapter's keys have no effect in full tuning, and so on."""
    if _is_idle(job, path):
        return False
    task = TASKS[job.task]
    if path[0] == "export":
        return task.ranks
    if not task.text:
        without = WITHOUT_TEXT if task.ranks else (*WITHOUT_TEXT, *WITHOUT_SOURCES, *HELD_OUT_KEYS)
        if path[0] in ("data", "evaluate") and any(part in TEXT_KEYS for part in path):
            return False
        return dotted(path) not in without and path[0] not in ("tune", "mix")
    if path[0] == "tune" and len(path) > 1 and path[1] != "method":
        return str(path[1]) in keys_of(job.tune.method, deep=job.tune.deep)
    others = [name for name, task in TASKS.items() if task.block and name != job.task]
    return path[0] not in others and field_at(path)[0] is not None


def _is_idle(job: Job, path: KeyPath) -> bool:
    """Returns whether a key has no effect beside the others of this job."""
    name, parts = str(path[-1]), job.parallel
    without_index = tuple(part for part in path if isinstance(part, str))
    if without_index in IDLE:
        return IDLE[without_index](job)
    if path[0] == "train":
        return name in SETTINGS - SETTINGS_OF[job.train.optimizer]
    if path[0] != "parallel":
        return False
    if name in ("shard_size", "expert"):
        return parts.shard == "none" if name == "shard_size" else parts.tensor == 1
    return any(getattr(parts, axis) == 1 and name in keys for axis, keys in AXIS_KEYS.items())
