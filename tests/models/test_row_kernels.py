"""Attention of a whole packed row in one call gives what attention document by document gives."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_packed_attention import CPU, PADDED, attending, farthest_gradient, own_loss
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from families import SHAPES, tiny
from launches import Launches
from stoker.models.attention import flex_row_attention, packed_row, varlen_attention, varlen_index
from stoker.models.attention.attention_scores import AttentionScores
from stoker.models.attention.collate import Row, Segment
from stoker.models.attention.varlen_index import QuerySpan
from stoker.models.language_model import lay_out_for
from stoker.models.tuning.lora import fuse_lora
from stoker.parallel.compile import compile_blocks

# ALiBi, bounded scores, sinks; values of another size than keys.
OTHER_SCORES = {
    "bloom",
    "gemma2",
    "vaultgemma",
    "gpt_oss",
    "falcon_alibi",
    "mpt",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "mimo_v2_flash",
}


def by_document(
    query_QHK: Tensor,
    key_SGK: Tensor,
    value_SGK: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    longest_queries: int,
    longest_keys: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """What `torch.nn.attention.varlen.varlen_attn` documents, one run at a time."""
    assert window_size[1] == 0
    grouped = query_QHK.shape[1] != key_SGK.shape[1]
    assert enable_gqa or not grouped or not varlen_attention.ASKS_FOR_GROUPS
    runs = []
    queries, keys = (b.diff().tolist() for b in (query_bounds, key_bounds))
    assert (max(queries), max(keys)) == (longest_queries, longest_keys)
    for q, k, v in zip(query_QHK.split(queries), key_SGK.split(keys), value_SGK.split(keys), strict=True):
        place_Q = torch.arange(len(q))[:, None] + len(k) - len(q)
        distance = place_Q - torch.arange(len(k))
        seen = (distance >= 0) & ((distance <= window_size[0]) if window_size[0] >= 0 else True)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # noqa: PLW2901
        run = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=grouped)
        runs.append(run[0].transpose(0, 1))
    return torch.cat(runs)


@contextmanager
def whole_rows(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention takes whole rows on this device too."""
    with patch.context() as patched:
        patched.setattr(packed_row, "takes_whole_rows", lambda device: True)
        yield


@pytest.mark.parametrize("family", sorted(set(SHAPES) - PADDED))
@pytest.mark.usefixtures("no_float32")
def test_one_call_a_layer_gives_the_sum_of_the_documents(
    family: str, documents: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family)
    reference = copy.deepcopy(model).eval()
    own_loss(reference, documents).backward()
    language = lay_out_for(attending(model.eval()))
    rows: list[int] = []

    def kernel(*arguments: Any, **options: Any) -> Tensor:
        rows.append(len(arguments[3]) - 1)
        return by_document(*arguments, **options)

    monkeypatch.setattr(varlen_attention, "kernel", kernel)
    monkeypatch.setattr(varlen_attention, "supports", lambda index, query, value: query.shape[-1] == value.shape[-1])
    with whole_rows(monkeypatch):
        for inputs in language.lay_out(documents, CPU):
            with packed_row.row_of(inputs):
                language.loss(inputs)[0].backward()

    assert farthest_gradient(model, reference) < 1e-12
    assert bool(rows) != (family in OTHER_SCORES)
    assert len(set(rows)) <= (2 if family == "llama4_text" else 1)  # documents, and their chunks


