"""Random first weights: transformers' distributions, and the same numbers however they are read."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from families import SHAPES, tiny
from stoker.hardware.process_device import Device
from stoker.job.schema import Job
from stoker.models.build_model import build_meta, build_model
from stoker.models.init_weights import Initial
from stoker.models.meta_model import parameters_on_meta
from stoker.models.prepare_architecture import training_form
from stoker.models.tuning.adapter_targets import layers_to_adapt
from stoker.models.tuning.adapters import lora_config
from stoker.models.weight_source import all_rows

CPU = Device("cpu", "fp32", "for tests")


def of_architecture(family: str) -> PreTrainedModel:
    config = AutoConfig.for_model(family, **{"vocab_size": 128, "pad_token_id": 3, **SHAPES[family]})
    return AutoModelForCausalLM.from_config(config)


def drawn(source: Initial, name: str, shape: torch.Size) -> Tensor:
    return source.read(name, all_rows(shape))


@pytest.mark.parametrize("family", SHAPES)
def test_every_parameter_has_transformers_own_distribution(family: str) -> None:
    """What is the same in two draws is equal (the row of padding too); the spread of all else is that of their draw."""
    torch.manual_seed(0)
    theirs, again = of_architecture(family), of_architecture(family)
    with parameters_on_meta():
        source = Initial(of_architecture(family), seed=1)
    for name, parameter in theirs.named_parameters():
        ours, expected = drawn(source, name, parameter.shape), parameter.detach()
        fixed = expected == again.get_parameter(name)
        assert ours.dtype == torch.float32 and torch.equal(ours[fixed], expected[fixed]), name
        if not fixed.all():
            noise = 6 / math.sqrt(expected.numel())  # six deviations of a mean
            assert ours.std() / expected.std() == pytest.approx(1, abs=noise), name
            assert abs(ours.mean() - expected.mean()) < noise * expected.std(), name
            assert not torch.equal(ours, expected), name


def test_gpt2_scales_what_ends_in_the_residual_path() -> None:
    with parameters_on_meta():
        model = of_architecture("gpt2")
    source = Initial(model, seed=1)
    layer = model.transformer.h[0].mlp
    narrow = drawn(source, "transformer.h.0.mlp.c_proj.weight", layer.c_proj.weight.shape)
    wide = drawn(source, "transformer.h.0.mlp.c_fc.weight", layer.c_fc.weight.shape)
    assert wide.std() / narrow.std() == pytest.approx(math.sqrt(2 * 2), rel=0.05)


def test_a_tensor_depends_on_its_name_and_the_seed_only() -> None:
    with parameters_on_meta():
        model = of_architecture("llama")
    name, other = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))
    shape = model.get_parameter(name).shape
    first = Initial(model, seed=1)
    drawn(first, other, shape)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again = drawn(first, name, shape)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(again, drawn(Initial(model, seed=1), name, shape))
    assert not torch.equal(again, drawn(first, other, shape))
    assert not torch.equal(again, drawn(Initial(model, seed=2), name, shape))
    assert torch.equal(first.read(name, (slice(3, 20), slice(5, 7))), again[3:20, 5:7])


def job_of(name: str, **tune: object) -> Job:
    block = {"model": {"name": name}, "data": [{"path": "x"}], "seed": 3}
    return Job.model_validate(block | {"task": "pretrain", "tune": {"rank": 4, "alpha": 8.0, **tune}})


def test_a_model_from_scratch_is_the_same_from_its_parts(tmp_path: Path) -> None:
    job = job_of("llama-3m", method="full")
    whole, source = build_model(job, tmp_path, CPU), build_meta(job, tmp_path, CPU).weights
    for name, weight in whole.named_parameters():
        rows = tuple(slice(size // 3, size) for size in weight.shape)
        assert torch.equal(source.read(name, rows), weight[rows])


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_fresh_adapters_are_drawn_as_peft_draws_them(family: str, tmp_path: Path) -> None:
    tiny(family, dtype=torch.float32).save_pretrained(tmp_path)
    job = job_of(str(tmp_path), method="lora")
    model, source = build_model(job, tmp_path, CPU), build_meta(job, tmp_path, CPU).weights
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert adapters and all("lora_" in name for name in adapters)
    for name, weight in adapters.items():
        assert torch.equal(source.read(name, all_rows(weight.shape)), weight)
        if ".lora_B." in name:
            assert not weight.any()
        else:  # uniform within the bound of Kaiming initialisation with a=sqrt(5)
            bound = 1 / math.sqrt(weight.shape[1])
            assert 0.8 * bound < weight.abs().max() <= bound
    drawn_first = [weight.flatten()[:8].tolist() for name, weight in adapters.items() if ".lora_A." in name]
    assert len({tuple(numbers) for numbers in drawn_first}) == len(drawn_first)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", "all-linear"),
        ("gpt2", "all-linear"),
        ("cohere", "all-linear"),
        ("falcon", "all-linear"),
        ("llama", ["embed_tokens", "q_proj"]),
    ],
)
def test_doras_first_magnitudes_are_pefts(family: str, targets: str | list[str], tmp_path: Path) -> None:
    tiny(family, dtype=torch.float32).save_pretrained(tmp_path)
    job = job_of(str(tmp_path), method="lora", dora=True, targets=targets)
    built = build_meta(job, tmp_path, CPU)
    ours = build_model(job, tmp_path, CPU)
    plain = tiny(family)
    training_form(plain)
    layers = layers_to_adapt(plain, job.tune, ())
    expected = get_peft_model(ours.get_base_model(), lora_config(job.tune, layers), adapter_name="peft")
    magnitudes = [name for name, _ in ours.named_parameters() if "lora_magnitude_vector.default" in name]
    assert magnitudes
    for name in magnitudes:
        theirs = expected.get_parameter(name.replace(".default.", ".peft."))
        torch.testing.assert_close(ours.get_parameter(name), theirs)
        torch.testing.assert_close(built.weights.read(name, (slice(3, 7),)), theirs[3:7])
