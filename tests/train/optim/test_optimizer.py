"""Which parameters are decayed, and that an optimizer's state goes to disk and back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from stoker.checkpoint.dcp_store import Saved
from stoker.job.blocks.train_block import TrainBlock
from stoker.parallel.shard_spec import WHOLE
from stoker.train.optim.low_precision_adamw import LowPrecisionAdamW
from stoker.train.optim.optimizer import build_optimizer, has_fused_step
from stoker.train.optim.saved_moments import empty_moments, moment_chunks


def block(**changes: object) -> TrainBlock:
    return TrainBlock.model_validate({"lr": 1e-2, "weight_decay": 0.1, "beta2": 0.95, "eps": 1e-8, **changes})


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3), nn.Linear(3, 2, bias=False))


def test_matrices_are_decayed_and_vectors_are_not() -> None:
    model = network()
    model[3].weight.requires_grad_(False)
    decayed, kept = build_optimizer(model, block()).param_groups
    assert decayed["weight_decay"] == 0.1 and kept["weight_decay"] == 0.0
    assert {id(p) for p in decayed["params"]} == {id(model[0].weight), id(model[2].weight)}
    assert {id(p) for p in kept["params"]} == {id(model[1].weight), id(model[1].bias), id(model[2].bias)}
    assert decayed["betas"] == (0.9, 0.95) and decayed["lr"] == 1e-2


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({}, torch.optim.AdamW),
        ({"optimizer_states": "bf16"}, LowPrecisionAdamW),
        ({"optimizer_states": "8bit"}, LowPrecisionAdamW),
        ({"optimizer": "adafactor"}, torch.optim.Adafactor),
        ({"optimizer": "sgd"}, torch.optim.SGD),
    ],
)
def test_the_state_goes_to_disk_and_back(keys: dict[str, str], kind: type) -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for step in range(count):
            generator = torch.Generator().manual_seed(step)
            model(torch.randint(5, (8,), generator=generator)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model = network()
    optimizer = build_optimizer(model, block(**keys))
    assert type(optimizer) is kind
    steps(model, optimizer, 3)

    again = copy.deepcopy(model)
    restored = build_optimizer(again, block(**keys))
    held = {key: chunks[0].tensor for key, chunks in moment_chunks(model, optimizer, WHOLE).items()}
    places = empty_moments(again, restored, {key: Saved(tuple(t.shape), t.dtype) for key, t in held.items()}, WHOLE)
    assert places.keys() == held.keys()
    for key, (place,) in places.items():
        place.tensor.copy_(held[key])
    steps(model, optimizer, 3)
    steps(again, restored, 3)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_light_optimizer_is_light() -> None:
    def numbers(name: str) -> int:
        model = nn.Linear(100, 100, bias=False)
        optimizer = build_optimizer(model, block(optimizer=name))
        model(torch.ones(1, 100)).sum().backward()
        optimizer.step()
        return sum(chunks[0].tensor.numel() for chunks in moment_chunks(model, optimizer, WHOLE).values())

    assert numbers("adafactor") < 300 and numbers("adamw") > 20_000


def test_sgd_steps_one_parameter_at_a_time() -> None:
    """All at once, on a GPU, would hold a second copy of all gradients."""
    optimizer = build_optimizer(network(), block(optimizer="sgd"))
    assert all(group["foreach"] is False for group in optimizer.param_groups)


@pytest.mark.parametrize(
    ("device", "dtype", "fused"),
    [
        ("cuda", torch.float32, True),
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float64, False),  # its kernel reads the step counter, which would be float64, as float32
        ("cpu", torch.float64, True),
        ("mps", torch.float32, False),
        ("cpu", torch.int64, False),
    ],
)
def test_the_fused_step_is_used_where_it_is_right(device: str, dtype: torch.dtype, fused: bool) -> None:
    assert has_fused_step(torch.device(device), dtype) == fused
