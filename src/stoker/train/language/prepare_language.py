"""Preparation of a language model, its data and its task, in the order of the data's path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from stoker.data.audit import Audit
from stoker.data.build_cache import Report
from stoker.data.corpus import Corpus, open_corpus
from stoker.data.stored_audit import audited
from stoker.errors import UserError
from stoker.hardware.process_device import Device
from stoker.job.layout import layout_of
from stoker.job.load_job import LoadedJob
from stoker.job.rollout_sizes import RolloutSizes
from stoker.job.task_spec import task_of, training_of, unit_size_of
from stoker.models.build_model import Built, build_meta
from stoker.models.objective import Objective, next_token
from stoker.models.text import TextSide, open_text_side
from stoker.models.tuning.adapters import unwrap
from stoker.parallel.layout_check import layout_problem
from stoker.parallel.mesh import Mesh
from stoker.train.language.input_fingerprints import input_fingerprints
from stoker.train.language.language_facts import describe_left_out, describe_new_rows, language_facts
from stoker.train.language.language_task import LanguageTask
from stoker.train.language.place_model import choose_attention, describe_linear, is_compiled, place_model
from stoker.train.language.router_loss import open_router_loss
from stoker.train.language.token_rows import missing_rows
from stoker.train.prepared import Prepared, describe_parameters, engine_of
from stoker.train.rollouts.open_critic import open_critic


def prepare_language(
    loaded: LoadedJob, device: Device, base: Path, report: Report | None, mesh: Mesh | None
) -> Prepared:
    """Implements `stoker.train.prepare.prepare`."""
    text = open_text_side(loaded, base)
    train = loaded.job.train.model_copy(update={"precision": device.precision, "seq_len": text.seq_len})
    job = loaded.job.model_copy(update={"train": train})
    corpus = open_corpus(job, text.codec, seq_len=text.seq_len, base=base, report=report, loaded=loaded)
    try:
        checked = audited(corpus, text.codec, loaded)
        if checked.problems:
            raise UserError(*checked.problems)
        text = replace(text, longest_row=_longest_row(corpus, task_of(job).work.rollouts(job), text.seq_len))
        return _prepare_model(replace(loaded, job=job), device, base, mesh, text, corpus, checked)
    except BaseException:
        corpus.close()
        raise


def _prepare_model(
    loaded: LoadedJob,
    device: Device,
    base: Path,
    mesh: Mesh | None,
    text: TextSide,
    corpus: Corpus,
    checked: Audit,
) -> Prepared:
    """Builds the model for the job's data, checks what only the model tells, and loads its weights."""
    job = loaded.job
    assert job.model is not None
    spec, training, layout = task_of(job).model, training_of(job), mesh.layout if mesh else layout_of(job)
    objective = training.objective(job) if training.objective else next_token
    first = training.first_values(loaded, base) if training.first_values else {}
    critic = open_critic(spec.critic(job), loaded, base, device, text) if spec.own_critic(job) else None
    with loaded.errors_at_their_keys():
        stop_id = text.tokenizer.eos_token_id
        built = build_meta(job, base, device, stop_id=stop_id, text=text.prompt_ids(job), first=first)
    inner = unwrap(built.model)
    unused = _check_rows(loaded, text, corpus, built)
    facts = {"model": f"{job.model.name}: {describe_parameters(built.model)}"}
    if built.left_out:
        facts["image part"] = describe_left_out(built.left_out)
    described_critic = f"{spec.critic(job)}: {describe_parameters(critic.model)}" if critic is not None else ""
    balance = open_router_loss(loaded, base, inner)
    task_type = _task_type(loaded, base, text, objective)
    if problem := layout_problem(inner, layout, loaded):
        raise UserError(problem)
    compiled, kernels = is_compiled(inner, job, device), choose_attention(inner, job, device, layout)

    language, parallel = place_model(built, critic, job, device, mesh, objective, balance, compiled=compiled)
    task = task_type(parallel.model if parallel else built.model, language, corpus, device.torch)
    if parallel and parallel.root:
        task.root = parallel.root

    facts |= language_facts(job, text, language, device, layout, compiled=compiled)
    if kernels:
        facts["attention"] = kernels
    if linear := describe_linear(inner, device):
        facts["linear attention"] = linear
    facts |= training.facts(loaded, base)
    if described_critic:
        facts["critic"] = described_critic
    if balance is not None:
        facts["routers"] = f"{balance.layers}, balanced by an auxiliary loss of {balance.coefficient:g}"
    if unused:
        facts["tokenizer"] = unused
    if built.new_rows is not None:
        facts["new tokens"] = describe_new_rows(job, len(text.tokenizer) - built.new_rows.first)
    return Prepared(
        job,
        task,
        device,
        facts,
        input_fingerprints(corpus, text, job, base),
        engine_of(task, device, mesh, parallel),
        parallel=parallel,
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


def _task_type(loaded: LoadedJob, base: Path, text: TextSide, objective: Objective) -> Callable[..., LanguageTask]:
    """Returns the constructor of the task."""
    training = training_of(loaded.job)
    make = training.samples(loaded, base, text) if training.samples else LanguageTask
    extras = training.extras(loaded, base) if training.extras else None
    return partial(make, training=training, objective=objective, extras=extras, unit_size=unit_size_of(loaded.job))
