"""Tiny checkpoints in the format of ChatGLM2, ChatGLM3 and the first GLM-4, and what their own code computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

WIDTH, HEADS, GROUPS, HEAD, MLP, LAYERS, ROWS = 32, 4, 2, 8, 48, 3, 400
CONFIG: dict[str, Any] = {
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    "auto_map": {"AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration"},
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "attention_dropout": 0.0,
    "ffn_hidden_size": MLP,
    "hidden_dropout": 0.0,
    "hidden_size": WIDTH,
    "kv_channels": HEAD,
    "layernorm_epsilon": 1e-05,
    "multi_query_attention": True,
    "multi_query_group_num": GROUPS,
    "num_attention_heads": HEADS,
    "num_layers": LAYERS,
    "original_rope": True,
    "padded_vocab_size": ROWS,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
TEXT = "the stoker feeds the fire and the fire feeds the stoker, 司炉 给 火 加 煤, what is a sophisticated stoker?\n"
ROLES = "<|system|> <|user|> <|assistant|> <|observation|>"  # which the code of ChatGLM3's tokenizer names


def stored_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Random weights by the names of the format."""
    draw = torch.Generator().manual_seed(seed)
    qkv = (HEADS + 2 * GROUPS) * HEAD
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (ROWS, WIDTH)}
    for layer in range(LAYERS):
        block = f"encoder.layers.{layer}"
        shapes |= {
            f"{block}.input_layernorm.weight": (WIDTH,),
            f"{block}.self_attention.query_key_value.weight": (qkv, WIDTH),
            f"{block}.self_attention.query_key_value.bias": (qkv,),
            f"{block}.self_attention.dense.weight": (WIDTH, HEADS * HEAD),
            f"{block}.post_attention_layernorm.weight": (WIDTH,),
            f"{block}.mlp.dense_h_to_4h.weight": (2 * MLP, WIDTH),
            f"{block}.mlp.dense_4h_to_h.weight": (WIDTH, MLP),
        }
    shapes |= {"encoder.final_layernorm.weight": (WIDTH,), "output_layer.weight": (ROWS, WIDTH)}
    tensors = {f"transformer.{name}": torch.randn(shape, generator=draw) * 0.3 for name, shape in shapes.items()}
    return tensors | {"transformer.rotary_pos_emb.inv_freq": torch.ones(HEAD // 4)}


def write_chatglm(
    folder: Path, *, roles: bool = True, weights: str = "model.safetensors", seed: int = 0, **config: object
) -> Path:
    """Writes a checkpoint with a sentencepiece vocabulary.

    Args:
        roles: whether it has the tokens of roles, as ChatGLM3 has and ChatGLM2 has not.
        weights: name of its file; ``.bin`` for pickled ones.
        config: other values of its configuration.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    tensors = stored_tensors(seed)
    if weights.endswith(".bin"):
        torch.save(tensors, folder / weights)
    else:
        save_file(tensors, folder / weights)
    (folder / "text.txt").write_text(TEXT * 20, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tokenization_chatglm.py").write_text(f"special_tokens = '{ROLES if roles else ''}'.split()\n")
    own = {"tokenizer_class": "ChatGLMTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_chatglm.X", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    return folder


def logits(tensors: dict[str, Tensor], ids_BL: Tensor, *, base: float = 10_000.0) -> Tensor:
    """The logits of the format's own code, in float64: a rotation of neighbours as a product of complex numbers."""
    t = {name.removeprefix("transformer."): value.double() for name, value in tensors.items()}
    batch, length = ids_BL.shape
    x_BLD = t["embedding.word_embeddings.weight"][ids_BL]
    angles = torch.outer(torch.arange(length).double(), base ** -(torch.arange(0, HEAD // 2, 2).double() / (HEAD // 2)))
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * t[name]

    def rotated(x_BLHK: Tensor) -> Tensor:
        first, rest = x_BLHK.chunk(2, -1)
        pairs = torch.view_as_complex(first.unflatten(-1, (-1, 2)).contiguous())
        return torch.cat([torch.view_as_real(pairs * turn).flatten(-2), rest], -1)

    for layer in range(LAYERS):
        block = f"encoder.layers.{layer}"
        h = norm(x_BLD, f"{block}.input_layernorm.weight")
        fused = f"{block}.self_attention.query_key_value"
        parts = (h @ t[f"{fused}.weight"].T + t[f"{fused}.bias"]).split(
            [HEADS * HEAD, GROUPS * HEAD, GROUPS * HEAD], -1
        )
        q, k, v = (part.unflatten(-1, (-1, HEAD)) for part in parts)
        q, k = rotated(q), rotated(k)
        k, v = (each.repeat_interleave(HEADS // GROUPS, 2) for each in (k, v))
        scores = torch.einsum("blhk,bmhk->bhlm", q, k) / HEAD**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)
        out = torch.einsum("bhlm,bmhk->blhk", scores, v).reshape(batch, length, -1)
        x_BLD = x_BLD + out @ t[f"{block}.self_attention.dense.weight"].T
        h = norm(x_BLD, f"{block}.post_attention_layernorm.weight")
        gate, up = (h @ t[f"{block}.mlp.dense_h_to_4h.weight"].T).chunk(2, -1)
        x_BLD = x_BLD + (functional.silu(gate) * up) @ t[f"{block}.mlp.dense_4h_to_h.weight"].T
    return norm(x_BLD, "encoder.final_layernorm.weight") @ t["output_layer.weight"].T
