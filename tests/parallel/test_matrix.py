"""Every layout of one family, and every family under one layout; ``make verify-all`` runs the whole matrix."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.models.families import FAMILIES
from stoker.verify.layout_cases import MATRIX
from stoker.verify.toy_job import make_twin
from stoker.verify.verifier import Verifier

GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 2}
# What transformers' default configurations lack, or have unlike any model.
COMPLETED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    # By default scores are multiplied by 1, which enlarges rounding beyond the bound.
    "granitemoe": {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
}
STEP = 5  # coprime to the number of layouts: families meet all of them
OFTEN = ("llama", "gpt2")
WHOLE = "llama"  # which has them all


def layout_of(number: int) -> int:
    """Which cell of the matrix the ``number``-th family is tried with."""
    return number * STEP % len(MATRIX)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f in OFTEN else pytest.mark.exhaustive) for f in FAMILIES]
)
def test_a_layout_computes_what_one_process_does(family: str, pool: Pool, tmp_path: Path) -> None:
    check(family, [layout_of(list(FAMILIES).index(family))], pool, tmp_path)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_layout_computes_what_one_process_does(pool: Pool, tmp_path: Path) -> None:
    assert not check(WHOLE, range(len(MATRIX)), pool, tmp_path)


@pytest.mark.slow
def test_values_of_latent_attention_have_another_size_than_keys(pool: Pool, tmp_path: Path) -> None:
    gathered = next(i for i, cell in enumerate(MATRIX) if cell.name == "context 2, gather")
    assert not check("deepseek_v3", [gathered], pool, tmp_path)


def check(family: str, layouts: Iterable[int], pool: Pool, folder: Path) -> list[str]:
    """Which layouts the family is refused, and why; none may compute anything else."""
    config = AutoConfig.for_model(family, **COMPLETED.get(family, {}))
    if getattr(config, "num_key_value_heads", None) is not None and not hasattr(config, "kv_lora_rank"):
        config = AutoConfig.for_model(family, **GROUPED, **COMPLETED.get(family, {}))
    (folder / "job.yaml").write_text("task: sft\nmodel: some/model\ndata: none.jsonl\nsteps: 5\n")
    twin = make_twin(load_job(folder / "job.yaml"), folder, folder, config=config)
    verifier = Verifier(twin, pool, whole=False)
    assert verifier.bound <= 1e-6
    verdicts = [verifier.verdict(MATRIX[i]) for i in layouts]
    wrong = [f"{v.cell.name}: {v.reason}" for v in verdicts if v.passed is False]
    assert not wrong, "\n".join(wrong)
    return [f"{v.cell.name}: {v.reason}" for v in verdicts if v.passed is None]
