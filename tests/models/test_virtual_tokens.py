"""Virtual tokens against peft's own on the plain model: logits, losses of packed rows, greedy answers."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from families import tiny
from stoker.checkpoint.export.adapter_export import save_adapter
from stoker.errors import UserError
from stoker.hardware.process_device import Device
from stoker.job.blocks.tune_block import TuneBlock
from stoker.job.schema import Job
from stoker.models.attention.collate import Row
from stoker.models.attention.packed_row import segments
from stoker.models.build_model import build_meta
from stoker.models.language_model import lay_out_for
from stoker.models.meta_model import allocate
from stoker.models.prepare_architecture import training_form
from stoker.models.tuning.adapters import without_adapter
from stoker.models.tuning.virtual_tokens import FirstValues, add_virtual_tokens, virtual_ids

FAMILIES = ("gpt2", "bloom", "opt", "gpt_neo", "gptj", "gpt_neox", "llama", "glm", "glm4", "qwen3", "mistral")
MORE = ("falcon", "gemma2", "phi3", "qwen3_moe")
METHODS: dict[str, dict[str, Any]] = {
    "prompt": {"method": "prompt"},
    "p-tuning": {"method": "p-tuning", "width": 12},
    "lstm": {"method": "p-tuning", "encoder": "lstm"},
    "deep": {"method": "p-tuning", "deep": True},
    "prefix": {"method": "prefix"},
}
CPU = torch.device("cpu")


def with_virtual_tokens(base: PreTrainedModel, text: list[int] | None = None, **block: Any) -> PreTrainedModel:
    """The model in its training form, with virtual tokens that are felt."""
    model = copy.deepcopy(base)
    training_form(model)
    embedding: Any = base.get_input_embeddings()
    reader = FirstValues(lambda ids: embedding.weight.detach()[list(ids)], text)
    drawn = add_virtual_tokens(model, TuneBlock.model_validate({"tokens": 5, **block}), reader, seed=0)
    new = allocate(model, CPU)
    assert set(new) == set(drawn) == {name for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in new.items():
            parameter.copy_(drawn[name]())
            if block.get("deep"):
                parameter.mul_(20)
    return model.eval()


def losses(logits_BTV: Tensor, row: Row) -> Tensor:
    ids, trained = row
    where = np.flatnonzero(trained[1:])
    targets = torch.from_numpy(ids[where + 1].astype(np.int64))
    return nn.functional.cross_entropy(logits_BTV[0, torch.from_numpy(where)], targets, reduction="sum")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_peft_computes_the_same(family: str, method: str, documents: list[Row], tmp_path: Path) -> None:
    if family in MORE and method not in ("prompt", "prefix"):
        return
    base = tiny(family, dtype=torch.float32).eval()
    model = with_virtual_tokens(base, **METHODS[method])
    save_adapter(model, tmp_path, "base")
    peft = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path)).eval()

    front, rows = virtual_ids(model), documents[:3]
    ids = torch.from_numpy(rows[0][0].astype(np.int64))[None]
    expected = peft(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -ids.shape[1] :]
    got = model(input_ids=torch.tensor([[*front, *ids[0].tolist()]])).logits[:, -ids.shape[1] :]
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
    untuned = base(input_ids=ids).logits
    assert (expected - untuned).abs().max() > 1e-2

    alone = sum(
        losses(
            peft(input_ids=(i := torch.from_numpy(row[0].astype(np.int64))[None]), attention_mask=torch.ones_like(i))
            .logits[:, -i.shape[1] :],
            row,
        )
        for row in rows
    )  # fmt: skip
    language = lay_out_for(model)
    assert language.packs == (method not in ("deep", "prefix") and family != "falcon")
    total, parts = torch.zeros(()), language.lay_out(rows, CPU)
    for part in parts:
        with segments(part.segments):
            total = total + language.loss(part)[0]
    torch.testing.assert_close(total, alone, rtol=2e-5, atol=1e-4)
    assert sum(part.tokens for part in parts) == sum(len(ids) for ids, _ in rows)
    assert sum(len(part.targets) for part in parts) == sum(int(trained[1:].sum()) for _, trained in rows)

    with without_adapter(model):
        torch.testing.assert_close(model(input_ids=ids).logits, untuned, rtol=0, atol=2e-5)


@pytest.mark.parametrize("method", ["prompt", "prefix"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_peft(family: str, method: str, tmp_path: Path) -> None:
    base = tiny(family, dtype=torch.float32).eval()
    model = with_virtual_tokens(base, **METHODS[method])
    save_adapter(model, tmp_path, "base")
    peft = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path)).eval()
    ids = torch.arange(2, 9)[None]
    mine = torch.tensor([[*virtual_ids(model), *ids[0].tolist()]])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = greedy(peft, ids, 6)
    got = model.generate(input_ids=mine, attention_mask=torch.ones_like(mine), **options)  # type: ignore[operator]
    assert got[0, mine.shape[1] :].tolist() == expected


@torch.no_grad()
def greedy(model: PeftModel, ids: Tensor, count: int) -> list[int]:
    """Token by token without a cache."""
    start = ids.shape[1]
    for _ in range(count):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        ids = torch.cat((ids, logits[:, -1:].argmax(-1)), dim=1)
    return ids[0, start:].tolist()


def test_a_prompt_begins_with_the_words_of_a_text() -> None:
    base = tiny("llama", dtype=torch.float32)
    model: Any = with_virtual_tokens(base, text=[7, 9], method="prompt")
    own: Any = base.get_input_embeddings()
    assert torch.equal(model.get_input_embeddings().embeddings(), own.weight[[7, 9, 7, 9, 7]])
    drawn: Any = with_virtual_tokens(base, method="prompt")
    rows = drawn.get_input_embeddings().embeddings()
    assert all((own.weight == row).all(1).any() for row in rows) and len(rows.unique(dim=0)) > 1


def test_a_prompt_on_scaled_embeddings_begins_as_the_blocks_get_them(tmp_path: Path) -> None:
    base: Any = tiny("gemma2", dtype=torch.float32)
    base.save_pretrained(tmp_path)
    block = {"model": {"name": str(tmp_path)}, "data": [{"path": "x"}], "task": "pretrain"}
    job: Any = Job.model_validate(block | {"tune": {"method": "prompt", "tokens": 3}})
    built = build_meta(job, tmp_path, Device("cpu", "fp32", "for tests"), text=[7, 9, 11])
    virtual: Any = built.model.get_input_embeddings()
    name = next(name for name, p in built.model.named_parameters() if p is virtual.encoder.weight)
    expected = base.get_input_embeddings()(torch.tensor([7, 9, 11]))
    torch.testing.assert_close(built.weights.read(name, (slice(0, 3), slice(0, expected.shape[1]))), expected)


def test_virtual_tokens_follow_ids_of_16_bits() -> None:
    model = lay_out_for(with_virtual_tokens(tiny("llama"), method="prompt"))
    row = np.array([3, 4, 5], np.uint16), np.ones(3, bool)
    assert dataclasses.replace(model, virtual=(70_000, 70_001))._behind(row)[0].tolist() == [70_000, 70_001, 3, 4, 5]


@pytest.mark.parametrize("family", ["deepseek_v3", "mimo_v2_flash"])
def test_values_of_another_size_than_keys_take_no_prefix(family: str) -> None:
    model = tiny(family)
    reader = FirstValues(lambda ids: model.get_input_embeddings().weight[list(ids)], None)
    tune = TuneBlock.model_validate({"method": "prefix", "tokens": 4})
    with pytest.raises(UserError, match="a prefix has keys and values of one size, and those of this model differ"):
        add_virtual_tokens(model, tune, reader, seed=0)


def test_linear_attention_has_no_keys_and_values_for_a_prefix() -> None:
    tune = TuneBlock.model_validate({"tokens": 5, "method": "prefix"})
    model = tiny("qwen3_next")
    with pytest.raises(UserError, match="Qwen3NextForCausalLM takes no cache of keys and values"):
        add_virtual_tokens(model, tune, FirstValues(lambda ids: model.get_input_embeddings().weight[ids]), seed=0)
