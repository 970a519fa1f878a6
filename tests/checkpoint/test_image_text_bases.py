"""Image-text models as the bases of jobs with new tokens, and with scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText

from image_text import save_image_text
from stoker.checkpoint.load_run import open_run
from stoker.cli.main import main

IDS = torch.arange(2, 30)[None]
pytestmark = pytest.mark.usefixtures("in_process_replay")


def test_rows_of_new_tokens_are_in_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = tokenizer.get_vocab_size()
    save_image_text(tmp_path / "tiny", "mistral3", vocabulary=rows)
    row = {"prompt": "How are you? <|new|>", "completion": "I am well."}
    Path("rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    Path("job.yaml").write_text(
        "task: sft\nmodel: {name: tiny, special_tokens: [<|new|>]}\ndata: rows.jsonl\nsteps: 2\ntune: full\n"
        "train: {lr: 2e-2, batch: 4, seq_len: 64, precision: fp32}\nevaluate: {fraction: 0}\n"
    )
    assert main(["train", "job.yaml", "faults.restarts=0"]) == 0
    assert main(["export", "job", "--format", "merged", "--to", "merged"]) == 0
    merged = AutoModelForImageTextToText.from_pretrained("merged", dtype=torch.float32).eval()
    assert merged.config.get_text_config().vocab_size == merged.get_input_embeddings().weight.shape[0] > rows
    tuned = open_run("job", tmp_path).model
    torch.testing.assert_close(merged(input_ids=IDS).logits, tuned(input_ids=IDS).logits, rtol=0, atol=1e-4)


def test_scores_have_no_adapter_of_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_image_text(tmp_path / "tiny", "mistral3")
    row = {"prompt": "How are you?", "chosen": "I am well.", "rejected": "The sea."}
    Path("rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    Path("job.yaml").write_text(
        "task: reward\nmodel: tiny\ndata: rows.jsonl\nsteps: 1\ntune: lora\nevaluate: {fraction: 0}\n"
        "train: {batch: 4, seq_len: 64, precision: fp32}\n"
    )
    assert main(["train", "job.yaml", "faults.restarts=0"]) == 0
    assert main(["export", "job", "--format", "adapter", "--to", "adapter"]) == 2
    assert "write --format merged" in capsys.readouterr().err
    assert main(["export", "job", "--format", "merged", "--to", "merged"]) == 0
    assert json.loads(Path("merged/config.json").read_text())["model_type"] == "mistral"


@pytest.mark.parametrize("tune", ["full", "{method: lora, rank: 4, targets: [q_proj, lm_head]}"])
def test_a_head_that_is_separate_in_the_files_or_by_an_adapter(
    tune: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistral Small 3.1 does not say that its head is not tied."""
    monkeypatch.chdir(tmp_path)
    save_image_text(tmp_path / "tiny", "mistral3", tied=True)
    if tune == "full":
        file = tmp_path / "tiny" / "model.safetensors"
        head = {"language_model.lm_head.weight": torch.randn(512, 32, generator=torch.Generator().manual_seed(1)) / 10}
        save_file(load_file(file) | head, file, metadata={"format": "pt"})
    row = {"prompt": "How are you?", "completion": "I am well."}
    Path("rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    Path("job.yaml").write_text(
        f"task: sft\nmodel: tiny\ndata: rows.jsonl\nsteps: 2\ntune: {tune}\nevaluate: {{fraction: 0}}\n"
        "train: {lr: 2e-2, batch: 4, seq_len: 64, precision: fp32}\n"
    )
    assert main(["train", "job.yaml", "faults.restarts=0"]) == 0
    assert main(["export", "job", "--format", "merged", "--to", "merged"]) == 0
    merged = AutoModelForImageTextToText.from_pretrained("merged", dtype=torch.float32).eval()
    assert merged.get_output_embeddings().weight is not merged.get_input_embeddings().weight
    tuned = open_run("job", tmp_path).model
    torch.testing.assert_close(merged(input_ids=IDS).logits, tuned(input_ids=IDS).logits, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["{tensor: 2}", "{pipeline: 2}", "{data: 2, shard: zero3}"])
def test_two_processes_read_and_train_what_one_does(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_processes: None
) -> None:
    monkeypatch.chdir(tmp_path)
    save_image_text(tmp_path / "tiny", "qwen3_vl")
    rows = [{"prompt": f"How are you? {i}", "completion": "I am well."} for i in range(8)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("job.yaml").write_text(
        "task: sft\nmodel: tiny\ndata: rows.jsonl\nsteps: 3\ntune: full\nevaluate: {fraction: 0}\n"
        "train: {lr: 2e-2, batch: 4, seq_len: 64, precision: fp64}\n"
    )
    losses = []
    for name, parallel in (("one", "{}"), ("two", layout)):
        assert main(["train", "job.yaml", f"parallel={parallel}", f"output=runs/{name}", "faults.restarts=0"]) == 0
        lines = Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], abs=1e-10)
