"""What the head takes, as counted and as PyTorch's own memory profile has it."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from typing import Literal

import pytest
import torch
from counted import peak_allocated
from torch import nn
from torch.profiler import profile

from stoker.models.head import Head
from stoker.plan.block_dtypes import BlockDtypes, block_dtypes
from stoker.plan.memory.head_memory import CHUNK, CHUNK_GPU, HeadBytes, head_bytes, scored_logits
from stoker.plan.shape import Shape

SHAPE = Shape("test", layers=1, width=128, heads=2, kv_heads=2, head_size=64, mlp_width=256, vocabulary=16384)
TOKENS = 2048  # two chunks


def counted_bytes(
    shape: Shape, types: BlockDtypes, *, trained: bool, wide: bool = False, compiled: bool = False
) -> HeadBytes:
    """Counts the head of one process on a CPU."""
    return head_bytes(shape, TOKENS, types=types, trained=trained, wide=wide, tensor=1, chunk=CHUNK, compiled=compiled)


@pytest.mark.parametrize(("trained", "width"), [(True, 128), (False, 128), (True, 64)])
def test_the_peak_of_the_head_is_as_counted(trained: bool, width: int) -> None:
    """Also of a head that reads hidden states of the embedding's width, after a projection to it."""
    linear = nn.Linear(width, SHAPE.vocabulary, bias=False).requires_grad_(trained)
    hidden = torch.randn(TOKENS, width, requires_grad=True)
    targets = torch.randint(0, SHAPE.vocabulary, (TOKENS,))
    with profile(profile_memory=True) as found:
        loss, _ = Head(linear).cross_entropy(hidden, targets)
        loss.backward()
    shape = replace(SHAPE, embedding_width=0 if width == SHAPE.width else width)
    counted = counted_bytes(shape, block_dtypes("fp32"), trained=trained)
    picked = 4 * TOKENS * width  # the hidden states are there before
    assert peak_allocated(found) == pytest.approx(max(counted.forward, counted.backward) - picked, rel=0.05)
    assert counted.chunk == CHUNK + picked  # of two chunks, one at a time


def test_processes_that_share_a_vocabulary_have_their_part_of_it() -> None:
    def counted(vocabulary: int, tensor: int, *, gpu: bool = False, norm: Literal["layer", "rms"] = "rms") -> HeadBytes:
        shape = replace(SHAPE, vocabulary=vocabulary, norm=norm)
        types = block_dtypes("bf16", held="16-bit") if gpu else block_dtypes("fp32")
        chunk = CHUNK_GPU if gpu else CHUNK
        return head_bytes(
            shape, TOKENS, types=types, trained=True, wide=False, tensor=tensor, chunk=chunk, compiled=False
        )

    assert counted(2 * SHAPE.vocabulary, 2) == counted(SHAPE.vocabulary, 1)
    # Autocast of a GPU gives layer norms in float32, of which tensor processes send a copy in 16 bits.
    alone, beside = (counted(n * SHAPE.vocabulary, n, gpu=True, norm="layer") for n in (1, 2))
    assert alone.chunk - beside.chunk == 2 * TOKENS * SHAPE.width * (4 - 2)
    assert counted(SHAPE.vocabulary, 1, gpu=True).chunk == beside.chunk  # other norms give 16 bits
    types = block_dtypes("bf16", held="16-bit")
    plain, layer = (counted_bytes(replace(SHAPE, norm=norm), types, trained=True) for norm in ("rms", "layer"))
    assert plain == layer  # so do all on a CPU


def test_capped_logits_add_the_slope_of_the_cap() -> None:
    linear = nn.Linear(SHAPE.width, SHAPE.vocabulary, bias=False).requires_grad_(False)
    hidden = torch.randn(TOKENS, SHAPE.width, requires_grad=True)
    targets = torch.randint(0, SHAPE.vocabulary, (TOKENS,))
    with profile(profile_memory=True) as found:
        loss, _ = Head(linear, softcap=30.0).cross_entropy(hidden, targets)
        loss.backward()
    counted = counted_bytes(replace(SHAPE, family="gemma2"), block_dtypes("fp32"), trained=False)
    picked = 4 * TOKENS * SHAPE.width
    assert peak_allocated(found) == pytest.approx(counted.forward - picked, rel=0.05)
    assert counted.chunk == 2 * CHUNK + picked


