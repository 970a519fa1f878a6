"""Adapters by request over one base, virtual tokens and quantised bases, against passes over the whole text."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from families import VOCABULARY, tiny
from stoker.errors import UserError
from stoker.generate.decoder import decoder_of
from stoker.generate.generation_engine import GenerationEngine
from stoker.generate.request import BASE, Request
from stoker.hardware.process_device import Device
from stoker.job.blocks.tune_block import TuneBlock
from stoker.models.meta_model import allocate
from stoker.models.prepare_architecture import training_form
from stoker.models.tuning.adapters import without_adapter
from stoker.models.tuning.lora import fuse_lora
from stoker.models.tuning.quantise import quantised_copy
from stoker.models.tuning.virtual_tokens import FirstValues, add_virtual_tokens, virtual_ids

EXACT = Device("cpu", "fp64", "a test compares")


def prompts(lengths: tuple[int, ...] = (4, 19, 11)) -> list[tuple[int, ...]]:
    generator = np.random.default_rng(5)
    return [tuple(generator.integers(2, VOCABULARY, length).tolist()) for length in lengths]


def lora(model: PreTrainedModel, name: str = "default") -> PeftModel:
    torch.manual_seed(7)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, config, adapter_name=name)  # type: ignore[return-value]


@torch.no_grad()
def whole_pass(engine: GenerationEngine, ids: tuple[int, ...]) -> Tensor:
    """Log-probabilities of every next token without a cache, shape (T, V)."""
    model = engine.decoder.language.model
    with engine.decoder.at_work():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)


def assert_likeliest(expected: Tensor, ids: list[int], log_probabilities: list[float], tolerance: float) -> None:
    assert ids == expected.argmax(-1).tolist()
    assert log_probabilities == pytest.approx(expected.max(-1).values.tolist(), abs=tolerance)


def test_requests_choose_their_adapter_in_one_batch() -> None:
    model = lora(tiny("llama"))
    model.add_adapter("other", LoraConfig(r=2, target_modules=["k_proj", "o_proj"], init_lora_weights=False))
    engine = GenerationEngine(decoder_of(model, EXACT, context=64))
    assert engine.decoder.adapters == ("default", "other")
    names = ("default", "other", BASE, None)
    generations = engine.run([Request(prompt, 9, adapter=name) for prompt in prompts() for name in names])
    answers = set()
    for generation in generations:
        start, name = len(generation.request.prompt) - 1, generation.request.adapter
        with engine.decoder.using(name):
            expected = whole_pass(engine, generation.so_far)[start:-1]
        assert_likeliest(expected, generation.ids, [t.log_probability for t in generation.tokens], 1e-10)
        answers.add((len(generation.request.prompt), tuple(generation.ids)))
    assert len(answers) == 3 * 3  # None is the adapter that is active, and all others differ
    assert model.active_adapter == "default"


def test_an_adapter_that_is_not_there_is_refused() -> None:
    engine = GenerationEngine(decoder_of(lora(tiny("llama")), EXACT, context=64))
    with pytest.raises(UserError, match="no adapter 'defualt'; there are: default"):
        engine.submit(Request((1, 2), 1, adapter="defualt"))


def test_a_beginning_is_not_shared_between_adapters() -> None:
    engine = GenerationEngine(decoder_of(lora(tiny("llama")), EXACT, context=64))
    (prompt,) = prompts((40,))
    first = engine.run([Request(prompt, 4, remember=True)])[0]
    again = (*first.so_far, 9)
    tuned, base = engine.run([Request(again, 4), Request(again, 4, adapter=BASE)])
    assert (tuned.shared, base.shared) == (43, 0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mistral"])
@pytest.mark.parametrize("method", ["prompt", "p-tuning", "prefix"])
def test_virtual_tokens_stand_before_every_answer(method: str, family: str) -> None:
    model = with_virtual_tokens(tiny(family), method)
    engine = GenerationEngine(decoder_of(model, EXACT, context=60))
    requests = [Request(prompt, 9, adapter=name) for prompt in prompts() for name in (None, BASE)]
    generations = engine.run([*requests, *requests])
    different = 0
    for tuned, base in zip(generations[::2], generations[1::2], strict=True):
        different += tuned.ids != base.ids
        for generation in (tuned, base):
            start = len(generation.request.prompt) - 1
            ids, skipped = generation.so_far, 0
            if generation is tuned:
                ids, skipped = (*virtual_ids(model), *ids), len(virtual_ids(model))
                expected = whole_pass(engine, ids)[skipped + start : -1]
            else:
                with without_adapter(model):
                    expected = whole_pass(engine, ids)[start:-1]
            assert_likeliest(expected, generation.ids, [t.log_probability for t in generation.tokens], 1e-9)
    assert different


def with_virtual_tokens(model: PreTrainedModel, method: str) -> PreTrainedModel:
    training_form(model)
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    reader = FirstValues(lambda ids: embedding.detach()[list(ids)])
    tune = TuneBlock.model_validate({"method": method, "tokens": 3})
    first = add_virtual_tokens(model, tune, reader, seed=2)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in allocate(model, torch.device("cpu")).items():
            value = first[name]().to(parameter.dtype)
            parameter.copy_(value + 0.5 * torch.randn(value.shape, generator=generator, dtype=value.dtype))
    return model.double()


@pytest.mark.parametrize("kind", ["int8", "4bit"])
def test_a_quantised_base_answers_as_it_does_in_whole_passes(kind: str) -> None:
    base = quantised_copy(
        tiny("llama", dtype=torch.float32, hidden_size=64, intermediate_size=128), kind, torch.float32
    )
    model: nn.Module = lora(base)
    fuse_lora(model)
    engine = GenerationEngine(decoder_of(model, Device("cpu", "fp32", "a test compares"), context=64))
    for name in (None, BASE):
        for generation in engine.run([Request(prompt, 6, adapter=name) for prompt in prompts()]):
            start = len(generation.request.prompt) - 1
            with engine.decoder.using(name):
                expected = whole_pass(engine, generation.so_far)[start:-1]
            assert_likeliest(expected, generation.ids, [t.log_probability for t in generation.tokens], 1e-4)
