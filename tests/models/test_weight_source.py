"""Weights read in slices against transformers' own loading of the same folder, for every family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from loading import load_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from families import SHAPES, tiny
from stoker.errors import UserError
from stoker.hardware.process_device import Device
from stoker.job.blocks.model_block import ModelBlock
from stoker.job.schema import Job
from stoker.models.build_model import build_meta, build_model
from stoker.models.load_model import Blank, blank_model
from stoker.models.prepare_architecture import training_form
from stoker.models.weight_source import Rows, all_rows, plain_name

CPU = Device("cpu", "fp32", "for tests")


def saved(folder: Path, family: str, **changes: object) -> PreTrainedModel:
    """A tiny model, saved; its biases and norms are not left at zero and one."""
    model = tiny(family, dtype=torch.float32, **changes)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_()
    model.save_pretrained(folder)
    return model


def blank(folder: Path, dtype: torch.dtype = torch.float32) -> Blank:
    return blank_model(ModelBlock(name=str(folder)), folder, seed=0, dtype=dtype)


def parts(shape: torch.Size, dim: int, count: int) -> list[Rows]:
    """A tensor cut into uneven parts along a dimension."""
    step = -(-shape[dim] // count)
    cuts = [slice(i, min(shape[dim], i + step)) for i in range(0, shape[dim], step)]
    return [(*all_rows(shape)[:dim], cut, *all_rows(shape)[dim + 1 :]) for cut in cuts]


@pytest.mark.parametrize("family", SHAPES)
def test_a_loaded_model_is_what_transformers_loads(family: str, tmp_path: Path) -> None:
    saved(tmp_path, family)
    for dtype in (torch.float32, torch.bfloat16):
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        loaded = load_model(ModelBlock(name=str(tmp_path)), tmp_path, seed=0, dtype=dtype)
        assert type(loaded) is type(expected) and loaded.training is expected.training
        assert loaded.config.to_dict() == expected.config.to_dict()
        assert loaded.generation_config.to_dict() == expected.generation_config.to_dict()
        for ours, theirs in (
            (dict(loaded.named_parameters()), dict(expected.named_parameters())),
            (dict(loaded.named_buffers()), dict(expected.named_buffers())),
        ):
            assert ours.keys() == theirs.keys()
            for name, tensor in ours.items():
                assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("family", SHAPES)
def test_parts_are_those_of_the_whole(family: str, tmp_path: Path) -> None:
    """Uneven chunks of the first dimension, as weights are sharded, and columns, as matrices are split."""
    expected = saved(tmp_path, family).state_dict()
    source = blank(tmp_path).weights
    for name, whole in expected.items():
        for dim in range(whole.dim()):
            read = [source.read(name, rows) for rows in parts(whole.shape, dim, 3)]
            assert torch.equal(torch.cat(read, dim), whole), name


def test_a_blank_model_takes_no_memory_and_its_buffers_are_real(tmp_path: Path) -> None:
    saved(tmp_path, "gptj")
    model = blank(tmp_path).model
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers()) and list(model.buffers())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_of_experts_only_those_asked_for_are_read(family: str, tmp_path: Path) -> None:
    expected = saved(tmp_path, family).state_dict()
    files = {}
    for number, (key, tensor) in enumerate(load_file(tmp_path / "model.safetensors").items()):
        files[key] = f"{number}.safetensors"
        save_file({key: tensor}, tmp_path / files[key])
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    source = blank(tmp_path).weights
    for key, file in files.items():
        if "layers.0" in key and "experts.3." in key:
            (tmp_path / file).unlink()
    stacked = [name for name in expected if "layers.0" in name and "experts." in name]
    for name in stacked:
        rows = (slice(1, 3), *all_rows(expected[name].shape[1:]))
        assert torch.equal(source.read(name, rows), expected[name][1:3])
    with pytest.raises(UserError, match="cannot be loaded"):
        source.read(stacked[0], all_rows(expected[stacked[0]].shape))


@pytest.mark.parametrize("family", ["gpt2", "bloom", "opt", "gpt_neox", "llama"])
def test_a_base_model_without_its_head_is_found_under_other_names(family: str, tmp_path: Path) -> None:
    """As the first checkpoints of these families were saved: no ``transformer.`` or ``model.`` before the names."""
    whole = tiny(family, dtype=torch.float32, tie_word_embeddings=True)
    whole.save_pretrained(tmp_path)
    whole.base_model.save_pretrained(tmp_path)
    keys = load_file(tmp_path / "model.safetensors").keys()
    assert not any(key.startswith(f"{whole.base_model_prefix}.") for key in keys)
    loaded = load_model(ModelBlock(name=str(tmp_path)), tmp_path, seed=0).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in whole.state_dict().items())


def test_a_tied_weight_is_found_under_either_of_its_names(tmp_path: Path) -> None:
    whole = saved(tmp_path, "llama", tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    save_file(stored, file, {"format": "pt"})
    loaded = load_model(ModelBlock(name=str(tmp_path)), tmp_path, seed=0)
    assert torch.equal(loaded.model.embed_tokens.weight, whole.lm_head.weight)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize("apart", [False, True])
def test_weights_that_are_stored_apart_are_not_tied(
    apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.models.safetensors_reader.COMPARED", 100)  # elements, of three rows
    saved(tmp_path, "llama", tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    stored["lm_head.weight"][-1] += float(apart)
    save_file(stored, file, {"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    loaded = load_model(ModelBlock(name=str(tmp_path)), tmp_path, seed=0)
    for model in (expected, loaded):
        assert (model.lm_head.weight is not model.model.embed_tokens.weight) == apart
        assert torch.equal(model.lm_head.weight, stored["lm_head.weight"])


def test_buffers_have_their_stored_values(tmp_path: Path) -> None:
    shape = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "v_head_dim": 8}
    shape |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    sizes = {**SHAPES["llama"], **shape, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "vocab_size": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **sizes), dtype=torch.float32)
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    for number, bias in enumerate(biases.values(), 1):
        bias.fill_(number)
    model.save_pretrained(tmp_path)
    loaded = dict(load_model(ModelBlock(name=str(tmp_path)), tmp_path, seed=0).named_buffers())
    assert biases and all(torch.equal(loaded[name], bias) for name, bias in biases.items())


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text()) | {"intermediate_size": 44}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.\w+\.weight in the shape \[\d+, \d+\], and its config"):
        blank(tmp_path)


@pytest.mark.parametrize("family", ["gpt2", "glm", "phi3", "qwen3_moe"])
@pytest.mark.parametrize("tuned", ["full", "lora"])
def test_parts_of_fused_layers_are_what_splitting_the_loaded_model_gives(
    family: str, tuned: str, tmp_path: Path
) -> None:
    saved(tmp_path, family)
    job = Job.model_validate({"task": "pretrain", "model": {"name": str(tmp_path)}, "data": [{"path": "x"}]})
    tune = {"method": tuned, "rank": 2, "alpha": 4.0}
    job = job.model_copy(update={"tune": job.tune.model_validate(tune), "seed": 3})
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    training_form(expected)
    wanted = dict(expected.named_parameters())
    model = build_model(job, tmp_path, CPU)
    plain = {plain_name(name): weight for name, weight in model.named_parameters()}
    assert {name for name in plain if "lora_" not in name} == wanted.keys()
    assert all(torch.equal(plain[name], weight) for name, weight in wanted.items())
    source = build_meta(job, tmp_path, CPU).weights
    for name, weight in model.named_parameters():
        for dim in range(weight.dim()):
            read = [source.read(name, rows) for rows in parts(weight.shape, dim, 3)]
            assert torch.equal(torch.cat(read, dim), weight), name
