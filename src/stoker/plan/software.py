"""Properties of a training program: the types of its states, its overlap, its launch times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.plan.setting import Setting


@dataclass(frozen=True)
class Software:
    """Properties of a training program. Sizes are bytes of one parameter or logit.

    The defaults describe a program with fused kernels; `STOKER` is Stoker itself.

    Attributes:
        name: of the program.
        weights: the copy that computes.
        states: what the optimizer keeps beside the weights and their gradients.
        memory: bytes by component of a pipeline's process; None for a program that runs transformers' own code,
            operator by operator (`stoker.plan.eager_memory`).
        flash: whether the attention's scores are never kept (Dao et al., 2022).
        traffic: bytes that norms, residuals and nonlinearities move, to those that fused kernels do.
        logit_traffic: bytes read and written per logit.
        sent_gradients: bytes of a gradient on its way.
        by_block: whether gradients and weights travel block by block, not in few large buckets.
        hidden: share of the passes beside which gradients and weights can travel.
        hidden_most: of their time, the share that can be hidden at most.
        hidden_tensor: share of tensor parallelism's collectives that matrix products hide.
        hidden_experts: share of the exchanges with experts that other work hides.
        repeated_sums: share of a pipeline's micro-batches after which unsharded gradients are summed across nodes,
            where once a step would do.
        exposed_sends: share of the sends between stages that nothing hides.
        launch: host seconds to launch a block's forward pass: less than that it never takes.
        launch_tensor: more of it under tensor parallelism.
        launch_across: the least of it, and more for each tensor-parallel process, in a pipeline across nodes.
    """

    name: str
    weights: int = 2
    states: float = 12
    memory: Callable[[Setting, int], Mapping[str, float]] | None = None
    flash: bool = True
    traffic: float = 0.72
    logit_traffic: float = 37.1
    sent_gradients: int = 2
    by_block: bool = False
    hidden: float = 0.7
    hidden_most: float = 0.68
    hidden_tensor: float = 0.0
    hidden_experts: float = 0.0
    repeated_sums: float = 0.0
    exposed_sends: float = 0.2
    launch: float = 3e-4
    launch_tensor: float = 1e-4
    launch_across: tuple[float, float] = (0.0, 0.0)


# Stoker trains float32 weights under 16-bit products (autocast, or FSDP2's mixed precision). Its traffic and its
# launches are counted from the operators of eager code (`stoker.plan.calibrated_time`): 70 of 5 microseconds forward.
# They were not measured on a GPU.
STOKER = Software("stoker", weights=4, states=8, by_block=True, traffic=2.6, launch=3.5e-4)
