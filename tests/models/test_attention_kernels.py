"""Attention of documents of one length as a batch, and the choice of the fastest kernel that agrees with torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from test_packed_attention import CPU, attending, farthest_gradient, own_loss
from test_row_kernels import by_document, whole_rows
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, _registry, current_flash_attention_impl, restore_flash_attention_impl

from families import VOCABULARY, tiny
from stoker.models.attention import attention_kernels, even_rows, packed_row, varlen_attention, varlen_index
from stoker.models.attention.attention_kernels import Heads, choose_kernels, heads_of
from stoker.models.attention.collate import Row
from stoker.models.language_model import lay_out_for

LENGTH = 13


@pytest.fixture
def equal_documents() -> list[Row]:
    generator = np.random.default_rng(2)
    rows = [generator.integers(2, VOCABULARY, LENGTH + 1).astype(np.uint32) for _ in range(3)]
    return [(ids, np.ones(len(ids), bool)) for ids in rows]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Rows are computed as batches where they can be; yields the lengths of the documents of each call."""
    lengths: list[int] = []
    even_attention = varlen_attention.even_attention

    def counted(length: int, *arguments: Any) -> Tensor:
        lengths.append(length)
        return even_attention(length, *arguments)

    monkeypatch.setattr(varlen_attention, "even_attention", counted)
    monkeypatch.setattr(varlen_attention, "kernel", by_document)
    monkeypatch.setattr(varlen_attention, "supports", lambda index, query, value: query.shape[-1] == value.shape[-1])
    monkeypatch.setattr(even_rows, "BACKEND", SDPBackend.MATH)
    even_rows.even_rows.enable()
    with whole_rows(monkeypatch):
        yield lengths
    even_rows.even_rows.disable()


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gemma"])
@pytest.mark.usefixtures("no_float32")
def test_a_batch_of_documents_gives_the_gradients_of_each(
    family: str, equal_documents: list[Row], documents: list[Row], batches: list[int]
) -> None:
    model = tiny(family)
    language = lay_out_for(attending(model.eval()))
    batches.clear()
    windows = getattr(model.config, "sliding_window", None)
    for rows in (equal_documents, documents):
        reference = copy.deepcopy(model).eval()
        reference.zero_grad()
        own_loss(reference, rows).backward()
        model.zero_grad()
        (inputs,) = language.lay_out(rows, CPU)
        with packed_row.row_of(inputs):
            language.loss(inputs)[0].backward()
        assert farthest_gradient(model, reference) < 1e-12
    assert set(batches) == (set() if windows is not None and windows < LENGTH else {LENGTH})


def test_blocks_compile_to_one_graph(equal_documents: list[Row], batches: list[int]) -> None:
    language = lay_out_for(tiny("llama", dtype=torch.float32).eval())
    plain = copy.deepcopy(language)
    torch.compiler.reset()
    for block in language.model.model.layers:
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    (inputs,) = language.lay_out(equal_documents, CPU)
    with packed_row.row_of(inputs):
        given = language.loss(inputs)[0]
        given.backward()
        torch.testing.assert_close(given, plain.loss(inputs)[0])
    assert batches


def test_only_the_first_shapes_are_batches() -> None:
    rows = even_rows.EvenRows()
    assert not rows.admit(1, 8)
    rows.enable()
    assert [rows.admit(1, length) for length in (8, 9, 10, 11, 12, 8)] == [True] * 4 + [False, True]


def test_torch_takes_cudnn_for_batches_of_documents_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would plan a kernel for each shape of padded rows, prompts and steps of decoding."""
    enabled: list[bool] = []

    def attention(query: Tensor, *_: Tensor, **__: Any) -> Tensor:
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return query

    torch.backends.cuda.enable_cudnn_sdp(True)
    lay_out_for(tiny("llama", dtype=torch.float32).eval())
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    even_rows.even_attention(4, *(torch.ones(2, 8, 16) for _ in range(3)), None)
    assert enabled == [True]
    assert not torch.backends.cuda.cudnn_sdp_enabled()


class Clock:
    """A clock that advances by 1 ms with each reading, and by the time of slow kernels."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        self.seconds += 1e-3
        return self.seconds


clock = Clock()


def slowly(*arguments: Any, **options: Any) -> Tensor:
    clock.seconds += 0.2
    return by_document(*arguments, **options)


def wrongly(*arguments: Any, **options: Any) -> Tensor:
    return by_document(*arguments, **options) * 1.1