@pytest.mark.parametrize("heads", [2, 4])
def test_the_arguments_are_those_of_torchs_function(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[inspect.BoundArguments] = []

    def kernel(*arguments: Any, **options: Any) -> Tensor:
        given.append(inspect.signature(varlen_attn).bind(*arguments, **options))
        return by_document(*arguments, **options)

    monkeypatch.setattr(varlen_attention, "kernel", kernel)
    index = varlen_index.varlen_index((Segment(0, 5), Segment(5, 3)), [QuerySpan(0, 0, 5), QuerySpan(1, 0, 3)], CPU)
    query, key, value = torch.randn(1, 4, 8, 8), torch.randn(1, heads, 8, 8), torch.randn(1, heads, 8, 8)

    out = varlen_attention.varlen_attention(index, query, key, value, AttentionScores())
    monkeypatch.setattr(varlen_attention, "ASKS_FOR_GROUPS", False)
    assert torch.equal(varlen_attention.varlen_attention(index, query, key, value, AttentionScores()), out)

    present, without = (call.arguments for call in given)
    asks = "enable_gqa" in inspect.signature(varlen_attn).parameters
    assert present.get("enable_gqa", False) == (asks and heads == 2) and "enable_gqa" not in without


def test_a_row_is_passed_to_the_kernel_and_back_without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_attention, "kernel", lambda q, k, v, *index, **how: q + k + v)
    projected = [torch.randn(1, 9, 2 * 16, requires_grad=True) for _ in range(3)]  # as linear layers return them
    index = varlen_index.varlen_index((Segment(0, 9),), [QuerySpan(0, 0, 9)], CPU)
    with Launches() as launches:
        states = (x.unflatten(-1, (2, 16)).transpose(1, 2) for x in projected)
        out = varlen_attention.varlen_attention(index, *states, AttentionScores()).flatten(2)
        gradients = torch.autograd.grad(out, projected, torch.ones_like(out))
    assert all(torch.equal(gradient, torch.ones_like(gradient)) for gradient in gradients)
    assert launches.count == 3  # two sums and the ones


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "bloom", "mistral"])
def test_flex_attention_gives_the_hidden_states_of_each_document(
    family: str, documents: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    language = lay_out_for(attending(tiny(family, dtype=torch.float32).eval()))
    monkeypatch.setattr(flex_row_attention, "supports", lambda *_: True)
    (inputs,) = language.lay_out(documents, CPU)

    def hidden() -> Tensor:
        with torch.no_grad(), packed_row.row_of(inputs):
            return language.hidden(inputs)

    expected = hidden()
    called = 0
    flex = flex_row_attention.flex_row_attention

    def counted(*arguments: Any, **options: Any) -> Tensor:
        nonlocal called
        called += 1
        return flex(*arguments, **options)

    monkeypatch.setattr(flex_row_attention, "flex_row_attention", counted)
    with whole_rows(monkeypatch):
        given = hidden()

    assert called == language.model.config.num_hidden_layers
    assert inputs.segments is not None
    assert any(s.prefix_length for s in inputs.segments)
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)


def test_a_short_row_of_grouped_heads_takes_the_kernel_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would take its kernel for decoding, which does not compile for 65 to 127 queries of two heads a group."""
    given: dict[str, Any] = {}

    def kernel(query: Tensor, *_: Tensor, **options: Any) -> Tensor:
        given.update(options)
        return query

    chosen = {flex_row_attention.flex_attention: kernel}
    monkeypatch.setattr(flex_row_attention, "_compiled", lambda function, _: chosen.get(function, function))
    row = packed_row.PackedRow((Segment(0, 70),), None, [QuerySpan(0, 0, 70)])
    query, key, value = (torch.randn(1, heads, 70, 16) for heads in (4, 2, 2))

    flex_row_attention.flex_row_attention(row, query, key, value, AttentionScores(softcap=2.0))

    assert given["enable_gqa"]
    assert given["kernel_options"]["BACKEND"] == "TRITON"


def test_masks_with_and_without_a_window_share_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's windows are short while packing is tested, and rows differ in length."""
    torch.compiler.reset()
    made = CompileCounter()
    compiled = torch.compile(flex_row_attention.create_block_mask, backend=made)
    monkeypatch.setattr(flex_row_attention, "_compiled", lambda *_: compiled)
    for first, second in ((14, 12), (300, 40), (90, 500)):
        segments = (Segment(0, first), Segment(first, second))
        row = packed_row.PackedRow(segments, None, [QuerySpan(0, 0, first), QuerySpan(1, 0, second)])
        row.masks[flex_row_attention.PLACES] = flex_row_attention._places(row, CPU)
        for window in (4, None, 200):
            mask = flex_row_attention._block_mask(row, window, CPU)
            q, k = torch.arange(first + second)[:, None], torch.arange(first + second)
            seen = (q >= k) & (q - k < (window or 1000)) & ((q < first) == (k < first))
            assert torch.equal(mask.mask_mod(0, 0, q, k), seen)
    assert made.frame_count <= 3


def test_attention_of_more_kinds_than_torchs_limit_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_compiled(x: Tensor, kind: str) -> Tensor:
        return x + (torch.compiler.is_compiling() and kind in "abcde")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with torch._dynamo.config.patch(recompile_limit=3):
        function = flex_row_attention._compiled(is_compiled, "cuda")
        assert [int(function(torch.zeros(()), kind)) for kind in "abcde"] == [1] * 5


