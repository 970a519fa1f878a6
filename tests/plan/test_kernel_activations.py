"""What blocks save on a GPU, where one kernel attends for a whole row: as they are, and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from counted import storages_saved
from torch import Tensor
from torch.profiler import profile
from transformers import AutoConfig

from families import tiny
from stoker.hardware.machines.cluster_file import load_cluster
from stoker.job.layout import Layout, Recompute
from stoker.models.attention import packed_row, varlen_attention
from stoker.models.language_model import lay_out_for
from stoker.models.prepare_architecture import training_form
from stoker.parallel.compile import compile_blocks
from stoker.plan.block_dtypes import block_dtypes
from stoker.plan.memory.saved_activations import EagerBlock, cast_weights
from stoker.plan.memory.stoker_memory import stage_activations
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.shapes.shape_of_config import shape_of_config

TOKENS = 256


@torch.library.custom_op("stoker_test::attend", mutates_args={})
def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])


@torch.library.custom_op("stoker_test::attend_backward", mutates_args={})
def attend_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor) -> list[Tensor]:
    return [torch.zeros_like(x) for x in (q, k, v)]


@attend_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor) -> list[Tensor]:
    return [torch.empty_like(x) for x in (q, k, v)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    return tuple(attend_backward(grad, *ctx.saved_tensors))


attend.register_autograd(_gradients, setup_context=_save)


@contextmanager
def one_kernel() -> Iterator[None]:
    """Attention as by torch's variable-length kernel: one call a row, which saves its inputs and results."""
    torch.compiler.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_row, "takes_whole_rows", lambda _: True)
        patch.setattr(varlen_attention, "supports", lambda *_: True)
        patch.setattr(varlen_attention, "kernel", lambda q, k, v, *_, **__: attend(q, k, v)[0])
        yield
    torch.compiler.reset()


def _saved(family: str, blocks: int, *, compiled: bool, selective: bool) -> tuple[int, int, Any]:
    """Bytes of the storages that autograd keeps after a pass under autocast, parameters aside; the products of the
    backward pass; the configuration."""
    model = tiny(family, dtype=torch.float32, num_hidden_layers=blocks).train()
    training_form(model)
    with torch.autocast("cpu", torch.bfloat16):
        language = lay_out_for(model)
    assert language.packs
    if compiled:  # the partition of forward and backward is the one that is compiled
        with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition")):
            compile_blocks(model, selective=selective)
    ids = np.arange(TOKENS + 1).astype(np.uint32) % 60
    [inputs] = language.lay_out([(ids, np.ones(len(ids), bool))], torch.device("cpu"))
    with one_kernel(), packed_row.row_of(inputs), torch.autocast("cpu", torch.bfloat16), storages_saved(model) as saved:
        kept = language.hidden(inputs)
    size = sum(storage.nbytes() for storage in saved.values())
    with profile() as backward:
        kept.sum().backward()
    products = sum(event.count for event in backward.key_averages() if event.key == "aten::mm")
    return size, products, model.config


@pytest.mark.parametrize(("compiled", "recompute"), [(False, "none"), (True, "none"), (True, "selective")])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_a_block_saves_what_is_counted(family: str, compiled: bool, recompute: Recompute) -> None:
    selective = recompute == "selective"
    (two, _, config), (four, products, _) = (_saved(family, n, compiled=compiled, selective=selective) for n in (2, 4))
    shape, types = shape_of_config(config.to_dict()), block_dtypes("bf16")
    layer = shape.layer(0)
    block = EagerBlock(shape, layer, seq_len=TOKENS, types=types, whole_rows=True, compiled=compiled)
    kept, _ = block.saved(recompute)
    if not selective:  # which casts them again
        kept += cast_weights(shape, layer, types=types) / TOKENS
    assert (four - two) / 2 / TOKENS == pytest.approx(kept, rel=0.02)
    assert products == 4 * 2 * 7  # gradients of inputs and weights: none is repeated


