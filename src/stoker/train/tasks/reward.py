"""``reward``: a model that scores answers, trained on pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from stoker.job.block import Block
from stoker.job.task_spec import (
    BlockSpec,
    Decided,
    ModelSpec,
    RowSpec,
    TaskSpec,
    WorkSpec,
    block_of_task,
    export_or_serve,
)
from stoker.train.language.language_training import LanguageTraining

if TYPE_CHECKING:
    from stoker.data.sequences import Document
    from stoker.job.load_job import LoadedJob
    from stoker.job.resolved import ResolvedJob
    from stoker.job.schema import Job
    from stoker.models.objective import Objective
    from stoker.train.engine import Engine
    from stoker.train.language.batch_extras import BatchExtras
    from stoker.train.language.language_task import LanguageTask


class RewardBlock(Block):
    """Terms of a reward model's loss."""

    margin: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="factor of the rows' margins, the target differences between the scores of a pair; 0: not used",
    )
    center: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="weight of the squared sum of a pair's scores, which keeps scores near 0"
    )


def _defaults(_: Job) -> dict[str, Decided]:
    return {
        "train.lr": Decided(1e-5, "full tuning of trained weights"),
        "train.eps": Decided(1e-5, "gradients of one score a row are small: steps early on are smaller"),
    }


def _objective(job: Job) -> Objective:
    from stoker.train.preference.reward_objective import RewardObjective

    return RewardObjective(block_of_task(job, RewardBlock))


def _extras(loaded: LoadedJob, _: Path) -> BatchExtras:
    from stoker.train.preference.reward_objective import RewardExtras

    return RewardExtras(loaded, block_of_task(loaded.job, RewardBlock))


def _facts(loaded: LoadedJob, _: Path) -> dict[str, str]:
    from stoker.train.preference.reward_objective import NOT_CENTRED

    evaluate = loaded.job.evaluate
    return {} if evaluate.data or evaluate.fraction else {"offset": NOT_CENTRED}


def _details(task: LanguageTask, engine: Engine, documents: Sequence[Document], names: Sequence[str]) -> dict[str, Any]:
    from stoker.train.preference.reward_calibration import calibration

    return calibration(task, engine, documents, names)


def _next_commands(job: ResolvedJob, run: str) -> tuple[str, ...]:
    return f"eval {run} YOUR.jsonl", export_or_serve(job, run)


TASK = TaskSpec(
    name="reward",
    defaults=_defaults,
    adapter_lr=Decided(1e-4, "ten times the rate of full tuning"),
    block=BlockSpec(
        written=RewardBlock,
        reasons={
            "margin": "only which answer is better is used, not by how much",
            "center": "the offset centres the scores after training",
        },
    ),
    rows=RowSpec(kind=lambda _: "pairs"),
    model=ModelSpec(head="score", dropout=False),
    work=WorkSpec(roles=lambda _: ("reward",)),
    language=LanguageTraining(
        objective=_objective, extras=_extras, facts=_facts, target="pair", perplexity=False, details=_details
    ),
    exports=("adapter", "merged"),
    next_commands=_next_commands,
)
