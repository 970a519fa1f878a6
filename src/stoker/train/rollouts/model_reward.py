"""Rewards from a reward model, whose weights may also initialise the critic if it is a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from stoker.checkpoint.load_run import state_at
from stoker.errors import UserError
from stoker.job.load_job import LoadedJob, load_job
from stoker.job.resolved import ResolvedJob
from stoker.models.critic import CRITIC
from stoker.models.head import VALUE_HEAD
from stoker.models.score_head import OFFSET
from stoker.models.text import TextSide, open_text_side
from stoker.models.tuning.virtual_tokens import Drawn
from stoker.parallel.offload.idle_offload import IdleOffload
from stoker.runs.find_run import find_run
from stoker.train.preference.answer_scores import AnswerScores
from stoker.train.rollouts.rewards import PolicyAnswer
from stoker.train.rollouts.scoring_model import is_model, job_of_classifier, open_scoring_model

NAME = "reward"


class ModelReward:
    """Scores answers with a reward model; demonstrations in the data of a run score 0. Each process has a copy.

    Args:
        named: a run of task reward, or a sequence classifier.
        offload_idle: whether the model is in host memory while it does not score.

    Raises:
        UserError: it does not exist or gives no scores, its tokenizer is not the policy's, or its context is shorter
            than the policy's rows.
    """

    name = NAME

    def __init__(
        self, named: str, loaded: LoadedJob, base: Path, text: TextSide, *, offload_idle: bool = False
    ) -> None:
        key = f"{loaded.job.task}.reward"
        with loaded.errors_at(key):
            scoring = open_scoring_model(named, loaded, base)
        model = scoring.model
        self._scores = AnswerScores(scoring)
        self._idle = IdleOffload(lambda: [*model.parameters(), *model.buffers()] if offload_idle else ())
        self._idle.leave()
        if scoring.text.tokenizer.get_vocab() != text.tokenizer.get_vocab():
            message = f"the reward model {named} has another tokenizer than the policy"
            raise UserError(loaded.problem(key, message, "train a reward model on the policy's model"))
        scoring.text.check_fits(text.longest_row or text.seq_len, loaded, key, named)

    def __call__(self, answers: Sequence[PolicyAnswer]) -> list[float]:
        """Returns the score at the last token of each answer; see `stoker.train.rollouts.rewards.Reward`."""
        with self._idle.here():
            return self._scores([(*answer.prompt_ids, *answer.ids) for answer in answers])


def template_difference(named: str | None, loaded: LoadedJob, base: Path) -> dict[str, str]:
    """Returns a line on a reward model with another chat template than the prompts of a job; else none."""
    if named is None or _templates(loaded, base) <= _templates_of(named, loaded, base):
        return {}
    has = f"{named} has" if is_model(named, base) else f"the rows of {named} have"
    return {"reward": f"WARNING: {has} another chat template than the prompts, so it scores other texts"}


def _templates_of(named: str, loaded: LoadedJob, base: Path) -> set[str]:
    if not is_model(named, base):
        return _templates(load_job(find_run(named, base).job), base)
    job = job_of_classifier(named, loaded, base)
    return {open_text_side(replace(loaded, job=job), base).codec.template.source}


def _templates(loaded: LoadedJob, base: Path) -> set[str]:
    text = open_text_side(loaded, base)
    return {text.codec.for_source(source, base).template.source for source in loaded.job.data}


def critic_from(run: str, loaded: LoadedJob, base: Path) -> Drawn:
    """Returns initial weights of a shared critic from a reward run with the same adapters on the same model; else none.

    A critic starts as the reward model (Huang et al., 2024, "The N+ Details", 7), so its first values are the scores.
    """
    if is_model(run, base):
        return {}
    folder = find_run(run, base)
    theirs = load_job(folder.job).job
    if _difference(theirs, loaded.job):
        return {}
    tensors = state_at(folder, theirs, "last", base).tensors
    found: Drawn = {}
    head = f"base_model.model.{VALUE_HEAD}"
    for key, tensor in tensors.items():
        name = key.removeprefix("model/")
        if not isinstance(tensor, Tensor):
            continue
        if ".lora_" in name:
            found[name.replace(".default.", f".{CRITIC}.")] = tensor.detach
        elif key.startswith("model/") and tensor.shape[:1] == (1,):
            found[f"{head}.weight"] = tensor.detach
        elif key.startswith("buffer/") and name.endswith(f".{OFFSET}"):
            found[f"{head}.bias"] = (-tensor.reshape(1)).detach
    return found


def critic_start(run: str | None, loaded: LoadedJob, base: Path) -> str:
    """Describes what a shared critic begins as, and why it does not begin as the reward run `run`."""
    if run is None:
        return "begins at random"
    if is_model(run, base):
        return f"begins at random, as {run} is no run with adapters on the policy's model"
    why = _difference(load_job(find_run(run, base).job).job, loaded.job)
    hint = f"to begin as its scores, write critic: {run}, or a reward run that is tuned as this job is"
    return f"begins at random, as {why} ({hint})" if why else "begins as the reward model"


def _difference(theirs: ResolvedJob, ours: ResolvedJob) -> str:
    """Returns why the adapters of a reward run do not fit a job's critic; empty if they do."""
    assert theirs.model is not None and ours.model is not None
    if ours.tune.method not in ("lora", "qlora"):
        return f"a critic in the policy's own body has no adapter of its own (tune: {ours.tune.method})"
    if theirs.model.name != ours.model.name:
        return f"the reward run is on {theirs.model.name} and the policy on {ours.model.name}"
    if theirs.model.config != ours.model.config:
        return "the reward run has another model.config"
    for key in ("method", "rank", "alpha", "targets", "layers", "rslora", "dora", "modules_to_save"):
        other, own = getattr(theirs.tune, key), getattr(ours.tune, key)
        if other != own:
            return f"tune.{key} is {own} here and {other} in the reward run"
    return ""
