"""How a policy is trained from its answers: what `ppo` and every loss of `grpo` are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stoker.train.rollouts.iteration_plan import IterationPlan

Advantage = Literal["group", "group mean", "leave one out", "reward to go", "gae"]
Weight = Literal["token", "answer", "longest", "sum"]


@dataclass(frozen=True)
class PolicySettings:
    """The settings of a run.

    Attributes:
        plan: prompts, answers and passes of an iteration.
        max_tokens: most tokens of an answer.
        temperature: of the sampling; every log-probability is of logits divided by it.
        advantage: see `stoker.train.rollouts.advantages`.
        whiten: whether advantages are whitened over all tokens of an iteration.
        weight: what a token counts: 1 over the tokens of the step (``token``), of its answer (``answer``), or over
            ``max_tokens`` (``longest``), or 1 (``sum``); the last three over the answers of the step.
        kl: factor of the KL to the reference; 0 for no reference.
        kl_in_reward: whether it is subtracted from each token's reward (estimator k1), and not a term of the loss.
        missing_end: subtracted from the score of an answer without a stop token.
        overlong: tokens before ``max_tokens`` over which a penalty grows from 0 to 1 (DAPO, eq. 13).
        score_clip: scores are clipped to this on both sides; None for not.
        dynamic: most rounds of prompts that an iteration samples from to replace those whose answers all score alike
            (DAPO, section 3.2); 1 for no replacing.
        gamma, lam: discount, and lambda of GAE.
        whiten_rewards: whether rewards are divided by their standard deviation first.
        critic_warmup: iterations in which only the critic learns.
        kl_target: the KL of an answer that ``kl`` is moved towards (Ziegler et al., 2019, section 2.2); None for a
            fixed ``kl``.
        kl_horizon: answers over which it moves by as much as it is off.
        offload_idle: whether memory that idles while answers are sampled is given back.
    """

    plan: IterationPlan
    max_tokens: int
    temperature: float
    advantage: Advantage
    whiten: bool
    weight: Weight
    kl: float
    kl_in_reward: bool
    missing_end: float = 0.0
    overlong: int = 0
    score_clip: float | None = None
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
        """Whether there is one."""
        return self.advantage == "gae"
