"""The facts of every family put to work: hidden states and gradients of split models are those of the whole."""

from __future__ import annotations

import copy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from traffic import Traffic

from families import tiny
from stoker.job.layout import Layout
from stoker.launch.process_pool import Pool
from stoker.models.attention import packed_attention, packed_row
from stoker.models.attention.collate import pack
from stoker.models.blocks import blocks_of
from stoker.models.families import FAMILIES
from stoker.models.prepare_architecture import training_form
from stoker.parallel.float64_mode import in_float64
from stoker.parallel.mesh import Mesh
from stoker.parallel.tensor_parallel.tensor import _of_own_experts, split_tensors

LENGTHS = (14, 9, 18)  # 41 tokens less the last of each document: 38, which two processes share evenly


def largest_difference(name: str, tensor: int, sequence: bool, **changes: Any) -> float:
    """The error of this rank's hidden states and gradients, relative to the largest gradient of a parameter."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
    from families import deep

    torch.set_num_threads(1)
    model: Any = deep(name, **changes)
    training_form(model)
    packed_attention.register()
    model.set_attn_implementation(packed_attention.NAME)
    whole = copy.deepcopy(model)
    generator = np.random.default_rng(1)
    documents = [generator.integers(2, 128, length).astype(np.uint32) for length in LENGTHS]
    row = pack([(ids, np.ones(len(ids), bool)) for ids in documents], torch.device("cpu"), share=False)
    mesh = Mesh(Layout(tensor=tensor, sequence=sequence), torch.device("cpu"))

    def own(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(tensor, dim=1)[mesh.at("tensor")] if sequence else x

    with in_float64(), packed_row.segments(row.segments):
        expected = whole.base_model(input_ids=row.ids, position_ids=row.positions, use_cache=False).last_hidden_state
        weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        (expected * weights).sum().backward()

        placed = split_tensors(model, FAMILIES[name], mesh)
        embedded = own(model.get_input_embeddings()(row.ids))
        given = model.base_model(inputs_embeds=embedded, position_ids=row.positions, use_cache=False).last_hidden_state
        (given * own(weights)).sum().backward()

    worst = float((given - own(expected)).detach().abs().max())
    reference = {n: p.grad for n, p in whole.named_parameters()}
    for parameter_name, parameter in model.named_parameters():
        gradient, wanted = parameter.grad, reference[parameter_name]
        if wanted is None:
            continue
        if parameter_name in placed.pieces:
            wanted = placed.pieces[parameter_name].of(wanted)
        elif sequence or parameter_name in placed.partial:
            dist.all_reduce(gradient)
        worst = max(worst, float((gradient - wanted).abs().max() / wanted.abs().max().clamp(min=1.0)))
    return worst


def in_bfloat16(name: str, sequence: bool) -> tuple[int, float]:
    """Bytes an element of hidden states that the regions of a block send in both passes, and the median error
    of this rank's hidden states beside one process, relative to their norm: rounding sends some tokens elsewhere."""
    torch.set_num_threads(1)
    model: Any = tiny(name, dtype=torch.float32)
    training_form(model)
    packed_attention.register()
    model.set_attn_implementation(packed_attention.NAME)
    whole = copy.deepcopy(model)
    row = pack([(np.arange(2, 43).astype(np.uint32), np.ones(41, bool))], torch.device("cpu"), share=False)
    mesh = Mesh(Layout(tensor=2, sequence=sequence), torch.device("cpu"))
    split_tensors(model, FAMILIES[name], mesh)

    def own(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(2, dim=1)[mesh.at("tensor")] if sequence else x

    embedded = model.get_input_embeddings()(row.ids)
    with torch.autocast("cpu", torch.bfloat16), packed_row.segments(row.segments), Traffic(mesh.groups) as traffic:
        given = model.base_model(inputs_embeds=own(embedded), position_ids=row.positions, use_cache=False)
        given.last_hidden_state.float().square().sum().backward()
        expected = own(whole.base_model(input_ids=row.ids, use_cache=False).last_hidden_state).float()
    moved = sum(volume.size for volume in traffic.volumes.values())
    errors = (given.last_hidden_state.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return moved // (embedded.numel() * len(blocks_of(model))), float(errors.median())


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize(("name", "size"), [("llama", 2 + 2), ("mixtral", 2 + 4)])
def test_regions_of_products_send_half_of_the_bytes(pool: Pool, name: str, size: int, sequence: bool) -> None:
    """Attention and MLP both ways; a router reads float32, so experts get and give it. A gather and a scatter each."""
    for moved, error in pool.run(in_bfloat16, name, sequence, world=2):
        assert moved == 2 * size * (2 if sequence else 1)
        assert error < 3e-2


@pytest.mark.parametrize("chosen", [4, 2, 1], ids=["both", "first", "one"])
def test_experts_are_given_their_own_tokens_only(chosen: int) -> None:
    """Of two processes with two experts each; of the first ones only, the second computes one row, which gives 0."""
    model: Any = tiny("mixtral")
    experts = model.model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(1)
    x_TD = torch.randn(9, model.config.hidden_size, dtype=torch.float64, generator=generator, requires_grad=True)
    expert_TK = torch.stack([torch.randperm(4, generator=generator)[:2] % chosen for _ in range(9)])
    weight_TK = torch.rand(9, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    wanted = (x_TD, weight_TK, *experts.parameters())
    expected = experts(x_TD, expert_TK, weight_TK)
    gradients = torch.autograd.grad(expected.square().sum(), wanted)
    rows, parts = [], []

    def forward(start: int, x_PD: torch.Tensor, *choice: torch.Tensor) -> torch.Tensor:
        rows.append(len(x_PD))
        part = copy.copy(experts)
        part._parameters = {name: p[start : start + 2] for name, p in experts.named_parameters()}
        part.num_experts = 2
        return part(x_PD, *choice)

    for start in (0, 2):
        parts.append(_of_own_experts(partial(forward, start), start, start + 2, x_TD, expert_TK, weight_TK))
    given = torch.autograd.grad((parts[0] + parts[1]).square().sum(), wanted)
    torch.testing.assert_close(parts[0] + parts[1], expected)
    torch.testing.assert_close(given, gradients)
    assert rows == ([18, 1] if chosen <= 2 else [int((expert_TK < 2).sum()), int((expert_TK >= 2).sum())])


@pytest.mark.parametrize(("tensor", "sequence"), [(2, True), (4, False)], ids=["tensor2-sequence", "tensor4"])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if "tensor" not in family.refused])
@pytest.mark.often("gpt2", "llama", "glm4", "bloom", "mixtral", "olmo2", "phi3", "gpt_oss")
def test_a_split_model_is_the_whole(pool: Pool, name: str, tensor: int, sequence: bool) -> None:
    """With 8 heads, of which the grouped families have 2 for keys and values: fewer than four processes."""
    differences = pool.run(largest_difference, name, tensor, sequence, world=tensor)
    assert max(differences) < 1e-12


def test_every_process_has_some_of_five_experts(pool: Pool) -> None:
    """Parts of two, rounded up as in `torch.chunk`, would leave nothing for the fourth process."""
    assert max(pool.run(partial(largest_difference, num_local_experts=5), "mixtral", 4, False, world=4)) < 1e-12
