"""What an export says of its base, and its model card."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from families import tiny
from stoker.checkpoint.export.model_card import BaseName, public_name, warnings_of, write_card
from stoker.checkpoint.export.write_export import Export, check_request
from stoker.errors import UserError
from stoker.job.blocks.model_block import ModelBlock
from stoker.job.schema import Job
from stoker.models import offline_models
from stoker.models.tuning.quantise import FORMS
from stoker.runs.json_lines import append_line
from stoker.runs.run_folder import RunFolder

LLAMA = tiny("llama")


def job(model: str) -> Job:
    return Job.model_validate({"task": "sft", "model": {"name": model}, "data": [{"path": "rows.jsonl"}], "steps": 1})


def folder_with_config(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_a_hub_id_is_its_own_name(tmp_path: Path) -> None:
    assert public_name(job("org/name"), tmp_path).name == "org/name"


def test_a_packaged_model_is_named_by_its_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(offline_models.Packaged, "path", lambda self: file)
    found = public_name(job("smollm2-135m"), tmp_path)
    assert found.name == "HuggingFaceTB/SmolLM2-135M-Instruct" and found.warning is None
    assert "4-bit weights de-quantised" in found.remark


def test_a_folder_of_the_hubs_cache_is_named_by_its_id(tmp_path: Path) -> None:
    folder = folder_with_config(tmp_path / "hub" / "models--org--some-name" / "snapshots" / "0a1b")
    assert public_name(job(str(folder)), tmp_path).name == "org/some-name"


@pytest.mark.parametrize(
    ("given", "called"), [("tiny", "./tiny"), ("models/tiny", "./models/tiny"), ("{base}/tiny", "./tiny")]
)
def test_a_local_folder_is_warned_of(given: str, called: str, tmp_path: Path) -> None:
    name = given.format(base=tmp_path)
    folder_with_config(tmp_path / name)
    found: Any = public_name(job(name), tmp_path)
    assert found.name == called and "no hub id" in found.warning and str(tmp_path) not in found.warning


@pytest.mark.parametrize(("task", "tag"), [("sft", "text-generation"), ("reward", "text-classification")])
def test_the_card_names_losses_that_are_not_finite(task: str, tag: str, tmp_path: Path) -> None:
    source = {"path": "rows.jsonl"}
    given = {"task": task, "model": {"name": "org/name"}, "data": [source], "steps": 2, "tune": {"method": "full"}}
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    append_line(run.metrics, {"step": 1, "loss": math.nan})
    append_line(run.metrics, {"step": 2, "loss": 1.5})
    run.event("evaluated", step=2, loss=math.inf)
    tuned: Any = SimpleNamespace(model=LLAMA, job=Job.model_validate(given), folder=run, step=2, averaged=False)
    write_card(tuned, "merged", tmp_path, tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "| training rows, first and last step | not finite | 1.5000 |" in card
    assert "| held-out rows | not finite | not finite |" in card
    assert f"pipeline_tag: {tag}\n" in card
    assert ("remove what the chat template writes after the answer's end" in card) == (task == "reward")


@pytest.mark.parametrize(
    ("method", "settings"), [("lora", {"rank", "targets"}), ("p-tuning", {"tokens", "deep"}), ("full", set())]
)
def test_the_card_names_the_base_its_licence_and_the_settings_of_the_method(
    method: str, settings: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(offline_models.Packaged, "path", lambda self: file)
    tune = {"method": method} | ({"deep": True} if method == "p-tuning" else {})
    given = job("smollm2-135m").model_dump() | {"tune": tune}
    folder = RunFolder(tmp_path / "run")
    tuned: Any = SimpleNamespace(model=LLAMA, job=Job.model_validate(given), folder=folder, step=1, averaged=False)
    write_card(tuned, "adapter", tmp_path, tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "license: apache-2.0\n" in card and "Licence of the base: Apache-2.0." in card
    named = {"rank", "targets", "tokens", "deep"}
    assert {name for name in named if f"| {name} |" in card.split("## Settings")[1]} == settings


def test_the_card_counts_the_data_of_the_exported_step(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    part = {"name": "rows.jsonl", "rows": 320, "tokens": 16_960, "share": 1.0, "epochs": 5.25}
    run.event("started", steps=40, sources=[part])
    for step, row in ((4, "32 | 1,696 | 100.0% | 0.53"), (40, "320 | 16,960 | 100.0% | 5.25")):
        tuned: Any = SimpleNamespace(model=LLAMA, job=job("org/name"), folder=run, step=step, averaged=False)
        write_card(tuned, "merged", tmp_path, tmp_path)
        assert f"| rows.jsonl | {row} |" in (tmp_path / "README.md").read_text()


def test_the_card_says_that_losses_are_not_those_of_averaged_weights(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    for averaged in (True, False):
        tuned: Any = SimpleNamespace(model=LLAMA, job=job("org/name"), folder=run, step=6, averaged=averaged)
        write_card(tuned, "merged", tmp_path, tmp_path)
        card = (tmp_path / "README.md").read_text()
        assert ("averaged weights, step 6" in card) == ("not of their average" in card) == averaged


def test_only_an_adapter_needs_its_base(tmp_path: Path) -> None:
    folder_with_config(tmp_path / "tiny")
    name = public_name(job("./tiny"), tmp_path)
    assert warnings_of(job("./tiny"), "adapter", name, LLAMA) == [name.warning]
    assert not warnings_of(job("./tiny"), "merged", name, LLAMA) and not warnings_of(job("./tiny"), "gguf", name, LLAMA)


@pytest.mark.parametrize(
    ("method", "hint"), [("lora", "write --format merged"), ("prompt", "name a model with weights")]
)
def test_an_adapter_over_random_weights_is_refused(method: str, hint: str, tmp_path: Path) -> None:
    tuned: Any = Job.model_validate(job("llama-3m").model_dump() | {"tune": {"method": method}})
    with pytest.raises(UserError, match=f"llama-3m begins from random weights, so nobody .*; {hint}"):
        check_request(tuned, Export("adapter", tmp_path / "exported"))


def test_an_adapter_of_a_quantised_base_says_how_to_load_the_base() -> None:
    quantised = job("org/name").model_copy(update={"model": ModelBlock(name="org/name", quantise="4bit")})
    base = BaseName("org/name")
    (said,) = warnings_of(quantised, "adapter", base, LLAMA)
    settings = FORMS["4bit"].config(torch.float32, torch.uint8)
    for key in ("load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"):
        assert f"{key}={json.dumps(getattr(settings, key)).replace('true', 'True')}" in said
    assert not warnings_of(quantised, "merged", base, LLAMA)
    assert not warnings_of(job("org/name"), "adapter", base, LLAMA)
    (said,) = warnings_of(quantised, "adapter", base, tiny("hunyuan_v1_moe"))
    assert said.endswith(", llm_int8_skip_modules=['model.layers.*.mlp.gate.wg', 'lm_head'])")
