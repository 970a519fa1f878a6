"""Activations that a block of transformers' own code saves for the backward pass under Stoker.

Eager code saves more than fused kernels: an unfused norm saves its input in float32 and the normalised values in
addition to its output, autocast saves a 16-bit copy of the input for every product that reads it, GELU by the tanh
formula saves five tensors.

Every term was read from the models' code in transformers 5; a test compares it with the tensors that autograd
really saves. Bytes are those of one token of a micro-batch; where attention saves scores they grow with the row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal

from stoker.job.layout import Recompute
from stoker.plan.eager_traits import EagerTraits, code_of
from stoker.plan.shape import Layer, Shape

Held = Literal["fp32", "16-bit"]
FLOAT, HALF = 4, 2  # bytes
INDEX = 8  # bytes of an int64
DROPPED_SCORES = 3  # with dropout: the softmax, the mask, and their product


@dataclass(frozen=True)
class Arithmetic:
    """The dtypes in which a block computes; sizes are bytes of a number.

    Attributes:
        stream: of the hidden states that blocks add to.
        product: of the inputs and outputs of products.
        casts: whether each product saves a cast copy of its input.
        norms_trained: whether norms save the normalised values, which only their weights' gradients need.
        rank: of the adapters on the products; 0 if there are none.
        reads: whether products save their inputs, which only the gradients of their weights or adapters need.
    """

    stream: int
    product: int
    casts: bool
    norms_trained: bool = True
    rank: int = 0
    reads: bool = True

    @property
    def promoted(self) -> int:
        """Bytes of results of float32 weights and tables with hidden states: norms', rotated queries and keys."""
        return FLOAT if self.casts else self.stream


@lru_cache(maxsize=256)
def arithmetic(precision: str, *, held: Held = "fp32", rank: int = 0, frozen: bool | None = None) -> Arithmetic:
    """Returns the dtypes under Stoker.

    Args:
        precision: of products.
        held: the weights that a block computes with: float32 under autocast (one process, DDP), or 16-bit copies
            (FSDP2's mixed precision, and a frozen base). Hidden states are bfloat16 in both cases, and float16 in
            the second.
        rank: of adapters on a frozen base; 0 if there are none.
        frozen: whether the base is frozen; by default if there are adapters.
    """
    frozen = rank > 0 if frozen is None else frozen
    if precision in ("fp32", "tf32"):
        found = Arithmetic(FLOAT, FLOAT, casts=False)
    elif frozen or held == "16-bit":
        found = Arithmetic(HALF, HALF, casts=False)
    else:
        found = Arithmetic(FLOAT if precision == "fp16" else HALF, HALF, casts=True)
    return replace(found, norms_trained=not frozen, rank=rank, reads=rank > 0 or not frozen)


@dataclass(frozen=True)
class SavedActivations:
    """Bytes of one token that a block saves for the backward pass.

    Attributes:
        norms: inputs of norms, normalised values, dropout's masks.
        read: inputs of attention's first products.
        read_by_mlp: inputs of the MLP's first products, if they are other tensors.
        attention: queries, keys, values, the result, and scores where they are saved.
        feed_forward: from the MLP's (or the experts') first products to its last.
    """

    norms: float
    read: float
    read_by_mlp: float
    attention: float
    feed_forward: float

    @property
    def total(self) -> float:
        return self.norms + self.read + self.read_by_mlp + self.attention + self.feed_forward


