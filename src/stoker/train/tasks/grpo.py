"""``grpo``: a policy trained on the rewards of groups of its own answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from stoker.job.block import NaturalInt, PositiveInt
from stoker.job.task_spec import BlockSpec, Decided, ModelSpec, RowSpec, TaskSpec, WorkSpec, block_of_task
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
from stoker.train.rollouts.policy_conflicts import policy_conflicts

if TYPE_CHECKING:
    from stoker.errors import Problem
    from stoker.job.conflicts.conflict_view import View
    from stoker.job.load_job import LoadedJob
    from stoker.job.resolved import ResolvedJob
    from stoker.job.schema import Job
    from stoker.models.objective import Objective
    from stoker.train.rollouts.policy_settings import Advantage, PolicySettings, Weight


@dataclass(frozen=True)
class Variant:
    """A loss of ``grpo``: its advantage, token weights and default numbers."""

    advantage: Advantage
    weight: Weight
    paper: str
    sequence_ratio: bool = False
    whiten: bool = False
    clip: float = 0.2
    clip_high: float = 0.2
    kl: float = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    dynamic: int = 1


VARIANTS = {
    "grpo": Variant("group", "answer", "Shao et al., 2024", kl=0.04),
    "dr_grpo": Variant("group mean", "longest", "Liu et al., 2025"),
    "dapo": Variant("group", "token", "Yu et al., 2025", clip_high=0.28, dynamic=4),
    "gspo": Variant("group", "answer", "Zheng et al., 2025", sequence_ratio=True, clip=3e-4, clip_high=4e-4),
    "rloo": Variant("leave one out", "sum", "Ahmadian et al., 2024", kl=0.05, kl_in="reward"),
    "reinforce++": Variant("reward to go", "token", "Hu, 2025", whiten=True, kl=0.01, kl_in="reward"),
}


class GrpoBlock(PolicyBlock):
    """A policy that learns from groups of answers."""

    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce++"] = Field(
        default="grpo", description="loss computed from the scores of a group"
    )
    answers: PositiveInt = Field(default=8, description="number of answers to each prompt")
    dynamic: PositiveInt | None = Field(
        default=None,
        description="maximum number of draws of new prompts to replace those whose answers all have the same score",
    )
    overlong: NaturalInt = Field(
        default=0, description="number of tokens before max_tokens over which a length penalty grows to 1"
    )
    mask_truncated: bool = Field(
        default=False, description="leave answers without a stop token out of the loss; they count in means of scores"
    )


def _variant(job: Job) -> tuple[GrpoBlock, Variant]:
    block = job.grpo if isinstance(job.grpo, GrpoBlock) else GrpoBlock()  # type: ignore[attr-defined]
    return block, VARIANTS[block.loss]


def _defaults(job: Job) -> dict[str, Decided]:
    block, variant = _variant(job)
    why = f"as in {variant.paper}"
    dynamic = variant.dynamic if job.steps is not None else 1
    return {
        **TRAIN_DEFAULTS,
        "grpo.kl": Decided(variant.kl, why),
        "grpo.kl_in": Decided(variant.kl_in, why),
        "grpo.clip": Decided(variant.clip, why),
        "grpo.clip_high": Decided(*clip_high(block.clip, variant.clip, variant.clip_high, why)),
        "grpo.dynamic": Decided(dynamic, why if dynamic > 1 else f"{block.loss} keeps every prompt"),
    }


def _batch(job: Job) -> int:
    block, _ = _variant(job)
    return block.prompts * block.answers


def _checks(view: View) -> Iterator[Problem]:
    if view.value("task") != "grpo":
        return
    loss, answers = view.value("grpo.loss"), view.value("grpo.answers")
    yield from policy_conflicts(view, "grpo", VARIANTS[loss].kl, VARIANTS[loss].kl_in)
    if answers == 1 and loss != "reinforce++":
        message = f"`loss: {loss}` compares the answers to a prompt, and there is one"
        yield from view.at_each(["grpo.answers"], message, "write 2 or more, or loss: reinforce++")
    if view.value("grpo.overlong") >= view.value("grpo.max_tokens"):
        message = "grpo.overlong is not below grpo.max_tokens"
        yield from view.at_each(["grpo.overlong", "grpo.max_tokens"], message, "write fewer tokens")
    if view.given("grpo.dynamic") and view.value("grpo.dynamic") > 1 and view.value("steps") is None:
        message = "with `grpo.dynamic` it is not known beforehand how many prompts a step takes"
        yield from view.at_each(["grpo.dynamic", "epochs"], message, "give steps")


def settings_of(job: ResolvedJob) -> PolicySettings:
    """Returns the policy settings of a job."""
    from stoker.train.rollouts.policy_settings import PolicySettings

    block = block_of_task(job, GrpoBlock)
    variant = VARIANTS[block.loss]
    assert block.dynamic is not None
    return PolicySettings(
        **common_settings(job, block),
        advantage=variant.advantage,
        whiten=variant.whiten,
        weight=variant.weight,
        overlong=block.overlong,
        mask_truncated=block.mask_truncated,
        dynamic=block.dynamic,
    )


def _objective(job: ResolvedJob) -> Objective:
    block = block_of_task(job, GrpoBlock)
    variant = VARIANTS[block.loss]
    return clipped_objective(block, sequence_ratio=variant.sequence_ratio, by_answer=variant.weight != "token")


def _facts(loaded: LoadedJob, base: Path) -> dict[str, str]:
    from stoker.train.rollouts.model_reward import text_difference

    return text_difference(block_of_task(loaded.job, GrpoBlock).reward, loaded, base)


TASK = TaskSpec(
    name="grpo",
    defaults=_defaults,
    batch=_batch,
    adapter_lr=Decided(1e-5, "adapters take ten times the learning rate of full tuning"),
    block=BlockSpec(
        written=GrpoBlock,
        hint="write `grpo:` with a reward, as {rewards: [numeric]} or {reward: RUN}",
        reasons={
            **REASONS,
            "loss": "the usual one",
            "answers": "enough to tell good answers from bad",
            "overlong": "long answers are not penalised",
            "mask_truncated": "every answer is trained on",
        },
        examples={**EXAMPLES, "dynamic": "4"},
        checks=(_checks,),
        toy_keys=lambda job: {**toy_keys(2), "epochs": min(_variant(job)[0].epochs, 2)},
    ),
    names=lambda job: names_of("grpo", _variant(job)[0]),
    rows=RowSpec(prompts=True, expected_check=lambda job: expected_check_of(_variant(job)[0])),
    model=ModelSpec(dropout=False),
    work=WorkSpec(
        roles=lambda job: roles_of(_variant(job)[0]),
        resident=lambda job: copies_of(_variant(job)[0]),
        rollouts=lambda job: settings_of(job).sizes,
    ),
    language=LanguageTraining(
        objective=_objective,
        samples=lambda loaded, base, text: samples_of(loaded, base, text, settings_of(loaded.job)),
        facts=_facts,
        target="answer",
        perplexity=False,
    ),
)
