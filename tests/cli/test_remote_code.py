"""A model whose code lies in its own folder, as ChatGLM's: refused, and with the job's word for it tuned like any."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from stoker.cli.main import main
from tiny_llama import save_tokenizer

CODE = Path(__file__).parent / "remote"
JOB = """task: sft
model: {{name: chatglm, trust_remote_code: {trust}}}
data: rows.jsonl
steps: 6
tune: {{method: lora, rank: 4, layers: "1", modules_to_save: [output_layer]}}
train: {{lr: 2e-2, batch: 4, seq_len: 64, precision: fp32}}
evaluate: {{fraction: 0.2, every: 6}}
faults: {{restarts: 0}}
"""


@pytest.fixture(scope="module")
def base(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model, its code inside, as ``save_pretrained`` of such a model leaves it."""
    base = tmp_path_factory.mktemp("remote-code")
    folder = base / "chatglm"
    fast = save_tokenizer(folder, tokenizer)
    for file in CODE.glob("*.py"):
        shutil.copy(file, folder)
    config = {
        "model_type": "own_glm",
        "architectures": ["ChatGLMForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_chatglm.ChatGLMConfig",
            "AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration",
        },
        "padded_vocab_size": len(fast),
        "eos_token_id": fast.eos_token_id,
        "use_cache": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    trusted = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    AutoModelForCausalLM.from_config(trusted, trust_remote_code=True).save_pretrained(folder)
    lines = (json.dumps({"prompt": f"How are you? {i}", "completion": "I am well."}) for i in range(24))
    (base / "rows.jsonl").write_text("\n".join(lines) + "\n")
    for trust in (False, True):
        (base / f"trust-{str(trust).lower()}.yaml").write_text(JOB.format(trust=str(trust).lower()))
    return base


@pytest.fixture(autouse=True)
def here(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base)


def test_without_the_jobs_word_its_code_does_not_run(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spy = base / "chatglm" / "modeling_chatglm.py"
    code = spy.read_text()
    spy.write_text(code + "\nopen('it-ran', 'w').close()\n")
    try:
        assert main(["train", "trust-false.yaml"]) == 2
    finally:
        spy.write_text(code)
    message = capsys.readouterr().err
    assert "needs modelling code of its own" in message and "model.trust_remote_code: true" in message
    assert not (base / "it-ran").exists() and not (base / "runs" / "trust-false").exists()


@pytest.mark.slow
def test_with_it_an_adapter_is_trained_exported_and_loaded(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "trust-true.yaml"]) == 0
    events = [json.loads(line) for line in (base / "runs/trust-true/events.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "evaluated"]
    assert losses[-1] < losses[0] - 0.3
    export = ["export", "trust-true", "--format", "adapter", "--to", "out/adapter"]
    assert main(export) == 2
    assert "write --trust-remote-code" in capsys.readouterr().err
    assert main([*export, "--trust-remote-code"]) == 0
    assert "in a fresh process" in capsys.readouterr().out
    weights = load_file(base / "out/adapter/adapter_model.safetensors")
    names = {name.removeprefix("base_model.model.").split(".lora_")[0] for name in weights}
    block = ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    assert names == {"output_layer.weight", *(f"transformer.layers.1.{layer}" for layer in block)}
