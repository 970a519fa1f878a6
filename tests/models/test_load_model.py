"""Loading: from a folder, from a seed, from a GGUF file, quantised."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loading import load_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

from families import tiny
from stoker.errors import UserError
from stoker.job.blocks.model_block import ModelBlock
from stoker.job.blocks.tune_block import TuneBlock
from stoker.models.attention import packed_row
from stoker.models.language_model import lay_out_for
from stoker.models.load_model import blank_model
from stoker.models.offline_models import PACKAGED
from stoker.models.tuning.adapters import add_adapter, unwrap

CPU = torch.device("cpu")
ADAPTER = TuneBlock(method="lora", rank=4, alpha=8.0)


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def test_a_folder_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    model = tiny("qwen2", dtype=torch.float32)
    model.save_pretrained(tmp_path / "m")
    loaded = load_model(ModelBlock(name="m"), tmp_path, seed=0)
    assert type(loaded) is type(model) and same(loaded, model)
    half = load_model(ModelBlock(name="m"), tmp_path, seed=0, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_bounded_scores_are_never_left_to_sdpa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17 chooses it for Gemma 2, and then computes scores without their bound."""
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    model = tiny("gemma2", dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "m")
    loaded = load_model(ModelBlock(name="m"), tmp_path, seed=0)
    ids = torch.arange(9)[None]
    torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=1e-5)

    monkeypatch.setattr(model.config, "attn_logit_softcapping", None)
    model.save_pretrained(tmp_path / "unbounded")
    assert load_model(ModelBlock(name="unbounded"), tmp_path, seed=0).config._attn_implementation == "sdpa"


def test_random_weights_follow_the_seed(tmp_path: Path) -> None:
    one, again, other = (load_model(ModelBlock(name="llama-3m"), tmp_path, seed=s, stop_id=7) for s in (3, 3, 4))
    assert same(one, again) and not same(one, other)
    assert one.config.eos_token_id == 7 and one.config.tie_word_embeddings
    assert 2e6 < one.num_parameters() < 4e6


def test_a_missing_model_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model"):
        load_model(ModelBlock(name="./nowhere"), tmp_path, seed=0)


def test_a_model_of_images_that_has_no_causal_class_is_a_users_mistake(tmp_path: Path) -> None:
    AutoConfig.for_model("paligemma").save_pretrained(tmp_path / "m")
    with pytest.raises(UserError, match="transformers loads no model of the family paligemma") as caught:
        blank_model(ModelBlock(name="m"), tmp_path, seed=0)
    assert "its language model (gemma)" in str(caught.value)
    AutoConfig.for_model("glm4v_moe").save_pretrained(tmp_path / "v")
    with pytest.raises(UserError, match="transformers loads no model of the family glm4v_moe") as caught:
        blank_model(ModelBlock(name="v"), tmp_path, seed=0)
    assert "its language model" not in str(caught.value)  # nor would transformers load that


def test_attention_in_both_directions_is_a_users_mistake(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    for decodes in (False, True):
        config = AutoConfig.for_model("bert", vocab_size=32, is_decoder=decodes, **sizes)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / str(decodes))
    with pytest.raises(UserError, match="this bert also sees the later tokens"):
        load_model(ModelBlock(name="False"), tmp_path, seed=0)
    assert load_model(ModelBlock(name="True"), tmp_path, seed=0).config.is_decoder


GEMMA = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}


