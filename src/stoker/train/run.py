"""From what a job has been prepared to, to a run in its folder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from stoker.checkpoint.store import Store
from stoker.checkpoint.together import by_first
from stoker.errors import RunFailed
from stoker.job.render import dump_job
from stoker.job.schema import Job
from stoker.runs.folder import RunFolder, StepMetrics
from stoker.train.environment import environment
from stoker.train.loop import Loop, Outcome
from stoker.train.optimizer import build_optimizer
from stoker.train.plan import Plan, plan_of, schedule_of
from stoker.train.predicted import compared, predicted_of
from stoker.train.prepare import Prepared
from stoker.train.progress import Display
from stoker.train.resume import check_same_job
from stoker.train.samples import Sampler, sampler_for
from stoker.train.schedule import Schedule


def start(
    prepared: Prepared,
    folder: RunFolder,
    base: Path,
    *,
    display: Display | None = None,
    quiet: bool = False,
    on_step: Callable[[StepMetrics], None] = lambda _: None,
) -> tuple[Outcome, Loop]:
    """Runs the loop in a folder that the caller holds; goes on where an earlier run of it stopped."""
    job, task = prepared.job, prepared.task
    plan = plan_of(job, task)
    store = Store(base / job.checkpoint.to if job.checkpoint.to else folder.checkpoints)
    store.clean()
    by_first(lambda: check_same_job(job, prepared.fingerprints, folder, resuming=bool(store.steps())))
    display = display or Display(plan.steps, task.unit, quiet=quiet or not prepared.passes.first)
    optimizer = build_optimizer(task.model, job.train, on_host=job.parallel.offload == "optimizer")
    loop = Loop(
        task,
        optimizer=optimizer,
        schedule=schedule_of(job, plan),
        plan=plan,
        device=prepared.device,
        folder=folder,
        store=store,
        display=display,
        passes=prepared.passes,
        sampler=_sampler(prepared),
        pieces=prepared.pieces,
        aliases=prepared.aliases,
        on_step=on_step,
    )
    resumed = loop.resume()
    plan = loop.plan = plan_of(job, task, loop.progress)
    schedule = loop.schedule = schedule_of(job, plan)
    display.steps = plan.steps
    if resumed >= plan.steps:
        if prepared.corpus:
            prepared.corpus.close()
        display.note(f"this run is done: {resumed} steps. To train further raise `steps`; to start anew write --fresh")
        if prepared.passes.first and (folder.read_events() or [{}])[-1].get("event") != "done":
            folder.event("done", step=resumed)  # killed between its last checkpoint and its end
        return Outcome("done", resumed, None, None, None), loop
    facts = {**prepared.facts, **_derived(prepared, plan, schedule)}
    for name, fact in facts.items():
        display.note(f"{name:<10} {fact}")
    if resumed:
        display.note(f"going on after step {resumed}")
    comparison = predicted_of(prepared)
    display.note(comparison.line())
    if prepared.passes.first:
        _record(prepared, folder, plan, facts, resumed)
        comparison.write(folder)
    if job.train.tensorboard and prepared.passes.first:
        from stoker.train.tensorboard import tensorboard_writer

        loop.on_step = tensorboard_writer(folder.path / "tensorboard", resumed)
    try:
        outcome = loop.run()
    except BaseException as error:
        name = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        with suppress(RunFailed):  # the disk may be what failed
            if prepared.passes.first:
                folder.event(name, step=loop.progress.step, error=f"{type(error).__name__}: {error}")
        raise
    finally:
        if prepared.corpus:
            prepared.corpus.close()
    comparison = compared(comparison, folder, prepared.device, resumed=resumed)
    if prepared.passes.first:
        folder.event(outcome.state, step=outcome.step)
        comparison.write(folder)
    display.note(comparison.line())
    return outcome, loop


def _sampler(prepared: Prepared) -> Sampler | None:
    corpus, text, count = prepared.corpus, prepared.text, prepared.job.evaluate.samples
    if corpus is None or text is None or not count:
        return None
    return sampler_for(corpus.evaluation_documents(), count, text.codec)


def _record(prepared: Prepared, folder: RunFolder, plan: Plan, facts: dict[str, str], resumed: int) -> None:
    """What the folder tells of a run as it begins or goes on."""
    job = prepared.job
    folder.write_job(dump_job(job))
    folder.write_environment(environment(prepared.device, facts, prepared.fingerprints))
    repeated = folder.forget_after(resumed)
    common = {"task": job.task, "model": _model_name(job), "steps": plan.steps}
    if resumed:
        folder.event("resumed", step=resumed, repeated=repeated, **common)
    else:
        folder.event("started", **common, plan=asdict(plan))


def _model_name(job: Job) -> str:
    if job.model is not None:
        return job.model.name
    assert job.module is not None
    return job.module.model


def _derived(prepared: Prepared, plan: Plan, schedule: Schedule) -> dict[str, str]:
    device, checked = prepared.device, prepared.audit
    facts = {
        "device": f"{device.type} ({device.name}), {torch.get_num_threads()} threads, {device.precision}: {device.why}",
        "steps": f"{plan.steps} of {plan.batch} sequences ({plan.micro_batch} at a time), "
        f"{plan.samples} in all; "
        f"lr {schedule.peak:g}, {schedule.shape}, {schedule.warmup} of warm-up",
        "saves": f"every {plan.save_every} steps; held-out evaluation every {plan.evaluate_every}",
    }
    if checked:
        facts["data"] = (
            f"{checked.rows_used} of {checked.rows_in} rows, {checked.tokens:,} tokens, "
            f"{checked.trained_tokens / checked.tokens:.0%} trained; {checked.held_out} sequences held out"
        )
    return facts
