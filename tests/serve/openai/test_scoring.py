"""A reward run behind the server: the scores of training, and what cannot be asked of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import InProcess, in_process
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from stoker.checkpoint.load_run import open_run
from stoker.cli.main import main
from stoker.errors import UserError
from stoker.serve.served_models.open_served import open_served
from stoker.train.preference.answer_scores import AnswerScores
from tiny_llama import SIZES

ASKED = {"role": "user", "content": "Who is 3?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("The wind 3 is cold.", "I do not know 3."))


@pytest.fixture(scope="module")
def scorer(home: Path) -> Iterator[InProcess]:
    rows = ({"prompt": f"Who is {i}?", "chosen": f"The wind {i} is cold.", "rejected": f"I do not know {i}."}
            for i in range(12))  # fmt: skip
    (home / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "reward.yaml").write_text(
        "task: reward\nmodel: tiny\ndata: pairs.jsonl\nsteps: 6\ntune: {method: lora, rank: 4}\n"
        "train: {batch: 4, seq_len: 64, precision: fp32, lr: 5e-3}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main(["train", "reward.yaml"]) == 0
    with in_process(home, ["reward", "one"]) as found:
        yield found


@pytest.fixture(scope="module")
def classifiers(scorer: InProcess, home: Path) -> Iterator[InProcess]:
    """A merged export of the reward run, and a classifier of transformers."""
    fast = AutoTokenizer.from_pretrained(home / "tiny")
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": len(fast), "num_labels": 1, "pad_token_id": fast.pad_token_id}
    LlamaForSequenceClassification(LlamaConfig(**sizes, initializer_range=0.2)).save_pretrained(home / "foreign")
    fast.save_pretrained(home / "foreign")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main(["export", "reward", "--format", "merged", "--to", "merged"]) == 0
    with in_process(home, ["merged", "foreign"]) as found:
        yield found


def test_an_export_scores_as_its_run(classifiers: InProcess, scorer: InProcess) -> None:
    body = {"messages": [[ASKED, GOOD], [ASKED, BAD]]}
    found = [
        [entry["score"] for entry in server.post("/v1/score", {"model": name, **body}).json["data"]]
        for server, name in ((classifiers, "merged"), (scorer, "reward"))
    ]
    assert found[0] == pytest.approx(found[1], abs=1e-4) and found[0][0] > found[0][1]


def test_a_classifier_scores_as_in_transformers(classifiers: InProcess, home: Path) -> None:
    """At the last token of the text: the line break that ChatML writes after the stop token."""
    found = classifiers.post("/v1/score", {"model": "foreign", "messages": [[ASKED, GOOD], [ASKED, BAD]]}).json
    model = AutoModelForSequenceClassification.from_pretrained(home / "foreign")
    fast = AutoTokenizer.from_pretrained(home / "foreign")
    for entry, answer in zip(found["data"], (GOOD, BAD), strict=True):
        text = fast.apply_chat_template([ASKED, answer], tokenize=False)
        with torch.no_grad():
            logits = model(**fast(text, add_special_tokens=False, return_tensors="pt")).logits
        assert entry["score"] == pytest.approx(float(logits), abs=1e-5)


@pytest.mark.parametrize(
    ("path", "messages", "says"),
    [
        ("/v1/chat/completions", [ASKED], "scores answers and writes none"),
        ("/v1/score", [[ASKED]], "ends with the assistant's answer"),
        ("/v1/score", [[ASKED, {**GOOD, "content": "wind " * 400}]], "tokens"),
    ],
)
def test_what_a_classifier_cannot_be_asked_is_said(
    path: str, messages: list[Any], says: str, classifiers: InProcess
) -> None:
    response = classifiers.post(path, {"model": "foreign", "messages": messages})
    assert response.status == 400 and says in response.error["message"]


def test_a_classifier_that_cannot_be_served_is_refused(
    classifiers: InProcess, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    assert main(["chat", "foreign", "--prompt", "x"]) == 2
    assert "serve it, and ask for scores at /v1/score: stoker serve foreign" in capsys.readouterr().err
    for name, labels in (("labels", 2), ("silent", 1)):
        LlamaForSequenceClassification(LlamaConfig(**SIZES, vocab_size=400, num_labels=labels)).save_pretrained(
            home / name
        )
        fast = AutoTokenizer.from_pretrained(home / "tiny")
        fast.chat_template = fast.chat_template if labels == 2 else None
        fast.save_pretrained(home / name)
    for name, says in (("labels", "with 2 labels, and a reward model has one"), ("silent", "has no chat template")):
        with pytest.raises(UserError, match=says):
            open_served([name], home)


def score(scorer: InProcess, **body: Any) -> Any:
    return scorer.post("/v1/score", {"model": "reward", **body})


def test_scores_are_those_of_the_run(scorer: InProcess, home: Path) -> None:
    found = score(scorer, messages=[[ASKED, GOOD], [ASKED, BAD]]).json
    good, bad = (entry["score"] for entry in found["data"])
    assert good > bad and [entry["index"] for entry in found["data"]] == [0, 1]
    tuned = open_run("reward", home)
    text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in (ASKED, GOOD)).removesuffix(
        "\n"
    )
    ids = tuned.text.codec.encoder.encode_one(text)
    assert AnswerScores(tuned)([ids]) == pytest.approx([good], abs=1e-6)
    one = score(scorer, messages=[ASKED, GOOD]).json
    assert one["data"][0]["score"] == pytest.approx(good, abs=1e-6)
    assert one["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}


def test_the_list_says_which_models_score(scorer: InProcess) -> None:
    listed = scorer.get("/v1/models").json["data"]
    assert [model["id"] for model in listed if model.get("scores")] == ["reward"] and len(listed) > 1


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/chat/completions", {"messages": [ASKED]}, "scores answers and writes none"),
        ("/v1/completions", {"prompt": "The"}, "scores answers and writes none"),
        ("/v1/score", {"messages": [ASKED]}, "ends with the assistant's answer"),
        ("/v1/score", {"messages": [[ASKED, GOOD], []]}, "at least one message"),
        ("/v1/score", {"messages": [[ASKED, {**GOOD, "content": "wind " * 400}]]}, "cannot be scored"),
        ("/v1/score", {"messages": [ASKED, GOOD], "model": "one"}, "does not score them"),
        ("/v1/score", {"messages": "good"}, "messages"),
        ("/v1/score", {"messages": [ASKED, GOOD], "temperature": 1}, "temperature"),
    ],
)
def test_what_cannot_be_asked_is_said(path: str, body: dict[str, Any], says: str, scorer: InProcess) -> None:
    response = scorer.post(path, {"model": "reward", **body})
    assert response.status == 400 and says in response.error["message"]
