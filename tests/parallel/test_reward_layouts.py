"""`task: reward` under layouts against one process: the score is computed by one process of the row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoConfig

from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.verify.layout_cases import MATRIX, Cell
from stoker.verify.toy_job import make_twin
from stoker.verify.verifier import Verifier

JOB = "task: reward\nmodel: some/model\ndata: none.jsonl\nsteps: 5\ntune: {tune}\nreward: {{center: 0.1}}\n"
LORA = "{method: lora, rank: 4}"


def check(tune: str, cells: Sequence[Cell], pool: Pool, folder: Path, family: str = "llama") -> None:
    (folder / "job.yaml").write_text(JOB.format(tune=tune))
    loaded = load_job(folder / "job.yaml")
    twin = make_twin(loaded, folder, folder, steps=3, config=AutoConfig.for_model(family))
    verdicts = list(map(Verifier(twin, pool, whole=False).verdict, cells))
    assert [(v.cell.name, v.passed, v.reason) for v in verdicts] == [(cell.name, True, "") for cell in cells]


@pytest.mark.parametrize(
    ("name", "tune"), [("tensor 2 + sequence", "full"), ("1f1b", LORA), ("context 2, gather", LORA), ("zero3", "full")]
)
@pytest.mark.often("1f1b")
def test_layouts_compute_what_one_process_does(name: str, tune: str, pool: Pool, tmp_path: Path) -> None:
    cells = [cell for cell in MATRIX if cell.name == name]
    assert cells
    check(tune, cells, pool, tmp_path)


@pytest.mark.exhaustive  # every layout, in one of two variants; `make verify-all` has both
@pytest.mark.parametrize(("tune", "first"), [("full", 0), (LORA, 1)])
def test_every_layout_computes_what_one_process_does(tune: str, first: int, pool: Pool, tmp_path: Path) -> None:
    check(tune, MATRIX[first::2], pool, tmp_path)


@pytest.mark.slow  # a family whose rows are padded, and whose head is the model's own
def test_padded_rows(pool: Pool, tmp_path: Path) -> None:
    check("full", [cell for cell in MATRIX if cell.name == "DDP"], pool, tmp_path, family="falcon")
