"""Preparation of a language model, its data and its task, in the order of the data's path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from stoker.checkpoint.object_collectives import by_first
from stoker.data.build_cache import Report
from stoker.data.corpus import Corpus, open_corpus
from stoker.data.files.file_digests import file_digest
from stoker.data.sources import open_source
from stoker.data.stored_audit import audited
from stoker.errors import UserError
from stoker.hardware.cache_folder import cache_folder
from stoker.hardware.process_device import Device, is_nvidia
from stoker.job.blocks.source_block import SourceBlock
from stoker.job.imported_modules import module_of, python_files
from stoker.job.layout import Layout, layout_of
from stoker.job.load_job import LoadedJob
from stoker.job.resolution.compile_choice import compile_choice, compiles
from stoker.job.resolved import ResolvedJob
from stoker.job.rollout_sizes import RolloutSizes
from stoker.job.task_spec import NO_CRITIC, TaskSpec, task_of, together_of
from stoker.models.attention.attention_kernels import choose_kernels, heads_of
from stoker.models.build_model import Built, build_meta
from stoker.models.critic import attach_critic
from stoker.models.dropout import has_dropout
from stoker.models.families import family_of
from stoker.models.language_model import LanguageModel, OwnCritic, lay_out_for
from stoker.models.meta_model import allocate
from stoker.models.objective import Objective, next_token
from stoker.models.router_balance import RouterBalance, chooses_otherwise, hook_routers, routers_of
from stoker.models.router_check import no_routers, other_routers
from stoker.models.text import TextSide, open_text_side
from stoker.models.tuning.adapters import unwrap
from stoker.models.tuning.quantise import describe_quantisation
from stoker.models.weight_source import fill_whole
from stoker.parallel.apply_to_blocks import apply_to_blocks
from stoker.parallel.compile import has_compiler
from stoker.parallel.layout_check import layout_problem
from stoker.parallel.mesh import Mesh
from stoker.parallel.parallelize import ParallelModel, parallelize
from stoker.runs.run_folder import RunFolder
from stoker.train.language.language_task import LanguageTask
from stoker.train.language.token_rows import missing_rows
from stoker.train.prepared import Prepared, describe_parameters, engine_of
from stoker.train.rollouts.open_critic import open_critic

_CHUNKED = "chunked, trained positions only"


def objective_of(job: ResolvedJob) -> Objective:
    """Returns the objective that measures a run on data rows: the task's, or next tokens where it trains on its own
    answers.
    """
    task = task_of(job)
    return task.objective(job) if task.objective and not task.prompts else next_token


def measured_spec(job: ResolvedJob) -> TaskSpec:
    """Returns the job's task with the target of `objective_of`, which measures the tokens of data rows."""
    task = task_of(job)
    return replace(task, target="token", perplexity=True) if task.prompts else task


def prepare_language(
    loaded: LoadedJob, device: Device, base: Path, report: Report | None, mesh: Mesh | None
) -> Prepared:
    """Implements `stoker.train.prepare.prepare`."""
    spec = task_of(loaded.job)
    objective = spec.objective(loaded.job) if spec.objective else next_token
    text = open_text_side(loaded, base)
    train = loaded.job.train.model_copy(update={"precision": device.precision, "seq_len": text.seq_len})
    job = loaded.job.model_copy(update={"train": train})
    assert job.model is not None
    corpus = open_corpus(job, text.codec, seq_len=text.seq_len, base=base, report=report, loaded=loaded)
    checked = audited(corpus, text.codec, loaded)
    if checked.problems:
        corpus.close()
        raise UserError(*checked.problems)
    text = replace(text, longest_row=_longest_row(corpus, spec.rollouts(job), text.seq_len))
    first = spec.first_values(loaded, base) if spec.first_values else {}
    own = spec.own_critic(job)
    critic = open_critic(spec.critic(job), replace(loaded, job=job), base, device, text) if own else None
    stop_id = text.tokenizer.eos_token_id
    with loaded.errors_at_their_keys():
        built = build_meta(job, base, device, stop_id=stop_id, text=text.prompt_ids(job), first=first)
    model = built.model
    unused = _check_rows(loaded, text, corpus, built)
    described = describe_parameters(model)
    described_critic = f"{spec.critic(job)}: {describe_parameters(critic.model)}" if critic is not None else ""
    balance = _balance(loaded, base, unwrap(model))
    samples = _samples(replace(loaded, job=job), base, text, objective)
    layout = mesh.layout if mesh else layout_of(job)
    problem = layout_problem(unwrap(model), layout, loaded)
    if problem is not None:
        raise UserError(problem)
    compiled = _compiles(unwrap(model), job, device)
    kernels = _attention_kernels(unwrap(model), job, device, layout)
    language, spread_out = _ready(built, critic, job, device, mesh, objective, balance, compiled=compiled)
    whole = spread_out.model if spread_out else model
    task = samples(whole, language, corpus, device.torch)
    if spread_out and spread_out.root:
        task.root = spread_out.root
    facts = {
        "model": f"{job.model.name}: {described}",
        **_facts(job, text, language, device, layout, compiled=compiled),
    }
    if kernels:
        facts["attention"] = kernels
    facts |= spec.facts(loaded, base)
    if described_critic:
        facts["critic"] = described_critic
    if balance is not None:
        facts["routers"] = f"{balance.layers}, balanced by an auxiliary loss of {balance.coefficient:g}"
    if unused:
        facts["tokenizer"] = unused
    if built.new_rows is not None:
        facts["new tokens"] = _describe_new_rows(job, len(text.tokenizer) - built.new_rows.first)
    return Prepared(
        job,
        task,
        device,
        facts,
        _fingerprints(corpus, text, job, base),
        engine_of(task, device, mesh, spread_out),
        parallel=spread_out,
        audit=checked,
        corpus=corpus,
        text=text,
        new_rows=built.new_rows,
        hooks=task.hooks,
        mesh=mesh,
    )


