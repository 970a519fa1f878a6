"""What blocks keep for the backward pass, counted by the planner and by autograd itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from counted import lora_parameters, storages_saved
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from stoker.hardware.machines.cluster_file import load_cluster
from stoker.job.blocks.tune_block import TuneBlock
from stoker.job.layout import Layout
from stoker.launch.process_pool import Pool
from stoker.models.attention import packed_row
from stoker.models.attention.collate import Segment, pack
from stoker.models.families import FAMILIES, family_of
from stoker.models.language_model import lay_out_for
from stoker.models.prepare_architecture import training_form
from stoker.models.tuning.adapters import add_adapter
from stoker.models.tuning.lora import fuse_lora
from stoker.parallel import context_parallel
from stoker.parallel.context_parallel import GatherKeys
from stoker.parallel.mesh import Mesh
from stoker.parallel.recompute import recompute_blocks
from stoker.parallel.tensor_parallel.tensor import split_tensors, take_positions
from stoker.plan.block_dtypes import block_dtypes
from stoker.plan.memory.saved_activations import EagerBlock, cast_weights, row_bytes
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.shape import Shape
from stoker.plan.shapes.shape_of_config import shape_of_config
from stoker.plan.time.block_collectives import block_exchanges
from stoker.plan.time.efficiency import efficiency_of

TOKENS = 64
GPT: dict[str, Any] = {"n_embd": 64, "n_head": 8, "n_positions": 128, "n_inner": 160}
PLAIN: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "max_position_embeddings": 128}
GATED: dict[str, Any] = {**PLAIN, "intermediate_size": 160, "num_key_value_heads": 2}
WIDE: dict[str, Any] = {**GATED, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LINEAR = {
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 24},
    "layer_types": ["linear_attention", "full_attention"],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "gptj": {**GPT, "rotary_dim": 4},
    "gpt_neo": {
        **{"hidden_size": 64, "num_heads": 8, "intermediate_size": 160, "max_position_embeddings": 128},
        **{"attention_types": [[["global", "local"], 1]], "window_size": 128},
    },
    "bloom": {"hidden_size": 64, "n_head": 8},
    "opt": {**PLAIN, "ffn_dim": 160, "word_embed_proj_dim": 64},
    "gpt_neox": {**PLAIN, "intermediate_size": 160},
    "falcon": {**PLAIN, "ffn_hidden_size": 160},
    **dict.fromkeys(("llama", "mistral", "qwen2", "granite", "phi", "phi3", "cohere"), GATED),
    **dict.fromkeys(("qwen3", "gemma", "glm", "glm4"), WIDE),
    "gemma2": {**WIDE, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {**WIDE, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {**GATED, "num_local_experts": 4},
    "qwen2_moe": {**GATED, **EXPERTS, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {**WIDE, **EXPERTS},
    "qwen3_next": {**WIDE, **EXPERTS, **LINEAR, "shared_expert_intermediate_size": 40},
    "qwen3_5_text": {**WIDE, **LINEAR},
    "qwen3_5_moe_text": {**WIDE, **EXPERTS, **LINEAR, "shared_expert_intermediate_size": 40},
}
COUNTS = {"gpt2": "n_layer", "gptj": "n_layer", "bloom": "n_layer", "gpt_neo": "num_layers"}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _model(family: str, blocks: int, *, held: torch.dtype = torch.float32, rank: int = 0, **changes: Any) -> Any:
    keys = {**CONFIGS[family], **changes, COUNTS.get(family, "num_hidden_layers"): blocks}
    for name, key in (("layer_types", 1), ("attention_types", 0)):
        if name in keys:
            keys[name] = keys[name] * (blocks // 2) if key else [[["global", "local"], blocks // 2]]
    config = AutoConfig.for_model(family, **keys, vocab_size=256, bos_token_id=0, eos_token_id=1, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(config).to(held)
    training_form(model)
    if rank:
        adapted = add_adapter(model, TuneBlock(method="lora", rank=rank, alpha=2.0))
        fuse_lora(adapted)
    return model.train()


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt_neox", "phi", "cohere", "mixtral"])
def test_norms_save_an_input_that_has_a_gradient(family: str) -> None:
    """The first block's has none if adapters are trained and the embedding is not."""
    model = _model(family, 2, rank=4)
    sizes = []
    for trained in (False, True):
        inputs = torch.randn(1, TOKENS, model.config.hidden_size, requires_grad=trained)
        with storages_saved(model) as saved:
            model(inputs_embeds=inputs)
        sizes.append(sum(storage.nbytes() for storage in saved.values()))
    shape = shape_of_config(model.config.to_dict())
    types = block_dtypes("fp32", rank=4)
    block = EagerBlock(shape, shape.layer(0), seq_len=TOKENS, types=types, processor=True)
    statistics = 16 if family == "gpt_neox" else 8
    assert (sizes[1] - sizes[0]) / TOKENS == pytest.approx(block.norms_of_input(), abs=statistics)


