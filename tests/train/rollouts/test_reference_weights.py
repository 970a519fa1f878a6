"""The reference of a fully trained policy: its weights take the place of the trained ones, from page-locked memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stoker.train.rollouts import reference_weights
from stoker.train.rollouts.reference_weights import ReferenceWeights


def test_initial_weights_take_the_place_of_the_trained_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    owners: list[object] = []

    def host_memory(tensor: Tensor, owner: object) -> Tensor:
        owners.append(owner)
        return torch.empty_like(tensor)

    monkeypatch.setattr(reference_weights, "host_memory_like", host_memory)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[1].weight.requires_grad_(False)
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    reference = ReferenceWeights(model)
    assert owners == [reference] * 3
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    with reference.in_place():
        within = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert all(torch.equal(within[name], initial[name]) == (name != "1.weight") for name in initial)
    assert all(torch.equal(p, trained[name]) for name, p in model.named_parameters())