def eager_kept(
    shape: Shape,
    layer: Layer,
    *,
    seq_len: int,
    types: Arithmetic,
    tensor: int = 1,
    sequence: bool = False,
    gathered: int = 1,
    rows: int = 1,
    processor: bool = False,
    whole_rows: bool = False,
    compiled: bool = False,
    selective: bool = False,
) -> SavedActivations:
    """Returns the activations of a block without recomputation, by operator.

    Args:
        seq_len: tokens of a document; of a row where documents are not packed.
        tensor, sequence: tensor parallelism, and whether it splits hidden states as well. The input of a split product
            is gathered and saved whole.
        gathered: processes of a row whose keys and values each gathers and saves; 1 if heads are exchanged instead.
        rows: of a micro-batch, which processes divide as one packed row.
        processor: whether a CPU computes: its dropout masks are numbers, its attention with dropout saves scores.
        whole_rows: whether a GPU with flash attention computes rows that no other process shares.
        compiled: whether the block is compiled (counted for full tuning only): the backward pass computes what lies
            between products again, from their inputs and results.
        selective: whether compiled blocks recompute all operators but products and attention.
    """
    code = code_of(shape)
    compiled = compiled and types.reads and not types.rank
    of_attention, of_mlp = _readers(shape, layer, code)
    entering, entering_mlp = _entering(shape, layer, types, tensor, processor)
    if entering_mlp == types.product or compiled:  # all read one tensor: that of the norm
        of_mlp = min(of_mlp, 1 if shape.norms > 1 or not of_attention else 0)
    if entering == types.product or compiled:
        of_attention = min(of_attention, 1)
    selective = selective and compiled
    if selective or not types.reads:  # norms give the inputs of products
        of_attention = of_mlp = 0
    norms = _norms(shape, layer, code, types, processor)
    if compiled:  # the block's input, and the result of each further product that a norm's input is a sum with
        norms = (types.stream + (shape.norms - 1) * types.product) * shape.width
    return SavedActivations(
        norms / (tensor if sequence else 1),
        of_attention * types.product * shape.width,
        of_mlp * types.product * shape.width,
        _attention(shape, layer, code, types, seq_len, gathered, rows, processor, whole_rows=whole_rows) / tensor,
        _feed_forward(shape, layer, code, types, tensor, compiled=compiled, selective=selective),
    )


def eager_bytes(
    shape: Shape,
    layer: Layer,
    *,
    seq_len: int,
    types: Arithmetic,
    recompute: Recompute = "none",
    tensor: int = 1,
    sequence: bool = False,
    gathered: int = 1,
    rows: int = 1,
    processor: bool = False,
    whole_rows: bool = False,
    compiled: bool = False,
) -> tuple[float, float]:
    """Returns (bytes a token that each block saves, bytes a token that the recomputed block saves in addition).

    ``none`` saves all that `eager_kept` counts; ``full`` the block's input; ``selective`` recomputes the MLP, and
    saves its input in addition to the attention. Compiled, ``selective`` saves the results of products and attention.
    """
    counted = partial(
        eager_kept,
        shape,
        layer,
        seq_len=seq_len,
        types=types,
        tensor=tensor,
        sequence=sequence,
        gathered=gathered,
        rows=rows,
        processor=processor,
        whole_rows=whole_rows,
        compiled=compiled,
    )
    kept = counted()
    if recompute == "none":
        return kept.total, 0.0
    if recompute == "full":
        return types.stream * shape.width / (tensor if sequence else 1), kept.total
    if compiled:
        selected = counted(selective=True).total
        return selected, kept.total - selected
    again = kept.feed_forward + kept.read_by_mlp
    entry = _entering(shape, layer, types, tensor, processor)[1] * shape.width
    return kept.total - again + (entry if kept.read_by_mlp else 0.0), again


def cast_weights(shape: Shape, layer: Layer, *, types: Arithmetic, tensor: int = 1) -> float:
    """Returns bytes of the 16-bit copies of a block's matrices that autocast keeps from forward to backward pass."""
    if not types.casts:
        return 0.0
    parameters = sum(m.parameters for m in shape.matmuls(layer))
    return types.product * parameters / tensor


def row_bytes(
    shape: Shape, *, seq_len: int, types: Arithmetic, tensor: int = 1, gathered: int = 1, rows: int = 1
) -> float:
    """Returns the bytes a token of tensors that all blocks share: the biased masks of ALiBi (BLOOM), one per head."""
    code = code_of(shape)
    return shape.heads * seq_len * _seen(_pieces(gathered, rows)) * types.product / tensor if code.alibi else 0.0


