"""``ppo``: a policy trained on rewards, with a critic that estimates the return of its answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from stoker.job.block import Fraction, NaturalInt, PositiveInt, Text
from stoker.job.task_spec import (
    SHARED_CRITIC,
    BlockSpec,
    Decided,
    ModelSpec,
    Named,
    RowSpec,
    TaskSpec,
    WorkSpec,
    block_of_task,
)
from stoker.train.language.language_training import LanguageTraining
from stoker.train.rollouts.policy_block import (
    EXAMPLES,
    REASONS,
    TRAIN_DEFAULTS,
    PolicyBlock,
    clip_high,
    clipped_objective,
    common_settings,
    copies_of,
    expected_check_of,
    names_of,
    roles_of,
    samples_of,
    toy_keys,
)
from stoker.train.rollouts.policy_conflicts import if_known, policy_conflicts

if TYPE_CHECKING:
    from stoker.errors import Problem
    from stoker.job.conflicts.conflict_view import View
    from stoker.job.load_job import LoadedJob
    from stoker.job.resolved import ResolvedJob
    from stoker.job.schema import Job
    from stoker.models.objective import Objective
    from stoker.models.tuning.virtual_tokens import Drawn
    from stoker.train.rollouts.policy_settings import PolicySettings


class PpoBlock(PolicyBlock):
    """A policy and its critic (Schulman et al., 2017)."""

    prompts: PositiveInt = Field(default=32, description="number of prompts in each round of answers")
    answers: PositiveInt = Field(default=1, description="number of answers to each prompt")
    epochs: PositiveInt = Field(default=4, description="number of passes over the answers before new ones are sampled")
    gamma: Fraction = Field(default=1.0, description="discount of later rewards")
    lam: Fraction = Field(
        default=0.95, description="lambda of the advantage estimate: 1 has no bias, 0 has the least variance"
    )
    value_clip: Annotated[float, Field(gt=0)] | None = Field(
        default=0.2, description="clipping range of a value around that of the rollout; null disables it"
    )
    value_weight: Annotated[float, Field(gt=0)] = Field(default=0.1, description="coefficient of the critic's loss")
    critic: Text = Field(
        default=SHARED_CRITIC,
        description="model that estimates values: shared (the policy's base), or a separate model with the same "
        "tokenizer: a run of task reward, an earlier stage, a hub id or a folder",
    )
    critic_lr: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="learning rate of a separate critic"
    )
    critic_warmup: NaturalInt = Field(
        default=0, description="number of first rounds of answers that train only the critic"
    )
    whiten: bool = Field(default=True, description="whiten advantages over all answers")
    whiten_rewards: bool = Field(default=False, description="divide rewards by their standard deviation")
    kl_target: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="target KL of an answer in nats; the coefficient adapts to it, and is fixed without it",
    )
    kl_horizon: PositiveInt = Field(default=10_000, description="number of answers over which the coefficient adapts")


def _block(job: Job) -> PpoBlock:
    return job.ppo if isinstance(job.ppo, PpoBlock) else PpoBlock()  # type: ignore[attr-defined]


def _defaults(job: Job) -> dict[str, Decided]:
    kl = 0.15 if _block(job).kl_target is not None else 0.05
    return {
        **TRAIN_DEFAULTS,
        "ppo.kl": Decided(kl, "as in Ziegler et al., 2019, at its start" if kl == 0.15 else "as in Huang et al., 2024"),
        "ppo.kl_in": Decided("reward", "the critic sees what it costs to leave the reference"),
        "ppo.clip": Decided(0.2, "as in Schulman et al., 2017"),
        "ppo.clip_high": Decided(*clip_high(_block(job).clip, 0.2, 0.2, "as in Schulman et al., 2017")),
    }


def _batch(job: Job) -> int:
    block = _block(job)
    return block.prompts * block.answers


def _checks(view: View) -> Iterator[Problem]:
    if view.value("task") != "ppo":
        return
    yield from policy_conflicts(view, "ppo", 0.05, "reward")
    method = view.value("tune.method")
    if method in ("prefix", "prompt", "p-tuning"):
        message = f"`tune: {method}` does not change the model's weights, so no critic can be trained in them"
        yield from view.at_each(["tune.method"], message, "write full, lora or qlora")
    shared = view.value("ppo.critic") == SHARED_CRITIC
    if view.value("ppo.critic_warmup") and method == "full" and shared:
        message = "with `tune: full`, a shared critic trains the weights of the policy, so it cannot be trained alone"
        hint = "remove it, write tune: lora, or name a model in ppo.critic"
        yield from view.at_each(["ppo.critic_warmup", "tune.method"], message, hint)
    if not shared and (method == "qlora" or view.value("model.quantise") not in ("none", None)):
        message = "beside a quantised policy there is no critic with a base of its own"
        yield from view.at_each(["ppo.critic", "tune.method"], message, "remove ppo.critic, or write tune: lora")
    if shared and view.value("ppo.critic_lr") is not None:
        message = "a shared critic learns with the policy's rate"
        yield from view.at_each(["ppo.critic_lr"], message, "remove it, or name a model in ppo.critic")
    if view.value("ppo.kl_target") is not None and view.value("ppo.kl_in") == "loss":
        message = "an adaptive KL is one in the reward"
        yield from view.at_each(["ppo.kl_target", "ppo.kl_in"], message, "write kl_in: reward")
    if view.value("ppo.kl_target") is not None and view.value("ppo.kl") == 0:
        message = "`kl_target` multiplies the coefficient `kl`, which must be above 0 for that"
        yield from view.at_each(["ppo.kl_target", "ppo.kl"], message, "write kl: 0.15")
    if view.value("ppo.kl_target") is None and view.differs("ppo.kl_horizon"):
        message = "`kl_horizon` has no effect with a fixed coefficient"
        yield from view.at_each(["ppo.kl_horizon"], message, "remove it, or write kl_target: 6.0")
    yield from if_known(_policy_is_trained(view))


def _policy_is_trained(view: View) -> Iterator[Problem]:
    """Yields the problem of a warm-up of the critic that takes the whole run; an earlier version's run may have one."""
    from stoker.job.conflicts.layout_conflicts import batch_of

    warmup, steps = view.value("ppo.critic_warmup"), view.value("steps")
    if not warmup or steps is None or view.is_recorded("ppo.critic_warmup"):
        return
    of_round = view.value("ppo.prompts") * view.value("ppo.answers") * view.value("ppo.epochs") // batch_of(view)
    if warmup * of_round >= steps:
        message = f"the critic is trained alone for {warmup * of_round} steps, and the run has {steps}"
        hint = f"write at most {(steps - 1) // of_round} rounds"
        yield from view.at_each(["ppo.critic_warmup", "steps"], message, hint)


