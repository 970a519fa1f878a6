"""`task: dpo` under layouts against one process: whole runs, with the reference's passes and what is measured."""

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

JOB = "task: dpo\nmodel: some/model\ndata: none.jsonl\nsteps: 5\ntune: {tune}\ndpo: {dpo}\n"
LORA = "{method: lora, rank: 4}"


def check(tune: str, dpo: str, cells: Sequence[Cell], pool: Pool, folder: Path, family: str = "llama") -> None:
    (folder / "job.yaml").write_text(JOB.format(tune=tune, dpo=dpo))
    loaded = load_job(folder / "job.yaml")
    twin = make_twin(loaded, folder, folder, steps=3, config=AutoConfig.for_model(family))
    verdicts = list(map(Verifier(twin, pool, whole=False).verdict, cells))
    assert [(v.cell.name, v.passed, v.reason) for v in verdicts] == [(cell.name, True, "") for cell in cells]


def cells(*names: str) -> list[Cell]:
    found = [cell for cell in MATRIX if cell.name in names]
    assert len(found) == len(names)
    return found


@pytest.mark.parametrize(
    ("name", "tune", "dpo"),
    [
        ("1f1b", LORA, "{}"),
        ("context 2, gather", "full", "{loss: ipo}"),
        ("zero3", LORA, "{loss: kto}"),
    ],
)
@pytest.mark.often("1f1b")
def test_layouts_compute_what_one_process_does(name: str, tune: str, dpo: str, pool: Pool, tmp_path: Path) -> None:
    check(tune, dpo, cells(name), pool, tmp_path)


@pytest.mark.exhaustive  # every layout, in one of three variants; `make verify-all` has all of them
@pytest.mark.parametrize(
    ("tune", "dpo", "first"),
    [
        (LORA, "{sft_weight: 0.1}", 0),
        ("full", "{loss: robust, label_smoothing: 0.1}", 1),
        (LORA, "{loss: kto}", 2),
    ],
)
def test_every_layout_computes_what_one_process_does(
    tune: str, dpo: str, first: int, pool: Pool, tmp_path: Path
) -> None:
    check(tune, dpo, MATRIX[first::3], pool, tmp_path)


@pytest.mark.slow  # a family whose rows are padded, so that pairs are sorted by length
@pytest.mark.exhaustive
def test_padded_rows_keep_their_reference(pool: Pool, tmp_path: Path) -> None:
    check(LORA, "{}", cells("DDP"), pool, tmp_path, family="falcon")
