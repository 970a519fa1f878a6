"""Liger's kernels as `benchmarks/gpu.py` applies them: loss and gradients are those of the model's own code."""

from __future__ import annotations

import sys

import pytest
import torch
from gpu import use_liger
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
)


def gradients(model: modeling_llama.LlamaForCausalLM) -> dict[str, Tensor]:
    """The loss of two packed rows, and its gradients."""
    ids = torch.arange(24).reshape(2, 12) * 7 % 64
    places = torch.tensor([[*range(12)], [*range(5), *range(7)]])
    loss = model.cuda()(input_ids=ids.cuda(), labels=ids.cuda(), position_ids=places.cuda()).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.gpu
def test_loss_and_gradients_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("liger_kernel")
    torch.manual_seed(0)
    own = modeling_llama.LlamaForCausalLM(CONFIG)
    for name in ("LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb"):
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    use_liger()
    fused = modeling_llama.LlamaForCausalLM(CONFIG)
    fused.load_state_dict(own.state_dict())
    assert type(fused.model.norm) is not type(own.model.norm)
    torch.testing.assert_close(gradients(fused), gradients(own), rtol=1e-3, atol=1e-5)


def test_its_absence_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(SystemExit, match=r"^liger-kernel cannot be imported \(.*\): `make gpu-packages gpu-site`"):
        use_liger()