def test_a_run_has_the_keys_of_its_prefix_and_of_its_document_up_to_its_last_query() -> None:
    """As the processes of context parallelism have them, which take parts of documents."""
    row = (Segment(0, 4), Segment(4, 6, 0, 4), Segment(10, 3))
    runs = [QuerySpan(1, 2, 3), QuerySpan(2, 0, 3), QuerySpan(0, 1, 2)]

    index = varlen_index.varlen_index(row, runs, CPU)

    assert index.query_bounds.tolist() == [0, 3, 6, 8]
    assert index.key_bounds.tolist() == [0, 9, 12, 15]
    assert index.keys is not None
    assert index.keys.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 0, 1, 2]
    assert (index.longest_queries, index.longest_keys) == (3, 9)
    assert varlen_index.varlen_index(row[:1], [QuerySpan(0, 0, 4)], CPU).keys is None


@torch.library.custom_op("stoker_test::varlen", mutates_args={})
def opaque(
    q: Tensor, k: Tensor, v: Tensor, query_bounds: Tensor, key_bounds: Tensor, queries: int, keys: int, left: int
) -> Tensor:
    return by_document(q, k, v, query_bounds, key_bounds, queries, keys, window_size=(left, 0), enable_gqa=True)


@opaque.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, query_bounds: Tensor, key_bounds: Tensor, queries: int, keys: int, left: int
) -> Tensor:
    return torch.empty_like(q)


def _no_gradients(_: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (grad, *[None] * 7)


opaque.register_autograd(_no_gradients)


def made_row(generator: np.random.Generator, lengths: Iterable[int], prefix: int = 0) -> list[Row]:
    """Documents of these lengths, whose first tokens are the same."""
    rows = [(generator.integers(2, 60, n).astype(np.uint32), np.ones(n, bool)) for n in lengths]
    for ids, _ in rows[1:]:
        ids[:prefix] = rows[0][0][:prefix]
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(("tuned", "most"), [("full", 5), ("lora", 8)])
def test_compiled_blocks_have_one_graph_and_few_versions(
    tuned: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of any number of documents and any lengths share a compilation, also with evaluations between."""
    model = tiny("llama", dtype=torch.float32, num_hidden_layers=3)
    if tuned == "lora":
        fuse_lora(get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")))
    language = lay_out_for(model)
    plain = copy.deepcopy(language)
    torch.compiler.reset()
    compilations = 0

    def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        nonlocal compilations
        compilations += 1
        return graph.forward

    def kernel(q: Tensor, k: Tensor, v: Tensor, *index: Any, **how: Any) -> Tensor:
        return opaque(q, k, v, *index, how["window_size"][0])

    monkeypatch.setattr(varlen_attention, "kernel", kernel)
    monkeypatch.setattr(varlen_attention, "supports", lambda *_: True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, fullgraph=True, backend=counting))
    compile_blocks(model)
    generator = np.random.default_rng(0)
    some = [made_row(generator, generator.integers(4, 60, count)) for count in (4, 4, 2, 32, 1, 1, 7, 1, 30)]
    shared = [made_row(generator, generator.integers(20, 60, count), prefix=16) for count in (3, 5, 2, 9)]
    with whole_rows(monkeypatch):
        for number, row in enumerate([*some, *shared, *some]):
            (inputs,) = language.lay_out(row, CPU, share=True)
            evaluates = number % 3 == 2
            language.model.train(not evaluates)
            with packed_row.row_of(inputs), torch.set_grad_enabled(not evaluates):
                given = language.hidden(inputs)
            with packed_row.segments(inputs.segments), torch.no_grad():
                torch.testing.assert_close(given.detach(), plain.hidden(inputs), rtol=1e-4, atol=1e-4)

    assert 1 < compilations <= most


@pytest.mark.parametrize(("hip", "flash"), [(None, True), ("6.4", False)])
def test_only_nvidias_gpus_are_taken_to_have_flash_attention(
    hip: str | None, flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMD's are called CUDA devices too, and state a capability of 9."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 4))
    varlen_index._has_flash.cache_clear()
    try:
        assert varlen_index._has_flash(torch.device("cuda")) == flash
    finally:
        varlen_index._has_flash.cache_clear()