@pytest.mark.slow  # products in bfloat16 without hardware for them
def test_a_head_trained_beside_a_frozen_base_in_16_bits_is_as_counted() -> None:
    linear = nn.Linear(SHAPE.width, SHAPE.vocabulary, bias=False)
    hidden = torch.randn(TOKENS, SHAPE.width, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, SHAPE.vocabulary, (TOKENS,))
    with profile(profile_memory=True) as found:
        loss, _ = Head(linear).cross_entropy(hidden, targets)
        loss.backward()
    counted = counted_bytes(SHAPE, block_dtypes("bf16", frozen=True), trained=True, wide=True)
    picked = 2 * TOKENS * SHAPE.width
    assert peak_allocated(found) == pytest.approx(max(counted.forward, counted.backward) - picked, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_the_peak_of_a_compiled_head_is_as_counted(
    dtype: torch.dtype, precision: Literal["fp32", "bf16"], trained: bool
) -> None:
    linear = nn.Linear(SHAPE.width, SHAPE.vocabulary, bias=False).requires_grad_(trained)
    hidden = torch.randn(TOKENS, SHAPE.width, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, SHAPE.vocabulary, (TOKENS,))
    head = Head(linear, compiled=True)
    head.cross_entropy(hidden, targets)  # compiles
    with profile(profile_memory=True) as found:
        loss, _ = head.cross_entropy(hidden, targets)
        loss.backward()
    counted = counted_bytes(SHAPE, block_dtypes(precision), trained=trained, wide=True, compiled=True)
    picked = hidden.nbytes
    assert peak_allocated(found) == pytest.approx(max(counted.forward, counted.backward) - picked, rel=0.05)


@pytest.mark.parametrize(
    ("trained", "entropy", "compiled"),
    [
        *itertools.product((True, False), (True, False), (False,)),
        # The compiler writes the exponentials of an entropy to memory on a CPU, but not on a GPU.
        *(pytest.param(trained, False, True, marks=pytest.mark.slow) for trained in (True, False)),
    ],
)
def test_the_peak_of_scores_is_as_counted(trained: bool, entropy: bool, compiled: bool) -> None:
    linear = nn.Linear(SHAPE.width, SHAPE.vocabulary, bias=False).requires_grad_(trained)
    hidden = torch.randn(TOKENS, SHAPE.width, requires_grad=True)
    targets = torch.randint(0, SHAPE.vocabulary, (TOKENS,))
    head = Head(linear, compiled=compiled)

    def run() -> None:
        head.scores(hidden, targets, entropy=entropy).log_probability.sum().backward()

    if compiled:
        run()
    linear.zero_grad()
    hidden.grad = None
    gc.collect()  # what is freed while it is measured lowers the peak
    with profile(profile_memory=True) as found:
        run()
    types = block_dtypes("fp32")
    counted = head_bytes(
        SHAPE,
        TOKENS,
        types=types,
        trained=trained,
        wide=False,
        tensor=1,
        chunk=CHUNK,
        compiled=compiled,
        scores=True,
        entropy=entropy,
    )
    picked = 4 * TOKENS * SHAPE.width
    assert peak_allocated(found) == pytest.approx(max(counted.forward, counted.backward) - picked, rel=0.05)
    assert scored_logits(CHUNK, types, entropy=entropy, compiled=compiled) == CHUNK * (1 + (entropy and not compiled))


def test_the_entropy_with_its_gradient_has_three_chunks_at_once() -> None:
    linear = nn.Linear(SHAPE.width, SHAPE.vocabulary, bias=False).requires_grad_(False)
    hidden = torch.randn(TOKENS, SHAPE.width, requires_grad=True)
    targets = torch.randint(0, SHAPE.vocabulary, (TOKENS,))
    with profile(profile_memory=True) as found:
        scores = Head(linear).scores(hidden, targets, entropy=True, entropy_gradient=True)
        assert scores.entropy is not None
        (scores.log_probability + scores.entropy).sum().backward()
    assert peak_allocated(found) == pytest.approx(3 * CHUNK, rel=0.05)
