"""The job's block `evaluate`: held-out data and the interval of evaluations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stoker.job.block import Auto, Block, NaturalInt, PositiveInt
from stoker.job.blocks.source_block import SourceBlock


class EvaluateBlock(Block):
    """The evaluation: its held-out data and its interval."""

    data: list[SourceBlock] = Field(default_factory=list, description="sources to evaluate on")
    fraction: Annotated[float, Field(ge=0.0, lt=1.0)] | Auto = Field(
        default="auto", description="fraction of the training rows to hold out if evaluate.data is not given"
    )
    rows: PositiveInt | Literal["auto", "all"] = Field(
        default="auto", description="number of held-out sequences that an evaluation uses, or all"
    )
    every: PositiveInt | Auto = Field(default="auto", description="steps between evaluations")
    samples: NaturalInt = Field(
        default=0,
        description="number of answers to held-out prompts that each evaluation generates and logs, for people to read",
    )
