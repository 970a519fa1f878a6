"""From a job to a run: every part is built here, in the order in which the data goes through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stoker.checkpoint.store import Store
from stoker.checkpoint.together import by_first
from stoker.checkpoint.weights import NONE, trainable
from stoker.data.audit import Audit, audit
from stoker.data.build import Report
from stoker.data.corpus import Corpus, open_corpus
from stoker.errors import RunFailed, UserError
from stoker.hardware.device import Device, choose_device
from stoker.job.layout import layout_of
from stoker.job.load import LoadedJob
from stoker.job.render import dump_job
from stoker.job.schema import Job
from stoker.models.adapters import unwrap
from stoker.models.build import build_meta
from stoker.models.families import family_of
from stoker.models.families.facts import Family
from stoker.models.layout import lay_out_for
from stoker.models.meta import allocate
from stoker.models.text import TextSide, open_text_side
from stoker.models.weights import fill_whole
from stoker.parallel.check import layout_problem
from stoker.parallel.compile import compile_blocks
from stoker.parallel.mesh import Mesh
from stoker.parallel.module import spread_module
from stoker.parallel.pieces import Piece
from stoker.parallel.recompute import recompute_blocks
from stoker.parallel.spread import Spread, spread
from stoker.runs.folder import RunFolder, StepMetrics
from stoker.train.environment import environment
from stoker.train.loop import Loop, Outcome
from stoker.train.optimizer import build_optimizer
from stoker.train.passes import Alone, Passes, Together
from stoker.train.plan import Plan, plan_of, schedule_of
from stoker.train.progress import Display
from stoker.train.resume import check_same_job
from stoker.train.samples import Sampler, sampler_for
from stoker.train.schedule import Schedule
from stoker.train.task import Task
from stoker.train.tasks.language import LanguageTask
from stoker.train.tasks.module import ModuleTask, fingerprint_of

_CHUNKED = "chunked, trained positions only"


@dataclass(frozen=True)
class Prepared:
    """A job with its model, its data and its task: everything but the loop.

    Attributes:
        job: resolved for this machine: precision and sequence length are settled.
        facts: what is printed and recorded before training starts.
        fingerprints: of each source of data, by name.
        passes: how forward and backward passes are carried out, alone or with other processes.
        pieces, aliases: what this process holds of the model's parameters; see `stoker.parallel.spread.Spread`.
        audit: of a language task's data.
    """

    job: Job
    task: Task
    device: Device
    facts: dict[str, str]
    fingerprints: dict[str, str]
    passes: Passes
    pieces: Mapping[str, Piece] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    audit: Audit | None = None
    corpus: Corpus | None = None
    text: TextSide | None = None


def prepare(loaded: LoadedJob, base: Path, report: Report | None = None, *, mesh: Mesh | None = None) -> Prepared:
    """Builds model, data and task of a resolved job.

    Args:
        mesh: the processes of the job's layout; None for one.

    Raises:
        UserError: the data does not pass the audit, or the model cannot be loaded or spread as the job says.
    """
    job = loaded.job
    device = choose_device(job.train.precision, mesh.device if mesh else None)
    return (_prepare_module if job.task == "module" else _prepare_language)(loaded, device, base, report, mesh)


def _prepare_language(
    loaded: LoadedJob, device: Device, base: Path, report: Report | None, mesh: Mesh | None
) -> Prepared:
    text = open_text_side(loaded, base)
    train = loaded.job.train.model_copy(update={"precision": device.precision, "seq_len": text.seq_len})
    job = loaded.job.model_copy(update={"train": train})
    assert job.model is not None
    corpus = open_corpus(job, text.codec, seq_len=text.seq_len, base=base, report=report, loaded=loaded)
    checked = audit(corpus, text.codec, loaded)
    if checked.problems:
        corpus.close()
        raise UserError(*checked.problems)
    built = build_meta(job, base, device, stop_id=text.tokenizer.eos_token_id)
    model = built.model
    embedding = unwrap(model).get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    if len(text.tokenizer) > embedding.shape[0]:
        raise UserError(
            loaded.problem(
                "model.tokenizer",
                f"the tokenizer has {len(text.tokenizer)} tokens, more than the model's vocabulary",
            )
        )
    described = describe_parameters(model)
    layout = mesh.layout if mesh else layout_of(job)
    problem = layout_problem(unwrap(model), layout, loaded)
    if problem is not None:
        raise UserError(problem)
    spread_out: Spread | None = None
    if mesh is None:
        fill_whole(allocate(model, device.torch), built.weights)
        language = lay_out_for(unwrap(model))
        task = LanguageTask(model, language, corpus, device.torch)
        apply_to_blocks(job, unwrap(model), family_of(unwrap(model).config))
    else:
        spread_out = spread(built, mesh, compiled=job.train.compile is True, compute=device.autocast_dtype)
        assert spread_out.language is not None
        language = spread_out.language
        task = LanguageTask(spread_out.model, language, corpus, device.torch, root=spread_out.root)
    facts = {
        "model": f"{job.model.name}: {described}",
        "template": "the tokenizer's own" if text.own_template else "plain (the tokenizer has none)",
        "rows": "laid end to end, each attending to itself" if language.packs else "padded, grouped by length",
        "loss": "over the model's own logits" if language.head is None and layout.pipeline == 1 else _CHUNKED,
    }
    fingerprints = {s.source.name: s.source.fingerprint() for s in (*corpus.sources, *corpus.evaluation)}
    pieces, aliases = (spread_out.pieces, spread_out.aliases) if spread_out else (NONE, NONE)
    passes = _passes(task, device, mesh, spread_out)
    return Prepared(job, task, device, facts, fingerprints, passes, pieces, aliases, checked, corpus, text)


def _passes(task: Task, device: Device, mesh: Mesh | None, parts: Spread | None) -> Passes:
    if mesh is None or parts is None:
        return Alone(task, device, list(trainable(task.model).values()))
    return Together(task, device, mesh, root=parts.root, pipeline=parts.pipeline, gradients=parts.gradients)


def _prepare_module(
    loaded: LoadedJob, device: Device, base: Path, report: Report | None, mesh: Mesh | None
) -> Prepared:
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
    return prepare_module(job, model, loss=loss, data=data, held_out=held_out, device=device, mesh=mesh)


def prepare_module(
    job: Job, model: nn.Module, *, loss: Any, data: Any, held_out: Any, device: Device, mesh: Mesh | None = None
) -> Prepared:
    """The same for a module that is at hand; with a mesh it must be the same on every process."""
    job = job.model_copy(update={"train": job.train.model_copy(update={"precision": device.precision})})
    model = model.to(device.torch, torch.float64 if device.precision == "fp64" else None)
    if not trainable(model):
        raise UserError(f"{type(model).__name__} has no parameter that is trained")
    task = ModuleTask(model, loss, data, held_out, seed=job.seed, device=device.torch)
    facts = {"model": f"{type(model).__name__}: {describe_parameters(model)}"}
    parts = None
    if mesh is None:
        apply_to_blocks(job, model)
    else:
        parts = spread_module(model, mesh, compiled=job.train.compile is True, compute=device.autocast_dtype)
        assert parts.root is not None
        task.root = parts.root
    fingerprints = {"data": fingerprint_of(task.data)}
    return Prepared(job, task, device, facts, fingerprints, _passes(task, device, mesh, parts))


def apply_to_blocks(job: Job, model: nn.Module, family: Family | None = None) -> None:
    """Compile, then recompute what is compiled; for one process."""
    if job.train.compile:
        compile_blocks(model)
    if job.parallel.recompute != "none":
        recompute_blocks(model, job.parallel.recompute, family)


def describe_parameters(model: nn.Module) -> str:
    """``134.5 M parameters, 4.9 M trained (3.6 %)``."""
    trained = sum(p.numel() for p in trainable(model).values())
    total = max(1, sum(p.numel() for p in model.parameters()))
    return f"{total / 1e6:,.1f} M parameters, {trained / 1e6:,.1f} M trained ({trained / total:.1%})"


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
    if prepared.passes.first:
        _record(prepared, folder, plan, facts, resumed)
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
    if prepared.passes.first:
        folder.event(outcome.state, step=outcome.step)
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
