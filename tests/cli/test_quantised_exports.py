"""eval and export in fewer bits, and the adapter of a quantised base, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from stoker.checkpoint.load_run import open_run
from stoker.cli.main import main
from stoker.models.tuning.quantise import FORMS, compute_exactly, packed_parameters, quantisation
from tiny_llama import save_tiny_llama

ROWS = [("How are you?", "I am well, thank you."), ("What is blue?", "The sea is blue."), ("Who is cold?", "The wind.")]


@pytest.fixture(scope="module")
def base(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a LoRA run and a QLoRA run have been trained by the command."""
    base = tmp_path_factory.mktemp("quantised")
    save_tiny_llama(base / "tiny", tokenizer, num_key_value_heads=4)
    lines = (json.dumps({"prompt": f"{q} {i}", "completion": a}) for i in range(12) for q, a in ROWS)
    (base / "rows.jsonl").write_text("\n".join(lines) + "\n")
    common = "task: sft\nmodel: tiny\ndata: rows.jsonl\nsteps: 8\nevaluate: {fraction: 0.2, every: 4}\n"
    common += "train: {lr: 1e-2, batch: 4, seq_len: 64}\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        for method in ("lora", "qlora"):
            (base / f"{method}.yaml").write_text(f"{common}tune: {method}\n")
            assert main(["train", f"{method}.yaml"]) == 0
    return base


@pytest.fixture(autouse=True)
def here(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base)


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


SELDOM = [pytest.param(form, marks=pytest.mark.exhaustive) for form in ("8bit", "int8", "int4")]  # as 4bit goes


@pytest.mark.slow
def test_the_adapter_of_a_mixture_is_checked_with_its_experts_in_4_bits(
    base: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_llama(base / "mixture", tokenizer, num_key_value_heads=4, family="mixtral", num_local_experts=4)
    (base / "mixture.yaml").write_text((base / "qlora.yaml").read_text().replace("model: tiny", "model: mixture"))
    assert main(["train", "mixture.yaml"]) == 0
    assert "not quantised" not in capsys.readouterr().out
    assert main(["export", "mixture", "--format", "adapter", "--to", "of-mixture", "--json"]) == 0
    assert said(capsys)["verified"]
    assert "replace_parameter_4bit(experts, name" in (base / "of-mixture" / "README.md").read_text()


@pytest.mark.parametrize("form", ["4bit", *SELDOM])
@pytest.mark.slow
def test_eval_measures_the_merged_model_in_fewer_bits(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(FORMS[form].package)
    assert main(["eval", "lora", "--quantise", form, "--json"]) == 0
    found = said(capsys)
    tuned, held = (found[name]["loss"] for name in ("tuned", form))  # type: ignore[index]
    assert held != tuned and held == pytest.approx(tuned, rel=0.1 if form.startswith(("4", "int4")) else 0.02)


@pytest.mark.usefixtures("in_process_replay")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow
def test_a_folder_in_fewer_bits_is_what_transformers_loads(
    form: str, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(FORMS[form].package)
    assert main(["export", "lora", "--format", "merged", "--quantise", form, "--to", form, "--json"]) == 0
    found = said(capsys)
    assert "greedy answers equal" in str(found["verified"]) and "spread from the trained ones" in str(
        found["quantised"]
    )
    loaded = AutoModelForCausalLM.from_pretrained(base / form)
    assert len(packed_parameters(loaded)) == 14
    whole = sum(file.stat().st_size for file in (base / "tiny").glob("*.safetensors"))
    assert sum(file.stat().st_size for file in (base / form).glob("*.safetensors")) < whole


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_adapter_of_a_quantised_base_is_replayed_on_one(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "qlora", "--format", "adapter", "--to", "adapter", "--json"]) == 0
    assert "replayed" in str(said(capsys)["verified"])
    plain = AutoPeftModelForCausalLM.from_pretrained(
        base / "adapter", quantization_config=quantisation("4bit", torch.float32), dtype=torch.float32
    ).eval()
    compute_exactly(plain)
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        ours, theirs = open_run("qlora", base).model(input_ids=ids).logits, plain(input_ids=ids).logits
    assert float((ours - theirs).abs().max() / ours.std()) < 1e-4


@pytest.mark.slow
def test_what_cannot_be_is_refused_before_anything_is_computed(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = [
        (["eval", "qlora", "--quantise", "int8"], "in 4bit already"),
        (["export", "lora", "--format", "adapter", "--quantise", "4bit", "--to", "no"], "write --format merged"),
        (["export", "qlora", "--format", "merged", "--quantise", "4bit", "--to", "no"], "the base is quantised"),
        (["export", "lora", "--format", "merged", "--to", "tiny/config.json/x"], "config.json is not a folder"),
    ]
    for command, words in refused:
        assert main(command) == 2
        assert words in capsys.readouterr().err
    assert not (base / "no").exists()
