"""Whole models in one process, as the tests compare them with those of transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from stoker.job.blocks.model_block import ModelBlock
from stoker.models.load_model import blank_model
from stoker.models.meta_model import allocate
from stoker.models.weight_source import fill_whole


def load_model(
    block: ModelBlock, base: Path, *, seed: int, dtype: torch.dtype = torch.float32, stop_id: int | None = None
) -> PreTrainedModel:
    """The model of a job on the CPU (a quantised one where its library puts it)."""
    blank = blank_model(block, base, seed=seed, dtype=dtype, stop_id=stop_id)
    fill_whole(allocate(blank.model, torch.device("cpu")), blank.weights)
    return blank.model
