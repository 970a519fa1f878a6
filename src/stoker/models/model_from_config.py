"""Builds a model from its configuration, without memory for its parameters."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from stoker.errors import user_file_errors
from stoker.job.blocks.model_block import ModelBlock
from stoker.models.hf_config import generation_config
from stoker.models.meta_model import parameters_on_meta, set_parameter


def model_from_config(
    config: PreTrainedConfig, block: ModelBlock, where: str, dtype: torch.dtype, kind: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """Returns the model of a configuration, its parameters on the meta device, its buffers real.

    Args:
        where: folder or hub id of the generation settings.
        kind: transformers' class that chooses the model's class.

    Raises:
        UserError: the configuration is impossible.
    """
    with parameters_on_meta(), user_file_errors(f"the configuration of the model {block.name}"):
        model: PreTrainedModel = kind.from_config(config, dtype=dtype, trust_remote_code=block.trust_remote_code)
        for module in model.modules():  # recomputes buffers with float32 as the default, as loading by transformers
            module.__dict__.pop("_is_hf_initialized", None)
        model.initialize_weights()
    _keep_exact(model, dtype)
    generation = generation_config(where, block.revision)
    if generation is not None:  # else the one made from the model's configuration stays
        model.generation_config = generation
    bound_scores(model)
    return model.eval()


def bound_scores(model: PreTrainedModel) -> None:
    """Replaces transformers' choice `sdpa` where scores are bounded (Gemma 2): in 5.17 it ignores the bound."""
    config = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")


def _keep_exact(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Casts the few weights that a family always stores in float32."""
    for pattern, kept in model._get_dtype_plan(dtype).items():
        named = re.compile(pattern.replace("*", ".*"))
        for name, parameter in list(model.named_parameters()):
            if named.search(name):
                set_parameter(model, name, nn.Parameter(parameter.to(kept), parameter.requires_grad))
        for name, buffer in model.named_buffers():
            if named.search(name):
                buffer.data = buffer.to(kept)
