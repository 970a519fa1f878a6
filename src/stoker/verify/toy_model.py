"""Random weights of a job's twin."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from stoker.errors import UserError
from stoker.verify.toy_rows import END_ID

WEIGHT_SCALE = 0.2  # of random matrices: makes attention far from uniform
MOST_WEIGHTS = 20_000_000


def write_model(config: PreTrainedConfig, folder: Path, seed: int) -> None:
    """Writes a random model in the format of ``save_pretrained``.

    Raises:
        UserError: transformers cannot build the model, or it is not small.
    """
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if count > MOST_WEIGHTS:
            raise UserError(f"{config.model_type}: the small twin would have {count:,} weights, which is not small")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ZeroDivisionError) as error:
        raise UserError(f"there is no small twin of a {config.model_type}: {error}") from error
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and norms change as well: zeros and ones would hide a misplaced shard.
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * WEIGHT_SCALE
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise / 2)
    model.config.eos_token_id = END_ID
    model.generation_config = GenerationConfig(eos_token_id=END_ID)
    model.save_pretrained(folder)
