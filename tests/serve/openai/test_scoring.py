"""A reward run behind the server: the scores of training, and what cannot be asked of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import InProcess, in_process

from stoker.checkpoint.load_run import open_run
from stoker.cli.main import main
from stoker.train.preference.answer_scores import AnswerScores

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
