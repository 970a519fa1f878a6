"""What is summed over the products that a shape lists: FLOP of a forward pass, elements of adapters."""

from __future__ import annotations

from collections.abc import Collection

from stoker.plan.flop import attention_flop_per_token
from stoker.plan.matmul import STACKED
from stoker.plan.shape import Shape


def forward_flop_per_token(shape: Shape, *, seq_len: int, causal: bool) -> float:
    """FLOP of one forward pass with its logits, for one token: matrix products and attention, nothing else."""
    layers = sum(
        attention_flop_per_token(shape, shape.layer(i), seq_len=seq_len, causal=causal)
        + sum(matmul.forward_flop for matmul in shape.layer_matmuls(i))
        for i in range(shape.layers)
    )
    return layers + shape.head_matmul().forward_flop


def lora_parameters(shape: Shape, rank: int, *, targets: Collection[str] = ()) -> int:
    """Elements of low-rank adapters of a rank on the products of these names in all layers; by default on all but the
    head, the router and the stacked experts."""
    return sum(
        matmul.lora_parameters(rank)
        for i in range(shape.layers)
        for matmul in shape.layer_matmuls(i)
        if (matmul.name in targets if targets else matmul.name not in STACKED)
    )
