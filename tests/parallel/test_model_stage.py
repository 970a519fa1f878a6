"""Stages of a pipeline, in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from families import tiny
from stoker.job.layout import Layout
from stoker.models.head import VALUE_HEAD, Head
from stoker.models.language_model import lay_out_for
from stoker.models.objective import next_token
from stoker.parallel.model_stage import ModelStage


def test_hidden_states_are_sent_in_the_declared_type() -> None:
    """Under autocast on a GPU the norm behind BLOOM's embedding gives float32, and the receiver expects bfloat16."""
    model = tiny("bloom")
    language = lay_out_for(model)
    (inputs,) = language.lay_out([(np.arange(2, 12).astype(np.uint32), np.ones(10, bool))], torch.device("cpu"))
    mesh: Any = SimpleNamespace(layout=Layout(), groups={})
    stage = ModelStage(model, None, mesh, next_token, first=True, dtype=torch.bfloat16, embedded=torch.float64)
    stage.rows = [inputs]
    sent = stage(torch.zeros(1), torch.tensor([0]))
    assert sent.dtype == torch.bfloat16
    sent.sum().backward()
    assert all(p.grad is not None for p in model.transformer.h.parameters())


@pytest.mark.parametrize(
    ("outputs", "critic", "sent"),
    [(128, False, torch.bfloat16), (128, True, torch.float32), (1, False, torch.float32)],
    ids=["logits", "values", "score"],
)
def test_tensor_processes_round_what_only_logits_are_computed_from(
    outputs: int, critic: bool, sent: torch.dtype
) -> None:
    model = tiny("llama", dtype=torch.float32)
    (inputs,) = lay_out_for(model).lay_out([(np.arange(2, 12), np.ones(10, bool))], torch.device("cpu"))
    head = Head(nn.Linear(model.config.hidden_size, outputs))
    if critic:
        setattr(model, VALUE_HEAD, nn.Linear(model.config.hidden_size, 1))
    mesh: Any = SimpleNamespace(layout=Layout(tensor=2, sequence=False), groups={"tensor": object()})
    stage = ModelStage(model, head, mesh, next_token, first=True, dtype=torch.bfloat16, embedded=torch.float32)
    stage.rows, stage.reading = [inputs], lambda hidden_ND, _inputs, _head: hidden_ND
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert stage(torch.zeros(1), torch.tensor([0])).dtype == sent
