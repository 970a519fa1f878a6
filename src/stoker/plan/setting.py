"""Input of a prediction: a model, a batch, a cluster, and a layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Literal

from stoker.hardware.machines.cluster import Cluster
from stoker.job.keys.tune_keys import ADAPTERS
from stoker.job.layout import Layout, ScheduleName, blocks_of_stages, stages_of
from stoker.job.resolution.compile_choice import compiles
from stoker.job.rollout_sizes import RolloutSizes
from stoker.plan.pipeline import schedule_order
from stoker.plan.shape import Layer, Shape
from stoker.plan.software import STOKER, Software
from stoker.plan.trainable_params import PLAIN, Adapters, Tuning, end_elements, lora_elements, trained_elements

Blocks = Mapping[Layer, int]
LayoutKind = Literal["tensor", "shard", "offload", "split-backward", "adapters"]

# Bytes of a weight that a library stores in fewer bits, with its part of the scales: nf4 with one of 8 bits for 64
# weights, and one in float32 for 256 of those; a scale for an output of a thousand inputs and more; in torchao's 4 bits
# a byte, a scale in float32 and a zero point for 32.
PACKED_BYTES = {"4bit": 0.5 + 1 / 64 + 4 / 64 / 256, "8bit": 1.0, "int8": 1.0, "int4": 1 + 5 / 32}
CUT = ("4bit",)  # those whose packed weights ZeRO-3 shards


@dataclass(frozen=True)
class TrainingWork:
    """The work of a step, independent of the layout.

    Attributes:
        shape: of the model.
        seq_len: tokens of a row.
        global_batch: rows of an optimizer step.
        precision: of matrix products: ``fp32``, ``bf16``, ``fp16``, ``fp8``, ``fp4``.
        tuning: the tuning method.
        rank: of low-rank matrices.
        adapters: the parameters trained with frozen weights, in addition to `rank`.
        quantise: storage of a frozen base, by the values of a job's ``model.quantise``.
        computed: positions of a sample that blocks compute, if the data determines it: a prefix that rows of a
            micro-batch share is computed once, and nothing after the last trained token; None for all of full rows.
        rows: of a sample, each as long as `seq_len`: 2 for a pair of answers.
        resident: frozen models of the same size in memory with the trained one, whole in each process.
        reads: forward passes without gradients for each that is trained on, such as a reference's.
        rollouts: rounds of answers that are sampled between steps; None without.
        prompt: tokens of a prompt, if the data determines it; None for the rest of a full row.
        predicted: positions of a sample from which the next token is predicted, if the data determines it; None for
            all.
        sync_every: optimizer steps from one synchronisation of islands to the next; 1 without islands.
        islands: number of islands; None for one a node.
        scores: whether the loss is computed from the log-probability of each target.
        shared_critic: whether a critic with a head, and adapters of its own, is trained in the same model.
        refused: kinds of layouts and of tuning that the job's optimizer, adapters or compilation exclude.
        critic: another model that is trained on the same rows in each step, after this one; None without.
    """

    shape: Shape
    seq_len: int
    global_batch: int
    precision: str = "bf16"
    tuning: Tuning = "full"
    rank: int = 16
    adapters: Adapters = PLAIN
    quantise: str = "none"
    computed: float | None = None
    predicted: float | None = None
    rows: int = 1
    resident: int = 0
    reads: int = 0
    rollouts: RolloutSizes | None = None
    prompt: float | None = None
    sync_every: int = 1
    islands: int | None = None
    scores: bool = False
    shared_critic: bool = False
    refused: frozenset[LayoutKind] = frozenset()
    critic: TrainingWork | None = None

    @property
    def base(self) -> str:
        """Storage of the base: QLoRA's in 4 bits."""
        return "4bit" if self.tuning == "qlora" and self.quantise == "none" else self.quantise

    @property
    def low_rank(self) -> int:
        """Rank of the low-rank matrices; 0 without them."""
        return self.rank if self.tuning in ADAPTERS else 0

    @property
    def positions(self) -> float:
        """Computed positions of a sample, with virtual tokens."""
        return self.rows * (self.seq_len + self.adapters.positions) if self.computed is None else self.computed

    @property
    def attended(self) -> int:
        """Positions of a row that its last one attends to."""
        return self.seq_len + self.adapters.positions + self.adapters.prefix

    @property
    def prompt_tokens(self) -> float:
        """Tokens of a prompt that is answered."""
        assert self.rollouts is not None
        return max(1.0, self.seq_len - self.rollouts.tokens) if self.prompt is None else self.prompt

    @property
    def trained(self) -> int:
        """Elements that are trained. A quantised base keeps its fused layers."""
        shape = self.shape if self.base == "none" else replace(self.shape, splits_fused=False)
        found = trained_elements(shape, self.tuning, self.rank, self.adapters)
        if not self.shared_critic:
            return found
        return found + lora_elements(shape, self.low_rank, self.adapters) + shape.width + 1

    @property
    def trains_head(self) -> bool:
        """Whether the head's matrix is trained; beside adapters only if a job names it, or an embedding tied to it."""
        return self.tuning == "full" or end_elements(self.shape, self.adapters)[1] > 0

    def resized(self, *, seq_len: int | None = None, global_batch: int | None = None) -> TrainingWork:
        """Returns the work with rows of another length, or another batch; the critic's too."""
        return replace(
            self,
            seq_len=seq_len or self.seq_len,
            global_batch=global_batch or self.global_batch,
            critic=self.critic and self.critic.resized(seq_len=seq_len, global_batch=global_batch),
        )


