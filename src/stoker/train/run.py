"""From a job to a run: every part is built here, in the order in which the data goes through them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stoker.checkpoint.store import Store
from stoker.checkpoint.weights import trainable
from stoker.data.audit import Audit, audit
from stoker.data.build import Report
from stoker.data.corpus import Corpus, open_corpus
from stoker.errors import CannotRun, RunFailed, UserError
from stoker.hardware.device import Device, choose_device
from stoker.job.load import LoadedJob
from stoker.job.render import dump_job
from stoker.job.schema import Job
from stoker.models.adapters import unwrap
from stoker.models.build import build_model
from stoker.models.layout import lay_out_for
from stoker.models.text import TextSide, open_text_side
from stoker.parallel.compile import compile_blocks
from stoker.parallel.recompute import recompute_blocks
from stoker.runs.folder import RunFolder
from stoker.train.environment import environment
from stoker.train.loop import Loop, Outcome
from stoker.train.optimizer import build_optimizer
from stoker.train.plan import Plan, plan_of, schedule_of
from stoker.train.progress import Display
from stoker.train.resume import check_same_job
from stoker.train.schedule import Schedule
from stoker.train.task import Task
from stoker.train.tasks.language import LanguageTask
from stoker.train.tasks.module import ModuleTask, fingerprint_of


@dataclass(frozen=True)
class Prepared:
    """A job with its model, its data and its task: everything but the loop.

    Attributes:
        job: resolved for this machine: precision and sequence length are settled.
        facts: what is printed and recorded before training starts.
        fingerprints: of each source of data, by name.
        audit: of a language task's data.
    """

    job: Job
    task: Task
    device: Device
    facts: dict[str, str]
    fingerprints: dict[str, str]
    audit: Audit | None = None
    corpus: Corpus | None = None
    text: TextSide | None = None


def prepare(loaded: LoadedJob, base: Path, report: Report | None = None) -> Prepared:
    """Builds model, data and task of a resolved job.

    Raises:
        UserError: the data does not pass the audit, or the model cannot be loaded.
        CannotRun: the job asks for more processes than this version starts.
    """
    job = loaded.job
    if job.parallel.data not in (1, "auto"):
        raise CannotRun(
            loaded.problem(
                "parallel.data",
                f"parallel.data: {job.parallel.data} processes are asked for, and this version trains in one",
                "write 1, and reach the same batch with train.accumulation",
            )
        )
    device = choose_device(job.train.precision)
    return (_prepare_module if job.task == "module" else _prepare_language)(loaded, device, base, report)


def _prepare_language(loaded: LoadedJob, device: Device, base: Path, report: Report | None) -> Prepared:
    text = open_text_side(loaded, base)
    train = loaded.job.train.model_copy(update={"precision": device.precision, "seq_len": text.seq_len})
    job = loaded.job.model_copy(update={"train": train})
    assert job.model is not None
    corpus = open_corpus(job, text.codec, seq_len=text.seq_len, base=base, report=report, loaded=loaded)
    checked = audit(corpus, text.codec, loaded)
    if checked.problems:
        corpus.close()
        raise UserError(*checked.problems)
    model = build_model(job, base, device, stop_id=text.tokenizer.eos_token_id)
    embedding = unwrap(model).get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    if len(text.tokenizer) > embedding.shape[0]:
        raise UserError(
            loaded.problem(
                "model.tokenizer",
                f"the tokenizer has {len(text.tokenizer)} tokens, more than the model's vocabulary",
            )
        )
    language = lay_out_for(unwrap(model))
    task = LanguageTask(model, language, corpus, device.torch)
    apply_to_blocks(job, model)
    facts = {
        "model": f"{job.model.name}: {describe_parameters(model)}",
        "template": "the tokenizer's own" if text.own_template else "plain (the tokenizer has none)",
        "rows": "laid end to end, each attending to itself" if language.packs else "padded, grouped by length",
        "loss": "chunked, trained positions only" if language.head else "over the model's own logits",
    }
    fingerprints = {s.source.name: s.source.fingerprint() for s in (*corpus.sources, *corpus.evaluation)}
    return Prepared(job, task, device, facts, fingerprints, checked, corpus, text)


def _prepare_module(loaded: LoadedJob, device: Device, base: Path, report: Report | None) -> Prepared:
    from stoker.train.imports import import_path

    block = loaded.job.module
    assert block is not None
    job = loaded.job
    torch.manual_seed(job.seed)
    model = import_path(block.model, "module.model", loaded)(**block.arguments)
    if not isinstance(model, nn.Module):
        message = f"module.model: {block.model} gives a {type(model).__name__}, not a torch.nn.Module"
        raise UserError(loaded.problem("module.model", message))
    loss = import_path(block.loss, "module.loss", loaded)
    data = import_path(block.data, "module.data", loaded)()
    held_out = import_path(block.evaluate, "module.evaluate", loaded)() if block.evaluate else None
    return prepare_module(job, model, loss=loss, data=data, held_out=held_out, device=device)


def prepare_module(job: Job, model: nn.Module, *, loss: Any, data: Any, held_out: Any, device: Device) -> Prepared:
    """The same for a module that is at hand."""
    job = job.model_copy(update={"train": job.train.model_copy(update={"precision": device.precision})})
    model = model.to(device.torch)
    if not trainable(model):
        raise UserError(f"{type(model).__name__} has no parameter that is trained")
    task = ModuleTask(model, loss, data, held_out, seed=job.seed, device=device.torch)
    apply_to_blocks(job, model)
    facts = {"model": f"{type(model).__name__}: {describe_parameters(model)}"}
    return Prepared(job, task, device, facts, {"data": fingerprint_of(task.data)})


def apply_to_blocks(job: Job, model: nn.Module) -> None:
    """Compile, then recompute what is compiled."""
    if job.train.compile:
        compile_blocks(model)
    if job.parallel.recompute == "full":
        recompute_blocks(model)


def describe_parameters(model: nn.Module) -> str:
    """``134.5 M parameters, 4.9 M trained (3.6 %)``."""
    trained = sum(p.numel() for p in trainable(model).values())
    total = max(1, sum(p.numel() for p in model.parameters()))
    return f"{total / 1e6:,.1f} M parameters, {trained / 1e6:,.1f} M trained ({trained / total:.1%})"


def start(
    prepared: Prepared, folder: RunFolder, base: Path, *, display: Display | None = None, quiet: bool = False
) -> tuple[Outcome, Loop]:
    """Runs the loop in a folder that the caller holds; goes on where an earlier run of it stopped."""
    job, task = prepared.job, prepared.task
    plan = plan_of(job, task)
    store = Store(base / job.checkpoint.to if job.checkpoint.to else folder.checkpoints)
    store.clean()
    check_same_job(job, prepared.fingerprints, folder, resuming=bool(store.steps()))
    display = display or Display(plan.steps, task.unit, quiet=quiet)
    optimizer = build_optimizer(task.model, job.train)
    loop = Loop(
        task,
        optimizer=optimizer,
        schedule=schedule_of(job, plan),
        plan=plan,
        device=prepared.device,
        folder=folder,
        store=store,
        display=display,
    )
    resumed = loop.resume()
    plan = loop.plan = plan_of(job, task, loop.progress)
    schedule = loop.schedule = schedule_of(job, plan)
    display.steps = plan.steps
    if resumed >= plan.steps:
        if prepared.corpus:
            prepared.corpus.close()
        display.note(f"this run is done: {resumed} steps. To train further raise `steps`; to start anew write --fresh")
        if (folder.read_events() or [{}])[-1].get("event") != "done":  # killed between its last checkpoint and its end
            folder.event("done", step=resumed)
        return Outcome("done", resumed, None, None, None), loop
    folder.write_job(dump_job(job))
    folder.write_environment(environment(prepared.device, prepared.facts, prepared.fingerprints))
    facts = {**prepared.facts, **_derived(prepared, plan, schedule)}
    for name, fact in facts.items():
        display.note(f"{name:<10} {fact}")
    repeated = folder.forget_after(resumed)
    common = {"task": job.task, "model": _model_name(job), "steps": plan.steps}
    if resumed:
        display.note(f"going on after step {resumed}" + (f" ({repeated} steps are repeated)" if repeated else ""))
        folder.event("resumed", step=resumed, repeated=repeated, **common)
    else:
        folder.event("started", **common, plan=asdict(plan))
    if job.train.tensorboard:
        from stoker.train.tensorboard import tensorboard_writer

        loop.on_step = tensorboard_writer(folder.path / "tensorboard", resumed)
    try:
        outcome = loop.run()
    except BaseException as error:
        name = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        with suppress(RunFailed):  # the disk may be what failed
            folder.event(name, step=loop.progress.step, error=f"{type(error).__name__}: {error}")
        raise
    finally:
        if prepared.corpus:
            prepared.corpus.close()
    folder.event(outcome.state, step=outcome.step)
    return outcome, loop


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