def _longest_row(corpus: Corpus, rollouts: RolloutSizes | None, seq_len: int) -> int:
    """Returns the most tokens of a row, with the answer that is sampled to it."""
    sources = (*corpus.sources, *corpus.evaluation)
    if any(source.streams for source in sources) or (rollouts is not None and rollouts.replies):
        return seq_len  # later rows, and the replies of an environment, are not known
    lengths = np.concatenate([source.cache.column("length") for source in sources])
    if rollouts is not None:  # an answer takes the place of the row's own
        lengths = lengths - np.concatenate([s.cache.column("trained") for s in sources]) + rollouts.tokens
    return min(int(lengths.max()), seq_len)


def _fingerprints(corpus: Corpus, text: TextSide, job: ResolvedJob, base: Path) -> dict[str, str]:
    """Returns the fingerprints of the sources, of the tokenizer with each template, and of the files of rewards and
    environments; see `check_same_job`.
    """
    sources = (*corpus.sources, *corpus.evaluation)
    found = {s.source.name: s.source.fingerprint() for s in sources}
    found |= {
        f"the tokenizer or the template of {s.source.name}": text.codec.for_source(s.block, base).fingerprint
        for s in sources
    }
    named = [named.value for named in task_of(job).names(job) if named.kind == "source"]
    found |= {path: open_source(SourceBlock(path=path), base).fingerprint() for path in named}
    files = {str(f.relative_to(base) if f.is_relative_to(base) else f): f for f in _scorer_files(job, base)}
    digests = file_digest(list(files.values()), cache_folder() / "fingerprints.json")
    return found | dict(zip(files, digests, strict=True))


def _scorer_files(job: ResolvedJob, base: Path) -> Iterator[Path]:
    """Yields the files that scorers name: ``json_schema:FILE``, ``python:MODULE:FUNCTION``."""
    for named in task_of(job).names(job):
        if named.kind == "scorer":
            kind, _, argument = named.value.partition(":")
            if kind == "python" and (module := module_of(named.value, base)) is not None:
                yield from python_files(module)
            elif kind == "json_schema" and argument:
                yield base / argument


def _ready(
    built: Built,
    critic: Built | None,
    job: ResolvedJob,
    device: Device,
    mesh: Mesh | None,
    objective: Objective,
    balance: RouterBalance | None,
    *,
    compiled: bool,
) -> tuple[LanguageModel, ParallelModel | None]:
    """Returns the model, with a separate critic if any, in memory: whole, or this process' part of it."""
    if mesh is not None:
        spread_out = parallelize(
            built,
            mesh,
            objective,
            balance=balance,
            compiled=compiled,
            float8=job.train.float8,
            compute=device.autocast_dtype,
            apart=task_of(job).critic(job) != NO_CRITIC,
            critic=critic,
        )
        assert spread_out.language is not None
        return spread_out.language, spread_out
    language = _in_one_process(built, job, device, balance, compiled=compiled)
    if critic is not None:
        own = OwnCritic(_in_one_process(critic, job, device, None, compiled=compiled))
        language = replace(language, critic=own)
        attach_critic(built.model, built.weights, critic.model, critic.weights)
    return language, None


def _in_one_process(
    built: Built, job: ResolvedJob, device: Device, balance: RouterBalance | None, *, compiled: bool
) -> LanguageModel:
    """Loads the weights of a model, and applies the job's settings to its blocks."""
    fill_whole(allocate(built.model, device.torch), built.weights)
    inner = unwrap(built.model)
    with device.autocast():
        language = lay_out_for(inner, balance, compiled=compiled)
    layout, family = layout_of(job), family_of(inner.config)
    apply_to_blocks(inner, device.torch, layout, family, compiled=compiled, float8=job.train.float8)
    return language


