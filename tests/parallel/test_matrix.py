"""Every layout of one family, and every family under one layout; ``make verify-all`` runs the whole matrix."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from verify_all import config_of

from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.models.families import FAMILIES
from stoker.verify.layout_cases import MATRIX
from stoker.verify.toy_job import make_twin
from stoker.verify.verifier import Verifier

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


@pytest.mark.slow
def test_embeddings_for_every_block_follow_a_split_sequence(pool: Pool, tmp_path: Path) -> None:
    split = next(i for i, cell in enumerate(MATRIX) if cell.name == "tensor 2 + sequence")
    assert not check("gemma4_text, small", [split], pool, tmp_path)


def check(family: str, layouts: Iterable[int], pool: Pool, folder: Path) -> list[str]:
    """Which layouts the family is refused, and why; none may compute anything else."""
    (folder / "job.yaml").write_text("task: sft\nmodel: some/model\ndata: none.jsonl\nsteps: 5\n")
    twin = make_twin(load_job(folder / "job.yaml"), folder, folder, config=config_of(family))
    verifier = Verifier(twin, pool, whole=False)
    assert verifier.bound <= 1e-6
    verdicts = [verifier.verdict(MATRIX[i]) for i in layouts]
    wrong = [f"{v.cell.name}: {v.reason}" for v in verdicts if v.passed is False]
    assert not wrong, "\n".join(wrong)
    return [f"{v.cell.name}: {v.reason}" for v in verdicts if v.passed is None]