PLAIN: dict[str, Any] = {"hidden_size": 2048, "num_attention_heads": 16}
GATED: dict[str, Any] = {**PLAIN, "intermediate_size": 5632, "num_key_value_heads": 4}
WIDE: dict[str, Any] = {**GATED, "head_dim": 128}
CAPPED: dict[str, Any] = {**WIDE, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 1024}
EXPERTS: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
CONFIGS: dict[str, dict[str, Any]] = {
    **{"llama": GATED, "phi3": GATED, "gemma": WIDE, "gemma2": CAPPED, "gemma3_text": CAPPED, "bloom": PLAIN},
    **{"opt": {**PLAIN, "ffn_dim": 8192}, "gpt_neox": {**PLAIN, "intermediate_size": 8192}},
    **{"qwen3_moe": {**WIDE, **EXPERTS}, "mixtral": {**GATED, "intermediate_size": 2048, "num_local_experts": 8}},
    "gpt2": {"n_embd": 2048, "n_head": 16},
    "gpt_oss": {**CAPPED, "intermediate_size": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
}
# Bytes a token and block that autograd saves with torch 2.11 for CUDA 13, in eight rows of 4,096 tokens; without a GPU
# (benchmarks/without_gpu), 2026-11-27.
MEASURED = (
    *[("eager", "llama", 103176), ("eager", "phi3", 103176), ("eager", "gemma", 99081), ("eager", "gemma2", 131857)],
    *[("eager", "gemma3_text", 152417), ("eager", "bloom", 76880), ("eager", "opt", 68688)],
    *[("eager", "gpt_neox", 76880), ("eager", "qwen3_moe", 129510), ("eager", "mixtral", 107327)],
    ("eager", "gpt_oss", 136067),
    *[("lora", "llama", 80204), ("lora", "gemma3_text", 106917), ("lora", "opt", 65845), ("lora", "gpt_neox", 73969)],
    ("lora", "qwen3_moe", 76273),
    *[("compiled", "llama", 63240), ("compiled", "gpt2", 68688), ("compiled", "opt", 52304)],
    *[("compiled", "gpt_neox", 64584), ("compiled", "gemma2", 67344), ("compiled", "gemma3_text", 72544)],
    *[("compiled", "qwen3_moe", 88550), ("compiled", "mixtral", 74547)],
)


@pytest.mark.parametrize(("how", "family", "measured"), MEASURED, ids=str)
def test_a_block_saves_what_torch_for_cuda_does(how: str, family: str, measured: int) -> None:
    layers = "n_layer" if family in ("gpt2", "bloom") else "num_hidden_layers"
    config = AutoConfig.for_model(family, **CONFIGS[family], **{layers: 2})
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    shape = shape_of_config(config.to_dict())
    types = block_dtypes("bf16", rank=16 if how == "lora" else 0)
    kept = 0.0
    for layer in (shape.layer(0), shape.layer(1)):
        block = EagerBlock(shape, layer, seq_len=4096, types=types, rows=8, whole_rows=True, compiled=how == "compiled")
        kept += (block.saved()[0] + cast_weights(shape, layer, types=types) / (8 * 4096)) / 2
    assert kept == pytest.approx(measured, rel=0.035)


@pytest.mark.parametrize("family", ["bloom", "gemma2"])
def test_a_gpu_holds_no_scores_and_no_masks_of_rows(family: str) -> None:
    layers = "n_layer" if family == "bloom" else "num_hidden_layers"
    shape = shape_of_config(AutoConfig.for_model(family, **CONFIGS[family], **{layers: 2}).to_dict())

    def kept(length: int, rows: int) -> float:
        work = TrainingWork(shape, length, rows, precision="bf16")
        return stage_activations(Setting(work, load_cluster("1xH100"), Layout(), rows), 0).here

    assert kept(8192, 1) == kept(1024, 8)
