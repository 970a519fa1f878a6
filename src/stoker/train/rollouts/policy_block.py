"""The keys that `ppo:` and `grpo:` share, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stoker.job.block import Block, PositiveInt, Text
from stoker.job.task_spec import Decided, Named, block_of_task

if TYPE_CHECKING:
    from stoker.job.load_job import LoadedJob
    from stoker.job.resolved import ResolvedJob
    from stoker.models.text import TextSide
    from stoker.scoring.expected_check import ExpectedCheck
    from stoker.train.language.language_task import LanguageTask
    from stoker.train.rollouts.iteration_plan import IterationPlan
    from stoker.train.rollouts.policy_objective import PolicyObjective
    from stoker.train.rollouts.policy_settings import PolicySettings

TURNS = 8  # unless a job says another number
TOY_TOKENS = 6  # of an answer of a small copy
NonNegative = Annotated[float, Field(ge=0)]
TRAIN_DEFAULTS = {
    "train.lr": Decided(1e-6, "full tuning by rewards takes small steps"),
    "train.weight_decay": Decided(0.0, "a policy is not drawn to zero"),
    "train.eps": Decided(1e-5, "early steps on small gradients are smaller, as in Huang et al., 2024"),
}


class PtxBlock(Block):
    """Other data on which a policy is trained beside its answers (Ouyang et al., 2022, eq. 2)."""

    data: Text = Field(description="rows or texts: a file, a folder, a hub id or a packaged name")
    weight: Annotated[float, Field(gt=0)] = Field(default=1.0, description="weight of their mean cross entropy")
    sequences: PositiveInt | None = Field(default=None, description="sequences per step; by default as many as answers")


class PolicyBlock(Block):
    """Settings of a policy's answers and of their rewards."""

    reward: Text | None = Field(
        default=None,
        description="reward model: a run of task reward, an earlier stage, or a sequence classifier (folder or hub id)",
    )
    rewards: str | list[str] | dict[str, float] = Field(
        default_factory=list,
        description="reward functions: exact, normalised, numeric, regex:PATTERN, json_schema:FILE, rouge, chrf, "
        "code, language:CODE, length:TOKENS, length:MIN-MAX, python:MODULE:FUNCTION, judge:URL; several "
        "are added; a mapping gives their weights",
    )
    prompts: PositiveInt = Field(default=8, description="number of prompts in each round of answers")
    max_tokens: PositiveInt = Field(default=256, description="maximum length of an answer in tokens")
    temperature: Annotated[float, Field(gt=0)] = Field(default=1.0, description="sampling temperature")
    environment: Text | None = Field(
        default=None,
        description="function that returns what follows a turn of the model, such as a tool result: "
        "python:MODULE:FUNCTION, called with (messages, row)",
    )
    turns: PositiveInt = Field(
        default=TURNS, description="maximum number of model turns in an answer, with an environment"
    )
    epochs: PositiveInt = Field(default=1, description="number of passes over the answers before new ones are sampled")
    kl: NonNegative | None = Field(default=None, description="coefficient of the KL divergence from the initial model")
    kl_in: Literal["loss", "reward"] | None = Field(
        default=None,
        description="where the KL is applied: as a term of the loss, or subtracted from each token's reward",
    )
    kl_estimator: Literal["k2", "k3", "k3+"] = Field(
        default="k3+",
        description="estimator of the KL in the loss; k3+ has the value of k3 and the gradient of the reverse KL",
    )
    clip: NonNegative | None = Field(default=None, description="clipping range of the probability ratio below 1")
    clip_high: NonNegative | None = Field(default=None, description="clipping range of the probability ratio above 1")
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        default=None,
        description="bound on the loss of a token with a negative advantage, as a multiple of the advantage",
    )
    entropy: NonNegative = Field(default=0.0, description="coefficient of the entropy bonus")
    missing_end_penalty: NonNegative = Field(
        default=0.0, description="subtracted from the score of an answer without a stop token"
    )
    reward_clip: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="maximum absolute score of an answer"
    )
    advantage_clip: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="maximum absolute advantage of a token, after whitening"
    )
    offload_idle: bool = Field(
        default=False,
        description="move idle state to host memory: optimizer states and a separate critic during sampling, the "
        "reward run's model except while it scores",
    )
    ptx: PtxBlock | None = Field(default=None, description="other data that the policy is also trained on")


