"""A tiny Llama or Mixtral with random weights and the tiny tokenizer, in a folder as ``save_pretrained`` leaves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from stoker.data.templates.chat_template import CHATML

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def save_tokenizer(
    folder: Path, tokenizer: Tokenizer, *, template: str | None = CHATML, end: str = "<|im_end|>"
) -> PreTrainedTokenizerFast:
    """Writes a tokenizer with a chat template and an end token."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token="<pad>")
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


def save_tiny_llama(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    template: str | None = CHATML,
    end: str = "<|im_end|>",
    std: float | None = None,
    family: str = "llama",
    **sizes: Any,
) -> Path:
    """Writes a Llama in float32, the same each time, and its tokenizer.

    Args:
        end: the end token of tokenizer and configuration.
        std: the standard deviation of matrices, where answers of the untrained model are to differ.
        family: of the same keys, such as ``mixtral``.
        **sizes: other values of the configuration than `SIZES`.

    Returns:
        The folder.
    """
    fast = save_tokenizer(folder, tokenizer, template=template, end=end)
    torch.manual_seed(0)
    ends = {"eos_token_id": fast.eos_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(family, **{"vocab_size": len(fast), **SIZES, **ends, **sizes})
    model = AutoModelForCausalLM.from_config(config)
    if std is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=std)
    model.save_pretrained(folder)
    return folder
