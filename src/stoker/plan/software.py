"""Properties of a training program: the dtypes of its states, its overlap, its launch times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.job.resolution.compile_choice import CompileChoice

if TYPE_CHECKING:
    from stoker.plan.setting import Setting


@dataclass(frozen=True)
class Software:
    """Properties of a training program. Sizes are bytes of one parameter or logit.

    Attributes:
        name: of the program.
        weights: the weights that compute.
        states: optimizer states, in addition to these weights and their gradients.
        outer: states of the outer step of islands, which stay beside the weights.
        muon: whether Muon steps the matrices of the blocks.
        memory: bytes by component of a pipeline's process; None for a program that runs transformers' own code,
            operator by operator (`stoker.plan.memory.stoker_memory`).
        flash: whether the attention's scores are never saved (Dao et al., 2022).
        traffic: bytes that norms, residuals and nonlinearities move, relative to fused kernels in 16 bits.
        wide_traffic: the same where norms give float32 between products in 16 bits.
        compiles: whether Stoker compiles the blocks.
        logit_traffic: bytes read and written per logit.
        sent_gradients: bytes of a gradient in a collective.
        by_block: whether gradients and weights are communicated block by block, not in few large buckets.
        hidden: fraction of the passes that can overlap with collectives of gradients and weights.
        hidden_most: maximum fraction of these collectives that can be hidden.
        hidden_tensor: fraction of tensor parallelism's collectives that matrix products hide.
        hidden_experts: fraction of the exchanges with experts that other work hides.
        repeated_sums: fraction of a pipeline's micro-batches after which unsharded gradients are summed across nodes,
            where once a step would suffice.
        exposed_sends: fraction of the sends between stages that nothing hides.
        launch: host seconds to launch a block's forward pass, a lower bound of its time.
        launch_tensor: additional ones under tensor parallelism.
        launch_across: its minimum, and additional ones for each tensor-parallel process, in a pipeline across nodes.
    """

    name: str
    weights: int
    states: float
    outer: float
    muon: bool
    memory: Callable[[Setting, int], Mapping[str, float]] | None
    flash: bool
    traffic: float
    wide_traffic: float
    compiles: CompileChoice
    logit_traffic: float
    sent_gradients: int
    by_block: bool
    hidden: float
    hidden_most: float
    hidden_tensor: float
    hidden_experts: float
    repeated_sums: float
    exposed_sends: float
    launch: float
    launch_tensor: float
    launch_across: tuple[float, float]


# Stoker trains float32 weights under 16-bit products (autocast, or FSDP2's mixed precision), and sums gradients in
# float32. Its traffic in 16 bits and its launches are counted from the operators of eager code
# (`stoker.plan.time.calibrated_time`): 70 of 5 microseconds forward. `wide_traffic` and `COMPILED_TRAFFIC` were
# measured on an H200 with hidden states in float32 (docs/gpu.md). In eager code bfloat16 ones move as much: what their
# sums save, the norms' conversions add. `hidden_most` is that of published runs with FSDP2, where only the outermost
# unit waits; `logit_traffic`, `hidden`, `exposed_sends` and `launch_tensor` are those of published runs of other
# programs.
STOKER = Software(
    "stoker",
    weights=4,
    states=8,
    outer=0,
    muon=False,
    memory=None,
    flash=True,
    traffic=2.6,
    wide_traffic=6.7,
    compiles="never",
    logit_traffic=37.1,
    sent_gradients=4,
    by_block=True,
    hidden=0.7,
    hidden_most=0.9,
    hidden_tensor=0.0,
    hidden_experts=0.0,
    repeated_sums=0.0,
    exposed_sends=0.2,
    launch=3.5e-4,
    launch_tensor=1e-4,
    launch_across=(0.0, 0.0),
)
# A compiled cross entropy writes the products, reads them twice and writes their gradient, each in the products' type.
COMPILED_LOGIT_VISITS = 4
COMPILED_TRAFFIC = 0.72  # fused kernels in 16 bits
COMPILED_WIDE_TRAFFIC = 1.45  # of float32 hidden states
