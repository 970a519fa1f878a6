"""Settings of policy training, shared by `ppo` and every loss of `grpo`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stoker.job.rollout_sizes import RolloutSizes
from stoker.train.rollouts.iteration_plan import IterationPlan

Advantage = Literal["group", "group mean", "leave one out", "reward to go", "gae"]
Weight = Literal["token", "answer", "longest", "sum"]


@dataclass(frozen=True)
class PolicySettings:
    """Settings of policy training.

    Attributes:
        plan: prompts, answers and passes of an iteration.
        max_tokens: most tokens of an answer.
        replies: whether an environment replies to the model's turns.
        temperature: sampling temperature; log-probabilities are of logits divided by it.
        advantage: see `stoker.train.rollouts.advantages`.
        whiten: whether advantages are whitened over all tokens of an iteration.
        weight: weight of a token: 1 over the tokens of the step (``token``), of its answer (``answer``), or over
            ``max_tokens`` (``longest``), or 1 (``sum``); the last three over the answers of the step.
        kl: factor of the KL to the reference; 0 for no reference.
        kl_in_reward: whether the KL is subtracted from each token's reward (estimator k1) instead of being a loss term.
        missing_end: penalty of an answer without a stop token.
        overlong: tokens before ``max_tokens`` over which a penalty grows from 0 to 1 (DAPO, eq. 13).
        mask_truncated: whether answers without a stop token have no weight (DAPO, section 3.4).
        score_clip: scores are clipped to this range around 0; None for no clipping.
        advantage_clip: advantages are clipped to this range around 0, after whitening; None for no clipping.
        dynamic: most sampling rounds of an iteration, which replace prompts whose answers all have the same score
            (DAPO, section 3.2); 1 for no replacement.
        gamma, lam: discount, and lambda of GAE.
        whiten_rewards: whether rewards are divided by their standard deviation first.
        critic_warmup: iterations that train the critic alone.
        kl_target: KL per answer that ``kl`` is adapted to (Ziegler et al., 2019, section 2.2); None for a fixed ``kl``.
        kl_horizon: answers over which the relative deviation from the target is applied once.
        offload_idle: whether memory idle during sampling is released.
    """

    plan: IterationPlan
    max_tokens: int
    temperature: float
    advantage: Advantage
    whiten: bool
    weight: Weight
    kl: float
    kl_in_reward: bool
    replies: bool = False
    missing_end: float = 0.0
    overlong: int = 0
    mask_truncated: bool = False
    score_clip: float | None = None
    advantage_clip: float | None = None
    dynamic: int = 1
    gamma: float = 1.0
    lam: float = 0.95
    whiten_rewards: bool = False
    critic_warmup: int = 0
    kl_target: float | None = None
    kl_horizon: int = 10_000
    offload_idle: bool = False

    @property
    def critic(self) -> bool:
        """Whether there is a critic."""
        return self.advantage == "gae"

    @property
    def scores_in_training(self) -> bool:
        """Whether ``old`` may come from the passes that train on the answers.

        They then are in one step, and nothing that is computed before it depends on the policy's log-probabilities.
        """
        before = self.critic or (self.kl > 0 and self.kl_in_reward)
        return self.plan.epochs == 1 and self.plan.batch == self.plan.rollouts and not before

    @property
    def sizes(self) -> RolloutSizes:
        """The sizes of an iteration, for the planner."""
        plan = self.plan
        readings = (not self.scores_in_training) + (self.kl > 0) + self.critic
        return RolloutSizes(
            plan.prompts,
            plan.answers,
            self.max_tokens,
            plan.epochs,
            readings,
            self.replies,
            scored_in_training=self.scores_in_training,
            reference=self.kl > 0,
            idle_on_host=self.offload_idle,
        )

    @property
    def in_groups(self) -> bool:
        """Whether an answer is compared with the other answers to its prompt alone."""
        return self.advantage in ("group", "group mean", "leave one out")
