"""An objective that is not a sum over tokens, under layouts: how much likelier one document is than another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from stoker.checkpoint.gather import gather_whole
from stoker.checkpoint.run_weights import held_gradients
from stoker.job.layout import layout_of
from stoker.job.load_job import load_job
from stoker.job.task_spec import TASKS
from stoker.launch.process_pool import Pool
from stoker.models.attention.collate import Inputs
from stoker.models.head import Head, LogitsHead
from stoker.models.objective import Loss
from stoker.parallel.float64_mode import in_float64
from stoker.parallel.mesh import Mesh
from stoker.train.engine import Counts, Totals
from stoker.train.language.language_task import LanguageTask
from stoker.train.language.language_training import LanguageTraining
from stoker.train.prepare import prepare
from stoker.train.prepared import Prepared
from stoker.train.task import Part
from stoker.verify.layout_cases import MATRIX, Cell, reference_of
from stoker.verify.toy_job import Twin, make_twin

PAIRS, PAIRS_A_PASS = 8, 2
ENTROPY = 0.1  # its weight in the loss
OFTEN = ("3D 2 x 2 x 2", "tensor 2 + sequence", "context 2, gather")


@dataclass(frozen=True)
class Found:
    """What a step of a layout computed."""

    loss: float
    evaluated: Totals
    gradients: dict[str, Tensor]


def preference(hidden_ND: Tensor, inputs: Inputs, head: Head | LogitsHead) -> Loss:
    """-log sigmoid of how much likelier the first document of each pair is, less some of the documents' entropy."""
    scores = head.scores(hidden_ND, inputs.targets, entropy=True)
    assert scores.entropy is not None
    chosen, rejected = inputs.sum_by_document(scores.log_probability).view(-1, 2).unbind(1)
    uncertain = inputs.sum_by_document(scores.entropy)
    total = -torch.nn.functional.logsigmoid(chosen - rejected).sum() - ENTROPY * uncertain.log1p().sum()
    return Loss(inputs.counted_once(total), inputs.counted_once((chosen > rejected).sum()))


def pairs(prepared: Prepared, first: int, last: int) -> list[Part]:
    """The forward passes of some pairs of documents that follow each other in the corpus."""
    task = prepared.task
    assert isinstance(task, LanguageTask)
    documents = [document for index in range(2 * last) for document in task.corpus.sequences[index]]
    rows = [(document.row.ids, document.row.trained) for document in documents[2 * first : 2 * last]]
    laid_out = task.language.lay_out(rows, task.device, unit_size=2)
    return [Part(inputs, targets=inputs.rows // 2, tokens=inputs.tokens) for inputs in laid_out]


def computed(job_file: str) -> Found:
    """One step and one evaluation of the pairs, on this process and its peers."""
    path = Path(job_file)
    sft = replace(TASKS["sft"], language=LanguageTraining(objective=lambda _: preference))
    with in_float64(), patch.dict(TASKS, sft=sft):
        loaded = load_job(path)
        layout = layout_of(loaded.job)
        mesh = None if layout.one_process else Mesh(layout, torch.device("cpu"))
        prepared = prepare(loaded, path.parent, mesh=mesh)
        passes, model = prepared.engine, prepared.task.model
        mine = passes.share(0, PAIRS, PAIRS)
        size = PAIRS_A_PASS if mesh is not None else PAIRS
        parts = [part for i in range(*mine, size) for part in pairs(prepared, i, min(i + size, mine[1]))]
        counts: Counts = passes.count(parts)
        assert counts.targets == PAIRS
        loss = passes.train(parts, counts, torch.amp.GradScaler("cpu", enabled=False))
        total = passes.add_up(loss[None], loss.new_zeros(0))
        gradients = gather_whole(held_gradients(model, prepared.shards))
        with torch.no_grad():
            held_out = [part for i in range(0, PAIRS, PAIRS_A_PASS) for part in pairs(prepared, i, i + PAIRS_A_PASS)]
            evaluated = passes.evaluate(held_out)
    return Found(float(total), replace(evaluated, loss=round(evaluated.loss, 10)), gradients)


def twin_of(family: str, folder: Path) -> Twin:
    """A small model of the family and rows for it."""
    (folder / "job.yaml").write_text("task: sft\nmodel: some/model\ndata: none.jsonl\nsteps: 5\n")
    config = AutoConfig.for_model(family)
    return make_twin(load_job(folder / "job.yaml"), folder, folder, steps=2 * PAIRS, config=config)  # rows enough


def check(family: str, cells: list[Cell], pool: Pool, folder: Path) -> None:
    twin = twin_of(family, folder)
    reference: dict[str, Found] = {}
    for cell in cells:
        alone = str(twin.job_file(reference_of(cell), beside=cell))
        key = Path(alone).read_text().split("output:", maxsplit=1)[0]
        expected = reference.setdefault(key, pool.run(computed, alone, world=1)[0])
        found = pool.run(computed, str(twin.job_file(cell)), world=cell.world)[0]
        assert found.loss == pytest.approx(expected.loss, rel=1e-11), cell.name
        assert found.evaluated == expected.evaluated, cell.name
        assert expected.evaluated.correct not in (0, PAIRS)
        assert found.gradients.keys() == expected.gradients.keys(), cell.name
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(found.gradients[name], gradient, rtol=0, atol=1e-10, msg=f"{cell.name}: {name}")


@pytest.mark.parametrize("name", OFTEN)
@pytest.mark.often("3D 2 x 2 x 2", "tensor 2 + sequence", then="slow")
def test_a_loss_of_pairs_under_layouts_is_that_of_one_process(name: str, pool: Pool, tmp_path: Path) -> None:
    check("llama", [cell for cell in MATRIX if cell.name == name], pool, tmp_path)


def test_pairs_of_a_family_whose_rows_are_padded_stay_together(pool: Pool, tmp_path: Path) -> None:
    check("falcon", [cell for cell in MATRIX if cell.name == "DDP"], pool, tmp_path)


@pytest.mark.exhaustive
def test_a_loss_of_pairs_under_every_layout_is_that_of_one_process(pool: Pool, tmp_path: Path) -> None:
    check("llama", [cell for cell in MATRIX if cell.name not in OFTEN], pool, tmp_path)
