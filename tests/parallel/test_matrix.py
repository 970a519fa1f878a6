"""A part of the matrix that has every layout and every family in it; ``make verify-all`` runs all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from stoker.job.load import load_job
from stoker.launch.pool import Pool
from stoker.launch.verify import Verifier
from stoker.models.families import FAMILIES
from stoker.train.cells import MATRIX
from stoker.train.twin import make_twin

GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 2}
STEP = 5  # coprime to the number of layouts: families meet them in different order
OFTEN = ("llama", "gpt2", "qwen3_moe")
EACH = 3  # layouts of a family beside those of LLaMA, which has them all


def layouts_of(number: int) -> list[int]:
    """Which cells of the matrix the ``number``-th family is tried with."""
    return [(number * EACH + i) * STEP % len(MATRIX) for i in range(EACH)]


@pytest.mark.parametrize("family", [pytest.param(f, marks=[] if f in OFTEN else pytest.mark.slow) for f in FAMILIES])
def test_layouts_compute_what_one_process_does(family: str, pool: Pool, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family)
    if getattr(config, "num_key_value_heads", None) is not None:
        config = AutoConfig.for_model(family, **GROUPED)
    (tmp_path / "job.yaml").write_text("task: sft\nmodel: some/model\ndata: none.jsonl\nsteps: 5\n")
    twin = make_twin(load_job(tmp_path / "job.yaml").job, tmp_path, tmp_path, steps=5, config=config)
    verifier = Verifier(twin, pool)
    assert verifier.bound <= 1e-6
    cells = MATRIX if family == "llama" else [MATRIX[i] for i in layouts_of(list(FAMILIES).index(family))]
    verdicts = list(verifier.verdicts(cells))
    wrong = [f"{v.cell.name}: {v.reason}" for v in verdicts if v.passed is False]
    assert not wrong, "\n".join(wrong)
    if family == "llama":
        refused = [f"{v.cell.name}: {v.reason}" for v in verdicts if v.passed is None]
        assert not refused, "\n".join(refused)
