"""Activations that a block of transformers' own code saves for the backward pass under Stoker.

Eager code saves more than fused kernels: an unfused norm saves its input in float32 and the normalised values in
addition to its output, autocast saves a 16-bit copy of the input for every product that reads it.

Every term was read from the models' code in transformers 5; a test compares it with the tensors that autograd
really saves. Bytes are those of one token of a micro-batch; where attention saves scores they grow with the row.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property

from stoker.job.layout import Recompute
from stoker.plan.block_dtypes import FLOAT, BlockDtypes
from stoker.plan.eager_traits import EagerTraits, code_of
from stoker.plan.matmul import LINEAR_IN
from stoker.plan.memory.delta_net_activations import delta_net_activations
from stoker.plan.shape import Layer, Shape

INDEX = 8  # bytes of an int64
DROPPED_SCORES = 3  # with dropout: the softmax, the mask, and their product


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


@dataclass(frozen=True)
class EagerBlock:
    """A block, and the part of a micro-batch that a process passes through it.

    Attributes:
        seq_len: tokens of a document; of a row where documents are not packed.
        tensor, sequence: tensor parallelism, and whether it splits hidden states as well. The input of a split product
            is gathered and saved whole.
        gathered: processes of a row whose keys and values each gathers and saves; 1 if heads are exchanged instead.
        rows: of a micro-batch, which processes divide as one packed row.
        processor: whether a CPU computes: its dropout masks are numbers, its attention with dropout saves scores.
        whole_rows: whether a GPU with flash attention computes rows that no other process shares.
        compiled: whether the block is compiled: the backward pass computes what lies between products again, from
            their inputs and results.
        float8: whether the products are in 8 bits. A compiled backward pass computes their inputs again, in 8 bits.
    """

    shape: Shape
    layer: Layer
    _: KW_ONLY
    seq_len: int
    types: BlockDtypes
    tensor: int = 1
    sequence: bool = False
    gathered: int = 1
    rows: int = 1
    processor: bool = False
    whole_rows: bool = False
    compiled: bool = False
    float8: bool = False

    def saved(self, recompute: Recompute = "none") -> tuple[float, float]:
        """Returns (bytes a token that each block saves, bytes a token that the recomputed block saves in addition).

        ``none`` saves all that `by_operator` counts; ``full`` the block's input; ``selective`` recomputes the MLP, and
        saves its input in addition to the attention. Compiled, ``selective`` saves the results of products and
        attention.
        """
        kept = self.by_operator(selective=self.float8)
        if recompute == "none":
            return kept.total, 0.0
        if recompute == "full":
            return self.types.stream * self.shape.width / (self.tensor if self.sequence else 1), kept.total
        if self.compiled:
            selected = self.by_operator(selective=True).total
            return selected, kept.total - selected
        again = kept.feed_forward + kept.read_by_mlp
        entry = self._entering()[1] * self.shape.width
        return kept.total - again + (entry if kept.read_by_mlp else 0.0), again

    def by_operator(self, *, selective: bool = False) -> SavedActivations:
        """Returns the saved activations.

        Args:
            selective: whether a compiled block recomputes all operators but products and attention; otherwise
                recomputation is not counted.
        """
        shape, types = self.shape, self.types
        compiled = self.compiled and types.reads
        of_attention, of_mlp = self._readers()
        entering, entering_mlp = self._entering()
        if entering_mlp == types.product or compiled:  # all read one tensor: that of the norm
            of_mlp = min(of_mlp, 1 if shape.norms > 1 or not of_attention else 0)
        if entering == types.product or compiled:
            of_attention = min(of_attention, 1)
        selective = selective and compiled
        if selective or not types.reads:  # norms give the inputs of products
            of_attention = of_mlp = 0
        norms = self._norms()
        if compiled:  # the block's input, and the results of attention and MLP that other norms read, alone or in a sum
            results = 0 if shape.parallel_residual else min(shape.norms - 1, 2)
            norms = (types.stream + results * types.product) * shape.width
        return SavedActivations(
            norms / (self.tensor if self.sequence else 1),
            of_attention * types.product * shape.width,
            of_mlp * types.product * shape.width,
            self._attention() / self.tensor,
            self._feed_forward(compiled=compiled, selective=selective),
        )

    def gradients(self) -> float:
        """Returns the most bytes a token of gradients of hidden states and activations in the block's backward pass,
        less the activations that it has freed by then. Of a dense block this is the moment behind the product with the
        gate, or behind the nonlinearity. Measured with Llama, GPT-2, OPT, GPT-NeoX and Mixtral.
        """
        shape, product = self.shape, self.types.product
        width = shape.mlp_width if self.layer.feed_forward == "dense" else 0
        if self.layer.feed_forward == "experts" and shape.mixture is not None:
            width = shape.mixture.per_token * shape.mixture.width
        eager = 4 if self.layer.feed_forward == "experts" else self._code.backward
        tensors, copies = (1 if self.compiled else eager), 0
        if self.compiled and self.float8:  # a nonlinearity in float32, and two copies of a gradient in 8 bits
            tensors, copies = 5, 2
        return self.types.stream * shape.width + product * (tensors * width / self.tensor + copies * shape.width)

    @cached_property
    def _code(self) -> EagerTraits:
        return code_of(self.shape)

    @cached_property
    def _row_pieces(self) -> float:
        return _pieces(self.gathered, self.rows)

    def _readers(self) -> tuple[int, int]:
        """Returns how many products read the input of attention, and that of the MLP."""
        shape, layer = self.shape, self.layer
        attention = layer.attentions * (1 if self._code.one_qkv else 3) + layer.state_space + len(self._into_linear())
        up = 2 if shape.gated else 1
        if layer.feed_forward == "experts" and shape.mixture is not None:
            shared = up if shape.mixture.shared_width else 0
            routers = 0 if self.types.rank else 1 + shape.mixture.shared_gate  # adapters leave them as they are
            return attention, shared + routers
        return attention, up if layer.feed_forward == "dense" else 0

    def _into_linear(self) -> list[int]:
        """Returns the outputs of each module that reads the input of linear attention."""
        if not self.layer.linear:
            return []
        return [size for m in self.shape.matmuls(self.layer) if m.name in LINEAR_IN for size in m.modules]

    def _normed(self) -> int:
        """Returns the bytes of a number that a norm gives; autocast has layer norms computed in float32 on a GPU
        only, with any weights.
        """
        if self.shape.norm == "rms" or self._code.norm:
            own = self._code.norm or self._code.exact_norm
            return self.types.stream if own else self.types.promoted
        return self.types.stream if self.processor else FLOAT

    def _entering(self) -> tuple[int, int]:
        """Returns the bytes of a number that attention and MLP read: a norm's result. Tensor parallelism rounds it to
        the type of products before it is sent, but not for routers.
        """
        normed, product = self._normed(), self.types.product
        if self.tensor == 1:
            return normed, normed
        return product, normed if self.layer.feed_forward == "experts" else product

    def _normalised(self) -> int:
        """Returns the bytes of a number that a norm by the mean square normalises: saved if its weight is trained."""
        return (FLOAT if self._code.exact_norm else self.types.stream) * self.types.norms_trained

    def _norm(self) -> int:
        """Returns the bytes of the numbers that a norm before attention or MLP saves, for each number of its input."""
        if self._code.norm:
            return (self._code.norm - (not self.types.norms_trained)) * FLOAT
        if self.shape.norm == "rms":  # the input in float32, the normalised values
            return FLOAT + self._normalised()
        return self._normed()  # one fused kernel, which saves its input

    def norms_of_input(self) -> float:
        """Returns the bytes a token that norms of the block's input save, if it has a gradient."""
        norms = 2 if self.shape.parallel_residual and self.shape.norms > 1 and not self._share_input() else 1
        return norms * self._norm() * self.shape.width

    def _share_input(self) -> bool:
        """Returns whether fused norms side by side save the same tensor: unless each casts it."""
        fused = not self._code.norm and self.shape.norm == "layer"
        return fused and self.shape.parallel_residual and self._normed() == self.types.stream

    def _norms(self) -> float:
        shape, types = self.shape, self.types
        before = 1 if self._share_input() else min(shape.norms, 2) + max(self.layer.attentions - 1, 0)
        behind = max(shape.norms - 2, 0)
        kept = (before * self._norm() + behind * (FLOAT + self._normalised())) * shape.width
        statistics = FLOAT * shape.norms * (1 if shape.norm == "rms" else 2)
        masks = 2 * shape.width * (types.product if self.processor else 1) if shape.dropout else 0
        return kept + statistics + masks

    def _attention(self) -> float:
        """Returns the bytes of the layer's mixer of tokens: a state space, linear attention, or attention."""
        shape, types, code = self.shape, self.types, self._code
        product = types.product
        if self.layer.state_space and shape.state_space is not None:
            # Projections, convolution, gate and result; the scan's own states are not modelled.
            space = shape.state_space
            return product * (5 * space.inner + 4 * space.groups * space.state + 2 * space.heads)
        if self.layer.linear and shape.delta_net is not None:
            inside = delta_net_activations(
                shape.delta_net,
                types=types,
                seq_len=self.seq_len,
                processor=self.processor,
                compiled=self.compiled,
            )
            return inside + types.rank * product * (1 + len(self._into_linear()))
        if not self.layer.attentions:
            return 0.0
        kept = float(product * shape.value_width) * types.reads  # the output product's input
        kept += self._kernel()
        if self.gathered > 1:
            kept += self._gathered_keys()
        if shape.query_key_norm != "none":  # before their norm in float32, and normalised
            normalised = (FLOAT if code.exact_norm else product) * types.norms_trained
            width, heads = shape.query_width + shape.key_value_width, shape.heads + shape.kv_heads
            # Compiled, the products' results alone.
            kept += product * width if self.compiled and types.reads else (FLOAT + normalised) * width + FLOAT * heads
        if shape.output_gate:  # the sigmoid and the ungated result, or the gate itself
            kept += product * shape.query_width * (1 if self.compiled else 2)
            if product == FLOAT and not self.compiled:  # the norm's input is a part of the product with the gate
                kept += product * shape.query_width
        narrow = types.rank * product * (2 if code.one_qkv else 4)
        return self.layer.attentions * (kept + narrow)

    def _kernel(self) -> float:
        """Returns the bytes of queries, keys and values, scores where they are saved, and the kernel's results."""
        shape, types, code = self.shape, self.types, self._code
        product, scores = types.product, shape.heads * self.seq_len * _seen(self._row_pieces)
        query, key, value = shape.query_width, shape.key_value_width, shape.value_width
        if shape.latent is not None:
            latent = shape.latent
            content = shape.heads * (latent.content_size + latent.value_size)
            masked = shape.indexer is not None and self.seq_len > shape.indexer.keys
            # The mask of selected keys as numbers. The last are norms of the compressed, which two products read.
            return (
                product * (2 * query + content + 2 * value + self.seq_len * masked)
                + FLOAT * shape.heads
                + (FLOAT + 2 * product) * (latent.query_rank + latent.key_value_rank)
            )
        # Keys and values repeated for each head of the queries; scores before and behind the softmax.
        if code.softcap and self.processor:
            return product * 3 * query + self.seq_len + scores * (2 * FLOAT + (product if product < FLOAT else 0))
        one_kernel = self.whole_rows and product < FLOAT
        # If values are a part of one product's output, all of it is saved; not if others are gathered, in another
        # tensor, or if a kernel for a whole row copies them.
        whole = key if code.rotary and (self.gathered > 1 or one_kernel) else query + 2 * key
        if self._drops_scores:  # all in float32, queries and keys scaled
            alone = shape.fused_qkv and product == FLOAT and self.gathered == 1
            return FLOAT * (2 * query + (whole if alone else query) + DROPPED_SCORES * scores)
        if not code.packed:  # a mask; one head for all queries, copies for each of them, or all of the first product
            key_and_value = 2 * key if shape.kv_heads == 1 else query * (2 if shape.kv_heads < shape.heads else 4)
            return product * (query + key_and_value + self.seq_len) + FLOAT * shape.heads
        # The log-sum-exp, and the result, which the output product reads as it is where one kernel computes a row.
        kept = product * ((whole if shape.fused_qkv else key) + (query + key) * (code.rotary or not shape.fused_qkv))
        kept += FLOAT * shape.heads + product * value * (not one_kernel or not types.reads)
        if self._windowed and self.gathered == 1 and not one_kernel:
            kept += product * self.seq_len  # the mask as numbers
        return kept

    @property
    def _drops_scores(self) -> bool:
        return self._code.drops_scores and self.shape.dropout and self.processor

    @property
    def _windowed(self) -> bool:
        return 0 < self.layer.window < self.seq_len

    def _gathered_keys(self) -> float:
        """Returns the bytes that attention over a row of several processes saves beside those of its own tokens."""
        shape, types, code, pieces = self.shape, self.types, self._code, self._row_pieces
        width = 2 * shape.key_value_width
        if code.softcap and self.processor:  # each piece of a row repeats the keys and values that it sees
            return types.product * shape.query_width * (pieces - 1)
        if self._drops_scores:
            scaled = shape.key_value_width * (pieces + 1) / 2  # keys that each piece sees
            return FLOAT * ((self.gathered - 1) * width + scaled)
        # Queries that are not rotated are a part of one product's output, which stays with its keys and values.
        beside = shape.fused_qkv and not code.rotary
        masked = self.processor and not code.alibi  # a CPU saves its masks as numbers
        mask = self.seq_len * (_seen(pieces) if self._windowed else _masked(pieces))
        return types.product * ((self.gathered - 1 + beside) * width + mask * masked)

    def _feed_forward(self, *, compiled: bool, selective: bool) -> float:
        shape, types, code = self.shape, self.types, self._code
        product = types.product
        tensors = 2 + code.nonlinearity if shape.gated else code.nonlinearity
        if compiled:  # the first products' results, and the last one's input; ReLU needs its result only
            tensors = (3 if shape.gated else code.nonlinearity) - (selective and code.nonlinearity > 1)
        if self.layer.feed_forward == "dense":
            tensors -= not types.reads and code.nonlinearity > 1  # the last product's input
            narrow = types.rank * (3 if shape.gated and not shape.fused_gate else 2)
            return product * (tensors * shape.mlp_width + narrow) / self.tensor
        if self.layer.feed_forward != "experts" or shape.mixture is None:
            return 0.0
        mixture = shape.mixture
        # Inputs and results of grouped products are gathered rows.
        into = mixture.latent_width or shape.width
        # Adapters leave experts as they are, whose products then save no inputs.
        inputs = types.reads and not types.rank
        routed = product * mixture.per_token * ((tensors - (not inputs)) * mixture.width + (1 + inputs) * into)
        shared = product * tensors * mixture.shared_width
        # Routers and the gate of shared experts are not split.
        chosen = FLOAT * mixture.experts + mixture.per_token * (5 * INDEX + 2 * FLOAT)
        return (routed + shared) / self.tensor + product * shape.width * mixture.shared_gate + chosen


