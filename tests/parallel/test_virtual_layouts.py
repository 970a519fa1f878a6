"""Virtual tokens under data-parallel layouts against one process, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from stoker.errors import UserError
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.verify.layout_cases import Cell
from stoker.verify.toy_job import make_twin
from stoker.verify.verifier import Verifier

LAYOUTS = [
    Cell("ddp", {"data": 2}),
    Cell("zero2", {"data": 2, "shard": "zero2"}, accumulation=2),
    Cell("zero3", {"data": 2, "shard": "zero3"}),
]
JOB = "task: sft\nmodel: some/model\ndata: none.jsonl\nsteps: 5\ntune: {tune}\n"


@pytest.mark.parametrize("family", ["llama", pytest.param("bloom", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "tune",
    [
        pytest.param("prompt", marks=pytest.mark.exhaustive),
        pytest.param("{method: p-tuning, encoder: lstm}", marks=pytest.mark.exhaustive),
        pytest.param("prefix", marks=pytest.mark.exhaustive),
        "{method: p-tuning, deep: true}",
    ],
)
@pytest.mark.slow
def test_layouts_compute_what_one_process_does(family: str, tune: str, pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.format(tune=tune))
    twin = make_twin(load_job(tmp_path / "job.yaml"), tmp_path, tmp_path, steps=5, config=AutoConfig.for_model(family))
    verdicts = list(map(Verifier(twin, pool, whole=False).verdict, LAYOUTS))
    assert [(v.cell.name, v.passed) for v in verdicts] == [(cell.name, True) for cell in LAYOUTS], verdicts


@pytest.mark.parametrize(
    ("tune", "parallel", "words"),
    [
        ("prompt", "{tensor: 2}", "`tensor` gives a process a part of the model"),
        ("p-tuning", "{pipeline: 2}", "`pipeline` gives"),
        ("prefix", "{context: 2}", "`context` gives"),
        ("prefix", "{recompute: full}", "keys and values of the prefix twice"),
    ],
)
def test_the_rest_is_refused(tune: str, parallel: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.format(tune=tune) + f"parallel: {parallel}\n")
    with pytest.raises(UserError, match=words):
        load_job(tmp_path / "job.yaml")
