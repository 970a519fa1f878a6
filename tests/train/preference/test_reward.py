"""`task: reward`: the loss, the head, the offset, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from running import run, write_job
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from stoker.cli.main import main
from stoker.errors import UserError
from stoker.job.load_job import load_job
from stoker.models.attention.collate import cut_after_last_target
from stoker.models.score_head import draw_weights
from stoker.models.tuning.adapters import unwrap
from stoker.train.language.language_task import LanguageTask
from stoker.train.preference.reward_calibration import _of_source
from stoker.train.preference.reward_objective import heads_of, offset_of

ROWS = 20
WORDS = ["sea", "wind", "poem", "capital"]
LORA = {"method": "lora", "rank": 4}


def test_the_calibration_error_weighs_bins_by_their_pairs() -> None:
    """Three pairs are predicted to be right with 0.525, and two of them are; the fourth is sure and right."""
    found = _of_source(torch.tensor([0.1, 0.1, -0.1, 5.0], dtype=torch.float64))
    near, sure = (1 / (1 + math.exp(-difference)) for difference in (0.1, 5.0))
    assert [(one["pairs"], one["predicted"], one["right"]) for one in found["bins"]] == [
        (3, pytest.approx(near), pytest.approx(2 / 3)),
        (1, pytest.approx(sure), 1.0),
    ]
    assert found["error"] == pytest.approx(3 / 4 * (2 / 3 - near) + 1 / 4 * (1 - sure))
    assert found["accuracy"] == 0.75 and found["margin"] == pytest.approx(5.1 / 4)


@pytest.fixture
def reward(base: Path, sft: dict[str, Any]) -> dict[str, Any]:
    """A job of pairs: answers that name a word are better."""
    with (base / "pairs.jsonl").open("w") as file:
        for i in range(ROWS):
            answers = {"chosen": f"It is {WORDS[-i % 4]} " * (1 + i % 3), "rejected": f"I do not know {i}."}
            row = {"prompt": f"What is {WORDS[i % 4]} {i}?", **answers, "margin": 0.5 + i % 2}
            file.write(json.dumps(row) + "\n")
    evaluate = {"fraction": 0.2, "every": 4}
    return {
        **sft, "task": "reward", "data": "pairs.jsonl", "steps": 8, "evaluate": evaluate, "output": "runs/reward",
        "train": {**sft["train"], "lr": 3e-3},
    }  # fmt: skip


def evaluations(ran: Any) -> list[dict[str, Any]]:
    return [event for event in ran.folder.read_events() if event["event"] == "evaluated"]


@pytest.mark.parametrize("tune", ["full", LORA])
def test_a_run_learns_which_answers_are_better(tune: Any, reward: dict[str, Any], base: Path) -> None:
    ran = run(base, {**reward, "tune": tune})
    first, last = evaluations(ran)[0], evaluations(ran)[-1]
    assert last["loss"] < first["loss"] and last["accuracy"] == 1.0 and last["margin"] > max(0.0, first["margin"])
    assert "offset" not in ran.prepared.facts
    assert {"accuracy", "margin"} <= ran.folder.read_metrics()[-1].keys()
    assert offset_of(ran.prepared.task.model) == pytest.approx(last["chosen_score"])
    (offset,) = (value for name, value in ran.last_state().tensors.items() if name.endswith("offset"))
    assert float(offset) == pytest.approx(last["chosen_score"])


def test_a_head_with_an_adapter_is_trained_and_centred_too(reward: dict[str, Any], base: Path) -> None:
    ran = run(base, {**reward, "tune": {**LORA, "targets": ["q_proj", "lm_head"]}})
    assert offset_of(ran.prepared.task.model) == pytest.approx(evaluations(ran)[-1]["chosen_score"])
    (head,) = heads_of(ran.prepared.task.model)
    assert not torch.equal(head.weight.detach(), draw_weights(32, ran.prepared.job.seed, "score"))


def test_the_loss_is_that_of_bradley_and_terry(reward: dict[str, Any], base: Path, tiny_model: Path) -> None:
    """With margins and centring as TRL's RewardTrainer has them; scores read at the last token of a row by itself."""
    job = {**reward, "steps": 1, "reward": {"margin": 2.0, "center": 0.1}, "train": {**reward["train"], "lr": 1e-9}}
    ran = run(base, job)
    task = ran.prepared.task
    assert isinstance(task, LanguageTask) and ran.prepared.text is not None
    documents = task.corpus.evaluation_documents()
    (head,) = heads_of(task.model)
    assert head.weight.shape == (1, 32) and 0.5 < float(head.weight.detach().std() * 33**0.5) < 1.5
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    scores = []
    with torch.no_grad():
        for document in documents:
            ids, trained = (
                torch.tensor(x) for x in cut_after_last_target((document.row.ids.astype("int64"), document.row.trained))
            )
            assert trained[-1] and ids[-1] == ran.prepared.text.tokenizer.eos_token_id  # the stop token
            scores.append(float(plain.base_model(input_ids=ids[None]).last_hidden_state[0, -1] @ head.weight[0]))
        losses = [
            -float(logsigmoid(torch.tensor(chosen - rejected - 2.0 * document.row.margin)))
            + 0.1 * (chosen + rejected) ** 2
            for chosen, rejected, document in zip(scores[::2], scores[1::2], documents[::2], strict=True)
        ]
        found = evaluations(ran)[0]
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found["chosen_score"] == pytest.approx(sum(scores[::2]) / len(losses), rel=1e-4, abs=1e-5)


