"""LoRA adapters: which layers get one, in which scaling, and the fused pass against peft's own."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear

from families import tiny
from stoker.errors import UserError
from stoker.job.blocks.tune_block import TuneBlock
from stoker.models.tuning.adapters import add_adapter, unwrap, without_adapter
from stoker.models.tuning.lora import fuse_lora

IDS = torch.arange(2, 22)[None]


def tune(**changes: object) -> TuneBlock:
    return TuneBlock.model_validate({"method": "lora", "rank": 4, "alpha": 8.0, **changes})


def adapted(block: TuneBlock, family: str = "llama") -> PeftModel:
    """An adapted float64 model whose second matrices are not zero, as after some steps."""
    model = add_adapter(tiny(family), block).to(torch.float64)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return model


def lora_layers(model: torch.nn.Module) -> dict[str, LoraLinear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, LoraLinear)}


@pytest.mark.parametrize(("family", "layers"), [("llama", 14), ("gpt2", 8), ("gpt_neox", 8)])
def test_all_linear_is_every_linear_but_the_head(family: str, layers: int) -> None:
    model = add_adapter(tiny(family), tune())
    names = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    assert len(names) == layers
    assert not any("head" in name or "embed_out" in name for name in names)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, _ in model.named_parameters() if "lora_" in n
    }


@pytest.mark.parametrize(("rslora", "scaling"), [(False, 8.0 / 4), (True, 8.0 / 2)])
def test_the_scaling_is_alpha_over_rank_or_its_root(rslora: bool, scaling: float) -> None:
    model = add_adapter(tiny("llama"), tune(rslora=rslora, targets=["q_proj"]))
    layers = lora_layers(model).values()
    assert len(layers) == 2 and {layer.scaling["default"] for layer in layers} == {scaling}


def test_dora_has_magnitudes() -> None:
    model = add_adapter(tiny("llama"), tune(dora=True, targets=["q_proj"]))
    assert any("magnitude" in name for name, p in model.named_parameters() if p.requires_grad)


def test_a_target_that_is_no_layer_is_named_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no layer 'q_porj'; did you mean 'q_proj'\?.*down_proj"):
        add_adapter(tiny("llama"), tune(targets=["v_proj", "q_porj"]))


def test_without_its_adapter_a_model_is_what_it_was() -> None:
    base = tiny("llama").eval()
    model = adapted(tune()).eval()
    fuse_lora(model)
    expected = base(input_ids=IDS).logits
    with without_adapter(model):
        torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(model(input_ids=IDS).logits, expected, atol=1e-2)
    assert type(unwrap(model)) is type(base) and unwrap(base) is base


def test_a_model_whose_last_adapter_was_deleted_is_the_base() -> None:
    model = adapted(tune())
    base, before = unwrap(model), copy.deepcopy(model)
    model.delete_adapter("default")
    assert not model.peft_config and unwrap(model) is base
    with without_adapter(before):
        expected = before(input_ids=IDS).logits
    with without_adapter(model):
        torch.testing.assert_close(unwrap(model)(input_ids=IDS).logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt"])  # without biases and with
@pytest.mark.usefixtures("no_float32")
def test_the_fused_pass_is_pefts(family: str) -> None:
    model = adapted(tune(), family)
    reference = copy.deepcopy(model)
    assert fuse_lora(model) == len(lora_layers(model)) > 0

    given, expected = (m(input_ids=IDS, labels=IDS).loss for m in (model, reference))
    given.backward()
    expected.backward()

    assert float(given.detach()) == pytest.approx(float(expected.detach()), rel=1e-13)
    trained = 0
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        if q.grad is not None:
            trained += 1
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-13, msg=name)
    assert trained == 2 * len(lora_layers(model))


def test_the_fused_pass_under_autocast_is_as_near_to_float32_as_pefts() -> None:
    model = adapted(tune()).float().train()

    def results(autocast: bool) -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(input_ids=IDS).logits
        logits.float().square().mean().backward()
        return [logits.detach().float(), *(p.grad for p in model.parameters() if p.grad is not None)]

    exact, pefts = results(autocast=False), results(autocast=True)
    fuse_lora(model)
    fused = results(autocast=True)

    assert len(fused) == len(exact) > 1
    assert [a.dtype for a in fused] == [b.dtype for b in pefts]
    errors = [[float((a - c).norm() / c.norm()) for a, c in zip(x, exact, strict=True)] for x in (fused, pefts)]
    assert 0 < sum(errors[0]) < 1.6 * sum(errors[1])  # roundings differ in number and place


def test_merged_weights_are_not_adapted_twice() -> None:
    model = adapted(tune()).eval()
    fuse_lora(model)
    expected = model(input_ids=IDS).logits
    model.merge_adapter()
    torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("changes", [{"dropout": 0.1}, {"dora": True}])
def test_what_is_not_plain_keeps_pefts_pass(changes: dict[str, object]) -> None:
    assert fuse_lora(adapted(tune(**changes))) == 0


def test_gpt2s_transposed_layers_keep_pefts_pass() -> None:
    assert fuse_lora(adapted(tune(), "gpt2")) == 0
