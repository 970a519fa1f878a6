"""A language model's loss against transformers' own forward pass with labels."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig

from families import tiny
from stoker.models.attention import packed_attention, packed_row
from stoker.models.attention.collate import Row
from stoker.models.dropout import has_dropout, without_dropout
from stoker.models.language_model import lay_out_for

CPU = torch.device("cpu")


def transformers_loss(model: nn.Module, rows: list[Row]) -> Tensor:
    """The sum of what transformers computes from ``labels``, which is a mean over a row's trained tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for ids, trained in rows:
        ids_T = torch.from_numpy(ids.astype(np.int64))
        labels = torch.where(torch.from_numpy(trained), ids_T, -100)
        mean = model(input_ids=ids_T[None], labels=labels[None], use_cache=False).loss
        total = total + mean * int(trained[1:].sum())
    return total


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3_moe", "bloom"])
@pytest.mark.usefixtures("no_float32")
def test_loss_is_transformers_own(family: str, tied: bool, documents: list[Row]) -> None:
    model = tiny(family, tie_word_embeddings=tied)
    reference = copy.deepcopy(model)
    expected = transformers_loss(reference, documents)
    language = lay_out_for(model)
    assert language.head is not None

    total, correct, targets = 0.0, 0, 0
    for inputs in language.lay_out(documents, CPU):
        with packed_row.segments(inputs.segments):
            loss, right = language.loss(inputs)
        total, correct, targets = (
            total + float(loss.detach()),
            correct + int(right),
            targets + len(inputs.targets),
        )

    assert total == pytest.approx(float(expected.detach()), rel=1e-12)
    assert targets == sum(int(trained[1:].sum()) for _, trained in documents)
    assert 0 <= correct <= targets


@pytest.mark.usefixtures("no_float32")
def test_an_adapted_head_computes_its_own_logits(documents: list[Row]) -> None:
    model = tiny("llama")
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False))
    adapted.to(torch.float64)
    expected = transformers_loss(adapted, documents)
    language = lay_out_for(adapted.get_base_model())
    assert language.head is None and language.packs

    (inputs,) = language.lay_out(documents, CPU)
    with packed_row.segments(inputs.segments):
        loss, _ = language.loss(inputs)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)


def test_a_head_that_does_more_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", dtype=torch.float32)
    forward = model.forward

    def doubled(*arguments: Any, **options: Any) -> Any:
        output = forward(*arguments, **options)
        return replace(output, logits=2 * output.logits)

    monkeypatch.setattr(model, "forward", doubled)
    assert lay_out_for(model).head is None


def test_dropout_of_a_part_of_the_configuration_counts() -> None:
    model: Any = nn.Linear(1, 1)
    model.config = AutoConfig.for_model("gemma3", text_config={"attention_dropout": 0.1})
    assert has_dropout(model)
    without_dropout(model)
    assert not has_dropout(model) and model.config.text_config.attention_dropout == 0


@pytest.mark.parametrize(
    ("family", "rate"),
    [("gpt2", "summary_first_dropout"), ("gpt_neo", "classifier_dropout"), ("gpt_neox", "classifier_dropout")],
)
def test_the_rate_of_another_head_is_no_dropout(family: str, rate: str) -> None:
    model = tiny(family)
    assert getattr(AutoConfig.for_model(family), rate) == 0.1  # transformers' default
    setattr(model.config, rate, 0.1)
    assert not has_dropout(model)


def test_the_noise_of_routers_is_dropout() -> None:
    model = tiny("phimoe", router_jitter_noise=1.0).train()  # large, so that other experts are drawn
    assert has_dropout(model)

    def logits() -> torch.Tensor:
        return model(input_ids=torch.arange(2, 40)[None]).logits

    assert not torch.equal(logits(), logits())
    without_dropout(model)
    assert not has_dropout(model) and torch.equal(logits(), logits())


@pytest.mark.parametrize("leaks", [False, True])
def test_a_leak_that_rounding_would_hide_is_found(leaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name:
                parameter.mul_(1e-5)  # so attention changes less than the tolerance
    if leaks:
        monkeypatch.setattr("stoker.models.language_model.row_of", lambda _: nullcontext())
    assert lay_out_for(model).packs != leaks


@pytest.mark.parametrize("ignored", [False, True])
def test_windows_longer_than_the_probe_are_tested(ignored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = packed_attention._packed
    if ignored:
        monkeypatch.setattr(packed_attention, "_packed", lambda *args: attend(*args[:4], replace(args[4], window=None)))
    model = tiny("mistral", sliding_window=64)
    assert lay_out_for(model).packs != ignored
    assert model.config.sliding_window == 64


def test_the_probe_leaves_mode_and_gradients_alone() -> None:
    model = tiny("llama").train()
    lay_out_for(model)
    assert model.training and all(p.grad is None for p in model.parameters())
