"""Memory of a training program, beside the times of the planner's `Software`."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.job.layout import Offload, Recompute, Shard
from stoker.plan.setting import Setting
from stoker.plan.software import Software


@dataclass(frozen=True)
class LateFrees:
    """Blocks whose whole tensors (inputs gathered for split matrices, results before they are scattered) the allocator
    cannot use again yet, because the device has not finished the collectives that read them.

    The host runs at most CUDA's queue of 1,024 launches ahead of its device. In nanotron's pipelines it is that far
    ahead with large tensors, with two tensor-parallel processes, and on a single node; across nodes its launches are
    slow, and only the first step is late: the first stage launches its micro-batches while its first sends wait for
    the next stage, and the tensors of p - 2 of p are not freed. Equal plans of nanotron fall on both sides.

    Attributes:
        ahead: blocks whose forward passes fill the queue, at about 42 launches a block.
        large: bytes of a tensor's part from which on it is a large one.
        most: tensor-parallel processes from which on a pipeline's host is slower than its device.
    """

    ahead: int
    large: float
    most: int

    def blocks(self, setting: Setting, flying: float, part: float) -> float:
        """Late forward passes of a block.

        Args:
            flying: forward passes of a block whose activations a stage holds.
            part: bytes of a process' part of a whole tensor.
        """
        tensor, stages = setting.layout.tensor, setting.layout.pipeline
        if stages > 1 and tensor >= self.most:
            return 0.0
        behind = tensor == 2 or part >= self.large or setting.cluster.nodes == 1
        if stages > 1 and not behind:
            flying *= (stages - 2) / stages
        elif stages > 1 and setting.micro_batches > stages:
            return self.ahead
        return min(flying, self.ahead)


@dataclass(frozen=True)
class Program(Software):
    """A program with fused kernels that keeps the sums of gradients from step to step. Sizes are bytes of a number.

    Attributes:
        gradients: what micro-batches are summed in.
        logits: of a token's logits at the peak, with their softmax and gradient (16-bit logits, float32 of them,
            the gradients of both).
        later_logits: what is still held of the micro-batch before, when there is more than one.
        dropout: whether masks are kept.
        fused_gate: whether the product of a gated MLP's nonlinearity with its gate is computed again, not kept.
        late: which of sequence parallelism's whole tensors are freed late; None for none.
        unsummed: bytes of a gradient before it is added to the sum, of the head and the largest block.
        frozen: bytes of a weight that is not trained.
        seq_len: tokens of a row where nothing is said.
        first_stage: whether its logs tell of the first stage's memory.
        balanced: whether pipeline stages are cut by arithmetic, the head included, instead of by blocks.
        shard: what it shards where nothing is said.
        recompute: what it computes again where nothing is said.
        offload: what it can keep in the host's memory.
        paged: whether a single device's full runs keep the optimizer's states in the host's pages, and step in the
            backward pass where gradients have no room.
        crowded: seconds that a pipeline's micro-batch waits on a nearly full device: the allocator has to give back
            what it caches, and take it again.
        unverified: share by which the bound of its memory is wider, where no reading of it was at hand.
        sequence: whether tensor parallelism splits the activations outside of the matrices, too.
    """

    gradients: int = 4
    logits: float = 12.0
    later_logits: float = 0.0
    dropout: bool = False
    fused_gate: bool = False
    late: LateFrees | None = None
    unsummed: int = 0
    frozen: int = 2
    seq_len: int = 2048
    first_stage: bool = False
    balanced: bool = False
    shard: Shard = "none"
    recompute: Recompute = "none"
    offload: Offload = "none"
    paged: bool = False
    crowded: float = 0.0
    unverified: float = 0.0
    sequence: bool = False
