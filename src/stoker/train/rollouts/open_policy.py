"""Construction of a policy task."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from stoker.errors import UserError
from stoker.job.load_job import LoadedJob
from stoker.models.text import TextSide
from stoker.scoring.python_scorer import python_function
from stoker.scoring.scorers import scorer_of
from stoker.train.language.language_task import LanguageTask
from stoker.train.rollouts.environment import Environment
from stoker.train.rollouts.model_reward import ModelReward
from stoker.train.rollouts.policy_block import PolicyBlock
from stoker.train.rollouts.policy_settings import PolicySettings
from stoker.train.rollouts.policy_task import PolicyTask
from stoker.train.rollouts.pretraining_mix import open_mix
from stoker.train.rollouts.rewards import LENGTH, Reward, Rewards, ScorerReward, length_reward


def policy_task_factory(
    loaded: LoadedJob, base: Path, text: TextSide, *, block: PolicyBlock, settings: PolicySettings
) -> Callable[..., LanguageTask]:
    """Returns the constructor of a prepared job's task.

    Raises:
        UserError: a reward does not exist, or the answers do not fit into ``train.seq_len``.
    """
    job = loaded.job
    if settings.max_tokens >= text.seq_len:
        message = f"answers of {settings.max_tokens:,} tokens leave no room for a prompt in {text.seq_len:,}"
        raise UserError(loaded.problem(f"{job.task}.max_tokens", message, "write fewer"))
    return partial(
        PolicyTask,
        settings=settings,
        rewards=rewards_of(block, loaded, base, text),
        mix=open_mix(block.ptx, loaded, base, text) if block.ptx is not None else None,
        codec=text.codec,
        context=text.seq_len,
        seed=job.seed,
        environment=_environment(block, loaded, base, text),
        micro_batch=job.train.micro_batch,
    )


def _environment(block: PolicyBlock, loaded: LoadedJob, base: Path, text: TextSide) -> Environment | None:
    if block.environment is None:
        return None
    with loaded.errors_at(f"{loaded.job.task}.environment"):
        function = python_function(block.environment, block.environment.removeprefix("python:"), base)
    sources = (*loaded.job.data, *loaded.job.evaluate.data)
    codecs = [text.codec.for_source(source, base) for source in sources]
    return Environment(block.environment, function, codecs, block.turns)


def rewards_of(block: PolicyBlock, loaded: LoadedJob, base: Path, text: TextSide) -> Rewards:
    """Returns the rewards of a job.

    Raises:
        UserError: a reward does not exist; the error names the key's place.
    """
    given = [block.rewards] if isinstance(block.rewards, str) else block.rewards
    weights = given if isinstance(given, dict) else dict.fromkeys(given, 1.0)
    found: list[tuple[Reward, float]] = []
    if block.reward is not None:
        found.append((ModelReward(block.reward, loaded, base, text, offload_idle=block.offload_idle), 1.0))
    for number, (name, weight) in enumerate(weights.items()):
        key = f"{loaded.job.task}.rewards" + (f"[{number}]" if isinstance(block.rewards, list) else "")
        with loaded.errors_at(key):
            found.append((_reward(name, base), weight))
    return Rewards(tuple(found))


def _reward(name: str, base: Path) -> Reward:
    kind, _, argument = name.partition(":")
    return length_reward(argument) if kind == LENGTH else ScorerReward(name, scorer_of(name, base))
