"""Writes a model and its tokenizer as one GGUF file, for llama.cpp and programs built on it."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from stoker.checkpoint.export.gguf_layout import (
    FAMILIES,
    GgufFamily,
    expected_tensors,
    head_size,
    rotated_heads,
    tensor_name,
)
from stoker.checkpoint.export.gguf_tokenizer import gguf_tokenizer
from stoker.errors import RunFailed

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType, GGUFWriter
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

Dtype = Literal["f32", "f16", "q8_0"]


class _Source(NamedTuple):
    """A tensor's name in the model, its weight, and its type in the GGUF."""

    key: str
    weight: torch.Tensor
    kind: GGMLQuantizationType


def write_gguf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    target: Path,
    *,
    dtype: Dtype = "f16",
    name: str,
    stops: Collection[int],
) -> None:
    """Writes a model without a `gguf_problem`, and its tokenizer, as the GGUF file `target`, atomically.

    Matrices get `dtype`, vectors stay float32; with q8_0, matrices whose width is not a multiple of 32 are float16.
    A sliding window becomes the context length, up to which it makes no difference.

    Args:
        name: name of the model.
        stops: tokens that end an answer.

    Raises:
        UserError: GGUF cannot express the tokenizer, or the package is missing; nothing is written.
        RunFailed: a weight is not finite or too large for float16; nothing is left.
        OSError: the disk is full; nothing is left.
    """
    from gguf import GGUFWriter

    config, architecture = model.config, type(model).__name__
    family = FAMILIES[architecture]
    tokens = gguf_tokenizer(tokenizer, vocab_size=config.vocab_size, stops=stops)
    sources = _sources(model, family, dtype)
    partial = target.with_name(f".{target.name}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(partial, family.name)
    try:
        _write_config(writer, config, dtype, name=f"{name} ({architecture})")
        tokens.write(writer)
        _write_tensors(writer, sources, config, family)
        writer.close()
        partial.replace(target)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


def _write_config(writer: GGUFWriter, config: Any, dtype: Dtype, *, name: str) -> None:
    from gguf import GGML_QUANT_VERSION, LlamaFileType, RopeScalingType

    kinds = {"f32": LlamaFileType.ALL_F32, "f16": LlamaFileType.MOSTLY_F16, "q8_0": LlamaFileType.MOSTLY_Q8_0}
    window = getattr(config, "sliding_window", None) or config.max_position_embeddings
    rope = config.rope_parameters
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(kinds[dtype])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(min(config.max_position_embeddings, window))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size(config))
    writer.add_value_length(head_size(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_size(config))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _sources(model: PreTrainedModel, family: GgufFamily, dtype: Dtype) -> dict[str, _Source]:
    """Returns the tensors of the GGUF by name, in file order."""
    config, found = model.config, {}
    name_of = tensor_name(config, family)
    for key, weight in model.state_dict().items():
        if not (config.tie_word_embeddings and key == "lm_head.weight"):
            found[name_of(key) or key] = _Source(key, weight, _kind(tuple(weight.shape), dtype))
    wanted = expected_tensors(config, family)
    assert found.keys() == set(wanted), f"a {family.name} GGUF has other tensors: {found.keys() ^ set(wanted)}"
    assert found["token_embd.weight"].weight.shape == (config.vocab_size, config.hidden_size)
    return {name: found[name] for name in wanted}


def _kind(shape: tuple[int, ...], dtype: Dtype) -> GGMLQuantizationType:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if len(shape) == 1 or dtype == "f32":
        return GGMLQuantizationType.F32
    block, _ = GGML_QUANT_SIZES[GGMLQuantizationType.Q8_0]
    if dtype == "q8_0" and shape[-1] % block == 0:
        return GGMLQuantizationType.Q8_0
    return GGMLQuantizationType.F16


def _write_tensors(writer: GGUFWriter, sources: dict[str, _Source], config: Any, family: GgufFamily) -> None:
    """Writes header, keys and tensors, converted one at a time."""
    import numpy as np
    from gguf.quants import quant_shape_to_byte_shape

    rope_factors = _llama3_rope_factors(config)
    if rope_factors is not None:
        writer.add_tensor_info("rope_freqs.weight", rope_factors.shape, rope_factors.dtype, rope_factors.nbytes)
    for name, source in sources.items():
        stored = quant_shape_to_byte_shape(tuple(source.weight.shape), source.kind)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), math.prod(stored), raw_dtype=source.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if rope_factors is not None:
        writer.write_tensor_data(rope_factors)
    for data in _encoded(sources, config, family):
        writer.write_tensor_data(data)
    writer.flush()
    for stream in writer.fout or ():
        os.fsync(stream.fileno())


def _encoded(sources: dict[str, _Source], config: Any, family: GgufFamily) -> Iterator[np.ndarray]:
    import torch
    from gguf.quants import quantize

    largest = torch.finfo(torch.float16).max
    for name, source in sources.items():
        weight = source.weight.detach().to("cpu", torch.float32)
        if not torch.isfinite(weight).all():
            raise RunFailed(f"{source.key} holds values that are not finite; nothing was written")
        if source.kind.name == "F16" and weight.abs().max() > largest:
            raise RunFailed(f"{source.key} holds values beyond float16's {largest:g}; export as f32")
        if n_heads := rotated_heads(name, config, family):
            weight = _neighbours(weight, n_heads)
        yield quantize(weight.contiguous().numpy(), source.kind)


def _neighbours(weight_OD: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Reorders the rows of each head from (first halves, second halves) to (pair, pair, ...).

    transformers rotates row i with row i + K/2 of a head of K rows; llama.cpp, for the Llama family, row 2i
    with row 2i + 1.
    """
    rows, width = weight_OD.shape
    return weight_OD.view(n_heads, 2, rows // n_heads // 2, width).transpose(1, 2).reshape(rows, width)


def _llama3_rope_factors(config: Any) -> np.ndarray | None:
    """Returns the divisors of the frequencies in Llama 3's rope scaling, shape (K / 2,); None for other kinds."""
    if config.rope_parameters["rope_type"] != "llama3":
        return None
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device=torch.device("cpu"))
    size = head_size(config)
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
    return (plain / scaled).to(torch.float32).numpy()