def test_the_base_is_frozen_beside_an_adapter_but_not_the_head(reward: dict[str, Any], base: Path) -> None:
    ran = run(base, {**reward, "tune": LORA})
    trained = [name for name, p in unwrap(ran.prepared.task.model).named_parameters() if p.requires_grad]
    assert [name for name in trained if ".lora_" not in name] == ["lm_head.weight"] and len(trained) > 1


def test_a_run_goes_on_bit_for_bit(reward: dict[str, Any], base: Path) -> None:
    job = {**reward, "train": {**reward["train"], "schedule": "constant"}, "checkpoint": {"every": 4}}
    run(base, {**job, "steps": 4, "output": "runs/half"})
    rest = run(base, {**job, "output": "runs/half"})
    straight = run(base, job)
    assert rest.losses == straight.losses
    last, expected = rest.last_state().tensors, straight.last_state().tensors
    assert last.keys() == expected.keys() and all(torch.equal(last[name], expected[name]) for name in last)


def test_stoker_eval_measures_and_calibrates(
    reward: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(base)
    ran = run(base, reward)
    assert main(["eval", "runs/reward", "--json"]) == 0
    found, last = json.loads(capsys.readouterr().out), evaluations(ran)[-1]
    for name in ("loss", "accuracy", "margin"):
        assert found[name] == pytest.approx(last[name], abs=1e-5)
    assert main(["eval", "runs/reward", "pairs.jsonl", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (source,) = found["calibration"]
    assert source["source"] == "pairs.jsonl" and source["pairs"] == ROWS == sum(b["pairs"] for b in source["bins"])
    assert source["accuracy"] == pytest.approx(found["accuracy"])
    for one in source["bins"]:
        assert 0.5 <= one["predicted"] <= 1 and 0 <= one["right"] <= 1
    expected = sum(b["pairs"] * abs(b["predicted"] - b["right"]) for b in source["bins"]) / ROWS
    assert source["error"] == pytest.approx(expected)


def test_the_untuned_model_has_the_first_head(
    reward: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head is trained beside an adapter, so switching the adapter off is not enough."""
    monkeypatch.chdir(base)
    ran = run(base, {**reward, "tune": LORA})
    monkeypatch.setattr("stoker.evaluate.measure_run.untuned_model", None)  # a second model would need its memory
    assert main(["eval", "runs/reward", "--compare", "--json"]) == 0
    found, first = json.loads(capsys.readouterr().out)["untuned"], evaluations(ran)[0]
    assert first["step"] == 0
    for name in ("loss", "accuracy", "margin"):
        assert found[name] == pytest.approx(first[name], abs=1e-5)


def test_a_reward_run_is_not_talked_to(
    reward: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(base)
    run(base, {**reward, "steps": 1})
    assert main(["chat", "runs/reward", "--prompt", "Hello"]) == 2
    assert "scores answers and writes none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tune": "prompt"}, "needs a trained head"),
        ({"evaluate": {"samples": 2}}, "scores answers and writes none"),
        ({"reward": {"margin": -1}}, "reward.margin"),
    ],
)
def test_what_is_wrong_in_the_job_is_said(
    change: dict[str, Any], said: str, reward: dict[str, Any], base: Path
) -> None:
    with pytest.raises(UserError) as error:
        load_job(write_job(base, {**reward, **change}))
    assert said in str(error.value)


def test_margins_are_of_the_rows(reward: dict[str, Any], base: Path) -> None:
    rows = [json.loads(line) for line in (base / "pairs.jsonl").read_text().splitlines()]
    bare = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in rows]
    scored = [{**row, "chosen_score": 3, "rejected_score": 2.5} for row in bare]
    for name, written in (("bare", bare), ("scored", scored)):
        (base / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    job = {**reward, "steps": 1, "reward": {"margin": 1.0}}
    ran = run(base, {**job, "data": "scored.jsonl", "output": "runs/scored"})
    assert ran.prepared.corpus is not None
    assert {d.row.margin for d in ran.prepared.corpus.sequences[0]} == {0.5}
    with pytest.raises(UserError, match="no row has a margin"):
        run(base, {**job, "data": "bare.jsonl", "output": "runs/bare"})


@pytest.mark.slow
def test_ranked_answers_are_pairs_that_are_held_out_by_row(reward: dict[str, Any], base: Path) -> None:
    """What is learnt of scored answers is what is learnt of their pairs, margins included."""
    pairs, ranked = [], []
    for i in range(ROWS):
        answers = [f"It is {WORDS[-i % 4]} {i}", f"It may be {i}", f"I do not know {i}."]
        scores = [2.0, 1.5, -1.0]
        ranked.append({"prompt": f"What is {i}?", "answers": answers, "scores": scores})
        for better, worse in ((0, 1), (0, 2), (1, 2)):
            row = {"prompt": f"What is {i}?", "chosen": answers[better], "rejected": answers[worse]}
            pairs.append({**row, "chosen_score": scores[better], "rejected_score": scores[worse]})
    scored = [
        {"prompt": row["prompt"], "answer": answer, "score": score}
        for row in ranked
        for answer, score in zip(row["answers"], row["scores"], strict=True)
    ]
    first = {row["prompt"]: row for row in reversed(scored)}  # of each prompt one row, then the others
    scored = [*first.values()][::-1] + [row for row in scored if row is not first[row["prompt"]]]
    for name, rows in (("pairs", pairs), ("ranked", ranked), ("scored", scored)):
        (base / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = {
        **reward,
        "reward": {"margin": 1.0},
        "evaluate": {"fraction": 0.0},
        "train": {**reward["train"], "pack": False},
    }
    runs = [run(base, {**plain, "data": f"{name}.jsonl", "output": name}) for name in ("pairs", "ranked", "scored")]
    assert runs[0].losses == runs[1].losses == runs[2].losses
    assert offset_of(runs[0].prepared.task.model) == 0 and "nothing is held out" in runs[0].prepared.facts["offset"]
    held_out = run(base, {**reward, "data": "ranked.jsonl", "output": "held-out", "steps": 1}).prepared.corpus
    assert held_out is not None
    (mask,) = held_out.held_out
    by_row = mask.reshape(ROWS, 6)
    assert (by_row.all(1) | ~by_row.any(1)).all() and 0 < by_row.all(1).sum() < ROWS
