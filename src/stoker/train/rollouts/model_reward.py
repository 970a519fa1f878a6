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
from stoker.train.rollouts.scored_texts import tokens_of_reward_model
from stoker.train.rollouts.scoring_model import is_model, job_of_classifier, open_scoring_model

NAME = "reward"


class ModelReward:
    """Scores answers with a reward model; demonstrations in the data of a run score 0. Each process has a copy.

    Args:
        named: a run of task reward, or a sequence classifier.
        offload_idle: whether the model is in host memory while it does not score.

    Raises:
        UserError: it does not exist or gives no scores, its context is shorter than the policy's rows, or it has
            another tokenizer than the policy and no chat template.
    """

    name = NAME

    def __init__(
        self, named: str, loaded: LoadedJob, base: Path, text: TextSide, *, offload_idle: bool = False
    ) -> None:
        key = f"{loaded.job.task}.reward"
        with loaded.errors_at(key):
            scoring = open_scoring_model(named, loaded, base)
        model = scoring.model
        self._scoring, self._named, self._scores = scoring, named, AnswerScores(scoring)
        self._same_tokens = _same_tokens(scoring.text, text)
        self._idle = IdleOffload(lambda: [*model.parameters(), *model.buffers()] if offload_idle else ())
        self._idle.leave()
        if self._same_tokens:
            scoring.text.check_fits(text.longest_row or text.seq_len, loaded, key, named)
        elif is_model(named, base) and not scoring.text.own_template:
            message = f"{named} has another tokenizer than the policy, and no chat template to write texts for it"
            raise UserError(
                loaded.problem(key, message, "add the chat template that it was trained with to its folder")
            )

    def __call__(self, answers: Sequence[PolicyAnswer]) -> list[float]:
        """Returns the score at the last token of each answer; see `stoker.train.rollouts.rewards.Reward`."""
        if self._same_tokens:
            rows = [(*answer.prompt_ids, *answer.ids) for answer in answers]
        else:
            rows = [tokens_of_reward_model(self._scoring, answer, self._named) for answer in answers]
        with self._idle.here():
            return self._scores(rows)


def text_difference(named: str | None, loaded: LoadedJob, base: Path) -> dict[str, str]:
    """Returns a line on a reward model with another tokenizer, or another chat template than the prompts; else none."""
    if named is None:
        return {}
    of_model = is_model(named, base)
    theirs = replace(loaded, job=job_of_classifier(named, loaded, base)) if of_model else _loaded_run(named, base)
    own, other = open_text_side(loaded, base), open_text_side(theirs, base)
    if not _same_tokens(own, other):
        return {"reward": f"{named} has another tokenizer, and reads the texts in its own chat template"}
    if _templates(own, loaded, base) <= (
        {other.codec.template.source} if of_model else _templates(other, theirs, base)
    ):
        return {}
    has = f"{named} has" if of_model else f"the rows of {named} have"
    return {"reward": f"WARNING: {has} another chat template than the prompts, so it scores other texts"}


def _same_tokens(one: TextSide, other: TextSide) -> bool:
    return one.tokenizer.get_vocab() == other.tokenizer.get_vocab()


def _loaded_run(named: str, base: Path) -> LoadedJob:
    return load_job(find_run(named, base).job)


def _templates(text: TextSide, loaded: LoadedJob, base: Path) -> set[str]:
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
    why = _difference(_loaded_run(run, base).job, loaded.job)
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