def _readers(shape: Shape, layer: Layer, code: EagerTraits) -> tuple[int, int]:
    """Returns how many products read the input of attention, and that of the MLP."""
    attention = layer.attentions * (1 if code.one_qkv else 3) + layer.state_space
    up = 2 if shape.gated else 1
    if layer.feed_forward == "experts" and shape.mixture is not None:
        shared = up if shape.mixture.shared_width else 0
        return attention, 1 + shared + shape.mixture.shared_gate
    return attention, up if layer.feed_forward == "dense" else 0


def _normed(shape: Shape, code: EagerTraits, types: Arithmetic, processor: bool) -> int:
    """Returns the bytes of a number that a norm gives; autocast has layer norms computed in float32 on a GPU only."""
    returns_own_type = code.norm or code.exact_norm or (processor and shape.norm != "rms")
    return types.stream if returns_own_type else types.promoted


def _entering(shape: Shape, layer: Layer, types: Arithmetic, tensor: int, processor: bool) -> tuple[int, int]:
    """Returns the bytes of a number that attention and MLP read: a norm's result. Tensor parallelism rounds it to the
    type of products before it is sent, but not for routers."""
    normed = _normed(shape, code_of(shape), types, processor)
    if tensor == 1:
        return normed, normed
    return types.product, normed if layer.feed_forward == "experts" else types.product


def _norms(shape: Shape, layer: Layer, code: EagerTraits, types: Arithmetic, processor: bool) -> float:
    normalised = FLOAT if code.exact_norm else types.stream
    before = min(shape.norms, 2) + max(layer.attentions - 1, 0)
    behind = max(shape.norms - 2, 0)
    if code.norm:
        one = code.norm * FLOAT
    elif shape.norm == "rms":  # the input in float32, the normalised values
        one = FLOAT + normalised * types.norms_trained
    else:
        # One fused kernel, which saves its input; norms side by side save the same tensor.
        one = _normed(shape, code, types, processor)
        before = 1 if shape.parallel_residual else before
    kept = (before * one + behind * (FLOAT + normalised * types.norms_trained)) * shape.width
    statistics = FLOAT * shape.norms * (1 if shape.norm == "rms" else 2)
    masks = 2 * shape.width * (types.product if processor else 1) if shape.dropout else 0
    return kept + statistics + masks


def _attention(
    shape: Shape,
    layer: Layer,
    code: EagerTraits,
    types: Arithmetic,
    seq_len: int,
    gathered: int,
    rows: int,
    processor: bool,
    *,
    whole_rows: bool,
) -> float:
    pieces = _pieces(gathered, rows)
    product, scores = types.product, shape.heads * seq_len * _seen(pieces)
    if layer.state_space and shape.state_space is not None:
        # Projections, convolution, gate and result; the scan's own states are not modelled.
        space = shape.state_space
        return product * (5 * space.inner + 4 * space.groups * space.state + 2 * space.heads)
    if not layer.attentions:
        return 0.0
    query, key, value = shape.query_width, shape.key_value_width, shape.value_width
    # If values are a part of one product's output, all of it is saved; not if others are gathered, in another tensor.
    whole = query + 2 * key if gathered == 1 or not code.rotary else key
    fused, windowed = shape.fused_qkv, 0 < (layer.window or 0) < seq_len
    kept = float(product * value) * types.reads  # the output product's input
    if shape.latent is not None:
        latent = shape.latent
        content = shape.heads * (latent.content_size + latent.value_size)
        kept += product * (2 * query + content + 2 * value) + FLOAT * shape.heads
        # Norms of the compressed, which two products read.
        kept += (FLOAT + 2 * product) * (latent.query_rank + latent.key_value_rank)
    elif code.softcap:  # keys and values repeated for each head of the queries; scores before and behind the softmax
        kept += product * 3 * query + seq_len + scores * (2 * FLOAT + (product if product < FLOAT else 0))
    elif _drops_scores(shape, code, processor):  # all in float32, queries and keys scaled
        alone = fused and product == FLOAT and gathered == 1
        kept += FLOAT * (2 * query + (whole if alone else query) + DROPPED_SCORES * scores)
    elif not code.packed and shape.kv_heads == 1:  # too few heads for a fused kernel; in float32
        kept += FLOAT * (query + 2 * key + scores)
    elif not code.packed:
        kept += product * (4 * query + seq_len) + FLOAT * shape.heads
    else:
        kept += product * ((whole if fused else key) + (query + key if code.rotary or not fused else 0))
        # The log-sum-exp, and the result, which the output product reads as it is where one kernel computes a row.
        one_kernel = whole_rows and code.flash and product < FLOAT
        kept += FLOAT * shape.heads + product * value * (not one_kernel or not types.reads)
        if windowed and gathered == 1 and not one_kernel:
            kept += product * seq_len  # the mask as numbers
    if gathered > 1:
        mask = seq_len * (_seen(pieces) if windowed else _masked(pieces))
        kept += _gathered(shape, code, types, gathered, pieces, mask, processor)
    if shape.query_key_norm != "none":  # before their norm in float32, and normalised
        normalised = (FLOAT if code.exact_norm else product) * types.norms_trained
        kept += (FLOAT + normalised) * (query + key) + FLOAT * (shape.heads + shape.kv_heads)
    narrow = types.rank * product * (2 if code.one_qkv else 4)
    return layer.attentions * (kept + narrow)


