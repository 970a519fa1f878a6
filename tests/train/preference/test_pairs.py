"""A task that learns from pairs of answers, chosen and rejected: they stay together from the file to the loss."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from running import run, write_job
from torch import Tensor
from torch.nn.functional import logsigmoid

from stoker.cli.main import main
from stoker.data.corpus import Corpus
from stoker.data.sequences import Document
from stoker.errors import UserError
from stoker.job.load_job import load_job
from stoker.job.task_spec import TASKS, RowSpec
from stoker.models.attention.collate import Inputs
from stoker.models.head import Head, LogitsHead
from stoker.models.objective import Loss
from stoker.train.language.language_training import LanguageTraining

ROWS = 20


def preference(hidden_ND: Tensor, inputs: Inputs, head: Head | LogitsHead) -> Loss:
    """-log sigmoid of how much likelier the chosen answer is."""
    scores_N = head.scores(hidden_ND, inputs.targets).log_probability
    chosen, rejected = inputs.sum_by_document(scores_N).view(-1, 2).unbind(1)
    return Loss(inputs.counted_once(-logsigmoid(chosen - rejected).sum()), (chosen > rejected).sum())


@pytest.fixture
def pairs(base: Path, sft: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A job of such a task."""
    task = replace(
        TASKS["sft"],
        rows=RowSpec(kind=lambda _: "pairs"),
        language=LanguageTraining(target="pair", perplexity=False, objective=lambda _: preference),
    )
    monkeypatch.setitem(TASKS, "sft", task)
    words = ["sea", "wind", "poem", "capital"]
    with (base / "pairs.jsonl").open("w") as file:
        for i in range(ROWS):
            question = f"What is {words[i % 4]} {i}?"
            answers = {"chosen": f"It is {words[-i % 4]} " * (1 + i % 3), "rejected": f"I do not know {i}."}
            file.write(json.dumps({"prompt": question, **answers}) + "\n")
    evaluate = {"fraction": 0.2, "every": 4}
    return {**sft, "data": "pairs.jsonl", "steps": 8, "evaluate": evaluate, "output": "runs/pairs"}


def units(corpus: Corpus, documents: list[Document]) -> list[int]:
    """The rows of documents, which are pairs: both of a row, the chosen answer first."""
    rows = [corpus.sequences.origin(document)[1] for document in documents]
    assert rows[::2] == rows[1::2]
    assert all(
        first.index % 2 == 0 and second.index == first.index + 1
        for first, second in zip(documents[::2], documents[1::2], strict=True)
    )
    return rows[::2]


@pytest.mark.parametrize("packed", [False, True])
def test_pairs_stay_together(pairs: dict[str, Any], base: Path, packed: bool) -> None:
    ran = run(base, {**pairs, "train": {**pairs["train"], "pack": packed, "lr": 1e-2}})
    corpus = ran.prepared.corpus
    assert corpus is not None
    held_out = units(corpus, corpus.evaluation_documents())
    trained = [row for i in range(corpus.sequences.total(1)) for row in units(corpus, corpus.sequences[i])]
    assert len(held_out) == 4 and sorted(trained + held_out) == list(range(1, ROWS + 1))
    evaluated = [event for event in ran.folder.read_events() if event["event"] == "evaluated"]
    assert [event["targets"] for event in evaluated] == [4] * 3 and evaluated[0]["perplexity"] is None
    assert evaluated[-1]["loss"] < evaluated[0]["loss"]
    assert ran.prepared.audit is not None
    (drawn,) = ran.prepared.audit.mixture
    if not packed:
        assert drawn.rows == 8 * ran.loaded.job.train.batch and drawn.epochs == pytest.approx(drawn.rows / 16)


def test_a_run_of_pairs_is_measured_on_pairs(
    pairs: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run(base, pairs)
    monkeypatch.chdir(base)
    for words, number in (([], 4), (["pairs.jsonl"], ROWS)):
        assert main(["eval", "runs/pairs", *words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["pairs"] == found["rows_used"] == number and 0 <= found["pair_accuracy"] <= 1
        assert found["perplexity"] is None and found["bits_per_byte"] is None
    last = [event for event in ran.folder.read_events() if event["event"] == "evaluated"][-1]
    assert main(["eval", "runs/pairs"]) == 0
    assert (
        f"loss {last['loss']:.4f}  pair accuracy {last['accuracy']:.1%}  (4 trained pairs of 4 rows"
        in capsys.readouterr().out
    )


def test_rows_of_one_answer_and_split_pairs_are_refused(pairs: dict[str, Any], base: Path) -> None:
    with pytest.raises(UserError, match="its rows are one answer a row; task sft trains on pairs, chosen and rejected"):
        run(base, {**pairs, "data": "rows.jsonl"})
    for key, value in (("too_long", "split"), ("stream", True)):
        with pytest.raises(UserError, match="pairs"):
            load_job(write_job(base, {**pairs, "data": [{"path": "pairs.jsonl", key: value}]}))
