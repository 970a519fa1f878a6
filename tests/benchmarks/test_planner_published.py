"""Steps and memory as published, of runs that no number of the planner was fitted to."""

from __future__ import annotations

from typing import Any

import pytest
from planner_runs.cases import predict
from planner_runs.rows import Row

A100 = {"gpu": "A100-80GB-SXM", "seq_len": 2048, "recompute": "full"}
BLOOM: Row = {
    **A100, "source": "BLOOM", "hidden": 14336, "heads": 112, "ffn": 4 * 14336, "vocab": 250880, "num_gpus": 384,
    "dp": 8, "global_batch": 2048, "zero_stage": 1, "interconnect": "4x Omni-Path 100 Gb/s",
}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "seconds"),
    [
        ({"layers": 70, "tp": 4, "pp": 12, "micro_batch": 2}, 104.5),
        ({"layers": 72, "tp": 4, "pp": 12, "micro_batch": 2}, 110.42),
        ({"layers": 72, "tp": 8, "pp": 6, "micro_batch": 4}, 113.95),
    ],
)
def test_bloom(layout: dict[str, Any], seconds: float) -> None:
    """BigScience's logs of 176 and 181 billion parameters on 384 A100."""
    assert predict({**BLOOM, **layout}).step_time_s == pytest.approx(seconds, rel=0.12)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "gpus", "layout", "batch", "tflops"),
    [
        (40, 6144, 48, 256, {"tp": 8, "pp": 1, "dp": 32, "micro_batch": 8}, 1024, 135),
        (80, 12288, 96, 1536, {"tp": 8, "pp": 8, "vp": 2, "dp": 24, "micro_batch": 2}, 2304, 148),
        (128, 25600, 160, 3072, {"tp": 8, "pp": 64, "dp": 6, "micro_batch": 1}, 3072, 163),
    ],
)
def test_weak_scaling_of_megatron(
    layers: int, hidden: int, heads: int, gpus: int, layout: dict[str, int], batch: int, tflops: float
) -> None:
    """Narayanan et al., 2021, table 1, whose FLOP (equation 3) count recomputation."""
    network = {"interconnect": "8x HDR200"}
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": 4 * hidden, "vocab": 51200}
    row = {**A100, **network, **sizes, **layout, "source": "sc21", "num_gpus": gpus, "global_batch": batch}
    flop = 96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
    seconds = predict(row).step_time_s
    assert seconds is not None
    assert flop / seconds / gpus / 1e12 == pytest.approx(tflops, rel=0.08)
