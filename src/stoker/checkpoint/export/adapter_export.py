"""Export of an adapter in peft's format for transformers' model.

In training, each part of a fused layer has its own LoRA. The file has one LoRA on the fused layer, which computes the
same: the first matrices are concatenated, the second ones form a block diagonal.

Shapes: I inputs, O outputs of the fused layer, R rank.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from stoker.models.families import family_of
from stoker.models.resize_embeddings import rows_by_token
from stoker.models.split_fused import Parts, saved_tensors
from stoker.models.tuning.adapters import trained_whole, unwrap
from stoker.models.tuning.virtual_tokens import Prefix, VirtualPrompt, virtual_of

PREFIX = "base_model.model."
WEIGHTS = "adapter_model.safetensors"


def save_adapter(model: nn.Module, folder: Path, base_name: str) -> None:
    """Writes weights and configuration of a model's adapter; ``base_name`` is the base for transformers."""
    virtual = virtual_of(model)
    if virtual is not None:
        _save_virtual(virtual, folder, base_name)
        return
    assert isinstance(model, PeftModel)
    model.peft_config["default"].base_model_name_or_path = base_name
    # By default peft asks the hub for the base's vocabulary. Modules trained whole, embeddings included, follow below.
    model.save_pretrained(str(folder), save_embedding_layers=False)
    base = unwrap(model)
    split = {name: layer for name, layer in base.named_modules() if isinstance(layer, Parts)}
    whole = trained_whole(model)
    if not split and not whole:
        return
    family = family_of(base.config)
    config: Any = LoraConfig.from_pretrained(str(folder))
    state = load_file(folder / WEIGHTS)
    for name in whole:
        state |= {f"{PREFIX}{key}": tensor for key, tensor in saved_tensors(base, family, name).items()}
    for name, layer in split.items():
        count = _join(state, name, layer)
        if count:
            config.rank_pattern[name] = config.r * count
            # Keeps the factor on the product, alpha over the rank or over its root.
            config.alpha_pattern[name] = config.lora_alpha * (count**0.5 if config.use_rslora else count)
    if split:
        factors = re.compile(rf"{re.escape(PREFIX)}(.+)\.(lora_A\.weight|lora_embedding_A)")
        config.target_modules = {found[1] for key in state if (found := factors.fullmatch(key))}
        config.fan_in_fan_out = family is not None and bool(family.transposed)
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def keep_rows(base: PreTrainedModel, folder: Path, rows: int) -> None:
    """Truncates the embedding and the head in an adapter's file to a number of rows."""
    state = load_file(folder / WEIGHTS)
    for name in rows_by_token(base):
        if (held := state.get(f"{PREFIX}{name}")) is not None:
            state[f"{PREFIX}{name}"] = held[:rows].contiguous()
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})


@torch.no_grad()
def _save_virtual(virtual: VirtualPrompt | Prefix, folder: Path, base_name: str) -> None:
    """Saves the outputs of the encoder, without the encoder, as peft does."""
    config = copy.copy(virtual.config)
    config.base_model_name_or_path, config.inference_mode = base_name, True
    config.save_pretrained(str(folder))
    made = virtual.embeddings().detach().float().cpu().contiguous()
    save_file({"prompt_embeddings": made}, folder / WEIGHTS, metadata={"format": "pt"})


def _join(state: dict[str, Tensor], name: str, layer: Parts) -> int:
    """Replaces the LoRA matrices of a layer's parts by those of the layer; returns the number of parts with LoRA."""
    firsts, seconds, magnitudes = [], [], []
    dora = False
    parts: list[tuple[str, Any]] = list(layer.named_children())
    for part, linear in parts:
        inside = f"{PREFIX}{name}.{part}"
        first = state.pop(f"{inside}.lora_A.weight", None)
        second = state.pop(f"{inside}.lora_B.weight", None)
        firsts += [] if first is None else [first]
        seconds.append(torch.zeros(linear.weight.shape[0], 0) if second is None else second)
        magnitude = state.pop(f"{inside}.lora_magnitude_vector", None)
        # A part without DoRA has the magnitudes of its weight.
        magnitudes.append(magnitude if magnitude is not None else linear.weight.detach().norm(dim=1).cpu())
        dora = dora or magnitude is not None
    if firsts:
        whole = f"{PREFIX}{name}"
        state[f"{whole}.lora_A.weight"] = torch.cat(firsts)
        state[f"{whole}.lora_B.weight"] = torch.block_diag(*seconds).contiguous()
        if dora:
            state[f"{whole}.lora_magnitude_vector"] = torch.cat(magnitudes)
    return len(firsts)
