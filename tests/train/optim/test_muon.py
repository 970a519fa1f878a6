"""Muon against torch's own, its orthogonalisation against the singular values, and which weights it steps."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig

from launches import Launches
from stoker.errors import UserError
from stoker.job.blocks.train_block import TrainBlock
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.train.optim.muon import Muon, matrices_of
from stoker.train.optim.optimizer import build_optimizer
from stoker.train.optim.orthogonalise import COEFFICIENTS, ITERATIONS, orthogonalised
from stoker.verify.layout_cases import MATRIX
from stoker.verify.toy_job import make_twin
from stoker.verify.verifier import Verifier

LAYOUTS = ("DDP", "zero1", "hybrid 2 x 2", "interleaved", "zbv", "context 2, gather")
SHAPES = [(6, 10), (10, 6), (8, 8)]


class Blocks(nn.Module):
    """An embedding, two blocks of which one has experts, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 6)
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 9), nn.Linear(9, 6)), nn.Module()])
        self.layers[1].experts = nn.Module()
        self.layers[1].experts.up = nn.Parameter(torch.randn(3, 6, 12))
        self.layers[1].convolution = nn.Parameter(torch.randn(6, 1, 4))
        self.head = nn.Linear(6, 7, bias=False)


def train_block(**changes: object) -> TrainBlock:
    given = {"optimizer": "muon", "lr": 1e-2, "weight_decay": 0.1, "beta2": 0.95, "eps": 1e-8}
    return TrainBlock.model_validate({**given, **changes})


def stepped(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_vectors_stay_and_values_follow_the_polynomial(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / s.square().sum().sqrt()
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        s = a * s + b * s**3 + c * s**5
    assert s.min() > 0.6 and s.max() < 1.3
    torch.testing.assert_close(orthogonalised(x[None], torch.float64)[0], u * s @ v, rtol=0, atol=1e-10)


def test_experts_are_orthogonalised_each_for_itself() -> None:
    x = torch.randn(3, 6, 12, dtype=torch.float64)
    together = orthogonalised(x, torch.float64)
    for one, alone in zip(together, x, strict=True):
        torch.testing.assert_close(one, orthogonalised(alone[None], torch.float64)[0], rtol=0, atol=1e-13)


def test_weights_that_are_not_contiguous_take_the_same_steps() -> None:
    given = torch.randn(6, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    turned, plain = (nn.Parameter(x) for x in (given.t().contiguous().t(), given.clone()))
    assert not turned.is_contiguous()
    found, expected = (stepped(Muon([{"params": [p]}], lr=1e-2), [p])[0] for p in (turned, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_steps_are_those_of_torch() -> None:
    """Whose products are rounded to bfloat16."""
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    theirs = [nn.Parameter(p.detach().clone()) for p in mine]
    moved = stepped(Muon([{"params": mine, "weight_decay": 0.1}], 1e-2), mine)
    expected = stepped(torch.optim.Muon(theirs, 1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), theirs)
    for one, other in zip(moved, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3)  # of steps that add up to about 1e-2


def test_matrices_of_a_shape_are_stepped_together() -> None:
    parameters = [nn.Parameter(torch.randn(6, 10)) for _ in range(40)]
    optimizer = Muon([{"params": parameters, "weight_decay": 0.1}], 1e-2)
    stepped(optimizer, parameters, steps=1)
    with Launches() as launches:
        optimizer.step()
    assert launches.count < 3 * len(parameters)


def test_matrices_of_blocks_are_orthogonalised_and_all_else_is_adamws() -> None:
    model = Blocks()
    optimizer = build_optimizer(model, train_block())
    of = {
        name: group
        for group in optimizer.param_groups
        for name, p in model.named_parameters()
        for q in group["params"]
        if p is q
    }
    assert {name for name, group in of.items() if group["orthogonalise"]} == {
        "layers.0.1.weight", "layers.0.2.weight", "layers.1.experts.up",
    }  # fmt: skip
    assert of["embedding.weight"]["weight_decay"] == of["layers.0.1.weight"]["weight_decay"] == 0.1
    assert of["layers.0.0.weight"]["weight_decay"] == of["layers.0.1.bias"]["weight_decay"] == 0.0

    others = [p for name, p in model.named_parameters() if not of[name]["orthogonalise"]]
    plain = [nn.Parameter(p.detach().clone()) for p in others]
    groups = [{"params": [p], "weight_decay": 0.1 * (p.dim() >= 2)} for p in plain]
    moved = stepped(optimizer, others)
    expected = stepped(torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8), plain)
    for one, other in zip(moved, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_embeddings_in_a_list_of_blocks_are_no_matrices() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Embedding(4, 3), nn.Linear(3, 5)]))
    assert matrices_of(model) == {id(model[0][1].weight)}  # type: ignore[index]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="this model trains none"):
        build_optimizer(nn.Linear(2, 2), train_block())


def of_two_copies() -> list[Tensor]:
    """Weights after three steps in float64, of which two processes with the same gradients share the work."""
    torch.manual_seed(0)
    sizes = ((6, 10), (12, 5), (3, 4), (2, 7, 5))
    parameters = [nn.Parameter(torch.randn(size, dtype=torch.float64)) for size in sizes]
    copies = dist.group.WORLD if dist.is_initialized() else None
    optimizer = Muon([{"params": parameters, "weight_decay": 0.1}], 1e-2, copies)
    with patch("stoker.train.optim.muon.AT_ONCE", 14):  # elements, so that results are gathered in several pieces
        return stepped(optimizer, parameters, steps=3)


def test_copies_of_a_matrix_share_the_work_exactly(pool: Pool) -> None:
    alone = of_two_copies()
    for weights in pool.run(of_two_copies, world=2):
        for one, other in zip(weights, alone, strict=True):
            assert torch.equal(one, other)


@pytest.mark.slow  # processes of each layout
@pytest.mark.exhaustive
def test_layouts_that_can_gather_matrices_compute_what_one_process_does(pool: Pool, tmp_path: Path) -> None:
    train = "{optimizer: muon, warmup: 0, schedule: constant}"
    (tmp_path / "job.yaml").write_text(f"task: sft\nmodel: some/model\ndata: none.jsonl\nsteps: 5\ntrain: {train}\n")
    twin = make_twin(load_job(tmp_path / "job.yaml"), tmp_path, tmp_path, config=AutoConfig.for_model("llama"))
    cells = [cell for cell in MATRIX if cell.name in LAYOUTS]
    verdicts = list(map(Verifier(twin, pool, whole=False).verdict, cells))
    assert {v.cell.name: v.reason for v in verdicts if not v.passed} == {}
    assert len(verdicts) == len(LAYOUTS)
