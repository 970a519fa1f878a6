"""Recompute and compile change neither losses nor gradients."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from stoker.errors import UserError
from stoker.models.attention import packed_row
from stoker.models.blocks import blocks_of
from stoker.models.language_model import lay_out_for
from stoker.parallel.compile import compile_blocks, has_compiler
from stoker.parallel.recompute import recompute_blocks

IDS = torch.arange(2, 22).view(2, 10)


def tiny_llama(dropout: float = 0.0) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config)


def test_the_blocks_are_the_largest_list() -> None:
    model = tiny_llama()
    assert blocks_of(model) == list(model.model.layers)
    assert blocks_of(nn.Linear(2, 2)) == []
    lists = nn.ModuleDict({"small": nn.ModuleList([nn.Linear(1, 1)] * 3), "large": nn.ModuleList([nn.Linear(9, 9)])})
    assert blocks_of(lists) == list(lists["large"])


def test_members_of_nested_lists_are_blocks() -> None:
    """A list inside a list has no forward pass, which could be compiled, computed again or gathered for."""
    stages = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.ModuleList([nn.Linear(4, 4)])])
    assert blocks_of(stages) == [*stages[0], *stages[1]]
    model, x = copy.deepcopy(stages), torch.ones(1, 4)
    assert recompute_blocks(model) == 3
    assert torch.equal(model[0][1](x), stages[0][1](x)) and "forward" in vars(model[0][1])


def kept(model: nn.Module) -> tuple[int, torch.Tensor, list[torch.Tensor]]:
    """Numbers that autograd keeps for the backward pass of a step, and the step's loss and gradients."""
    numbers = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal numbers
        numbers += tensor.numel()
        return tensor

    torch.manual_seed(1)  # of the dropout
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return numbers, loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recompute_gives_the_same_bits_and_keeps_less(dropout: float) -> None:
    model = tiny_llama(dropout).train()
    reference = copy.deepcopy(model)
    assert recompute_blocks(model) == 2

    less, loss, grads = kept(model)
    more, expected, expected_grads = kept(reference)

    assert torch.equal(loss, expected)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected_grads, strict=True))
    assert less < more / 2


def test_without_blocks_there_is_nothing_to_recompute() -> None:
    with pytest.raises(UserError, match="no list of blocks"):
        recompute_blocks(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.slow
def test_compiled_blocks_give_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed, in two batches of other lengths, with recompute around: all that a job can ask for at once."""
    model = tiny_llama()
    language = lay_out_for(model)
    assert language.packs
    batches = [[(np.arange(n, dtype=np.uint32), np.ones(n, bool)) for n in lengths] for lengths in ((9, 14), (6, 20))]

    def losses() -> list[float]:
        found = []
        for rows in batches:
            (inputs,) = language.lay_out(rows, torch.device("cpu"))
            with packed_row.segments(inputs.segments):
                loss, _ = language.loss(inputs)
                loss.backward()
            found.append(float(loss.detach()))
        return found

    expected = losses()
    expected_grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    # All of torch.compile but the C++ compiler, which would take most of a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    assert compile_blocks(model) == 2
    recompute_blocks(model)
    counters.clear()
    assert losses() == pytest.approx(expected, rel=1e-6)
    assert counters["stats"]["unique_graphs"] > 2  # and not given up on
    for parameter, wanted in zip(model.parameters(), expected_grads, strict=True):
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-5)


def test_a_model_without_blocks_is_compiled_whole() -> None:
    model = nn.Linear(3, 2)
    assert compile_blocks(model) == 1


def test_without_a_c_compiler_blocks_are_not_compiled_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("stoker.parallel.compile.find_spec", lambda _: True)  # Triton is not in every environment
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "gcc").touch(0o755)
    assert not has_compiler()
    (tmp_path / "Python.h").touch()
    assert has_compiler()
    (tmp_path / "gcc").unlink()
    assert not has_compiler()


def test_a_selective_recompute_of_compiled_blocks_saves_less_in_as_many_graphs() -> None:
    def step(*, selective: bool) -> tuple[int, int, list[torch.Tensor]]:
        torch.compiler.reset()
        counters.clear()
        model = tiny_llama().train()
        # The partition that inductor compiles, without its compiler.
        with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition")):
            compile_blocks(model, selective=selective)
        numbers, _, gradients = kept(model)
        return numbers, counters["stats"]["unique_graphs"], gradients

    less, graphs, gradients = step(selective=True)
    more, expected_graphs, expected = step(selective=False)
    blocks, norms, width, inside = 2, 2, 16, 48
    assert more - less >= blocks * (norms * width + inside) * IDS.numel()  # the inputs of products
    assert graphs == expected_graphs
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)
    torch.compiler.reset()