def fails(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("no kernel image\nis available")


@pytest.mark.parametrize(
    ("kernel", "cudnn", "described", "used"),
    [
        (by_document, SDPBackend.OVERRIDEABLE, "FlashAttention 3, ", True),
        (wrongly, SDPBackend.OVERRIDEABLE, "FlashAttention 3 is not used (other values)", False),
        (fails, SDPBackend.OVERRIDEABLE, "FlashAttention 3 is not used (RuntimeError: no kernel image is", False),
        (slowly, SDPBackend.MATH, "FlashAttention 3 is not used (not faster); cuDNN for documents of one", False),
    ],
)
def test_a_kernel_is_used_if_it_agrees_and_is_faster(
    kernel: Callable[..., Tensor],
    cudnn: SDPBackend,
    described: str,
    used: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Handle:
        def remove(self) -> None:
            monkeypatch.setattr(varlen_attention, "kernel", slowly)

    def register() -> Handle:
        monkeypatch.setattr(varlen_attention, "kernel", kernel)
        return Handle()

    monkeypatch.setattr(varlen_attention, "kernel", slowly)
    monkeypatch.setattr(attention_kernels, "time", clock)
    monkeypatch.setattr(even_rows, "BACKEND", cudnn)
    monkeypatch.setattr(attention_kernels, "supports", lambda *_: True)
    monkeypatch.setattr(attention_kernels, "has_faster", lambda _: True)
    monkeypatch.setattr(attention_kernels, "INSTALLED", {"FA3": "torch"})
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", register)
    try:
        found = choose_kernels(Heads(4, 2, 8), 16, torch.float32, CPU)
        assert found.startswith(described), found
        assert (current_flash_attention_impl() == "FA3") == used
        assert varlen_attention.kernel is (kernel if used else slowly)
        batch = cudnn is SDPBackend.MATH
        segments = [attention_kernels.Segment(i * 16, 16) for i in range(2)]
        runs = [varlen_index.QuerySpan(i, 0, 16) for i in range(2)]
        assert varlen_index.varlen_index(segments, runs, CPU).even == (16 if batch else None)
    finally:
        restore_flash_attention_impl(_raise_warn=False)
        even_rows.even_rows.disable()


@pytest.mark.parametrize(
    ("third", "fourth", "used"), [(fails, by_document, "FA4"), (by_document, wrongly, "FA3"), (fails, wrongly, None)]
)
def test_of_two_installed_kernels_one_that_works_is_used(
    third: Callable[..., Tensor], fourth: Callable[..., Tensor], used: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FlashAttention 4 on GPUs that FlashAttention 3 has no kernels for."""

    class Handle:
        def remove(self) -> None:
            monkeypatch.setattr(varlen_attention, "kernel", slowly)

    def register(kernel: Callable[..., Tensor]) -> Handle:
        monkeypatch.setattr(varlen_attention, "kernel", kernel)
        return Handle()

    kernels = {"FA3": third, "FA4": fourth}
    monkeypatch.setattr(varlen_attention, "kernel", slowly)
    monkeypatch.setattr(attention_kernels, "time", clock)
    monkeypatch.setattr(even_rows, "BACKEND", SDPBackend.OVERRIDEABLE)
    monkeypatch.setattr(attention_kernels, "supports", lambda *_: True)
    monkeypatch.setattr(attention_kernels, "has_faster", lambda _: True)
    monkeypatch.setattr(attention_kernels, "INSTALLED", dict.fromkeys(kernels, "torch"))
    for name, kernel in kernels.items():
        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, name, partial(register, kernel))
    try:
        choose_kernels(Heads(4, 2, 8), 16, torch.float32, CPU)
        assert current_flash_attention_impl() == used
        assert varlen_attention.kernel is (kernels[used] if used else slowly)
    finally:
        restore_flash_attention_impl(_raise_warn=False)
        even_rows.even_rows.disable()


def test_nothing_is_measured_without_such_a_gpu() -> None:
    assert choose_kernels(Heads(4, 2, 8), 16, torch.bfloat16, CPU) == ""


def test_heads_are_those_of_a_process() -> None:
    config = tiny("llama").config
    size = config.hidden_size // config.num_attention_heads
    assert heads_of(config, 1) == Heads(config.num_attention_heads, config.num_key_value_heads, size)
    assert heads_of(config, 2) == Heads(config.num_attention_heads // 2, config.num_key_value_heads // 2, size)
