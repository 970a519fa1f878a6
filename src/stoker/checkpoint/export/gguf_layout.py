"""The architectures that GGUF can express, and the layout of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_BLOCK = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
_ROPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class GgufFamily:
    """The layout of an architecture in a GGUF.

    Attributes:
        name: ``general.architecture``.
        permute: whether rows of q and k heads are reordered, as llama.cpp rotates adjacent rows.
        extra: a block's tensors besides the weights of all families.
    """

    name: str
    permute: bool = False
    extra: tuple[str, ...] = ()


FAMILIES = {
    "LlamaForCausalLM": GgufFamily("llama", permute=True),
    "MistralForCausalLM": GgufFamily("llama", permute=True),
    "Qwen2ForCausalLM": GgufFamily("qwen2", extra=("attn_q.bias", "attn_k.bias", "attn_v.bias")),
    "Qwen3ForCausalLM": GgufFamily("qwen3", extra=("attn_q_norm.weight", "attn_k_norm.weight")),
}


def gguf_problem(config: dict[str, Any]) -> str | None:
    """Returns why a model of this ``config.json`` cannot be written as GGUF; None when it can."""
    return next(_problems(config), None)


def head_size(config: Any) -> int:
    """Returns the rows of one attention head (K)."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def expected_tensors(config: Any, family: GgufFamily) -> list[str]:
    """Returns the GGUF names of a model's tensors, in the order of writing."""
    head = [] if config.tie_word_embeddings else ["output.weight"]
    block = [f"{name}.weight" for name in _BLOCK] + list(family.extra)
    blocks = [f"blk.{i}.{name}" for i in range(config.num_hidden_layers) for name in block]
    return ["token_embd.weight", *blocks, "output_norm.weight", *head]


def tensor_name(config: Any, family: GgufFamily) -> Callable[[str], str | None]:
    """Returns a function from transformers' name of a tensor to its GGUF name; None for an unknown one."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == family.name)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    return lambda name: names.get_name(name, try_suffixes=(".weight", ".bias"))


def rotated_heads(name: str, config: Any, family: GgufFamily) -> int | None:
    """Returns the number of heads whose rows are reordered in a GGUF tensor; None for other tensors."""
    heads = {"attn_q.weight": config.num_attention_heads, "attn_k.weight": config.num_key_value_heads}
    return heads.get(name.split(".", 2)[-1]) if family.permute else None


def _problems(config: dict[str, Any]) -> Iterator[str]:
    architecture = (config.get("architectures") or ["(none named)"])[0]
    if architecture not in FAMILIES:
        yield f"the architecture {architecture} is none of {', '.join(FAMILIES)}"
    if config.get("quantization_config"):
        yield "the weights are quantised; GGUF needs them as they were before"
    if _rope_type(config) not in _ROPES:
        yield f"rope scaling {_rope_type(config)!r} is none of {', '.join(_ROPES)}"
    if (_rope(config).get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        yield "only a part of each head is rotated"
    if config.get("hidden_act", "silu") != "silu":
        yield f"the activation is {config['hidden_act']}, not silu"
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(key):
            yield f"{key} is set"


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the rope settings; their key was renamed in transformers 5."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _rope_type(config: dict[str, Any]) -> str:
    return _rope(config).get("rope_type") or _rope(config).get("type") or "default"
