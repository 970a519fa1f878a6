"""From a corpus to a model with new tokens, by the commands that a user gives."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from stoker.checkpoint.export.write_export import Export, write_export
from stoker.checkpoint.load_run import open_run
from stoker.cli.main import main
from stoker.runs.run_folder import RunFolder
from tiny_llama import save_tiny_llama

CHINESE = ["今天天气很好，我们去公园散步。", "我们今天去公园，天气很好！", "公园里的天气今天很好。", "你好，世界。"]
ENGLISH = ["The stoker feeds the furnace.", "The furnace heats the sea.", "How are you today?"]
JOB = """
task: pretrain
model: {name: model, tokenizer: tokenizer}
data:
- {path: zh.jsonl, weight: 3}
- {path: en.jsonl, weight: 1}
evaluate: {data: [{path: held.jsonl}]}
tune: {method: full, new_rows_first: 4}
steps: 12
train: {batch: 4, lr: 1e-2, seq_len: 64, precision: fp32, pack: false}
output: run
faults: {restarts: 0}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> Path:
    """Rows, a tiny model with its tokenizer, and a job."""
    monkeypatch.chdir(tmp_path)
    for name, texts in (("zh", CHINESE * 40), ("en", ENGLISH * 20), ("held", ["我们今天去公园散步，你好！"])):
        rows = (json.dumps({"text": f"{text} {i}"}) for i, text in enumerate(texts))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    sizes = {"hidden_size": 32, "num_key_value_heads": 4, "intermediate_size": 48, "tie_word_embeddings": True}
    save_tiny_llama(tmp_path / "model", tokenizer, template=None, **sizes)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


@pytest.mark.slow
def test_a_model_learns_new_tokens_and_leaves_as_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extend = ["tokenizer", "extend", "--from", "model", "--corpus", "zh.jsonl", "--size", "30", "-o", "tokenizer"]
    assert main(extend) == 0
    capsys.readouterr()
    assert main(["data", "job.yaml", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["sources"]
    assert [part["rows"] for part in told] == [36, 12] and sum(part["share"] for part in told) == pytest.approx(1)
    assert main(["train", "job.yaml"]) == 0
    started = next(e for e in RunFolder(folder / "run").read_events() if e["event"] == "started")
    assert started["sources"] == told
    capsys.readouterr()

    assert main(["eval", "run", "--compare", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {*found} == {"tuned", "untuned", "original", "step"}
    old, new = AutoTokenizer.from_pretrained("model"), AutoTokenizer.from_pretrained("tokenizer")
    text = json.loads((folder / "held.jsonl").read_text())["text"]
    for name, tokenizer in (("original", old), ("tuned", new), ("untuned", new)):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        size = len(text.encode()) - len(tokenizer.convert_ids_to_tokens(ids[0]))  # a character of a token is a byte
        assert found[name]["tokens"] == len(ids)  # the first is not predicted, and the end is
        assert found[name]["text_bytes"] == size
        bits = found[name]["loss"] * found[name]["tokens"] / math.log(2) / size
        assert found[name]["bits_per_byte"] == pytest.approx(bits)
    assert found["tuned"]["bits_per_byte"] < found["untuned"]["bits_per_byte"]
    assert found["tuned"]["tokens"] < 0.5 * found["original"]["tokens"]

    run = open_run("run", folder)
    write_export(run, Export("merged", folder / "out"), folder, lambda _: None)  # it is replayed elsewhere
    model, tokenizer = AutoModelForCausalLM.from_pretrained("out"), AutoTokenizer.from_pretrained("out")
    assert len(tokenizer) == len(old) + 30 and model.config.vocab_size == 448
    ids = tokenizer(text + tokenizer.eos_token, return_tensors="pt", add_special_tokens=False).input_ids
    assert model(ids, labels=ids).loss.item() == pytest.approx(found["tuned"]["loss"], rel=1e-4)


def test_a_tokenizer_that_is_not_there_is_told_before_anything_is_loaded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "job.yaml"]) == 2
    error = capsys.readouterr().err
    assert "job.yaml:3:" in error and "no tokenizer 'tokenizer'" in error and "stoker tokenizer extend" in error
