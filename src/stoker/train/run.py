"""Training run of a prepared job in its folder: optimizer, saver, hooks, loop, and records of its start and end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from stoker.checkpoint.dcp_store import Store, place_of
from stoker.checkpoint.object_collectives import rank
from stoker.checkpoint.saver import Saver
from stoker.checkpoint.snapshots import Snapshots
from stoker.errors import RunFailed
from stoker.job.resolved import ResolvedJob
from stoker.job.task_spec import task_of
from stoker.node_cache.job_urls import urls_of
from stoker.parallel.data_parallel.power_sgd import PowerSgd
from stoker.parallel.data_parallel.replicate import power_sgd_of
from stoker.parallel.float64_mode import arithmetic_of
from stoker.resilience.fault_injection import Chaos
from stoker.resilience.heartbeat import Heart
from stoker.runs.plan_record import PredictionRecord
from stoker.runs.run_folder import RunFolder
from stoker.train.deterministic import deterministic_kernels
from stoker.train.display import Display
from stoker.train.faults.out_of_memory import reported_memory_errors
from stoker.train.hooks import Hook
from stoker.train.language.sample_answers import Sampler, sampler_for
from stoker.train.loop import Loop
from stoker.train.optim.optimizer import build_optimizer
from stoker.train.prepared import Prepared
from stoker.train.records.plan_prediction import add_measurement, predicted_of
from stoker.train.records.resume_check import check_same_job
from stoker.train.records.run_cache_stats import RunCacheStats
from stoker.train.records.run_facts import run_facts
from stoker.train.records.start_record import record_start
from stoker.train.run_result import RunResult
from stoker.train.run_schedule import memory_interval
from stoker.train.step_hooks.local_sgd import OuterStep
from stoker.train.step_hooks.power_sgd_state import PowerSgdState
from stoker.train.step_hooks.weight_average import WeightAverage
from stoker.train.training_state import FurtherState


def train_run(
    prepared: Prepared,
    folder: RunFolder,
    base: Path,
    *,
    display: Display | None = None,
    quiet: bool = False,
    hooks: Sequence[Hook] = (),
    heart: Heart | None = None,
    began: float | None = None,
) -> tuple[RunResult, Loop]:
    """Trains in a folder that the caller has locked; resumes an earlier run in it. Closes what was prepared.

    Args:
        began: start of this process' preparation of the job, seconds since 1970; by default now.
    """
    with closing(prepared):
        heart, began = heart or Heart(), began or time.time()
        display = display or Display(prepared.task.unit, quiet=quiet or not prepared.engine.first)
        event = folder.event if prepared.engine.first else _no_event
        loop = _build_loop(prepared, folder, base, event=event, display=display, hooks=hooks, heart=heart)
        heart.beat("restore")
        resumed = loop.resume()
        heart.restored(resumed)
        if resumed >= loop.length.steps:
            return _done_before(loop, prepared, folder, display, resumed), loop
        facts = {**prepared.facts, **run_facts(prepared, loop.length, loop.schedule)}
        for name, fact in facts.items():
            display.note(f"{name:<10} {fact}")
        if resumed:
            display.note(f"going on after step {resumed}")
        comparison = predicted_of(prepared)
        display.note(comparison.line())
        if prepared.engine.first:
            loop.hooks.extend(_trackers(prepared.job, folder.path, resumed))
            record_start(prepared, folder, loop.length, facts, resumed=resumed, where=loop.resumed_from, began=began)
            if prepared.job.checkpoint.to is not None:
                loop.store.claim(folder)
            comparison.write(folder)
        with (
            _recorded_failure(loop, heart, event),
            deterministic_kernels(prepared.job.train.deterministic),
            arithmetic_of(prepared.device),
            reported_memory_errors(prepared, loop.optimizer, heart, comparison.predicted),
        ):
            result = loop.run()
            cached = RunCacheStats().measures() if urls_of(prepared.job) else {}
        _compare(comparison, prepared, folder, display, resumed=resumed)
        event(result.state, step=result.step, stall=round(loop.saver.stall, 3), **cached)
        return result, loop


def _build_loop(
    prepared: Prepared,
    folder: RunFolder,
    base: Path,
    *,
    event: Callable[..., None],
    display: Display,
    hooks: Sequence[Hook],
    heart: Heart,
) -> Loop:
    """Returns the loop of a prepared run, before it has a state.

    Raises:
        UserError: the folder has the run of another job, or the place of its checkpoints those of another run.
    """
    job = prepared.job
    saver = _saver(job, folder, base, event=event, note=display.note)
    resuming = saver.has_state()
    corrected = check_same_job(job, prepared.fingerprints, folder, resuming=resuming, problem_of=prepared.data_problem)
    if corrected:
        display.note(f"{', '.join(corrected)} changed after an error of user code: the run resumes with the new code")
        event("code_changed", files=corrected)
    optimizer = build_optimizer(
        prepared.task.model,
        job.train,
        on_host=job.parallel.offload == "optimizer",
        loraplus_ratio=job.tune.loraplus_ratio,
        critic_ratio=task_of(job).model.critic_rate(job),
        copies=prepared.mesh.groups["batch"] if prepared.mesh else None,
    )
    outer = _outer(prepared)
    loop = Loop(
        prepared,
        folder,
        optimizer=optimizer,
        saver=saver,
        display=display,
        event=event,
        heart=heart,
        sampler=_sampler(prepared),
        further=[*_further(prepared, outer)],
        hooks=[
            *([outer.hook(lambda: loop.length.steps)] if outer else []),
            *_own_hooks(prepared, optimizer),
            *prepared.hooks,
            _chaos(folder, saver, optimizer),
            *hooks,
        ],
    )
    return loop


def _done_before(loop: Loop, prepared: Prepared, folder: RunFolder, display: Display, resumed: int) -> RunResult:
    """Returns the result of a run that has all of its steps already."""
    loop.save_what_was_kept()
    job = prepared.job
    if job.steps is None and task_of(job).grows(job):
        display.note(f"this run is done: {resumed} steps. It continues when the data has further rows")
    else:
        further = "To train further raise `steps` or `epochs`; to start over write --fresh"
        display.note(f"this run is done: {resumed} steps. {further}")
    if prepared.engine.first and (folder.read_events() or [{}])[-1].get("event") != "done":
        folder.event("done", step=resumed)  # killed between its last checkpoint and its end
    return replace(loop.result("done"), held_out_before=None)  # nothing to compare it with


@contextmanager
def _recorded_failure(loop: Loop, heart: Heart, event: Callable[..., None]) -> Iterator[None]:
    """Writes the event of an error, unless the supervisor does."""
    try:
        yield
    except BaseException as error:
        if not heart.watched:
            kind = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            with suppress(RunFailed):  # the disk may be the cause
                cause = type(error).__name__
                event(kind, step=loop.progress.step, cause=cause, error=f"{cause}: {error}")
        raise


def _compare(
    comparison: PredictionRecord, prepared: Prepared, folder: RunFolder, display: Display, *, resumed: int
) -> None:
    """Writes the measurement beside the prediction, and prints both if there is a prediction; a collective."""
    comparison = add_measurement(comparison, folder, prepared.device, resumed=resumed)
    if prepared.engine.first:
        comparison.write(folder)
    if comparison.predicted is not None:
        display.note(comparison.line())


def _chaos(folder: RunFolder, saver: Saver, optimizer: Optimizer) -> Hook:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    chaos = Chaos(folder, rank(), Path(saver.store.folder), parameters)
    return Hook(chaos.before_passes, chaos.after_passes)


def _outer(prepared: Prepared) -> OuterStep | None:
    mesh = prepared.mesh
    if mesh is None or mesh.layout.islands == 1:
        return None
    sync = prepared.job.parallel.sync
    return OuterStep(prepared.task.model, sync, mesh, prepared.shards)


def _further(prepared: Prepared, outer: OuterStep | None) -> Iterator[FurtherState]:
    """Yields the state in checkpoints beside weights and moments."""
    yield from (part for part in (outer, prepared.further) if part is not None)
    memories = _power_sgd(prepared)
    if memories is not None:
        assert prepared.mesh is not None
        yield PowerSgdState(prepared.task.model, memories, prepared.mesh)


def _trackers(job: ResolvedJob, folder: Path, resumed: int) -> Iterator[Hook]:
    """Yields the hooks that write or send metrics where the job asks for it."""
    if job.train.tensorboard:
        from stoker.train.step_hooks.tensorboard import tensorboard_hook

        yield tensorboard_hook(folder / "tensorboard", resumed)
    if job.train.wandb is not None:
        from stoker.train.step_hooks.wandb_tracker import wandb_hook

        yield wandb_hook(job, folder)
    if job.train.mlflow is not None:
        from stoker.train.step_hooks.mlflow_tracker import mlflow_hook

        yield mlflow_hook(job, folder)


def _own_hooks(prepared: Prepared, optimizer: Optimizer) -> Iterator[Hook]:
    """Yields the hooks of `parallel.compress: powersgd`, `tune.new_rows_first` and `train.average`."""
    memories = _power_sgd(prepared)
    if memories is not None:
        yield Hook(after_optimizer=lambda _lr, taken: None if taken else memories.undo())
    steps, new, average = prepared.job.tune.new_rows_first, prepared.new_rows, prepared.job.train.average
    if steps and new is not None:
        from stoker.train.step_hooks.embedding_warmup import EmbeddingWarmup  # imports transformers

        yield EmbeddingWarmup(prepared.task.model, optimizer, new, steps, prepared.shards).hook()
    if average is not None:
        yield WeightAverage(optimizer, average).hook()


def _power_sgd(prepared: Prepared) -> PowerSgd | None:
    return power_sgd_of(prepared.parallel.root) if prepared.parallel is not None else None


def _sampler(prepared: Prepared) -> Sampler | None:
    corpus, text, count = prepared.corpus, prepared.text, prepared.job.evaluate.samples
    if corpus is None or text is None or not count:
        return None
    return sampler_for(corpus.evaluation_documents(), count, text.codec, text.context)


def _no_event(_name: str, **_values: Any) -> None:
    """Records nothing; used on all processes but the first, which records each event once."""


def _saver(
    job: ResolvedJob, folder: RunFolder, base: Path, *, event: Callable[..., None], note: Callable[[str], None]
) -> Saver:
    wanted = job.checkpoint
    store = Store(place_of(wanted.to, folder, base))
    if wanted.to is not None:  # a place outside the locked folder
        store.check_owner(folder)
    store.clean()
    snapshots, memory = Snapshots(folder.path), memory_interval(job)
    return Saver(store, snapshots, background=wanted.background, memory=memory, event=event, note=note)
