"""The model that scores answers: that of a reward run, or a sequence classifier with one label."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import nn

from stoker.checkpoint.load_run import open_run
from stoker.errors import Problem, UserError
from stoker.hardware.process_device import Device
from stoker.job.blocks.model_block import ModelBlock
from stoker.job.document.yaml_document import parse_mapping
from stoker.job.load_job import LoadedJob, check_document
from stoker.job.resolved import ResolvedJob
from stoker.job.task_spec import TASKS, task_of
from stoker.models.build_model import build_model
from stoker.models.hf_config import config_of
from stoker.models.load_model import is_classifier
from stoker.models.model_files import settings_of
from stoker.models.model_source import find_model, require_model
from stoker.models.score_head import SCORE_OFFSET, score_head_of
from stoker.models.text import TextSide, context_of, open_text_side
from stoker.models.tuning.adapters import unwrap
from stoker.models.tuning.quantise import device_for
from stoker.parallel.float64_mode import arithmetic_of

SCORES = "reward"  # the task of the models that give scores


class ScoringModel(NamedTuple):
    """A model with a score head, in evaluation mode.

    Attributes:
        text: its tokenizer, with the chat template of its rows.
        ends_at_stop: whether the score of a text is that at the last stop token, as in a run of task reward and its
            exports, and not at the last token, as in other sequence classifiers.
    """

    model: nn.Module
    device: Device
    text: TextSide
    ends_at_stop: bool


def is_model(named: str, base: Path) -> bool:
    """Returns whether a name is that of a model, and not of a run."""
    return find_model(named, base, or_run=True) is not None


def open_scoring_model(named: str, loaded: LoadedJob, base: Path) -> ScoringModel:
    """Opens a reward run, or a sequence classifier in a folder or on the hub.

    Raises:
        UserError: there is none, or it gives no scores.
    """
    if not is_model(named, base):
        tuned = open_run(named, base)
        if task_of(tuned.job).model.head != "score":
            message = f"{named} is a run of task {tuned.job.task}, whose model gives no scores"
            raise UserError(Problem(message, "name a run of task reward"))
        text = replace(tuned.text, codec=tuned.text.codec.for_source(tuned.job.data[0], base))
        return ScoringModel(tuned.model, tuned.device, text, ends_at_stop=True)
    job = job_of_classifier(named, loaded, base)
    device = device_for(job)
    with arithmetic_of(device):
        model = build_model(job, base, device).eval().requires_grad_(False)
    head = score_head_of(model)
    for parameter in model.parameters():  # as the weights of a frozen base
        if device.autocast_dtype is not None and (head is None or parameter is not head.weight):
            parameter.data = parameter.data.to(device.autocast_dtype)
    exported = hasattr(unwrap(model).config, SCORE_OFFSET)
    return ScoringModel(model, device, open_text_side(replace(loaded, job=job), base), ends_at_stop=exported)


def open_classifier(block: ModelBlock, base: Path) -> ScoringModel:
    """Opens a sequence classifier without a job.

    Raises:
        UserError: it cannot be loaded, gives no single score, or has no chat template.
    """
    flags = {"trust_remote_code": block.trust_remote_code, "allow_pickle": block.allow_pickle}
    job = {"task": SCORES, "model": {"name": block.name, **flags}, "data": "unused.jsonl", "tune": "full", "steps": 1}
    scoring = open_scoring_model(block.name, check_document(parse_mapping(json.dumps(job), file="")), base)
    if not scoring.text.own_template:
        message = f"{block.name} has no chat template, in which it reads the answers that it scores"
        raise UserError(Problem(message, "add the chat template that it was trained with to its folder"))
    return scoring


def names_classifier(block: ModelBlock, base: Path) -> bool:
    """Returns whether a model is a sequence classifier."""
    source = find_model(block.name, base, or_run=True)
    return (
        source is not None
        and source.kind in ("folder", "hub")
        and is_classifier(config_of(settings_of(source, block.revision, own_code=block.trust_remote_code), block))
    )


def job_of_classifier(named: str, loaded: LoadedJob, base: Path) -> ResolvedJob:
    """Returns a job that scores by a sequence classifier.

    Raises:
        UserError: it is another model, which gives no scores.
    """
    job = scoring_job(named, loaded)
    block = job.model
    assert block is not None
    if not names_classifier(block, base):
        message = f"{named} is a language model, which gives no scores"
        raise UserError(Problem(message, "name a run of task reward, or a sequence classifier with one label"))
    tune, model = job.tune.model_copy(update={"method": "full"}), block.model_copy(update={"quantise": "none"})
    context = context_of(require_model(named, base), block) or job.train.seq_len
    train = job.train.model_copy(update={"seq_len": min(job.train.seq_len, context)})  # its rows are checked themselves
    return job.model_copy(update={"tune": tune, "model": model, "train": train})


def scoring_job(named: str, loaded: LoadedJob) -> ResolvedJob:
    """Returns a job of task reward for a model, tuned as the policy is."""
    job = loaded.job
    assert job.model is not None
    block = TASKS[SCORES].block
    assert block is not None
    model = job.model if named == job.model.name else job.model.of_other(named)
    return job.model_copy(update={"task": SCORES, SCORES: block.written(), "model": model})