def settings_of(job: ResolvedJob) -> PolicySettings:
    """Returns the policy settings of a job."""
    from stoker.train.rollouts.policy_settings import PolicySettings

    block = block_of_task(job, PpoBlock)
    return PolicySettings(
        **common_settings(job, block),
        advantage="gae",
        whiten=block.whiten,
        weight="token",
        gamma=block.gamma,
        lam=block.lam,
        whiten_rewards=block.whiten_rewards,
        critic_warmup=block.critic_warmup,
        kl_target=block.kl_target,
        kl_horizon=block.kl_horizon,
    )


def _objective(job: ResolvedJob) -> Objective:
    from stoker.train.rollouts.actor_critic import ActorCritic

    block = block_of_task(job, PpoBlock)
    return ActorCritic(clipped_objective(block, critic=True), block.value_clip, block.value_weight)


def _critic_values(loaded: LoadedJob, base: Path) -> Drawn:
    """Returns the initial weights of a shared critic: the reward run's, if it has the same adapters."""
    block = _block(loaded.job)
    if block.critic != SHARED_CRITIC or block.reward is None:
        return {}
    from stoker.train.rollouts.model_reward import critic_from

    return critic_from(block.reward, loaded, base)


def _facts(loaded: LoadedJob, base: Path) -> dict[str, str]:
    from stoker.train.rollouts.model_reward import critic_start, text_difference

    block = block_of_task(loaded.job, PpoBlock)
    facts = text_difference(block.reward, loaded, base)
    return facts | ({"critic": critic_start(block.reward, loaded, base)} if block.critic == SHARED_CRITIC else {})


def _critic_rate(job: ResolvedJob) -> float:
    return (_block(job).critic_lr or job.train.lr) / job.train.lr


def _names(job: Job) -> tuple[Named, ...]:
    critic = _block(job).critic
    own = (Named("ppo.critic", critic, "model"),) if critic != SHARED_CRITIC else ()
    return (*names_of("ppo", _block(job)), *own)


def _toy_keys(job: Job) -> dict[str, object]:
    block = _block(job)
    epochs = {"epochs": min(block.epochs, 2), "critic_warmup": min(block.critic_warmup, 1)}
    return {**toy_keys(1), **epochs}


TASK = TaskSpec(
    name="ppo",
    defaults=_defaults,
    batch=_batch,
    adapter_lr=Decided(1e-5, "adapters take ten times the learning rate of full tuning"),
    block=BlockSpec(
        written=PpoBlock,
        hint="write `ppo:` with a reward, as {reward: RUN} or {rewards: [numeric]}",
        reasons={
            **REASONS,
            "prompts": "enough for a mean over answers",
            "answers": "the baseline is the critic, not other answers",
            "epochs": "as in Ouyang et al., 2022",
            "gamma": "a reward at the end counts for every token",
            "lam": "as in Schulman et al., 2017",
            "value_clip": "the critic moves no faster than the policy",
            "value_weight": "as in Huang et al., 2024",
            "critic": "policy and critic share the base",
            "critic_lr": "the policy's learning rate, as in Huang et al., 2024",
            "critic_warmup": "policy and critic are trained from the start",
            "whiten": "steps do not depend on the scale of rewards",
            "whiten_rewards": "the scale of rewards is kept",
            "kl_target": "a fixed coefficient",
            "kl_horizon": "as in Ziegler et al., 2019",
        },
        examples={**EXAMPLES, "value_clip": "0.2", "kl_target": "6.0", "critic_lr": "1e-5"},
        checks=(_checks,),
        toy_keys=_toy_keys,
    ),
    names=_names,
    rows=RowSpec(prompts=True, expected_check=lambda job: expected_check_of(_block(job))),
    model=ModelSpec(dropout=False, critic=lambda job: _block(job).critic, critic_rate=_critic_rate),
    work=WorkSpec(
        roles=lambda job: (*roles_of(_block(job)), "critic"),
        resident=lambda job: copies_of(_block(job)),
        rollouts=lambda job: settings_of(job).sizes,
    ),
    language=LanguageTraining(
        objective=_objective,
        samples=lambda loaded, base, text: samples_of(loaded, base, text, settings_of(loaded.job)),
        first_values=_critic_values,
        facts=_facts,
        target="answer",
        perplexity=False,
    ),
)
