"""The job's block `parallel`: the layout of the processes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stoker.job.block import Auto, Block, NaturalInt, PositiveInt
from stoker.job.layout import Compress, ContextBy, Offload, Outer, Recompute, ScheduleName, Shard


class SyncBlock(Block):
    """Islands: groups of processes that train by themselves between two synchronisations (local SGD, DiLoCo)."""

    every: PositiveInt = Field(default=1, description="steps between two synchronisations; 1: no islands")
    outer: Outer = Field(
        default="nesterov",
        description="outer optimizer of the islands' changes: their average, or SGD with Nesterov momentum",
    )
    outer_lr: Annotated[float, Field(gt=0)] = Field(default=0.7, description="learning rate of outer: nesterov")
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="momentum of outer: nesterov")
    islands: PositiveInt | Auto = Field(
        default="auto",
        description="number of islands; auto: one per node, or on a single node one per replica of the model",
    )


class ParallelBlock(Block):
    """The parallel layout: processes = data x tensor x pipeline x context."""

    data: PositiveInt | Auto = Field(
        default="auto", description="data-parallel processes, each with different samples; only they multiply the batch"
    )
    shard: Shard = Field(
        default="none",
        description="state sharded over the data-parallel processes: zero1 optimizer states, zero2 also gradients, "
        "zero3 also weights",
    )
    shard_size: PositiveInt | Auto = Field(
        default="auto",
        description="processes that one copy is sharded over; fewer than data: several replicas (hybrid)",
    )
    prefetch: PositiveInt = Field(
        default=1, description="blocks whose weights shard: zero3 gathers ahead, beside the current one"
    )
    tensor: PositiveInt = Field(default=1, description="tensor-parallel processes, which split each matrix")
    sequence: bool | Auto = Field(
        default="auto", description="also split the activations outside of the matrices, along the sequence"
    )
    async_tensor: bool = Field(
        default=False,
        description="overlap the collectives of tensor with the matrix products beside them, in compiled blocks",
    )
    pipeline: PositiveInt = Field(
        default=1, description="pipeline-parallel processes, which split the blocks into stages"
    )
    schedule: ScheduleName | Auto = Field(
        default="auto",
        description="pipeline schedule of the micro-batches; interleaved, zero-bubble and zbv place two stages on "
        "each process",
    )
    stages: Annotated[list[PositiveInt], Field(min_length=1)] | Auto = Field(
        default="auto",
        description="number of blocks of each pipeline stage, first to last; auto distributes them evenly",
    )
    context: PositiveInt = Field(default=1, description="context-parallel processes, which split each sequence")
    context_by: ContextBy | Auto = Field(
        default="auto", description="attention over split sequences: gather keys and values, or ulysses (by heads)"
    )
    expert: PositiveInt | Auto = Field(
        default="auto",
        description="expert-parallel processes, which split the experts of a mixture; currently equal to tensor",
    )
    recompute: Recompute = Field(
        default="none",
        description="activations to recompute in the backward pass; full: all of a block except its input; "
        "selective: those that are large and cheap to compute",
    )
    offload: Offload = Field(
        default="none",
        description="what to keep in host memory: optimizer states; params: also weights and gradients, with zero3; "
        "activations: what blocks save for the backward pass",
    )
    compress: Compress = Field(
        default="none",
        description="gradient compression between replicas: none, rounding to bf16, or products of two narrow "
        "matrices (powersgd) with error feedback",
    )
    compress_rank: PositiveInt = Field(default=4, description="rank of the matrices of compress: powersgd")
    sync: SyncBlock = Field(
        default_factory=SyncBlock,
        description="less frequent synchronisation of gradients, for slow links between nodes",
    )
    devices: Annotated[list[NaturalInt], Field(min_length=1)] | Auto = Field(
        default="auto", description="indices of the devices to use, one per process, such as [0, 2]"
    )