def _drops_scores(shape: Shape, code: EagerTraits, processor: bool) -> bool:
    return code.drops_scores and shape.dropout and processor


def _gathered(
    shape: Shape, code: EagerTraits, types: Arithmetic, gathered: int, pieces: float, mask: float, processor: bool
) -> float:
    """Returns the bytes that attention over a row of several processes saves beside those of its own tokens.

    Args:
        mask: elements a token of the masks of a CPU, which are saved as numbers.
    """
    width = 2 * shape.key_value_width
    if code.softcap:  # each piece of a row repeats the keys and values that it sees
        return types.product * shape.query_width * (pieces - 1)
    if _drops_scores(shape, code, processor):
        scaled = shape.key_value_width * (pieces + 1) / 2  # keys that each piece sees
        return FLOAT * ((gathered - 1) * width + scaled)
    # Queries that are not rotated are a part of one product's output, which stays with its keys and values.
    beside = shape.fused_qkv and not code.rotary
    masked = processor and not code.alibi
    return types.product * ((gathered - 1 + beside) * width + mask * masked)


def _pieces(gathered: int, rows: int) -> float:
    """Returns the pieces that each row is cut into: a micro-batch is cut into two parts for each process as one packed
    row, and its rows stay whole where processes gather none.
    """
    return max(1.0, 2 * gathered / rows) if gathered > 1 else 1.0


def _seen(pieces: float) -> float:
    """Returns the share of its row that the average query is multiplied with, as each piece ends with its own keys."""
    return (pieces + 1) / (2 * pieces)


def _masked(pieces: float) -> float:
    """Returns the elements of masks a token, as a share of its row, in the process that has most: a row's first piece
    has none, nor has a whole row.
    """
    if pieces <= 2:  # each process has as many first pieces as last ones
        return 0.5 if pieces > 1 else 0.0
    return _seen(pieces)


def _feed_forward(
    shape: Shape, layer: Layer, code: EagerTraits, types: Arithmetic, tensor: int, *, compiled: bool, selective: bool
) -> float:
    product = types.product
    tensors = 2 + code.nonlinearity if shape.gated else code.nonlinearity
    if compiled:  # the first products' results, and the last one's input
        tensors = (3 if shape.gated else 2) - selective
    if layer.feed_forward == "dense":
        tensors -= not types.reads and code.nonlinearity > 1  # the last product's input
        narrow = types.rank * (3 if shape.gated and not shape.fused_gate else 2)
        return product * (tensors * shape.mlp_width + narrow) / tensor
    if layer.feed_forward != "experts" or shape.mixture is None:
        return 0.0
    mixture = shape.mixture
    # Inputs and results of grouped products are gathered rows.
    into = mixture.latent_width or shape.width
    routed = product * mixture.per_token * (tensors * mixture.width + 2 * into)
    shared = product * tensors * mixture.shared_width
    # Routers and the gate of shared experts are not split.
    chosen = FLOAT * mixture.experts + mixture.per_token * (5 * INDEX + 2 * FLOAT)
    return (routed + shared) / tensor + product * shape.width * mixture.shared_gate + chosen
