"""Activations that linear attention by the gated delta rule saves for the backward pass.

On a CPU it is transformers' own code in PyTorch, which computes the rule in float32 on padded chunks. On a GPU the rule
and its convolution are the kernels of flash-linear-attention, which compute all else again in the backward pass. A test
compares both with the tensors that autograd saves.
"""

from __future__ import annotations

from math import ceil

from stoker.plan.block_dtypes import FLOAT, BlockDtypes
from stoker.plan.layer import RULE_CHUNK, DeltaNet


def delta_net_activations(
    net: DeltaNet, *, types: BlockDtypes, seq_len: int, processor: bool, compiled: bool = False
) -> float:
    """Returns bytes of a token from the first products to the last one's input.

    Args:
        seq_len: tokens of a document.
        processor: whether a CPU computes.
        compiled: whether the gated norm is compiled: its backward pass computes it again from the rule's result and
            the gate.
    """
    product, heads = types.product, net.value_heads
    rule = _torch_rule(net, product, seq_len) if processor else _kernels(net, product)
    decays = (2 * FLOAT + product) * heads  # the argument and the result of a softplus, and a sigmoid
    # Result and gate in float32, the gate's SiLU, their product; the normalised result.
    norm = net.value_width * (4 * FLOAT + product * types.norms_trained) + FLOAT * heads
    if compiled:
        norm = 2 * product * net.value_width
    return rule + decays + norm + product * net.value_width * types.reads


def _torch_rule(net: DeltaNet, product: int, seq_len: int) -> float:
    chunks = ceil(seq_len / RULE_CHUNK)
    padded = chunks * RULE_CHUNK / seq_len
    pairs, keys, values = net.value_heads * RULE_CHUNK, net.value_heads * net.key_size, net.value_width
    state = net.state / RULE_CHUNK  # one before each chunk
    convolution = 2 * product * net.channels
    normalised = FLOAT * (2 * keys + 2 * net.value_heads)  # queries and keys before their norm
    if product < FLOAT:  # autocast multiplies copies
        wide = 2 * pairs + 4 * keys + 2 * values + state
        copies = product * (3 * pairs + 7 * keys + 2 * values + 2 * state)
    else:  # queries and keys that nothing is padded to are not contiguous, so products copy them
        contiguous = 4 if padded == 1 and chunks > 1 else 0
        wide, copies = 5 * pairs + (6 + contiguous) * keys + 3 * values + state, 0.0
    return convolution + normalised + padded * (FLOAT * (wide + 4 * net.value_heads) + copies)


def _kernels(net: DeltaNet, product: int) -> float:
    pairs = net.value_heads * RULE_CHUNK  # the inverse of each chunk's triangular system
    # The convolution's input; queries and keys with their norms, values, both decays.
    kept = net.channels + 2 * net.key_width + net.value_width + pairs
    return product * kept + FLOAT * (2 * net.key_heads + 2 * net.value_heads)


def most_of_rule(net: DeltaNet, product: int, *, processor: bool) -> float:
    """Returns the most bytes a token of the rule without gradients: of the code on a CPU, about four tensors of pairs
    of tokens, seven of queries and keys, and three of values.
    """
    keys = net.value_heads * net.key_size
    if processor:
        return FLOAT * (4 * net.value_heads * RULE_CHUNK + 7 * keys + 3 * net.value_width)
    # The convolution's input and result, and queries, keys, values, the two corrections, states, result.
    return product * (2 * net.channels + 2 * net.key_width + keys + 3 * net.value_width + net.state / RULE_CHUNK)
