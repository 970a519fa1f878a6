"""Modules trained whole beside an adapter: in which type, tied or not, in mixed precision, and without the tuning."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from families import tiny
from stoker.errors import UserError
from stoker.job.blocks.tune_block import TuneBlock
from stoker.models.head import head_of
from stoker.models.tuning.adapters import add_adapter, keep_originals, trained_whole, without_adapter

IDS = torch.arange(2, 22)[None]


def adapted(family: str, names: list[str], dtype: torch.dtype = torch.float64) -> PeftModel:
    block = {"method": "lora", "rank": 4, "alpha": 8.0, "modules_to_save": names}
    return add_adapter(tiny(family, dtype=dtype), TuneBlock.model_validate(block))


def trained(model: nn.Module) -> set[str]:
    return {n.removeprefix("base_model.model.") for n, p in model.named_parameters() if p.requires_grad}


def gradient_of_head(model: nn.Module, base: nn.Module) -> Tensor:
    """The head's gradient by the chunked cross entropy, which is what trains."""
    head = head_of(base)
    assert head is not None
    hidden = base.base_model(input_ids=IDS).last_hidden_state[0, :-1]  # type: ignore[operator]
    head.cross_entropy(hidden, IDS[0, 1:])[0].backward()
    gradient = base.get_output_embeddings().weight.grad  # type: ignore[operator]
    assert gradient is not None
    return gradient


def test_they_stay_where_they_are_and_are_trained() -> None:
    model = adapted("llama", ["lm_head", "norm"])
    assert trained_whole(model) == ["model.norm", "lm_head"]
    assert {n for n in trained(model) if "lora_" not in n} == {"lm_head.weight", "model.norm.weight"}
    assert trained_whole(adapted("llama", [])) == [] and trained_whole(tiny("llama")) == []


@pytest.mark.parametrize("names", [["lm_head"], ["embed_tokens", "lm_head"]])
@pytest.mark.usefixtures("no_float32")
def test_the_chunked_head_gives_the_gradient_of_the_models_own_loss(names: list[str]) -> None:
    model = adapted("llama", names)
    reference = copy.deepcopy(model)
    reference(input_ids=IDS, labels=IDS).loss.backward()
    expected = reference.get_base_model().lm_head.weight.grad
    given = gradient_of_head(model, model.get_base_model())  # type: ignore[arg-type]
    torch.testing.assert_close(given / (IDS.shape[1] - 1), expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", ["lm_head", "wte"])
def test_a_tied_pair_stays_tied(name: str) -> None:
    model = adapted("gpt2", [name])
    base = model.get_base_model()
    assert trained_whole(model) == ["transformer.wte", "lm_head"]
    assert base.lm_head.weight is base.transformer.wte.weight and base.lm_head.weight.requires_grad
    assert model.peft_config["default"].ensure_weight_tying
    gradient_of_head(model, base)  # type: ignore[arg-type]
    rows = base.lm_head.weight.grad.abs().sum(dim=1)
    assert int((rows > 0).sum()) == rows.numel()


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma2"])
def test_they_are_float32_beside_a_base_in_half_precision(family: str) -> None:
    names = {"gpt2": ["wte", "ln_f"]}.get(family, ["embed_tokens", "norm"])
    model = adapted(family, names, torch.bfloat16)
    base = model.get_base_model()
    kinds = {n: p.dtype for n, p in model.named_parameters() if p.requires_grad}
    assert set(kinds.values()) == {torch.float32} and len(kinds) > len(names)
    assert base.base_model.get_input_embeddings()(IDS).dtype == torch.bfloat16  # the residuals keep their type
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    whole = adapted(family, names, torch.float32)
    whole.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    assert float(loss.detach()) == pytest.approx(float(whole(input_ids=IDS, labels=IDS).loss.detach()), rel=3e-2)


@pytest.mark.parametrize(("family", "name"), [("llama", "lm_head"), ("gpt2", "lm_head"), ("gpt2", "h.0.attn.c_attn")])
def test_without_the_tuning_a_model_is_what_it_was(family: str, name: str) -> None:
    expected = tiny(family).eval()(input_ids=IDS).logits
    model = adapted(family, [name]).eval()
    keep_originals(model)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.1)
    tuned = model(input_ids=IDS).logits
    with without_adapter(model):
        torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(model(input_ids=IDS).logits, tuned) and not torch.allclose(tuned, expected, atol=1e-2)


def test_quantised_weights_cannot_be_trained() -> None:
    model = tiny("llama", dtype=torch.float32)
    model.lm_head.weight = nn.Parameter(torch.zeros(4096, 1, dtype=torch.uint8), requires_grad=False)
    block = TuneBlock.model_validate({"method": "lora", "alpha": 8.0, "modules_to_save": ["lm_head"]})
    with pytest.raises(UserError, match="lm_head is quantised"):
        add_adapter(model, block)