@pytest.mark.parametrize(
    ("family", "sizes", "hint"),
    [
        ("xlnet", {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}, '"attn_type": "uni"'),
        ("gemma3_text", GEMMA | {"use_bidirectional_attention": True}, "name a causal"),
        ("gemma4_text", GEMMA | {"use_bidirectional_attention": "all"}, "name a causal"),
        ("cpmant", {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "dim_head": 8}, "name a"),
    ],
)
def test_attention_in_both_directions_without_a_decoder_is_a_users_mistake(
    family: str, sizes: dict[str, Any], hint: str, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(family, vocab_size=32, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    early = [model(input_ids=torch.tensor([[5, 6, 7, last]])).logits[0, 0] for last in (8, 9)]
    assert not torch.equal(*early)  # it does see later tokens
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(UserError, match=f"this {family} also sees the later tokens") as caught:
        load_model(ModelBlock(name="m"), tmp_path, seed=0)
    assert hint in str(caught.value)


def test_an_xlnet_with_causal_attention_loads(tmp_path: Path) -> None:
    config = AutoConfig.for_model("xlnet", vocab_size=32, d_model=16, n_layer=1, n_head=2, d_inner=16, attn_type="uni")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "m")
    model = load_model(ModelBlock(name="m"), tmp_path, seed=0)
    early = [model(input_ids=torch.tensor([[5, 6, 7, last]])).logits[0, 0] for last in (8, 9)]
    assert torch.equal(*early)


def test_a_damaged_file_is_a_users_mistake(tmp_path: Path) -> None:
    tiny("llama", dtype=torch.float32).save_pretrained(tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match="the model m cannot be loaded"):
        load_model(ModelBlock(name="m"), tmp_path, seed=0)


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    model = tiny("llama", dtype=torch.float32)
    weights = {name: w for name, w in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(tmp_path / "m", state_dict=weights)
    with pytest.raises(UserError, match=r"m contains no weights for model\.layers\.1\.mlp"):
        load_model(ModelBlock(name="m"), tmp_path, seed=0)


@pytest.mark.exhaustive  # transformers reads the file for a minute; small files in `test_gguf`
def test_smollm2_gives_transformers_own_losses(tmp_path: Path) -> None:
    """The real model, read from its GGUF file and laid out for training, against transformers' reading."""
    path = PACKAGED["smollm2-135m"].path()
    assert path is not None
    own = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    language = lay_out_for(load_model(ModelBlock(name="smollm2-135m"), tmp_path, seed=0).eval())
    assert language.packs and language.head is not None

    generator = np.random.default_rng(0)
    rows = [(generator.integers(0, 49152, n).astype(np.uint32), np.ones(n, bool)) for n in (40, 25, 33)]
    rows[1][0][:20] = rows[0][0][:20]
    expected = 0.0
    with torch.no_grad():
        for ids, _ in rows:
            ids_T = torch.from_numpy(ids.astype(np.int64))[None]
            expected += float(own(input_ids=ids_T, labels=ids_T).loss) * (len(ids) - 1)
        (inputs,) = language.lay_out(rows, CPU)
        with packed_row.segments(inputs.segments):
            loss, _ = language.loss(inputs)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    tied = language.model.get_input_embeddings().weight, language.model.get_output_embeddings().weight
    assert tied[0] is tied[1]


@pytest.mark.parametrize(("quantise", "close"), [("8bit", 0.1), ("4bit", 0.7)])
def test_a_quantised_base_computes_about_the_same_and_trains(quantise: str, close: float, tmp_path: Path) -> None:
    model = tiny("llama", dtype=torch.float32, hidden_size=64, intermediate_size=128)
    model.save_pretrained(tmp_path / "m")
    block = ModelBlock(name="m", quantise=quantise)  # type: ignore[arg-type]
    quantised = load_model(block, tmp_path, seed=0)
    small = [m for m in quantised.modules() if "bnb" in f"{type(m).__module__}" or "bitsandbytes" in type(m).__module__]
    assert len(small) == 14  # seven linears of each block; the head stays as it was

    ids = torch.arange(2, 22)[None]
    with torch.no_grad():
        expected, logits = model.eval()(input_ids=ids).logits, quantised.eval()(input_ids=ids).logits
    assert float((logits - expected).norm() / expected.norm()) < close

    adapted = add_adapter(quantised, ADAPTER)
    language = lay_out_for(unwrap(adapted).train())
    assert language.packs and language.head is not None
    before = copy.deepcopy({n: p.detach().clone() for n, p in adapted.named_parameters() if p.requires_grad})
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        (inputs,) = language.lay_out([(np.arange(2, 22, dtype=np.uint32), np.ones(20, bool))], CPU)
        with packed_row.segments(inputs.segments):
            loss, _ = language.loss(inputs)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert all("lora_" in name for name in before)


def test_without_bitsandbytes_the_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny("llama", dtype=torch.float32).save_pretrained(tmp_path / "m")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # importing it fails
    with pytest.raises(UserError, match=r"stoker\[quantise\]"):
        load_model(ModelBlock(name="m", quantise="8bit"), tmp_path, seed=0)
