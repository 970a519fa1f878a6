"""Makes the samples of a policy's job."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from stoker.errors import UserError
from stoker.job.load_job import LoadedJob
from stoker.models.text import TextSide
from stoker.scoring.scorers import scorer_of
from stoker.train.language_task import LanguageTask
from stoker.train.rollouts.policy_block import PolicyBlock, RewardBlock
from stoker.train.rollouts.policy_settings import PolicySettings
from stoker.train.rollouts.policy_task import PolicyTask
from stoker.train.rollouts.rewards import Reward, Rewards, ScorerReward, length_reward


def policy_samples(
    loaded: LoadedJob, base: Path, text: TextSide, *, block: PolicyBlock, settings: PolicySettings
) -> Callable[..., LanguageTask]:
    """What makes the task of a prepared job.

    Raises:
        UserError: there is no such reward, or the answers do not fit into the model's context.
    """
    job = loaded.job
    if text.context is not None and settings.max_tokens >= text.context:
        message = f"answers of {settings.max_tokens:,} tokens leave no room for a prompt in {text.context:,}"
        raise UserError(loaded.problem(f"{job.task}.max_tokens", message, "write fewer"))
    return partial(
        PolicyTask,
        settings=settings,
        rewards=rewards_of(block, loaded, base),
        codec=text.codec,
        context=text.context,
        seed=job.seed,
        micro_batch=job.train.micro_batch,
    )


def rewards_of(block: PolicyBlock, loaded: LoadedJob, base: Path) -> Rewards:
    """The rewards of a job.

    Raises:
        UserError: there is no such reward, with the key's place.
    """
    given = [block.rewards] if isinstance(block.rewards, str) else block.rewards
    named = [each if isinstance(each, RewardBlock) else RewardBlock(name=each) for each in given]
    found: list[tuple[Reward, float]] = []
    for number, each in enumerate(named):
        key = f"{loaded.job.task}.rewards" + (f"[{number}]" if not isinstance(block.rewards, str) else "")
        try:
            found.append((_reward(each.name, base), each.weight))
        except UserError as error:
            (problem,) = error.problems
            raise UserError(loaded.problem(key, problem.message, problem.suggestion)) from error
    return Rewards(tuple(found))


def _reward(name: str, base: Path) -> Reward:
    kind, _, argument = name.partition(":")
    return length_reward(argument) if kind == "length" else ScorerReward(name, scorer_of(name, base))
