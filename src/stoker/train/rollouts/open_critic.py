"""Opening of a separate critic: a run of task reward, or a model with a randomly initialised score head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from stoker.checkpoint.load_run import state_at
from stoker.errors import UserError, placed_errors
from stoker.hardware.process_device import Device
from stoker.job.layout import layout_of
from stoker.job.load_job import LoadedJob, load_job
from stoker.job.resolved import ResolvedJob
from stoker.job.task_spec import task_of
from stoker.models.build_model import Built, build_meta
from stoker.models.score_head import OFFSET, score_head_of
from stoker.models.text import TextSide, open_text_side
from stoker.models.tuning.adapters import unwrap
from stoker.models.tuning.virtual_tokens import Drawn
from stoker.parallel.layout_check import layout_problem
from stoker.runs.find_run import find_run
from stoker.train.rollouts.scoring_model import is_model, scoring_job

KEY = "ppo.critic"


def open_critic(named: str, loaded: LoadedJob, base: Path, device: Device, text: TextSide) -> Built:
    """Builds the critic of a job on meta; see `build_meta`. A reward run's critic starts with its weights and offset.

    Args:
        named: a model or a run, as written in the job.
        text: the policy's text side.

    Raises:
        UserError: the model or run does not exist, its model gives no scores, it cannot be laid out as the policy is,
            its tokenizer differs, or its context is shorter than the policy's rows; the error names the key.
    """
    hint = "name a run of task reward on the policy's model, or the policy's model itself"
    with placed_errors(lambda p: loaded.problem(KEY, p.message, p.suggestion or hint)):
        job, first = (scoring_job(named, loaded), {}) if is_model(named, base) else _of_run(named, loaded, base)
        theirs = replace(loaded, job=job)
        own = open_text_side(theirs, base)
        if own.tokenizer.get_vocab() != text.tokenizer.get_vocab():
            raise UserError(f"the critic {named} has another tokenizer than the policy")
        built = build_meta(job, base, device, first=first)
    own.check_fits(text.longest_row or text.seq_len, loaded, KEY, named)
    problem = layout_problem(unwrap(built.model), layout_of(loaded.job), loaded)
    if problem is not None:
        raise UserError(loaded.problem(KEY, f"the critic {named}: {problem.message}", problem.suggestion))
    if f"buffer/{OFFSET}" in first:
        head = score_head_of(unwrap(built.model))
        getattr(head, OFFSET).copy_(first[f"buffer/{OFFSET}"]())
    return built


def _of_run(named: str, loaded: LoadedJob, base: Path) -> tuple[ResolvedJob, Drawn]:
    """Returns the job of a run, and its weights by name."""
    folder = find_run(named, base)
    theirs = load_job(folder.job).job
    if task_of(theirs).model.head != "score":
        raise UserError(f"{named} is a run of task {theirs.task}, whose model gives no scores")
    assert theirs.model is not None
    if theirs.tune.method not in ("full", "lora") or theirs.model.quantise != "none":
        raise UserError(f"{named} is a run on a quantised base, which cannot be a critic of its own")
    first: Drawn = {}
    for key, tensor in state_at(folder, theirs, "last", base).tensors.items():
        if not isinstance(tensor, Tensor):
            continue
        if key.startswith("model/"):
            first[key.removeprefix("model/")] = tensor.detach
        elif key.startswith("buffer/") and key.endswith(f".{OFFSET}"):
            first[f"buffer/{OFFSET}"] = tensor.detach
    tune = theirs.tune.model_copy(update={"dropout": 0.0})
    return theirs.model_copy(update={"train": loaded.job.train, "tune": tune, "parallel": loaded.job.parallel}), first