REASONS = {
    "reward": "rewards are computed from the text",
    "rewards": "only the reward run",
    "prompts": "a few prompts a step",
    "max_tokens": "a short paragraph",
    "temperature": "answers are drawn from the policy itself",
    "environment": "an answer is one turn",
    "turns": "a few tool calls",
    "epochs": "each answer is used once, by the policy that generated it",
    "kl_estimator": "non-negative, and with the right gradient",
    "dual_clip": "not bounded",
    "entropy": "no bonus",
    "missing_end_penalty": "an answer that does not end is scored like any other",
    "reward_clip": "scores are not clipped",
    "advantage_clip": "advantages are not clipped",
    "offload_idle": "moving the state takes time in every round",
    "ptx": "trained only on answers",
    "ptx.weight": "as much as the rewards",
    "ptx.sequences": "one for each answer",
}
EXAMPLES = {
    "reward": "runs/reward",
    "rewards": "[numeric]",
    "kl": "0.04",
    "kl_in": "loss",
    "clip": "0.2",
    "clip_high": "0.28",
    "dual_clip": "3.0",
    "reward_clip": "5.0",
    "advantage_clip": "5.0",
    "ptx.data": "my.jsonl",
    "environment": "python:my_tools:reply",
    "ptx.sequences": "8",
}


def roles_of(block: PolicyBlock) -> tuple[str, ...]:
    """Returns the names of the models that are resident during training."""
    return ("policy", *(["reference"] if block.kl != 0 else []), *(["reward"] if block.reward is not None else []))


def names_of(name: str, block: PolicyBlock) -> tuple[Named, ...]:
    """Returns the references of a task's block beside model and data: the reward run, rewards, environment,
    other data.
    """
    return (
        *([Named(f"{name}.reward", block.reward, "reward_model")] if block.reward is not None else []),
        *(Named(f"{name}.rewards", reward, "scorer") for reward in _rewards(block)),
        *([Named(f"{name}.environment", block.environment, "scorer")] if block.environment is not None else []),
        *([Named(f"{name}.ptx.data", block.ptx.data, "source")] if block.ptx is not None else []),
    )


def expected_check_of(block: PolicyBlock) -> ExpectedCheck | None:
    """Returns the check of the expected answers with which rewards compare; None if no reward does."""
    from stoker.scoring.expected_check import expected_check

    return expected_check(_rewards(block))


def _rewards(block: PolicyBlock) -> list[str]:
    return [block.rewards] if isinstance(block.rewards, str) else list(block.rewards)


def iteration_plan_of(job: ResolvedJob) -> IterationPlan:
    """Returns the plan of a job's iterations."""
    from stoker.train.rollouts.iteration_plan import IterationPlan

    block = getattr(job, job.task)
    return IterationPlan(block.prompts, block.answers, block.epochs, job.train.batch, job.seed)


def common_settings(job: ResolvedJob, block: PolicyBlock) -> dict[str, Any]:
    """Returns the arguments of `PolicySettings` that follow from the shared keys."""
    assert block.kl is not None
    return {
        "plan": iteration_plan_of(job),
        "max_tokens": block.max_tokens,
        "replies": block.environment is not None,
        "offload_idle": block.offload_idle,
        "temperature": block.temperature,
        "kl": block.kl,
        "kl_in_reward": block.kl_in == "reward",
        "missing_end": block.missing_end_penalty,
        "score_clip": block.reward_clip,
        "advantage_clip": block.advantage_clip,
    }


def samples_of(loaded: LoadedJob, base: Path, text: TextSide, settings: PolicySettings) -> Callable[..., LanguageTask]:
    """Returns the constructor of a prepared job's task; see `TaskSpec`."""
    from stoker.train.rollouts.open_policy import policy_task_factory

    block = block_of_task(loaded.job, PolicyBlock)
    return policy_task_factory(loaded, base, text, block=block, settings=settings)


def clipped_objective(block: PolicyBlock, **more: Any) -> PolicyObjective:
    """Returns the clipped loss of the shared keys; ``more`` are further arguments of `PolicyObjective`."""
    from stoker.train.rollouts.policy_objective import PolicyObjective

    assert block.clip is not None and block.clip_high is not None and block.kl is not None
    return PolicyObjective(
        clip_low=block.clip,
        clip_high=block.clip_high,
        dual_clip=block.dual_clip,
        kl=0.0 if block.kl_in == "reward" else block.kl,
        estimator=block.kl_estimator,
        entropy=block.entropy,
        temperature=block.temperature,
        ptx=block.ptx.weight if block.ptx is not None else 0.0,
        **more,
    )


def toy_keys(answers: int) -> dict[str, object]:
    """Returns the block of a small copy of the job, without keys that name other things; see `TaskSpec`."""
    without = dict.fromkeys(("reward", "environment", "ptx", "overlong", "mask_truncated", "dynamic"))
    return {**without, "turns": TURNS, "answers": answers, "max_tokens": TOY_TOKENS}


def clip_high(written: float | None, low: float, high: float, why: str) -> tuple[float, str]:
    """Returns the upper clip and its reason: that of the lower clip where it is written and the two defaults
    are equal.
    """
    return (written, "as far as clip") if written is not None and low == high else (high, why)


def copies_of(block: PolicyBlock) -> int:
    """Counts frozen models beside the policy on a device: the reward run's model, counted as large as the policy, as
    its run may not exist yet. The weights of a reference without adapters to switch off are on the host.
    """
    return int(block.reward is not None)
