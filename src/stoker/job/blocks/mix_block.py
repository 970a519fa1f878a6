"""The job's block `mix`: the mixing of several sources."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stoker.job.block import Block


class MixBlock(Block):
    """The mixing of several sources."""

    temperature: Annotated[float, Field(ge=0.01)] | None = Field(
        default=None,
        description="sample sources by rows^(1/temperature); 1 is proportional, larger is flatter",
    )
