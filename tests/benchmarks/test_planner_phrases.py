"""Phrases of tables: types of numbers by what is kept in them, recomputation, sharding."""

from __future__ import annotations

import pytest
from planner_runs.phrases import Sharing, numbers_of, recomputed, sharing, zero_stage


@pytest.mark.parametrize(
    ("phrase", "products"),
    [
        ("bf16 + fp32 grad accumulation", "bf16"), ("bf16 (fp32 grad accumulation)", "bf16"), ("BF16", "bf16"),
        ("mixed-16bit", "16bit"), ("16-mixed", "16bit"), ("amp_bf16 / MP DEFAULT", "bf16"), ("mixed bf16", "bf16"),
        ("fp16 mixed Adam", "fp16"), ("tf32", "tf32"), ("fp32", "fp32"), ("float8", "fp8"), ("fp8 hybrid", "fp8"),
        ("FP8-CS", "fp8"), ("MXFP8", "fp8"), ("amp_fp8", "fp8"), ("fp8 + bf16", "fp8"), ("NVFP4", "fp4"),
        ("FP8 (precision column absent in 25.09 table)", "fp8"), ("bf16 + nf4", "bf16"),
        ("bf16 params, 8-bit AdamW", "bf16"),
        ("bf16 PagedAdamW8bit", "bf16"), ("bf16 weights, fp32 master weights and Adam states", "bf16"),
        ("mixed precision (bf16/fp32)", "bf16"), ("FP8 (first and last layer BF16)", "fp8"),
        ("AMP", None), (None, None),
    ],
)  # fmt: skip
def test_products(phrase: str | None, products: str | None) -> None:
    assert numbers_of(phrase).products == products


@pytest.mark.parametrize(
    ("phrase", "weights", "gradients", "moments", "master"),
    [
        ("bf16 (params and optimizer bf16)", 2, 2, 2, 0),
        ("pure bf16", 2, 2, 2, 0),
        ("bf16 + fp32 grad accumulation", None, 4, None, None),
        ("bf16 with fp32 main grads", None, 4, None, None),
        ("bf16 (8-bit optimizer)", None, None, 1, None),
        ("bf16, adamw8bit", None, None, 1, None),
        ("bf16 params, 8-bit AdamW", 2, 2, 1, 0),
        ("bf16 weights, fp32 master weights and Adam states", 2, None, 4, 4),
        ("fp16 mixed Adam", None, None, None, None),
        ("bf16 / MP PURE", None, None, None, None),  # what FSDP gathers and sums in, not what it keeps
    ],
)
def test_what_is_kept(
    phrase: str, weights: float | None, gradients: float | None, moments: float | None, master: float | None
) -> None:
    found = numbers_of(phrase)
    assert (found.weights, found.gradients, found.moments, found.master) == (weights, gradients, moments, master)
    assert not found.notes


@pytest.mark.parametrize("phrase", ["posit16", "bf16 (quire sums)"])
def test_what_is_not_known_is_said(phrase: str) -> None:
    assert numbers_of(phrase).notes


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("none", "none"), (False, "none"), ("no AC", "none"), ("full", "full"), (True, "full"), ("full AC", "full"),
        ("block", "full"), ("activation checkpointing", "full"), ("selective", "selective"), ("op-SAC", "selective"),
        ("selective (op)", "selective"), ("core_attn", "selective"), ("unknown", None), (None, None), ("banana", None),
    ],
)  # fmt: skip
def test_recomputation(value: object, meant: str | None) -> None:
    found, notes = recomputed(value)
    assert found == meant and bool(notes) == (value == "banana")


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (None, Sharing()), (False, Sharing(0)), ("FULL_SHARD", Sharing(3)), (True, Sharing(3)), ("64", Sharing(3, 64)),
        ("HSDP", Sharing(3, "node")), ("HYBRID_SHARD 16x8", Sharing(3, 8)), ("HSDP (shard 32)", Sharing(3, 32)),
        ("SHARD_GRAD_OP", Sharing(2)), ("_HYBRID_SHARD_ZERO2", Sharing(2, "node")), ("NO_SHARD", Sharing(0)),
    ],
)  # fmt: skip
def test_sharding(value: object, meant: Sharing) -> None:
    assert sharing(value) == meant


@pytest.mark.parametrize(
    ("value", "meant"),
    [(0, 0), (3, 3), ("1", 1), ("ZeRO-1", 1), ("stage 2", 2), ("ZeRO_3", 3), ("distributed optimizer", 1), ("none", 0),
     (None, None), ("unknown", None), ("banana", None)],
)  # fmt: skip
def test_stages(value: object, meant: int | None) -> None:
    found, notes = zero_stage(value)
    assert found == meant and bool(notes) == (value == "banana")