def final_norm(shape: Shape, *, types: BlockDtypes, processor: bool = False) -> tuple[float, float]:
    """Returns bytes a token of the norm before the head, which is not compiled: saved until its backward pass, and the
    most within it. On a GPU, autocast has layer norms computed in float32.
    """
    if shape.norm == "rms" or code_of(shape).norm:
        # The input in float32 and the normalised values; then the input, and five gradients and factors in float32.
        return (FLOAT + types.stream * types.norms_trained) * shape.width, 6 * FLOAT * shape.width
    size = types.promoted if processor else FLOAT
    return size * shape.width, 3 * size * shape.width  # the input, and the gradients of both sides


def cast_weights(shape: Shape, layer: Layer, *, types: BlockDtypes, tensor: int = 1) -> float:
    """Returns bytes of the 16-bit copies of a block's matrices that autocast keeps from forward to backward pass."""
    if not types.casts:
        return 0.0
    parameters = sum(m.parameters for m in shape.matmuls(layer))
    return types.product * parameters / tensor


def row_bytes(
    shape: Shape, *, seq_len: int, types: BlockDtypes, tensor: int = 1, gathered: int = 1, rows: int = 1
) -> float:
    """Returns the bytes a token of tensors that all blocks share: the biased masks of ALiBi (BLOOM), one per head."""
    code = code_of(shape)
    return shape.heads * seq_len * _seen(_pieces(gathered, rows)) * types.product / tensor if code.alibi else 0.0


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
