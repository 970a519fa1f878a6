"""``stoker eval --by-token``: the losses of single tokens add up to the loss that `stoker eval` measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from stoker.checkpoint.load_run import open_run
from stoker.cli.main import main
from stoker.data.token_cache import Row
from stoker.errors import UserError
from stoker.evaluate.token_losses import check_token_losses
from stoker.job.load_job import load_job
from stoker.runs.run_folder import RunFolder
from stoker.train.language.measured_task import measured_training
from tiny_llama import save_tiny_llama

COMMON = "model: tiny\nsteps: 8\nevaluate: {fraction: 0}\ncheckpoint: {every: 4, keep: 5}\n"
TRAIN = "lr: 1e-2, batch: 4, seq_len: 64, precision: fp32"
JOBS = {
    "pretrain": f"task: pretrain\ndata: texts.jsonl\n{COMMON}train: {{{TRAIN}}}\n",
    "sft": f"task: sft\ndata: rows.jsonl\ntune: lora\n{COMMON}train: {{{TRAIN}, pack: true}}\n",
}
DATA = {"pretrain": "texts.jsonl", "sft": "rows.jsonl"}


@pytest.fixture(scope="module")
def base(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each task, both of which pack."""
    base = tmp_path_factory.mktemp("token-losses")
    save_tiny_llama(base / "tiny", tokenizer)
    texts = [{"text": f"The sea is blue and the wind {i} is cold. " * (1 + i % 5)} for i in range(9)]
    rows = [{"prompt": f"What is {i}?", "completion": f"It is {i}. " * (1 + 12 * (i == 4))} for i in range(9)]
    for name, lines in (("texts.jsonl", texts), ("rows.jsonl", rows)):
        (base / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        for name, job in JOBS.items():
            (base / f"{name}.yaml").write_text(job)
            assert main(["train", f"{name}.yaml", "--json"]) == 0
    return base


@pytest.fixture(autouse=True)
def here(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base)


def measured(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["eval", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def added_up(samples: list[dict[str, Any]]) -> tuple[float, int]:
    """The mean of the losses, and how many there are; exactly the trained tokens have one."""
    for sample in samples:
        assert [loss is not None for loss in sample["loss"]] == sample["trained"]
    losses = [loss for sample in samples for loss in sample["loss"] if loss is not None]
    return sum(losses) / len(losses), len(losses)


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("at", ["last", "4"])
def test_losses_of_tokens_add_up_to_that_of_the_rows(name: str, at: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole = measured(capsys, name, DATA[name], "--at", at)
    by_token = measured(capsys, name, DATA[name], "--at", at, "--by-token", "100")
    assert added_up(by_token["samples"]) == (pytest.approx(whole["loss"], abs=1e-6), whole["tokens"])
    assert by_token["loss"] == pytest.approx(whole["loss"], abs=1e-6)
    assert (by_token["step"], by_token["tokens"]) == (whole["step"], whole["tokens"])
    assert whole["step"] == (4 if at == "4" else 8)


@pytest.mark.parametrize("name", JOBS)
def test_packed_sequences_have_the_losses_of_their_rows(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured(capsys, name, "--by-token", "100")
    packed = measured(capsys, name, "--by-token", "100", "--packed")
    documents = [document for each in packed["packed"] for document in each["documents"]]
    assert max(len(each["documents"]) for each in packed["packed"]) > 1
    assert packed["sequences"] == len(packed["packed"]) < len(rows["samples"]) == len(documents) == rows["sequences"]
    of_row = {(each["row"], tuple(each["ids"])): each["loss"] for each in rows["samples"]}
    for document in documents:
        assert document["loss"] == pytest.approx(of_row[document["row"], tuple(document["ids"])], abs=1e-5)
    assert added_up(documents) == (pytest.approx(measured(capsys, name, DATA[name])["loss"], abs=1e-6), rows["tokens"])


def test_a_window_has_the_losses_of_those_rows(capsys: pytest.CaptureFixture[str]) -> None:
    everything = measured(capsys, "sft", "--by-token", "100")["samples"]
    part = measured(capsys, "sft", "--by-token", "2", "--offset", "3")
    assert [each["row"] for each in part["samples"]] == [4, 5]
    for one, other in zip(part["samples"], everything[3:5], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5) and one["ids"] == other["ids"]
    assert part["samples"][1]["lost"] > 0 and not part["samples"][0]["lost"]
    assert part["loss"] == pytest.approx(added_up(part["samples"])[0], abs=1e-9)


def test_a_loss_is_minus_the_log_probability_of_its_token(capsys: pytest.CaptureFixture[str]) -> None:
    sample = measured(capsys, "pretrain", "texts.jsonl", "--by-token", "1")["samples"][0]
    model, ids = open_run("pretrain", Path.cwd()).model, torch.tensor([sample["ids"]])
    with torch.no_grad():
        log_p = model(input_ids=ids).logits[0].log_softmax(-1)
    expected = -log_p[:-1].gather(1, ids[0, 1:, None]).squeeze(1)
    assert sample["loss"][0] is None
    assert sample["loss"][1:] == pytest.approx(expected.tolist(), abs=1e-5)


def test_people_see_each_loss_behind_its_token(capsys: pytest.CaptureFixture[str]) -> None:
    loss = measured(capsys, "sft", "--by-token", "1")["samples"][0]["loss"]
    assert main(["eval", "sft", "--by-token", "1"]) == 0
    out = capsys.readouterr().out
    assert [f"⟦{value:.2f}⟧" in out for value in loss if value is not None] == [True] * out.count("⟦")
    assert f"{sum(value is not None for value in loss)} trained tokens of 1 sequence\n" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sft", "--by-token", "0"], "--by-token must be above 0"),
        (["sft", "--by-token", "3", "--offset", "-1"], "--offset at least 0"),
        (["sft", "--offset", "3"], "--by-token"),
        (["sft", "--packed"], "--by-token"),
        (["sft", "rows.jsonl", "--by-token", "3", "--packed"], "leave DATA out"),
        (["sft", "--by-token", "3", "--compare"], "--by-token and --compare are separate evaluations"),
        (["sft", "--by-token", "3", "--at", "5"], "has no checkpoint '5'"),
        (["sft", "--by-token", "3", "--at", "²"], "has no checkpoint '²'"),
        (["sft", "none.jsonl", "--by-token", "3"], "none.jsonl"),
    ],
)
def test_wrong_options_are_one_clear_error(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", *words]) == 2
    assert said in capsys.readouterr().err


def test_without_trained_tokens_there_is_no_loss(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(capsys, "sft", "--by-token", "2", "--offset", "900")
    assert (found["loss"], found["tokens"], found["samples"]) == (None, 0, [])
    assert main(["eval", "sft", "--by-token", "2", "--offset", "900"]) == 0
    assert capsys.readouterr().out == "step 8: no loss: there is no sequence 900 or later\n"

    def untrained(_: object, rows: list[Row]) -> list[np.ndarray]:
        return [np.full(len(row.ids), np.nan) for row in rows]

    monkeypatch.setattr("stoker.evaluate.token_losses.token_losses", untrained)
    assert measured(capsys, "sft", "--by-token", "2")["loss"] is None
    assert main(["eval", "sft", "--by-token", "2"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("step 8: no loss: none of the tokens of 2 sequences is trained\n") and "nan" not in out


def test_a_loss_of_pairs_is_none_of_tokens(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [{"prompt": f"What is {i}?", "chosen": "The sea.", "rejected": "The wind."} for i in range(6)]
    (base / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    job = f"task: dpo\ndata: pairs.jsonl\ntune: lora\n{COMMON}train: {{{TRAIN}}}\n".replace("steps: 8", "steps: 1")
    (base / "dpo.yaml").write_text(job)
    assert main(["train", "dpo.yaml"]) == 0
    monkeypatch.setattr("stoker.checkpoint.load_run.open_run", None)  # its model is not opened for that
    assert main(["eval", "dpo", "--by-token", "2"]) == 2
    assert "is not one of single tokens" in capsys.readouterr().err


@pytest.mark.parametrize(("task", "extra"), [("grpo", "grpo: {rewards: 'regex:[0-9]+'}"), ("reward", "")])
def test_policies_are_measured_by_the_loss_of_tokens(task: str, extra: str, base: Path) -> None:
    path = base / f"{task}.yaml"
    path.write_text(f"task: {task}\nmodel: tiny\ndata: rows.jsonl\nsteps: 1\n{extra}\n")
    job = load_job(path).job
    assert (measured_training(job).target == "token") == (task == "grpo")
    if task == "grpo":
        check_token_losses(job, RunFolder(base / "run"))
    else:
        with pytest.raises(UserError, match="not one of single tokens"):
            check_token_losses(job, RunFolder(base / "run"))
