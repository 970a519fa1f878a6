"""The sizes that the configurations of all families give by the same keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stoker.plan.shape import Shape
from stoker.plan.shapes.config_keys import Settings

DROPOUTS = ("resid_pdrop", "hidden_dropout", "dropout", "dropout_rate", "resid_dropout", "residual_dropout")
GPT: dict[str, Any] = {"norm_bias": True, "qkv_bias": True, "output_bias": True, "mlp_bias": True}
LLAMA: dict[str, Any] = {"gated": True, "norm": "rms"}

# Every how many layers one has full attention, where others have a window and no layer is named.
FULL_EVERY = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "gemma4_text": 6, "cohere2": 4, "exaone_moe": 4, "afmoe": 4}


def decoder(c: Settings, **facts: Any) -> Shape:
    """Returns the sizes that a configuration states, with facts of the family, which override them."""
    width, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    base: dict[str, Any] = {
        "name": c.family,
        "layers": facts["layers"] if "layers" in facts else c.integer("num_hidden_layers"),
        "width": width,
        "heads": heads,
        "kv_heads": c.integer("num_key_value_heads", heads),
        "head_size": c.integer("head_dim", width // heads),
        "mlp_width": c.integer("intermediate_size", 4 * width),
        "vocabulary": c.integer("vocab_size"),
        "tied": c.flag("tie_word_embeddings"),
        "dropout": any(c.flag(key) for key in DROPOUTS),
    }
    shape = Shape(**{**base, **facts})
    return _with_windows(shape, _windows(c, shape.layers))


def _windows(c: Settings, layers: int) -> list[int]:
    """Returns each layer's window, 0 for full attention; empty if all layers have full attention."""
    if c.family == "gpt_neo":
        kinds = c.words("attention_types") or ["global"]
        return [c.integer("window_size") if kinds[i % len(kinds)] == "local" else 0 for i in range(layers)]
    if c.value("use_sliding_window") is False:
        return []
    if c.family == "llama4_text":
        return _chunks(c, layers)
    window = c.integer("sliding_window", 0, least=0)
    kinds = c.words("layer_types")
    if kinds and window:
        return [window if "sliding" in kinds[i % len(kinds)] else 0 for i in range(layers)]
    if c.family in FULL_EVERY:
        every = c.integer("sliding_window_pattern", FULL_EVERY[c.family])
        return [window if (i + 1) % every else 0 for i in range(layers)]
    first = c.integer("max_window_layers", 0, least=0)
    return [window if i >= first else 0 for i in range(layers)] if window else []


def _chunks(c: Settings, layers: int) -> list[int]:
    """Returns each layer's chunk, the most tokens that its tokens attend to; 0 for full attention."""
    chunk, every = c.integer("attention_chunk_size", 0, least=0), c.integer("no_rope_layer_interval")
    rotary = c.integers("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
    kinds = c.words("layer_types") or ["chunked_attention" if rotary[i] else "full" for i in range(layers)]
    return [chunk if kinds[i] == "chunked_attention" else 0 for i in range(layers)]


def _with_windows(shape: Shape, windows: list[int]) -> Shape:
    if not any(windows):
        return shape
    layers = [shape.layer(index) for index in range(shape.layers)]
    return replace(shape, pattern=tuple(replace(layer, window=w) for layer, w in zip(layers, windows, strict=True)))
