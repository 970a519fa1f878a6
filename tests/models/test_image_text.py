"""The language model of an image-text checkpoint computes what the whole model does, for text."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from loading import load_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from image_text import SHAPES, VOCABULARY, save_image_text, tiny_image_text
from stoker.errors import UserError
from stoker.job.blocks.model_block import ModelBlock
from stoker.models.families import family_of
from stoker.models.hf_config import IMAGE_TEXT
from stoker.models.load_model import blank_model
from stoker.models.model_source import require_model
from stoker.models.tokenizers.job_tokenizer import load_tokenizer_from
from stoker.models.tuning.quantise import FORMS, packed_parameters
from stoker.plan.shapes.shape_of_config import shape_of_config

LANGUAGE = re.compile(r"(model\.)?(language_model|text_model)\.(model\.)?")
IDS = torch.arange(2, 44).view(2, 21) * 5 % VOCABULARY


def loss_and_gradients(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the next tokens, and the gradients of the language model by their names in a causal one."""
    model.set_experts_implementation("eager")  # others have no float64
    names = {p: n for n, p in model.named_parameters() if n.startswith("lm_head") or LANGUAGE.match(n)}
    if not names or not any(LANGUAGE.match(n) for n in names.values()):
        names = {p: n for n, p in model.named_parameters()}
    logits = model(input_ids=IDS, use_cache=False).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    found = torch.autograd.grad(loss, list(names), allow_unused=True)
    plain = (LANGUAGE.sub("" if "lm_head" in n else "model.", n, count=1) for n in names.values())
    return loss.detach(), {n: g for n, g in zip(plain, found, strict=True) if g is not None}


@pytest.mark.parametrize("family", IMAGE_TEXT)
@pytest.mark.often("gemma3", "qwen3_5", "mistral3", "qwen3_vl", "llama4")
def test_loss_and_gradients_are_those_of_the_whole_model(family: str, tmp_path: Path) -> None:
    whole = tiny_image_text(family)
    whole.save_pretrained(tmp_path / "m")
    blank = blank_model(ModelBlock(name="m"), tmp_path, seed=0, dtype=torch.float64)
    text = load_model(ModelBlock(name="m"), tmp_path, seed=0, dtype=torch.float64)
    assert not any(isinstance(layer, nn.Conv2d | nn.Conv3d) for layer in text.modules())
    assert blank.left_out == whole.num_parameters() - text.num_parameters() > 0

    if family not in ("gemma4", "llama4"):  # whose shapes the planner does not know
        config = json.loads((tmp_path / "m" / "config.json").read_text())
        assert shape_of_config(config).parameters == text.num_parameters()

    ours, gradients = loss_and_gradients(text)
    theirs, expected = loss_and_gradients(whole)
    assert abs(ours - theirs) < 1e-12
    assert gradients.keys() == expected.keys() and len(gradients) > 15
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12, msg=name)


def test_every_shape_of_the_tests_is_a_known_family() -> None:
    assert set(SHAPES) == set(IMAGE_TEXT)


@pytest.mark.parametrize("family", ["qwen3_vl", "mistral3", "gemma3", "qwen3_5"])
def test_layouts_know_the_language_model(family: str, tmp_path: Path) -> None:
    save_image_text(tmp_path / "m", family)
    facts = family_of(blank_model(ModelBlock(name="m"), tmp_path, seed=0).model.config)
    assert facts is not None and facts.name in ("qwen3", "mistral", "gemma3_text", "qwen3_5_text")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("original", [True, False])
def test_files_of_either_names_in_parts_and_tied(tied: bool, original: bool, tmp_path: Path) -> None:
    whole = save_image_text(tmp_path / "m", "gemma3", tied=tied, save_original_format=original, max_shard_size="40KB")
    assert len(list((tmp_path / "m").glob("model-*.safetensors"))) > 2
    text = load_model(ModelBlock(name="m"), tmp_path, seed=0)
    assert (text.get_input_embeddings().weight is text.get_output_embeddings().weight) == tied
    torch.testing.assert_close(text(input_ids=IDS).logits, whole(input_ids=IDS).logits, rtol=0, atol=1e-6)


def test_a_head_that_the_files_store_separately_is_untied(tmp_path: Path) -> None:
    save_image_text(tmp_path / "m", "gemma3", tied=True)
    file = tmp_path / "m" / "model.safetensors"
    weights = load_file(file)
    head = torch.randn(VOCABULARY, 32)
    save_file(weights | {"language_model.lm_head.weight": head}, file, metadata={"format": "pt"})
    text = load_model(ModelBlock(name="m"), tmp_path, seed=0)
    assert torch.equal(text.get_output_embeddings().weight, head)
    assert torch.equal(text.get_input_embeddings().weight, weights["language_model.model.embed_tokens.weight"])


def test_a_quantised_base_has_the_layers_of_the_language_model(tmp_path: Path) -> None:
    pytest.importorskip(FORMS["int8"].package)
    whole = save_image_text(tmp_path / "m", "qwen3_vl")
    blank = blank_model(ModelBlock(name="m", quantise="int8"), tmp_path, seed=0)
    packed = packed_parameters(blank.model)
    assert len(packed) == 2 * 7 and blank.left_out > 0
    assert torch.equal(blank.model.get_output_embeddings().weight, whole.get_output_embeddings().weight)
    apart = blank.model(input_ids=IDS).logits - whole(input_ids=IDS).logits
    assert 0 < float(apart.abs().max()) < 0.1 * float(whole(input_ids=IDS).logits.std())


def test_what_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    save_image_text(tmp_path / "m", "mistral3")
    config = tmp_path / "m" / "config.json"
    content = json.loads(config.read_text())
    shutil.copytree(tmp_path / "m", tmp_path / "bits")
    bits = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (tmp_path / "bits" / "config.json").write_text(json.dumps(content | {"quantization_config": bits}))
    with pytest.raises(UserError, match="the weights of bits, an image-text model, are stored quantised"):
        blank_model(ModelBlock(name="bits", quantise="8bit"), tmp_path, seed=0)

    file = tmp_path / "m" / "model.safetensors"
    weights = load_file(file)
    del weights["language_model.model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"m contains no weights for model.language_model.layers.1.mlp.up_proj.weight"):
        blank_model(ModelBlock(name="m"), tmp_path, seed=0)


def test_the_template_of_the_processor_is_the_tokenizers(tmp_path: Path) -> None:
    save_image_text(tmp_path / "m", "mistral3")
    source = require_model("m", tmp_path)
    template = load_tokenizer_from(source).chat_template
    (tmp_path / "m" / "chat_template.json").write_text(json.dumps({"chat_template": "another"}))
    assert load_tokenizer_from(source).chat_template == template  # the tokenizer's own is used first
    (tmp_path / "m" / "chat_template.jinja").unlink()
    assert load_tokenizer_from(source).chat_template == "another"
    (tmp_path / "m" / "chat_template.json").write_text("{")
    with pytest.raises(UserError, match=r"chat_template.json of .*/m cannot be read"):
        load_tokenizer_from(source)
    (tmp_path / "m" / "chat_template.json").write_text("[]")
    assert load_tokenizer_from(source).chat_template is None
