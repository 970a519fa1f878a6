"""Stages of a pipeline, in one process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from families import tiny
from stoker.models.language_model import lay_out_for
from stoker.models.objective import next_token
from stoker.parallel.model_stage import ModelStage


def test_hidden_states_are_sent_in_the_declared_type() -> None:
    """Under autocast on a GPU the norm behind BLOOM's embedding gives float32, and the receiver expects bfloat16."""
    model = tiny("bloom")
    language = lay_out_for(model)
    (inputs,) = language.lay_out([(np.arange(2, 12).astype(np.uint32), np.ones(10, bool))], torch.device("cpu"))
    body = replace(language, head=None)
    stage = ModelStage(body, next_token, first=True, dtype=torch.bfloat16, embedded=torch.float64)
    stage.rows = [inputs]
    sent = stage(torch.zeros(1), torch.tensor([0]))
    assert sent.dtype == torch.bfloat16
    sent.sum().backward()
    assert all(p.grad is not None for p in model.transformer.h.parameters())
