"""FLOP of a token, as computed and as publications count them.

One multiplication with one addition is two FLOP. A backward pass is twice a forward pass. No convention counts
recomputation: that is the hardware's FLOP, not the model's.
"""

from __future__ import annotations

from dataclasses import replace

from stoker.plan.shape import Layer, Shape


def attended_tokens(seq_len: int, *, causal: bool, window: int = 0) -> float:
    """Returns the number of tokens that one token attends to, on average over a sequence.

    Args:
        causal: whether only itself and those before it; otherwise products with masked tokens count as well.
        window: the most tokens, itself among them; 0 for no such limit.
    """
    reach = min(window, seq_len) if window else seq_len
    if not causal:
        return reach
    return reach - reach * (reach - 1) / (2 * seq_len)


def attention_flop_per_token(shape: Shape, layer: Layer, *, seq_len: int, causal: bool = True) -> float:
    """Returns FLOP of one forward pass in a layer's queries with keys and weights with values, for one token; of linear
    attention those of its rule. An indexer's scores count with them; unselected keys are masked, and so computed.
    """
    if layer.linear and shape.delta_net is not None:
        return shape.delta_net.forward_flop
    tokens = attended_tokens(seq_len, causal=causal, window=layer.window)
    selects = layer.indexed and shape.indexer is not None and seq_len > shape.indexer.keys
    index = shape.indexer.heads * shape.indexer.size if selects and shape.indexer is not None else 0
    return layer.attentions * 2 * (shape.query_width + shape.value_width + index) * tokens


def model_flop_per_token(shape: Shape, *, seq_len: int, frozen: bool = False) -> float:
    """FLOP of a forward and a backward pass for one token by the PaLM convention.

    6 N + 12 L H Q T with all (active) parameters N, embedding included, and full attention in every layer that has
    attention (Chowdhery et al., 2022, appendix B); the rule of linear attention in those that have it. MosaicML,
    nanotron and most tables count so.

    Args:
        frozen: whether only adapters are trained: no gradients of the weights, 4 N instead of 6 N.
    """
    full = 3 * sum(
        attention_flop_per_token(shape, replace(shape.layer(i), window=0), seq_len=seq_len, causal=False)
        for i in range(shape.layers)
    )
    return (4 if frozen else 6) * shape.active_parameters + full
