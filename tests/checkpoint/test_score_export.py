"""A reward run as transformers' sequence classification."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from stoker.cli.main import main

MLP = {"intermediate_size": 48}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, **MLP},
    "qwen2": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, **MLP},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
}


@pytest.mark.parametrize(
    ("family", "tune"),
    [
        ("gpt2", "full"),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("llama", "lora"), ("qwen2", "full"))),
    ],
)
@pytest.mark.slow
@pytest.mark.exhaustive
def test_an_export_scores_as_the_run(  # in a fresh process
    family: str,
    tune: str,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.save_pretrained("model")  # its padding is its end token, as in many models
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=len(fast), eos_token_id=fast.eos_token_id, **SHAPES[family])
    AutoModelForCausalLM.from_config(config).save_pretrained("model")
    rows = [{"prompt": f"What is {i}?", "chosen": f"It is {i}, " * (1 + i % 3), "rejected": "No."} for i in range(16)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("reward.yaml").write_text(
        f"task: reward\nmodel: model\ndata: pairs.jsonl\ntune: {tune}\nsteps: 4\n"
        "train: {batch: 4, seq_len: 64, lr: 1e-3, precision: fp32}\nevaluate: {fraction: 0.25}\n"
    )
    assert main(["train", "reward.yaml"]) == 0
    capsys.readouterr()
    assert main(["export", "runs/reward", "--format", "merged", "--to", "exported", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"]["difference"] < 1e-4 and found["loss"]["rows"] == 6
    scorer = AutoModelForSequenceClassification.from_pretrained("exported")
    events = [json.loads(line) for line in Path("runs/reward/events.jsonl").read_text().splitlines()]
    held_out = [event for event in events if event["event"] == "evaluated"][-1]
    assert scorer.config.num_labels == 1 and scorer.config.score_offset == pytest.approx(
        held_out["chosen_score"], abs=1e-5
    )
    assert scorer.config.pad_token_id != fast.eos_token_id
    tokens = AutoTokenizer.from_pretrained("exported")
    assert tokens.pad_token_id == scorer.config.pad_token_id
    assert main(["export", "runs/reward", "--format", "gguf", "--to", "other"]) == 2
    assert "write adapter or merged" in capsys.readouterr().err
    if tune == "full":
        assert main(["export", "runs/reward", "--format", "adapter", "--to", "other"]) == 2
        assert "write --format merged" in capsys.readouterr().err
