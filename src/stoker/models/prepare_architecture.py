"""Converts a model between its form in training and the form that transformers saves.

In training, in every layout, fused layers are split, attention goes through transformers' interface, GELU by the tanh
formula is one operator, LongRoPE goes by document, the residual stream is bfloat16 if products are, and what gets no
gradient is frozen.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.activations import NewGELUActivation

from stoker.models.attention.long_rope import choose_by_document
from stoker.models.autocast import in_bfloat16
from stoker.models.blocks import blocks_of
from stoker.models.families import falcon, family_of
from stoker.models.families.facts import untrained_modules
from stoker.models.split_fused import ParameterSource, join_fused, split_fused


def training_form(model: PreTrainedModel) -> dict[str, ParameterSource]:
    """Converts a model for training, in place, by the facts of its family.

    Must come before adapters are inserted. Works on the meta device too. A quantised model keeps its fused layers, as
    their packed weights have no rows.

    Returns:
        The sources of the parameters that a checkpoint does not store under their own name.
    """
    for block in blocks_of(model):
        block.register_forward_pre_hook(_round_input)
        _fuse_gelu(block)
    choose_by_document(model)
    family = family_of(model.config)
    if model.config.model_type == "falcon":
        falcon.attend(model)
    if family is None:
        return {}
    if family.attend is not None:
        family.attend(model)
    for layer in untrained_modules(model, family):
        layer.requires_grad_(False)
    return {} if getattr(model, "hf_quantizer", None) is not None else split_fused(model, family)


def _round_input(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Casts the hidden states that enter a block: what comes from embeddings, and from norms at the end of blocks."""
    return (*map(in_bfloat16, arguments[:1]), *arguments[1:])


def _fuse_gelu(block: nn.Module) -> None:
    """Computes GELU by the tanh formula in one kernel. transformers uses nine operators, which autocast on a GPU makes
    float32, and which save four tensors for the backward pass.
    """
    for module in block.modules():
        if isinstance(module, NewGELUActivation):
            module.forward = partial(nn.functional.gelu, approximate="tanh")  # type: ignore[method-assign]


def saved_form(model: PreTrainedModel) -> None:
    """Converts a model to the form that transformers saves, in place. Its adapters must have been merged."""
    family = family_of(model.config)
    if family is not None and getattr(model, "hf_quantizer", None) is None:
        join_fused(model, family)
