"""Writes a model and its tokenizer as one GGUF file, for llama.cpp and programs built on it."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from stoker.checkpoint.export.gguf_changes import parts_of
from stoker.checkpoint.export.gguf_families import FAMILIES
from stoker.checkpoint.export.gguf_keys import rope_of, write_shape
from stoker.checkpoint.export.gguf_layout import GgufFamily, StoredTensor, head_size, stored_tensors
from stoker.checkpoint.export.gguf_tokenizer import gguf_tokenizer
from stoker.errors import RunFailed

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType, GGUFWriter
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

Dtype = Literal["f32", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
ENDS = ("token_embd.weight", "output.weight")  # embeddings and head: q8_0 in files of fewer bits
EXACT = ("ffn_gate_inp.weight", "position_embd.weight")  # routers and positions, small and sensitive, stay float32


class _Planned(NamedTuple):
    """A weight, its place in the GGUF, and the shape and type of its parts there."""

    stored: StoredTensor
    weight: torch.Tensor
    shapes: list[tuple[int, ...]]
    kinds: list[GGMLQuantizationType]


def write_gguf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    target: Path,
    *,
    dtype: Dtype = "f16",
    name: str,
    stops: Collection[int],
    chat: bool = True,
) -> None:
    """Writes a model without a `gguf_problem`, and its tokenizer, as the GGUF file `target`, atomically.

    Matrices get `dtype`, vectors stay float32. In quantised files, matrices whose width is not a multiple of 32 are
    float16; below 8 bits, embeddings and head are q8_0.
    A sliding window becomes the context length, up to which it makes no difference.

    Args:
        name: name of the model.
        stops: tokens that end an answer.
        chat: whether the model was trained on conversations.

    Raises:
        UserError: GGUF cannot express the tokenizer, or the package is missing; nothing is written.
        RunFailed: a weight is not finite or too large for float16; nothing is left.
        OSError: the disk is full; nothing is left.
    """
    from gguf import GGUFWriter

    config, architecture = model.config, type(model).__name__
    family = FAMILIES[architecture]
    tokens = gguf_tokenizer(tokenizer, vocab_size=config.vocab_size, stops=stops, chat=chat)
    planned = _planned(model, family, dtype)
    partial = target.with_name(f".{target.name}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(partial, family.name)
    try:
        _write_config(writer, config, family, dtype, name=tokens.model_name(f"{name} ({architecture})"))
        tokens.write(writer)
        _write_tensors(writer, planned, config)
        writer.close()
        partial.replace(target)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


def _write_config(writer: GGUFWriter, config: Any, family: GgufFamily, dtype: Dtype, *, name: str) -> None:
    from gguf import GGML_QUANT_VERSION, LlamaFileType

    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(LlamaFileType.ALL_F32 if dtype == "f32" else LlamaFileType[f"MOSTLY_{dtype.upper()}"])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    write_shape(writer, config, family)


def _planned(model: PreTrainedModel, family: GgufFamily, dtype: Dtype) -> list[_Planned]:
    """Returns the weights of the GGUF, in file order."""
    import torch

    weights, planned = model.state_dict(), []
    for stored in stored_tensors(model, family):
        weight = weights[stored.key]
        changed = _changed(stored, torch.empty_like(weight, device="meta"), model.config)
        shapes = [tuple(part.shape) for part in changed]
        kinds = [_kind(name, shape, dtype) for name, shape in zip(stored.names, shapes, strict=True)]
        planned.append(_Planned(stored, weight, shapes, kinds))
    names = [name for plan in planned for name in plan.stored.names]
    assert len(set(names)) == len(names), f"two weights have one name in a {family.name} GGUF"
    return planned


def _changed(stored: StoredTensor, weight: torch.Tensor, config: Any) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of a weight in llama.cpp's form."""
    parts = parts_of(weight, len(stored.names))
    change = stored.change
    return tuple(change.to_gguf(part, config) for part in parts) if change is not None else parts


def _kind(name: str, shape: tuple[int, ...], dtype: Dtype) -> GGMLQuantizationType:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if len(shape) == 1 or dtype == "f32" or name.endswith(EXACT):
        return GGMLQuantizationType.F32
    block, _ = GGML_QUANT_SIZES[GGMLQuantizationType.Q8_0]
    if dtype == "f16" or shape[-1] % block != 0:
        return GGMLQuantizationType.F16
    return GGMLQuantizationType.Q8_0 if name in ENDS else GGMLQuantizationType[dtype.upper()]


def _write_tensors(writer: GGUFWriter, planned: list[_Planned], config: Any) -> None:
    """Writes header, keys and tensors, converted one at a time."""
    import numpy as np
    from gguf.quants import quant_shape_to_byte_shape

    rope_factors = _llama3_rope_factors(config)
    if rope_factors is not None:
        writer.add_tensor_info("rope_freqs.weight", rope_factors.shape, rope_factors.dtype, rope_factors.nbytes)
    for plan in planned:
        for name, shape, kind in zip(plan.stored.names, plan.shapes, plan.kinds, strict=True):
            bytes_ = quant_shape_to_byte_shape(shape, kind)
            writer.add_tensor_info(name, bytes_, np.dtype(np.uint8), math.prod(bytes_), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if rope_factors is not None:
        writer.write_tensor_data(rope_factors)
    for data in _encoded(planned, config):
        writer.write_tensor_data(data)
    writer.flush()
    for stream in writer.fout or ():
        os.fsync(stream.fileno())


def _encoded(planned: list[_Planned], config: Any) -> Iterator[np.ndarray]:
    import torch
    from gguf.quants import quantize

    largest = torch.finfo(torch.float16).max
    for stored, source, _, kinds in planned:
        weight = source.detach().to("cpu", torch.float32)
        if not torch.isfinite(weight).all():
            raise RunFailed(f"{stored.key} holds values that are not finite; nothing was written")
        for part, kind in zip(_changed(stored, weight, config), kinds, strict=True):
            if kind.name == "F16" and part.abs().max() > largest:
                raise RunFailed(f"{stored.key} holds values beyond float16's {largest:g}; export as f32")
            yield quantize(part.contiguous().numpy(), kind)


def _llama3_rope_factors(config: Any) -> np.ndarray | None:
    """Returns the divisors of the frequencies in Llama 3's rope scaling, shape (K / 2,); None for other kinds."""
    rope = rope_of(getattr(config, "rope_parameters", None) or {})
    if rope.get("rope_type") != "llama3":
        return None
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device=torch.device("cpu"))
    size = head_size(config)
    plain = rope["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
    return (plain / scaled).to(torch.float32).numpy()