@dataclass(frozen=True)
class Setting:
    """Work on a cluster under a layout.

    Attributes:
        work: the computation.
        cluster: the cluster.
        layout: the size of each axis.
        micro_batch: rows of a forward pass.
        expert: processes that a layer's experts are divided over, out of those that see different tokens.
        software: the training program.
        stages_per_process: of a pipeline, where another program has other numbers than Stoker; None for Stoker's.
    """

    work: TrainingWork
    cluster: Cluster
    layout: Layout
    micro_batch: int
    expert: int = 1
    software: Software = STOKER
    stages_per_process: int | None = None

    @property
    def chunks(self) -> int:
        """Pipeline stages of a process."""
        return self.stages_per_process or self.layout.stages_per_process

    @property
    def shape(self) -> Shape:
        return self.work.shape

    @property
    def compiled(self) -> bool:
        """Returns whether blocks are compiled."""
        return compiles(
            self.software.compiles,
            self.layout,
            model_type=self.shape.family,
            tuning=self.work.tuning,
            precision=self.work.precision,
            nvidia=self.cluster.device.is_nvidia,
        )

    @cached_property
    def micro_batches(self) -> int:
        """Forward passes of a process in a step, at least one."""
        return max(1, round(self.work.global_batch / (self.layout.data * self.micro_batch)))

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch in the hidden states of one process, not counting tensor parallelism."""
        return self.micro_batch * self.work.positions / self.layout.context

    @property
    def predicting(self) -> float:
        """Tokens of a micro-batch from which the next token is predicted, without virtual ones."""
        work = self.work
        predicted = work.rows * work.seq_len if work.predicted is None else work.predicted
        return self.micro_batch * predicted / self.layout.context

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """The blocks of each stage of the pipeline, in the order of a micro-batch's passes."""
        count = self.layout.pipeline * self.chunks
        sizes = self.layout.stages
        return blocks_of_stages(self.shape.layers, count, sizes if sizes and len(sizes) == count else None)

    @property
    def homes(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each process."""
        return _homes(self.layout.schedule, self.layout.pipeline, self.chunks)

    @property
    def last(self) -> int:
        """The process that has the last stage, and with it the head."""
        return 0 if self.layout.schedule == "zbv" and self.chunks > 1 else self.layout.pipeline - 1

    def in_flight(self, process: int) -> float:
        """Returns the most micro-batches whose activations a pipeline process saves (Narayanan et al., 2021), counted
        as passes through all of its blocks.
        """
        layout = self.layout
        if layout.pipeline == 1:
            return 1.0
        return _in_flight(layout.schedule, layout.pipeline, self.micro_batches, self.chunks)[process]

    @property
    def stage_blocks(self) -> tuple[Blocks, ...]:
        """The number of blocks of each kind, by stage."""
        return _blocks(self.shape, self.stages)

    @property
    def blocks(self) -> tuple[Blocks, ...]:
        """The number of blocks of each kind, by process."""
        return _merged(self.shape, self.stages, self.homes)


@lru_cache(maxsize=65536)
def _in_flight(name: ScheduleName, processes: int, micro_batches: int, chunks: int) -> tuple[float, ...]:
    kept = schedule_order.in_flight(name, processes=processes, micro_batches=micro_batches, chunks=chunks)
    return tuple(sum(counts) / len(counts) for counts in kept)


@cache
def _homes(schedule: ScheduleName, processes: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    return tuple(
        stages_of(schedule, process=at, processes=processes, stages_per_process=chunks) for at in range(processes)
    )


@lru_cache(maxsize=4096)
def _merged(shape: Shape, stages: tuple[range, ...], homes: tuple[tuple[int, ...], ...]) -> tuple[Blocks, ...]:
    blocks = _blocks(shape, stages)
    return tuple(dict(sum((Counter(blocks[stage]) for stage in own), Counter[Layer]())) for own in homes)


@lru_cache(maxsize=4096)
def _blocks(shape: Shape, stages: tuple[range, ...]) -> tuple[Blocks, ...]:
    return tuple(dict(Counter(shape.layer(i) for i in stage)) for stage in stages)
