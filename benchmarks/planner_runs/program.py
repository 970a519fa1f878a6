"""What a training program keeps in memory, beside what the planner's `Software` says of its time."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.job.layout import Offload, Recompute, Shard
from stoker.plan.software import Software


@dataclass(frozen=True)
class LateFrees:
    """Which inputs, gathered for split matrices on a stream of their own, are not freed in time to be used again.

    Measured on nanotron. A pipeline's first stage runs ahead of its device while it fills: of p micro-batches in flight
    the inputs of p - 2 are late. With two tensor-parallel processes, or where the inputs are large, almost all are.
    Equal plans fall on both sides; why is not known.

    Attributes:
        one: share of them without a pipeline.
        large: bytes of a split input from which on `of_large` are freed late at least.
        most: tensor-parallel processes from which on a pipeline's are freed in time.
    """

    one: float
    large: float
    of_large: float
    most: int

    def share(self, stages: int, tensor: int, size: float) -> float:
        """Of the inputs, those freed late."""
        if stages == 1:
            return self.one
        if tensor >= self.most:
            return 0.0
        if tensor == 2:
            return 1.0
        return max((stages - 2) / stages, self.of_large if size >= self.large else 0.0)


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
        late: which of the inputs that sequence parallelism gathers for split matrices are freed late; None for none.
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
