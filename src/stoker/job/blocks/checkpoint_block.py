"""The job's block `checkpoint`: the interval of checkpoints, and which of them are kept."""

from __future__ import annotations

from pydantic import Field

from stoker.job.block import Auto, Block, NaturalInt, PositiveInt


class CheckpointBlock(Block):
    """Checkpoints: their interval, and which of them are kept."""

    every: PositiveInt | Auto = Field(default="auto", description="steps between checkpoints")
    keep: PositiveInt = Field(default=2, description="number of newest checkpoints to keep")
    keep_every: PositiveInt | None = Field(
        default=None, description="also keep every checkpoint whose step is a multiple of this number, without limit"
    )
    full_every: PositiveInt = Field(
        default=1,
        description="for embedding tables: every N-th checkpoint stores all rows, the others only changed rows",
    )
    best: bool = Field(default=True, description="also keep the checkpoint with the lowest held-out loss")
    to: str | None = Field(
        default=None, description="another folder or a URL for the checkpoints; by default inside the run's folder"
    )
    background: bool = Field(
        default=True, description="write checkpoints in the background; training waits only for the copy to host memory"
    )
    memory: NaturalInt | Auto = Field(
        default="auto",
        description="steps between copies of the state in host memory, for recovery after a process dies; 0: none",
    )
