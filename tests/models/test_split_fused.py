"""Fused layers split and joined again: the same function, the same file, and sources that say where parts lie."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from families import tiny
from stoker.job.blocks.tune_block import TuneBlock
from stoker.models.families import FAMILIES
from stoker.models.prepare_architecture import saved_form, training_form
from stoker.models.split_fused import saved_tensors, split_fused
from stoker.models.tuning.adapters import add_adapter
from stoker.models.tuning.lora import fuse_lora

FUSED = [name for name, family in FAMILIES.items() if family.fused]
IDS = torch.arange(2, 30)[None]


@pytest.mark.parametrize("family", FUSED)
def test_a_split_model_computes_the_same(family: str) -> None:
    whole = tiny(family)
    split = copy.deepcopy(whole)
    assert split_fused(split, FAMILIES[family])

    expected, given = (m(input_ids=IDS, labels=IDS) for m in (whole, split))
    torch.testing.assert_close(given.logits, expected.logits, rtol=1e-12, atol=1e-12)

    expected.loss.backward()
    given.loss.backward()
    squares = [sum(float(p.grad.square().sum()) for p in m.parameters()) for m in (whole, split)]
    assert squares[0] == pytest.approx(squares[1], rel=1e-10)


@pytest.mark.parametrize("family", FUSED)
def test_every_new_parameter_is_read_from_where_its_source_says(family: str, tmp_path: Path) -> None:
    model = tiny(family, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    sources = split_fused(model, FAMILIES[family])
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        for name, parameter in model.named_parameters():
            source = sources.get(name)
            if source is None and ".experts." in name:  # stored expert by expert
                continue
            if source is None:
                assert torch.equal(file.get_tensor(name), parameter)
                continue
            rows = slice(None) if source.rows is None else slice(*source.rows)
            stored = file.get_slice(source.name)
            read = stored[:, rows].T if source.transposed else stored[rows]
            assert torch.equal(read, parameter)


@pytest.mark.parametrize("family", FUSED)
def test_on_the_meta_device_shapes_and_sources_are_the_same(family: str) -> None:
    real = tiny(family)
    blank = copy.deepcopy(real).to("meta")
    assert split_fused(blank, FAMILIES[family]) == split_fused(real, FAMILIES[family])
    everything = (dict(m.named_parameters(remove_duplicate=False)) for m in (real, blank))
    shapes = [{n: (p.shape, p.dtype) for n, p in parameters.items()} for parameters in everything]
    assert shapes[0] == shapes[1]
    assert all(p.is_meta for p in blank.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_saved_form_is_transformers_own(family: str) -> None:
    model = tiny(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kinds = [type(m) for m in model.modules()]
    training_form(model)
    saved_form(model)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[n], before[n]) for n in before)
    assert [type(m) for m in model.modules()] == kinds


@pytest.mark.parametrize("family", FUSED)
def test_the_tensors_of_a_module_are_those_that_transformers_saves(family: str) -> None:
    model = tiny(family)
    path = f"{FAMILIES[family].blocks}.1"
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.startswith(f"{path}.")}
    training_form(model)
    after = saved_tensors(model, FAMILIES[family], path)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("targets", [["c_attn"], ["attn.c_attn"], ["query", "key", "value"]])
def test_a_fused_target_means_its_parts(targets: list[str]) -> None:
    model = tiny("gpt2")
    training_form(model)
    block = TuneBlock.model_validate({"method": "lora", "rank": 4, "alpha": 8.0, "targets": targets})
    adapted = add_adapter(model, block).to(torch.float64)
    names = {n.split(".lora_A")[0].split(".attn.")[1] for n, _ in adapted.named_parameters() if "lora_A" in n}
    assert names == {"c_attn.query", "c_attn.key", "c_attn.value"}
    assert fuse_lora(adapted) == 6
