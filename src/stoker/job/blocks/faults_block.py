"""The job's block `faults`: restarts, lost devices, hangs and invalid numbers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stoker.job.block import LARGEST, LONGEST, Auto, Block, NaturalInt, PositiveInt


class NodesBlock(Block):
    """The number of nodes that train; each runs a supervisor, `stoker node`."""

    min: PositiveInt = Field(
        description="minimum number of nodes; more than half of max, or a network partition can split the run in two"
    )
    max: PositiveInt = Field(description="maximum number of nodes; additional nodes wait as spares")


class FaultsBlock(Block):
    """The handling of faults: restarts, lost devices, hangs and invalid numbers."""

    restarts: NaturalInt = Field(default=3, description="number of restarts of the processes before giving up")
    back_off: Annotated[float, Field(ge=0, le=LONGEST)] = Field(
        default=1.0, description="seconds before the first restart; doubled before each further restart"
    )
    lost: Literal["replace", "shrink"] = Field(
        default="replace",
        description="after a device is lost: wait for a replacement, or continue with fewer data-parallel processes",
    )
    hang: Annotated[float, Field(gt=0, le=LONGEST)] | Auto = Field(
        default="auto", description="seconds without progress after which a process counts as hung"
    )
    nodes: NodesBlock | None = Field(
        default=None,
        description="minimum and maximum number of nodes of `stoker node`; by default all nodes are required",
    )
    slow: Annotated[float, Field(gt=1)] = Field(
        default=1.5,
        description="multiple of the median time of all processes above which a process is reported as slow",
    )
    check: bool = Field(default=True, description="test every device before training and after a fault")
    not_finite: Literal["stop", "skip", "roll-back"] = Field(
        default="stop",
        description="if the loss or the gradient is not finite: stop; skip the step; or return to a checkpoint and "
        "skip the samples",
    )
    spike: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="robust z-score of the loss above which training returns to a checkpoint and skips the samples; "
        "0 disables it",
    )
    window: Annotated[int, Field(ge=8, le=LARGEST)] = Field(
        default=64, description="number of previous steps that a loss is compared with"
    )
    deadline: Annotated[float, Field(gt=0, le=LONGEST)] = Field(
        default=60.0, description="seconds after SIGTERM within which a run saves and exits"
    )
    requeue: Annotated[int, Field(ge=0, lt=256)] | None = Field(
        default=None,
        description="exit code after SIGTERM, on which the scheduler restarts the job; by default 128 + signal",
    )
