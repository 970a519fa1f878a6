"""Memory of Stoker's head and cross entropy, which compute logits in chunks (`stoker.models.head`)."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.plan.block_dtypes import FLOAT, BlockDtypes
from stoker.plan.eager_traits import code_of
from stoker.plan.shape import Shape

CHUNK = 64 * 2**20  # bytes of the float32 logits of a chunk, on a CPU
CHUNK_GPU = 8 * CHUNK


@dataclass(frozen=True)
class HeadBytes:
    """Bytes by their lifetime.

    Attributes:
        chunk: of the current chunk, and the selected hidden states: freed before the backward pass begins.
        kept: from the forward to the end of the backward pass: the gradient of the hidden states, and that of a trained
            head in float32.
        scaled: from the beginning of the backward pass on: the same gradients times that of the loss. For a tied head
            this becomes the gradient of the embedding.
    """

    chunk: float
    kept: float
    scaled: float

    @property
    def forward(self) -> float:
        """Bytes during the last chunk."""
        return self.chunk + self.kept

    @property
    def backward(self) -> float:
        """Bytes when the backward pass enters the last block."""
        return self.kept + self.scaled


def head_bytes(
    shape: Shape,
    tokens: float,
    *,
    types: BlockDtypes,
    trained: bool,
    wide: bool,
    tensor: int,
    chunk: int,
    compiled: bool,
    scores: bool = False,
    entropy: bool = False,
) -> HeadBytes:
    """Memory of the head for a micro-batch with this number of predicted tokens.

    Args:
        types: see `stoker.plan.block_dtypes`.
        trained: whether the head's matrix is; under adapters only if a job names it.
        wide: whether it is in float32 although hidden states may not be.
        tensor: processes that the vocabulary is split over.
        chunk: `CHUNK` or `CHUNK_GPU`.
        compiled: whether scores and cross entropy are, which then change no tensor in place.
        scores: whether it gives the log-probability of each target. Under a trained head the backward pass computes the
            logits again, the fullest moment.
        entropy: whether it gives the entropy as well.
    """
    words = shape.outputs / tensor
    width = shape.embedding_width or shape.width
    at_once = min(float(chunk), FLOAT * tokens * words)
    low = types.product < FLOAT
    cast_back = trained and chunk == CHUNK  # on a CPU, of the gradient: products in 16 bits are summed in float32
    if compiled:  # the products and their gradient; the cast back after the products are freed
        logits = at_once * (1 + cast_back / 2 if low else 2)
    else:  # float32 logits turn into their own gradient in place, which is cast
        logits = at_once * (1.5 if low else 1) + at_once * code_of(shape).softcap  # the cap's slope
    matrix = FLOAT * words * width * trained
    cast = types.product * words * width * (low and (wide or types.casts))  # of float32 weights
    # What the last norm gives, and a cast copy with its gradient; tensor processes send the cast copy.
    fused_norm = shape.norm == "layer" and not code_of(shape).norm
    normed = FLOAT if fused_norm and chunk == CHUNK_GPU else types.promoted  # autocast of a GPU, with any weights
    hidden = tokens * width * (normed if tensor == 1 else types.stream)
    gradient = tokens * width * types.product
    scored = scored_logits(at_once, types, entropy=entropy, compiled=compiled) if scores else 0.0
    if scores and trained:
        forward = scored + cast + 2 * hidden
        backward = logits + cast + 2 * gradient + matrix
        return HeadBytes(max(forward, backward), 0.0, gradient + matrix)
    return HeadBytes(max(logits, scored) + cast + 2 * hidden - gradient, gradient + matrix, gradient + matrix)


def scored_logits(chunk: float, types: BlockDtypes, *, entropy: bool, compiled: bool) -> float:
    """Returns the bytes of the logits of a chunk without gradients: the product and its float32 copy, which becomes the
    probabilities; then those and the terms of the entropy. Compiled, there is the product only.

    Args:
        chunk: bytes of its float32 logits.
    """
    product = chunk * (0.5 if types.product < FLOAT else 1.0)
    if compiled:
        return product
    return max(product + chunk * (types.product < FLOAT), 2.0 * chunk * entropy)