class FirstOfTwo(GatherKeys):
    """The process with the first and the last quarter of a row; the others are copies.

    Attributes:
        row: its segments, of equal lengths.
        moved: bytes of the keys and values of the whole row, as processes gather them, for each block.
    """

    is_first = True

    def __init__(self, rows: int = 1) -> None:
        group: Any = None
        length = 2 * TOKENS // rows
        object.__setattr__(self, "row", tuple(Segment(at * length, length) for at in range(rows)))
        super().__init__(group, ((0, TOKENS // 2), (3 * TOKENS // 2, 2 * TOKENS)))
        object.__setattr__(self, "moved", [])  # a frozen dataclass

    def total(self, x: Tensor) -> Tensor:
        return x

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Replaces the collective by a copy within the block."""

        def doubled(x: Tensor, dim: int, _group: Any) -> Tensor:
            both = torch.cat((x, x), dim)
            self.moved.append(both.nbytes)
            return both

        with patch.object(context_parallel, "gather_parts", doubled), patch("torch.distributed.get_world_size", two):
            yield


def two(_group: Any = None) -> int:
    return 2


def _saved(model: Any, low: torch.dtype | None, recompute: str, across: FirstOfTwo | None = None) -> int:
    """Bytes of the different storages that autograd keeps after a forward pass, parameters aside."""
    language = lay_out_for(model)
    if recompute != "none":
        recompute_blocks(model, recompute, family_of(model.config))  # type: ignore[arg-type]
    ids = (2 + np.arange(TOKENS + 1) % 250).astype(np.uint32)
    [inputs] = language.lay_out([(ids, np.ones(len(ids), bool))], torch.device("cpu"))
    arithmetic = torch.autocast("cpu", low) if low else nullcontext()
    row = across.row if across is not None else inputs.segments
    alone = across.gathering() if across is not None else nullcontext()
    with packed_row.segments(row, across), arithmetic, storages_saved(model) as saved, alone:
        kept = language.hidden(inputs)
    del kept
    return sum(storage.nbytes() for storage in saved.values())


def _measured(
    family: str,
    low: torch.dtype | None = None,
    recompute: str = "none",
    across: FirstOfTwo | None = None,
    **options: Any,
) -> Any:
    """(bytes a token and block, mean of the kinds; the shape), as what two more blocks keep."""
    two, four = (_model(family, blocks, **options) for blocks in (2, 4))
    more = _saved(four, low, recompute, across) - _saved(two, low, recompute, across)
    return more / 2 / TOKENS, shape_of_config(two.config.to_dict())


def saved_under_tensor(family: str, precision: str, sequence: bool) -> float:
    """Bytes a token that two more blocks keep on this process of two."""
    torch.set_num_threads(1)
    low = torch.bfloat16 if precision == "bf16" else None
    mesh = Mesh(Layout(tensor=2, sequence=sequence), torch.device("cpu"))
    row = pack([(np.arange(2, TOKENS + 3), np.ones(TOKENS + 1, bool))], torch.device("cpu"), share=False)

    def saved(blocks: int) -> int:
        model = _model(family, blocks)
        lay_out_for(model)
        split_tensors(model, FAMILIES[family], mesh)
        embedded = take_positions(model.get_input_embeddings()(row.ids), mesh)
        given = {"inputs_embeds": embedded, "position_ids": row.positions, "use_cache": False}
        autocast = torch.autocast("cpu", low) if low else nullcontext()
        with packed_row.segments(row.segments), autocast, storages_saved(model) as kept:
            out = model.base_model(**given)
        del out
        return sum(storage.nbytes() for storage in kept.values())

    return (saved(4) - saved(2)) / row.ids.numel()


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _predicted(shape: Shape, precision: str, *, casts: bool = True, **options: Any) -> float:
    kinds = [shape.layer(0), shape.layer(1)]
    types = block_dtypes(precision, **options)
    tokens = [EagerBlock(shape, k, seq_len=TOKENS, types=types, processor=True).saved()[0] for k in kinds]
    weights = [cast_weights(shape, k, types=types) / TOKENS for k in kinds] if casts else [0.0]
    return _mean(tokens) + _mean(weights)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_block_keeps_what_is_counted(family: str, precision: str) -> None:
    measured, shape = _measured(family, torch.bfloat16 if precision == "bf16" else None)
    assert _predicted(shape, precision) == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [300, 320])
def test_linear_attention_keeps_what_is_counted(tokens: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several chunks, of which the last is padded or is not."""
    monkeypatch.setattr(f"{__name__}.TOKENS", tokens)
    monkeypatch.setitem(CONFIGS, "qwen3_5_text", {**CONFIGS["qwen3_5_text"], "max_position_embeddings": 512})
    measured, shape = _measured("qwen3_5_text", torch.bfloat16 if precision == "bf16" else None)
    assert _predicted(shape, precision) == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("form", [{"num_kv_heads": 2, "new_decoder_architecture": True}, {"multi_query": False}])
def test_falcons_with_more_key_value_heads_keep_what_is_counted(form: dict[str, Any], precision: str) -> None:
    measured, shape = _measured("falcon", torch.bfloat16 if precision == "bf16" else None, **form)
    assert _predicted(shape, precision) == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gpt_neox", "mixtral"])
def test_a_block_of_16_bit_weights_keeps_what_is_counted(family: str) -> None:
    measured, shape = _measured(family, torch.bfloat16, held=torch.bfloat16)
    assert _predicted(shape, "bf16", held="16-bit", casts=False) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "qwen3_next", "qwen3_5_text"])
def test_a_block_with_adapters_keeps_what_is_counted(family: str, precision: str) -> None:
    held, low = (torch.bfloat16, torch.bfloat16) if precision == "bf16" else (torch.float32, None)
    measured, shape = _measured(family, low, held=held, rank=4)
    copies = 2 * lora_parameters(shape, 4) / shape.layers / TOKENS if low else 0.0  # of the adapters themselves
    predicted = _predicted(shape, precision, casts=False, rank=4) + copies
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2"])
def test_recompute_leaves_what_is_counted(family: str, recompute: Any, precision: str) -> None:
    measured, shape = _measured(family, torch.bfloat16 if precision == "bf16" else None, recompute)
    types = block_dtypes(precision)
    kept, again = EagerBlock(shape, shape.layer(0), seq_len=TOKENS, types=types, processor=True).saved(recompute)
    if types.casts and recompute == "selective":  # copies of the attention's weights
        products = shape.matmuls(shape.layer(0))
        inside = [m.parameters for m in products if m.name.split()[-1] not in ("up", "down")]
        kept += types.product * sum(inside) / TOKENS
    assert kept == pytest.approx(measured, rel=0.03)
    assert again > 0


@pytest.mark.parametrize(
    ("family", "precision"),
    [(family, "fp32") for family in ("llama", "qwen3", "gpt_neox", "gpt2", "bloom", "gemma2")]
    + [(family, "bf16") for family in ("llama", "gpt2", "bloom", "opt")],
)
def test_gathered_keys_and_values_of_a_whole_row_are_counted(family: str, precision: str) -> None:
    low = torch.bfloat16 if precision == "bf16" else None
    measured, shape = _measured(family, low, across=FirstOfTwo())
    types = block_dtypes(precision)
    kept, _ = EagerBlock(shape, shape.layer(0), seq_len=2 * TOKENS, types=types, gathered=2, processor=True).saved()
    kept += cast_weights(shape, shape.layer(0), types=types) / TOKENS
    assert kept == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.often("mixtral", "qwen3_moe")
def test_tensor_processes_keep_what_is_counted(pool: Pool, family: str, precision: str, sequence: bool) -> None:
    """Their mean, as a router may choose more experts of one."""
    measured = pool.run(saved_under_tensor, family, precision, sequence, world=2)
    shape, types = shape_of_config(_model(family, 2).config.to_dict()), block_dtypes(precision)
    kinds = [shape.layer(0), shape.layer(1)]
    split: Any = {"types": types, "tensor": 2}
    kept = [EagerBlock(shape, k, seq_len=TOKENS, sequence=sequence, processor=True, **split).saved()[0] for k in kinds]
    weights = [cast_weights(shape, k, **split) / TOKENS for k in kinds]
    assert sum(kept) + sum(weights) == pytest.approx(_mean(measured), rel=0.02)


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "gemma2"])
def test_a_micro_batch_of_several_rows_is_cut_as_one(family: str, rows: int) -> None:
    """Into four parts: queries see three quarters of each of two rows, and all of each of four."""
    measured, shape = _measured(family, across=FirstOfTwo(rows))
    length, types = 2 * TOKENS // rows, block_dtypes("fp32")
    kept, _ = EagerBlock(
        shape, shape.layer(0), seq_len=length, types=types, gathered=2, rows=rows, processor=True
    ).saved()
    assert kept == pytest.approx(measured, rel=0.03)


WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 16},
    "gpt_neo": {"window_size": 16},
    "gemma3_text": {"sliding_window": 16},
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("family", WINDOWED)
def test_masks_of_windows_are_counted_once_where_keys_are_gathered(family: str, rows: int) -> None:
    measured, shape = _measured(family, across=FirstOfTwo(rows), **WINDOWED[family])
    length, types = 2 * TOKENS // rows, block_dtypes("fp32")
    kept = [
        EagerBlock(shape, layer, seq_len=length, types=types, gathered=2, rows=rows, processor=True).saved()[0]
        for layer in (shape.layer(0), shape.layer(1))
    ]
    assert _mean(kept) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "opt"])
def test_keys_and_values_are_gathered_in_the_type_that_is_counted(family: str, precision: str) -> None:
    across, model = FirstOfTwo(), _model(family, 2)
    _saved(model, torch.bfloat16 if precision == "bf16" else None, "none", across)
    shape = shape_of_config(model.config.to_dict())
    work = TrainingWork(shape, 2 * TOKENS, 1, precision=precision)
    cluster = replace(load_cluster("2xA100-80GB"), link_latency_s=0.0)
    efficiency = efficiency_of(cluster.device)
    exchange = block_exchanges(Setting(work, cluster, Layout(context=2), 1), shape.layer(0), efficiency)["context"]
    rate = cluster.device.link_gbs * 1e9 * efficiency.link
    assert [exchange.forward, exchange.backward] == pytest.approx([moved / 2 / rate for moved in across.moved])


