"""A GPT-2, whose layers are split and turned over in training, exported as what plain programs load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from stoker.cli.main import main
from tiny_llama import save_tokenizer


@pytest.fixture(scope="module")
def base(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("split-layers")
    fast = save_tokenizer(base / "tiny", tokenizer)
    torch.manual_seed(0)
    shape = {"vocab_size": len(fast), "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=None, eos_token_id=fast.eos_token_id)).save_pretrained(
        base / "tiny"
    )
    lines = (json.dumps({"prompt": f"How are you? {i}", "completion": "I am well."}) for i in range(24))
    (base / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (base / "job.yaml").write_text(
        "task: sft\nmodel: tiny\ndata: rows.jsonl\nsteps: 6\ntune: {method: lora, rank: 4, targets: [c_attn, c_fc]}\n"
        "train: {lr: 2e-2, batch: 4, seq_len: 64, precision: fp32}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        assert main(["train", "job.yaml"]) == 0
    return base


@pytest.mark.usefixtures("in_process_replay")
@pytest.mark.parametrize("form", ["adapter", "merged"])
@pytest.mark.slow
def test_transformers_and_peft_answer_as_the_run(base: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The export is replayed by plain transformers and peft before it is called done."""
    monkeypatch.chdir(base)
    assert main(["export", "job", "--format", form, "--to", f"out/{form}"]) == 0
    if form == "merged":
        merged, original = (AutoModelForCausalLM.from_pretrained(base / p) for p in ("out/merged", "tiny"))
        assert [n for n, _ in merged.named_parameters()] == [n for n, _ in original.named_parameters()]
        changed = {n for n, p in merged.named_parameters() if not torch.equal(p, original.get_parameter(n))}
        assert changed == {
            f"transformer.h.{i}.{layer}.weight" for i in range(2) for layer in ("attn.c_attn", "mlp.c_fc")
        }
    else:
        config = json.loads((base / "out/adapter/adapter_config.json").read_text())
        assert all(name.endswith(("attn.c_attn", "mlp.c_fc")) for name in config["target_modules"])
        assert set(config["rank_pattern"].values()) == {12}
