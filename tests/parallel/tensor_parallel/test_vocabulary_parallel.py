"""The input of a head that is split over tensor processes, in one process."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from families import tiny
from stoker.models.head import VALUE_HEAD
from stoker.parallel.tensor_parallel.vocabulary_parallel import to_head


@pytest.mark.parametrize(
    ("outputs", "critic", "sent"),
    [(128, False, torch.bfloat16), (128, True, torch.float32), (1, False, torch.float32)],
    ids=["logits", "values", "score"],
)
def test_tensor_processes_round_what_only_logits_are_computed_from(
    outputs: int, critic: bool, sent: torch.dtype
) -> None:
    model = tiny("llama", dtype=torch.float32)
    head = nn.Linear(model.config.hidden_size, outputs)
    if critic:
        setattr(model, VALUE_HEAD, nn.Linear(model.config.hidden_size, 1))
    mesh = SimpleNamespace(splits_sequence=False, groups={"tensor": object()})
    model.base_model.register_forward_hook(partial(to_head, model, head, mesh))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model.base_model(torch.arange(2, 12)[None]).last_hidden_state.dtype == sent