def test_a_window_shorter_than_the_row_costs_a_mask() -> None:
    measured, shape = _measured("mistral", sliding_window=16)
    assert _predicted(shape, "fp32") == pytest.approx(measured, rel=0.01)
    assert measured > _measured("mistral")[0] + 4 * TOKENS - 1


def test_alibi_costs_one_mask_for_all_blocks() -> None:
    one, two = (_saved(_model("bloom", blocks), None, "none") for blocks in (2, 4))
    shape = shape_of_config(_model("bloom", 2).config.to_dict())
    outside = (2 * one - two) / TOKENS
    assert row_bytes(shape, seq_len=TOKENS, types=block_dtypes("fp32")) == pytest.approx(outside, rel=0.5)
    assert row_bytes(shape, seq_len=TOKENS, types=block_dtypes("fp32")) == 4 * 8 * TOKENS


def test_tensor_parallelism_divides_what_is_inside_and_sequence_what_is_between() -> None:
    shape = shape_of_config({"model_type": "llama", **GATED, "num_hidden_layers": 2, "vocab_size": 256})
    types = block_dtypes("bf16", held="16-bit")
    whole, split, both = (
        EagerBlock(shape, shape.layer(0), seq_len=TOKENS, types=types, **options).saved()[0]
        for options in ({}, {"tensor": 2}, {"tensor": 2, "sequence": True})
    )
    width, mlp, queries, keys = 64, 160, 64, 16
    inside = 2 * (4 * mlp + 3 * queries + 2 * keys) + 4 * 8
    between = 2 * (4 + 2) * width + 2 * 4
    gathered = 2 * 2 * width
    assert (whole, split, both) == (
        inside + between + gathered,
        inside / 2 + between + gathered,
        (inside + between) / 2 + gathered,
    )
    inputs = [
        EagerBlock(shape, shape.layer(0), seq_len=TOKENS, types=types, tensor=2, sequence=sequence).saved("full")[0]
        for sequence in (False, True)
    ]
    assert inputs == [2 * width, 2 * width / 2]