def _compiles(model: PreTrainedModel, job: ResolvedJob, device: Device) -> bool:
    """Returns whether the model's blocks are compiled."""
    choice = compile_choice(job)
    if choice == "measured" and not has_compiler():
        return False
    return compiles(
        choice,
        layout_of(job),
        model_type=model.config.model_type,
        tuning=job.tune.method,
        precision=device.precision,
        nvidia=is_nvidia(device.torch),
    )


def _attention_kernels(model: PreTrainedModel, job: ResolvedJob, device: Device, layout: Layout) -> str:
    """Selects the kernels of attention on a GPU; returns their description.

    Newer kernels support no dropout, and are not compared for bitwise reproducible results.
    """
    heads, dtype, length = heads_of(model.config, layout.tensor), device.autocast_dtype, job.train.seq_len
    if heads is None or dtype is None or has_dropout(model) or job.train.deterministic:
        return ""
    assert isinstance(length, int)
    return choose_kernels(heads, length - 1, dtype, device.torch)  # a document's last token is only a target


def _check_rows(loaded: LoadedJob, text: TextSide, corpus: Corpus, built: Built) -> str:
    """Checks that the model has a row for every token of the data, and new rows where the job trains them first.

    Returns:
        how many tokens of the tokenizer have no row, as those of images in a text model; empty if all have one.
    """
    embedding: Any = unwrap(built.model).get_input_embeddings()
    rows, tokens, unused = embedding.weight.shape[0], len(text.tokenizer), ""
    if problem := missing_rows(loaded, text, corpus, rows):
        raise UserError(problem)
    if tokens > rows:
        unused = f"{tokens - rows:,} of its {tokens:,} tokens have no embedding, and the data has none of them"
    if loaded.job.tune.new_rows_first and built.new_rows is None:
        message = "the model has a row for every token, so there are no new ones to train first"
        hint = "remove it, or name a tokenizer of `stoker tokenizer extend` in model.tokenizer, or model.special_tokens"
        raise UserError(loaded.problem("tune.new_rows_first", message, hint))
    return unused


def _facts(
    job: ResolvedJob, text: TextSide, language: LanguageModel, device: Device, layout: Layout, *, compiled: bool
) -> dict[str, str]:
    facts = {
        "template": "the tokenizer's own" if text.own_template else "plain (the tokenizer has none)",
        "rows": "packed; documents do not attend to each other" if language.packs else "padded, grouped by length",
        "loss": "over the model's own logits" if language.head is None and layout.pipeline == 1 else _CHUNKED,
    }
    quantised = describe_quantisation(job, device, layout, language.model)
    if quantised is not None:
        facts["base"] = quantised
    if job.train.float8 != "none":
        facts["float8"] = f"{job.train.float8}, {_pace_of_float8(device, compiled=compiled)}"
    if compiled:
        facts["compiled"] = "each block, in the first step"
    return facts


def _pace_of_float8(device: Device, *, compiled: bool) -> str:
    if device.type == "cpu":
        return "imitated on this processor, which is slower than no float8"
    return "compiled" if compiled else "not compiled, which is slower than no float8: see `train.compile`"


def _samples(loaded: LoadedJob, base: Path, text: TextSide, objective: Objective) -> Callable[..., LanguageTask]:
    """Returns the constructor of the task, as its spec defines it."""
    spec = task_of(loaded.job)
    make = spec.samples(loaded, base, text) if spec.samples else LanguageTask
    extras = spec.extras(loaded, base) if spec.extras else None
    return partial(make, spec=spec, objective=objective, extras=extras, together=together_of(loaded.job))


def _balance(loaded: LoadedJob, base: Path, model: PreTrainedModel) -> RouterBalance | None:
    balance = hook_routers(model, router_coefficient(loaded.job, model))
    if loaded.job.train.router_aux_loss in ("auto", 0.0):
        return balance
    if chooses_otherwise(model) and not by_first(RunFolder(base / loaded.job.output).has_begun):
        raise UserError(other_routers(loaded))
    if balance is None:
        raise UserError(no_routers(loaded))
    return balance


def router_coefficient(job: ResolvedJob, model: PreTrainedModel) -> float:
    """Returns the factor of the routers' auxiliary loss: the job's, or the model's own if its routers are trained."""
    given = job.train.router_aux_loss
    if given != "auto":
        return given
    trained = any(p.requires_grad for router in routers_of(model) for p in router.parameters())
    own = getattr(model.config.get_text_config(), "router_aux_loss_coef", None)
    return float(own or 0.0) if trained else 0.0


def _describe_new_rows(job: ResolvedJob, tokens: int) -> str:
    words = f"{tokens:,}, each embedding starts as the mean of the embeddings of the token's former pieces"
    first = job.tune.new_rows_first
    return f"{words}; for {first} steps only they are trained" if first else words
