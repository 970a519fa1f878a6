"""The layout of a run: the number of processes along each axis of the mesh."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from stoker.job.resolved import ResolvedJob

Shard = Literal["none", "zero1", "zero2", "zero3"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]
ContextBy = Literal["gather", "ulysses"]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "params", "activations"]
Compress = Literal["none", "bf16", "powersgd"]
Outer = Literal["average", "nesterov"]
SHARDS: tuple[Shard, ...] = get_args(Shard)
LOOPED: tuple[ScheduleName, ...] = ("interleaved", "zero-bubble", "zbv")  # two stages a process
ROUNDS: tuple[ScheduleName, ...] = ("interleaved", "zero-bubble")  # micro-batches go through in equal rounds
SPLIT_BACKWARD: tuple[ScheduleName, ...] = ("zero-bubble", "zbv")  # gradients of inputs first, of weights later


@dataclass(frozen=True)
class Layout:
    """Processes = data x tensor x pipeline x context.

    Attributes:
        data: processes that train on different samples.
        shard: the sharded states: none; optimizer states (zero1); gradients too (zero2); weights too (zero3).
        shard_size: processes that one copy is sharded over; fewer than ``data`` is hybrid sharding: the copies
            are replicas of each other. 1 without sharding.
        prefetch: blocks whose weights zero3 gathers ahead.
        tensor: processes that each matrix is split over.
        sequence: whether activations outside of the matrices are split along the sequence, over the same processes.
        async_tensor: whether collectives of tensor parallelism overlap with the matrix products beside them.
        pipeline: processes that the blocks are split over.
        schedule: the pipeline schedule, the order of its micro-batches.
        stages: blocks of each stage, first to last; None splits them evenly.
        context: processes that each sequence is split over.
        context_by: ``gather`` gathers keys and values, ``ulysses`` exchanges heads for tokens.
        recompute: the activations that are recomputed in the backward pass instead of being stored.
        offload: what is stored in host memory instead of on the device.
        compress: the compression of gradients between replicas.
        compress_rank: rank of the factors of ``powersgd``.
        islands: groups of replicas that train independently between two synchronisations.
        sync_every: optimizer steps between two synchronisations of the islands.
    """

    data: int = 1
    shard: Shard = "none"
    shard_size: int = 1
    prefetch: int = 1
    tensor: int = 1
    sequence: bool = False
    async_tensor: bool = False
    pipeline: int = 1
    schedule: ScheduleName = "1f1b"
    stages: tuple[int, ...] | None = None
    context: int = 1
    context_by: ContextBy = "gather"
    recompute: Recompute = "none"
    offload: Offload = "none"
    compress: Compress = "none"
    compress_rank: int = 4
    islands: int = 1
    sync_every: int = 1

    @property
    def world(self) -> int:
        """Processes in all."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def zero(self) -> int:
        """ZeRO's stage, from 0 (nothing is sharded) to 3."""
        return SHARDS.index(self.shard)

    @property
    def sharers(self) -> int:
        """Processes that a copy's states are spread over; 1 without sharding."""
        return self.shard_size * self.context if self.zero else 1

    @property
    def replicas(self) -> int:
        """Copies of a sharded model."""
        return self.data // self.shard_size

    @property
    def stages_per_process(self) -> int:
        """Pipeline stages per process."""
        return 2 if self.pipeline > 1 and self.schedule in LOOPED else 1

    @property
    def stage_count(self) -> int:
        """Pipeline stages in all."""
        return self.pipeline * self.stages_per_process

    def stages_of(self, process: int) -> tuple[int, ...]:
        """Returns the stages of a process of the pipeline."""
        return stages_of(
            self.schedule, process=process, processes=self.pipeline, stages_per_process=self.stages_per_process
        )

    def takes(self, micro_batches: int) -> bool:
        """Returns whether the pipeline's schedule can run a step of this number of micro-batches.

        As torch.distributed.pipelining demands: 1F1B fills all its stages; the looped 1F1B and zero-bubble
        schedules run equal rounds of at least as many micro-batches as there are processes.
        """
        if self.pipeline == 1:
            return True
        if self.schedule in ROUNDS:
            return micro_batches % max(1, micro_batches // self.pipeline) == 0
        return self.schedule != "1f1b" or micro_batches >= self.pipeline

    @property
    def steps_on_host(self) -> bool:
        """Returns whether the host has the optimizer's states, and steps."""
        return self.offload in ("optimizer", "params")

    @property
    def one_process(self) -> bool:
        """Returns whether the layout has a single process."""
        return self.world == 1

    def describe(self) -> str:
        """``data 4 (zero3 over 2) x tensor 2 + sequence``, for people."""
        parts = []
        if self.data > 1 or self.world == 1 or self.shard != "none":
            over = f" over {self.shard_size}" if self.shard_size != self.data else ""
            parts.append(f"data {self.data}" + (f" ({self.shard}{over})" if self.shard != "none" else ""))
        if self.tensor > 1:
            split = f"tensor {self.tensor}" + (" + sequence" if self.sequence else "")
            parts.append(split + (" + async" if self.async_tensor else ""))
        if self.pipeline > 1:
            stages = f", {'-'.join(map(str, self.stages))}" if self.stages else ""
            parts.append(f"pipeline {self.pipeline} ({self.schedule}{stages})")
        if self.context > 1:
            parts.append(f"context {self.context} ({self.context_by})")
        more = [f"recompute {self.recompute}"] if self.recompute != "none" else []
        more += [f"offload {self.offload}"] if self.offload != "none" else []
        more += [f"gradients in {self.compress}"] if self.compress != "none" else []
        more += [f"{self.islands} islands, synchronised every {self.sync_every} steps"] if self.islands > 1 else []
        return ", ".join([" x ".join(parts), *more])


def stages_of(schedule: ScheduleName, *, process: int, processes: int, stages_per_process: int) -> tuple[int, ...]:
    """Returns a process' stages, first to last: every ``processes``-th one; in a V one from each end."""
    if schedule == "zbv" and stages_per_process > 1:
        return process, 2 * processes - 1 - process
    return tuple(process + i * processes for i in range(stages_per_process))


@cache
def blocks_of_stages(blocks: int, stages: int, sizes: tuple[int, ...] | None = None) -> tuple[range, ...]:
    """Returns the blocks of each stage: of these sizes, else evenly, with the remainder on the first stages."""
    sizes = sizes or tuple(blocks // stages + (i < blocks % stages) for i in range(stages))
    ends = tuple(accumulate(sizes))
    return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))


def layout_of(job: ResolvedJob) -> Layout:
    """Returns the layout of a resolved job."""
    parts = job.parallel
    return Layout(
        data=parts.data,
        shard=parts.shard,
        shard_size=parts.shard_size,
        prefetch=parts.prefetch,
        tensor=parts.tensor,
        sequence=parts.sequence,
        async_tensor=parts.async_tensor,
        pipeline=parts.pipeline,
        schedule=parts.schedule,
        stages=None if parts.stages == "auto" else tuple(parts.stages),
        context=parts.context,
        context_by=parts.context_by,
        recompute=parts.recompute,
        offload=parts.offload,
        compress=parts.compress,
        compress_rank=parts.compress_rank,
        islands=parts.sync.islands,
        sync_every=parts.sync.every,
    )
