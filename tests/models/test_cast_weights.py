"""Copies of weights in the type of products give the tokens of autocast, whose casts of every step they save."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.profiler import profile

from families import tiny
from stoker.generate.decoder import Decoder, decoder_of
from stoker.generate.generation_engine import GenerationEngine
from stoker.generate.request import Request, Token
from stoker.hardware.process_device import Device
from stoker.models.cast_weights import CastWeights
from stoker.models.head import OWN_CRITIC
from stoker.models.tuning.lora import fuse_lora
from stoker.train.rollouts import answer_sampling

BF16 = Device("cpu", "bf16", "")
PROMPTS = ((5, 6, 7), (9, 4, 8, 12, 3))


def answers(decoder: Decoder) -> list[list[Token]]:
    return [generation.tokens for generation in GenerationEngine(decoder).run([Request(p, 5) for p in PROMPTS])]


def weights_cast_by(decoder: Decoder) -> int:
    """Casts of whole matrices of linear layers in a pass."""
    shapes = {str(list(layer.weight.shape)) for layer in decoder.model.modules() if isinstance(layer, nn.Linear)}
    cache = decoder.new_rows()
    cache.open([1], [None])
    with decoder.at_work(), profile(record_shapes=True) as found:
        decoder.preview(torch.zeros(1, 1, dtype=torch.int64), cache)
    events = [event for event in found.events() if event.name == "aten::_to_copy"]
    return sum(str(event.input_shapes[0]) in shapes for event in events)


@pytest.mark.parametrize("lora", [False, True])
def test_answers_are_the_same_without_casts(lora: bool) -> None:
    model = tiny("llama", dtype=torch.float32)
    if lora:
        model = get_peft_model(model.to(torch.bfloat16), LoraConfig(r=4, init_lora_weights=False))  # type: ignore[assignment]
        fuse_lora(model)
    decoder = decoder_of(model, BF16, context=64)
    copying = replace(decoder, cast=CastWeights(model, torch.bfloat16))
    assert answers(copying) == answers(decoder)
    assert weights_cast_by(copying) == 0 < weights_cast_by(decoder)
    with torch.no_grad():  # as a training step between
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    assert answers(copying) == answers(decoder)


def test_answers_of_a_policy_are_sampled_with_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is not for keys and values."""
    decoder = decoder_of(tiny("llama", dtype=torch.float32), BF16, context=64)
    copies = CastWeights(decoder.model, torch.bfloat16)
    made: list[tuple[Decoder, int]] = []

    class Engine(GenerationEngine):
        def __init__(self, decoder: Decoder, *, memory: int) -> None:
            made.append((decoder, memory))
            super().__init__(decoder, memory=memory)

    monkeypatch.setattr(answer_sampling, "GenerationEngine", Engine)
    monkeypatch.setattr(answer_sampling, "free_memory", lambda _: 1 << 30)
    monkeypatch.setattr(answer_sampling, "cast_weights", lambda decoder, memory: copies)
    prompts = [answer_sampling.Prompt(0, np.array([7, 8]), "rows.jsonl", 0)]
    how = {"answers": 1, "max_tokens": 4, "temperature": 0.0, "stop_ids": frozenset[int](), "seed": 0}
    (episode,) = answer_sampling.sampled(decoder, prompts, **how)  # type: ignore[arg-type]
    assert len(episode.ids) == 4 and [(each.cast, memory) for each, memory in made] == [
        (copies, (1 << 30) - copies.nbytes)
    ]


def test_layers_outside_of_autocast_use_their_own_weights() -> None:
    layer, x = nn.Linear(4, 3), torch.randn(2, 4)
    copies = CastWeights(nn.Sequential(layer), torch.bfloat16)
    expected = layer(x)
    with copies.in_use():
        assert torch.equal(layer(x), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
    assert "forward" not in vars(layer)


def test_layers_of_a_layout_in_16_bits_and_of_a_critic_have_no_copies() -> None:
    model = nn.Sequential(*(nn.Linear(4, 3) for _ in range(3)))
    model[0].to(torch.bfloat16)
    model[1].forward = model[1].forward
    model.add_module(OWN_CRITIC, nn.Sequential(nn.Linear(4, 3)))  # on the host while answers are sampled
    assert CastWeights(model, torch.bfloat16).layers == [model[2]]
