"""The job's block `export`: exports during training."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stoker.job.block import LONGEST, Block, PositiveInt, Text


class ExportSyncBlock(Block):
    """A store of tables that follows a run of task ranking while it trains."""

    to: Text = Field(description="store that receives changed rows and the tower: lmdb://PATH or redis://HOST:PORT/DB")
    every_seconds: Annotated[float, Field(gt=0, le=LONGEST)] | None = Field(
        default=None,
        description="maximum age of a change in seconds before it is sent; alternatively, give every_steps",
    )
    every_steps: PositiveInt | None = Field(default=None, description="steps between two updates of the store")


class ExportBlock(Block):
    """Exports during training."""

    sync: ExportSyncBlock | None = Field(
        default=None, description="store of embedding tables that follows the run; for task ranking"
    )
