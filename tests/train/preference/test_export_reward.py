"""Reward runs as adapters: what peft loads for sequence classification has the scores of the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification
from running import run
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from stoker.checkpoint.export import export_run
from stoker.checkpoint.load_run import open_run
from stoker.cli.main import main
from stoker.models.tuning.quantise import compute_exactly, quantisation
from stoker.train.preference.answer_scores import AnswerScores

WORDS = ("sea", "wind", "poem")


@pytest.fixture
def reward(base: Path, sft: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A job of pairs, in the current folder."""
    monkeypatch.chdir(base)
    with (base / "pairs.jsonl").open("w") as file:
        for i in range(16):
            answers = {"chosen": f"It is the {WORDS[i % 3]}. " * (1 + i % 3), "rejected": f"I do not know {i}."}
            file.write(json.dumps({"prompt": f"What is {i}?", **answers}) + "\n")
    shutil.copytree(sft["model"], base / "tiny")
    more = {"task": "reward", "model": "tiny", "data": "pairs.jsonl", "evaluate": {"fraction": 0.25, "every": 4}}
    return {**sft, **more, "steps": 4}


@pytest.mark.usefixtures("in_process_replay")
@pytest.mark.parametrize(
    ("method", "precision", "allowed", "targets"),
    [
        ("lora", "fp32", 2e-4, "all-linear"),
        ("qlora", "fp32", 2e-4, "all-linear"),
        ("lora", "bf16", 5e-2, "all-linear"),
        ("lora", "fp32", 2e-4, ["q_proj", "lm_head"]),
    ],
)
@pytest.mark.slow
def test_peft_loads_an_adapter_with_the_scores_of_the_run(
    method: str,
    precision: str,
    allowed: float,
    targets: Any,
    reward: dict[str, Any],
    base: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The base of a run in mixed precision is in 16 bits, and its score head in 32."""
    train = {**reward["train"], "precision": precision}
    run(base, {**reward, "tune": {"method": method, "rank": 4, "targets": targets}, "train": train})
    if method == "qlora":
        assert main(["export", "run", "--format", "merged", "--to", "merged"]) == 2
        assert "write --format adapter" in capsys.readouterr().err
    assert main(["export", "run", "--format", "adapter", "--to", "adapter", "--json"]) == 0
    assert "scored 6 answers" in json.loads(capsys.readouterr().out.splitlines()[-1])["verified"]
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]
    said = json.loads(Path("adapter/score.json").read_text())
    more = {"quantization_config": quantisation("4bit", torch.float32)} if method == "qlora" else {}
    loaded = AutoPeftModelForSequenceClassification.from_pretrained(
        "adapter", num_labels=1, pad_token_id=said["pad_token_id"], dtype=torch.float32, **more
    ).eval()
    compute_exactly(loaded)
    tokenizer = AutoTokenizer.from_pretrained("adapter")
    texts = ["What is 3? It is the sea.", "What is 4? I do not know 9.", "The wind"]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    with torch.no_grad():
        theirs = loaded(**{key: batch[key] for key in ("input_ids", "attention_mask")}).logits[:, 0]
    ours = AnswerScores(open_run("run", base))([tokenizer(text)["input_ids"] for text in texts])
    assert len({round(score, 4) for score in ours}) == 3
    assert (theirs - said["score_offset"]).tolist() == pytest.approx(ours, abs=allowed)


@pytest.mark.usefixtures("in_process_replay")
def test_an_adapter_that_scores_differently_is_not_an_export(
    reward: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(base, {**reward, "steps": 1, "tune": {"method": "lora", "rank": 4}})
    written = export_run.replay_scores

    def spoiled(folder: Path, request: Any) -> list[float]:
        tensors = load_file(folder / "adapter_model.safetensors")
        tensors["base_model.model.score.weight"] *= 1.5
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        return written(folder, request)

    monkeypatch.setattr(export_run, "replay_scores", spoiled)
    assert main(["export", "run", "--format", "adapter", "--to", "adapter"]) == 1
    assert "scores differently" in capsys.readouterr().err and not Path("adapter").exists()


@pytest.mark.usefixtures("in_process_replay")
@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_reward_model_is_trained_further_with_its_head(
    tied: bool, reward: dict[str, Any], base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((base / "tiny/config.json").read_text())
    assert config["tie_word_embeddings"]
    if not tied:
        weights = load_file("tiny/model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, "tiny/model.safetensors", metadata={"format": "pt"})
        Path("tiny/config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    first = run(base, reward)
    assert main(["export", "run", "--format", "merged", "--to", "merged"]) == 0
    again = {**reward, "model": "merged", "output": "again", "steps": 1, "train": {**reward["train"], "lr": 1e-9}}
    for tune in ({"method": "full"}, {"method": "lora", "rank": 2}):
        ran = run(base, {**again, "tune": tune, "output": f"again-{tune['method']}"})
        (begun,) = [e for e in ran.folder.read_events() if e["event"] == "evaluated" and e["step"] == 0]
        (ended,) = [e for e in first.folder.read_events() if e["event"] == "evaluated" and e["step"] == 4]
        assert begun["loss"] == pytest.approx(ended["loss"], abs=1e-6)
    ids = [[5, 6, 7], [8, 9]]
    wanted = AnswerScores(open_run("run", base))(ids)
    assert AnswerScores(open_run("again-lora", base))(ids) == pytest.approx(wanted, abs=1e-5)
    sft = {**reward, "task": "sft", "output": "sft"}
    Path("sft.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    Path("job.yaml").write_text(
        json.dumps({**sft, "model": "merged", "data": "sft.jsonl", "evaluate": {"fraction": 0}})
    )
    capsys.readouterr()
    assert main(["train", "job.yaml", "faults.restarts=0"]) == 2
    assert "merged has the weights of a classifier, which scores texts and writes none" in capsys.readouterr().err


@pytest.mark.usefixtures("in_process_replay")
def test_a_classifier_with_several_labels_is_no_reward_model(
    reward: dict[str, Any], base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained("tiny", num_labels=3)
    model.save_pretrained("three")
    AutoTokenizer.from_pretrained("tiny").save_pretrained("three")
    Path("job.yaml").write_text(json.dumps({**reward, "model": "three"}))
    assert main(["train", "job.yaml", "faults.restarts=0"]) == 2
    assert "three is a classifier with 3 labels, and a reward model has one" in capsys.readouterr().err
