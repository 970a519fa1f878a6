"""FLOP of a token, as they are done and by the conventions that publications count by.

One multiplication with one addition is two FLOP. A backward pass is twice a forward pass. No convention counts what is
computed again (recompute): that is the hardware's FLOP, not the model's.
"""

from __future__ import annotations

from typing import Literal

from stoker.plan.shape import Layer, Shape

Convention = Literal["palm", "without embedding", "matmul", "causal"]

# Of one step of a Mamba-2 state, per element of the state: decay, input, output and skip, as Megatron-LM counts.
STATE_FLOP = 7


def attended_tokens(seq_len: int, *, causal: bool, window: int = 0) -> float:
    """How many tokens one token attends to, on average over a sequence.

    Args:
        causal: whether only itself and those before it; otherwise products with masked tokens count as well.
        window: the most tokens, itself among them; 0 for no such limit.
    """
    reach = min(window, seq_len) if window else seq_len
    if not causal:
        return reach
    return reach - reach * (reach - 1) / (2 * seq_len)


def attention_flop_per_token(shape: Shape, layer: Layer, *, seq_len: int, causal: bool = True) -> float:
    """FLOP of one forward pass in a layer's queries with keys and weights with values, for one token."""
    tokens = attended_tokens(seq_len, causal=causal, window=layer.window)
    return layer.attentions * 2 * (shape.query_width + shape.value_width) * tokens


def layer_flop_per_token(shape: Shape, index: int, *, seq_len: int, causal: bool = True) -> float:
    """FLOP of one forward pass through the layer at an index, for one token."""
    layer = shape.layer(index)
    flop = attention_flop_per_token(shape, layer, seq_len=seq_len, causal=causal)
    flop += sum(matmul.forward_flop for matmul in shape.layer_matmuls(index))
    if layer.state_space and shape.state_space is not None:
        flop += STATE_FLOP * shape.state_space.inner * shape.state_space.state
    return flop


def forward_flop_per_token(shape: Shape, *, seq_len: int, causal: bool = True) -> float:
    """FLOP of one forward pass with its logits, for one token: matrix products and attention, nothing else."""
    layers = sum(layer_flop_per_token(shape, i, seq_len=seq_len, causal=causal) for i in range(shape.layers))
    return layers + shape.head_matmul().forward_flop


def model_flop_per_token(shape: Shape, *, seq_len: int, convention: Convention = "palm", frozen: bool = False) -> float:
    """FLOP of a forward and a backward pass for one token, by a convention.

    - ``palm``: 6 N + 12 L H Q T with all (active) parameters N, embedding included, and full attention in every layer
      (Chowdhery et al., 2022, appendix B). MosaicML, nanotron and most tables count so.
    - ``without embedding``: the same without the table of tokens where that is not the head too (torchtitan, PyTorch).
    - ``matmul``: matrix products, logits and full attention (Narayanan et al., 2021, equation 3 without its
      recomputation: 72 B S L h^2 (1 + S / (6 h) + V / (12 L h)) for GPT). Megatron-LM long counted so.
    - ``causal``: the same with half the attention, and with windows where there are: what must be done. The tables of
      Megatron-Bridge count so.

    Args:
        frozen: whether only adapters are trained: no gradients of the weights, 4 N instead of 6 N (``palm`` only).
    """
    if convention == "causal":
        return 3 * forward_flop_per_token(shape, seq_len=seq_len, causal=True)
    full = 3 * sum(
        attention_flop_per_token(shape, Layer(attentions=shape.layer(i).attentions), seq_len=seq_len, causal=False)
        for i in range(shape.layers)
    )
    if convention == "matmul":
        matmuls = [matmul for i in range(shape.layers) for matmul in shape.layer_matmuls(i)]
        return full + 3 * sum(matmul.forward_flop for matmul in (*matmuls, shape.head_matmul()))
    counted = shape.active_parameters
    if convention == "without embedding" and not shape.tied:
        counted -= shape.vocabulary * (shape.embedding_width or shape.width)
    return (4 if frozen else 6) * counted + full
