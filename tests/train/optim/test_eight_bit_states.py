"""AdamW's moments in 8 bits: the numbers of the codebook, the nearest of them, steps of a peer, losses, resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import create_dynamic_map
from running import run
from tokenizers import Tokenizer
from torch import Tensor, nn

from stoker.checkpoint.dcp_store import Saved
from stoker.errors import UserError
from stoker.job.blocks.train_block import TrainBlock
from stoker.parallel.shard_spec import WHOLE, NamedShards, Piece
from stoker.train.optim.eight_bit_states import BLOCK, codebook, codebook_for, dequantised, quantised
from stoker.train.optim.optimizer import build_optimizer
from stoker.train.optim.saved_moments import empty_moments, moment_chunks
from tiny_llama import save_tiny_llama

BETAS, EPS, LR, DECAY = (0.9, 0.99), 1e-8, 1e-2, 0.1
EIGHT_BIT = "train.optimizer_states=8bit"


def optimizer_of(model: nn.Module, states: str = "8bit") -> torch.optim.Optimizer:
    given = {"lr": LR, "weight_decay": DECAY, "beta2": BETAS[1], "eps": EPS, "optimizer_states": states}
    return build_optimizer(model, TrainBlock.model_validate(given))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** (step % 3)
        optimizer.step()


@pytest.fixture
def job(tokenizer: Tokenizer, sft: dict[str, Any], base: Path) -> dict[str, Any]:
    """A job of a model all of whose matrices have whole blocks, with a constant rate."""
    model = save_tiny_llama(base / "model", tokenizer, template=None)
    train = {**sft["train"], "schedule": "constant", "warmup": 0, "lr": 1e-3}
    return {**sft, "model": str(model), "tune": "full", "train": train}


@pytest.mark.parametrize("signed", [True, False])
def test_the_codebook_is_that_of_dynamic_trees(signed: bool) -> None:
    values = codebook(signed)
    assert values.shape == (256,) and len(values.unique()) == 256
    expected = create_dynamic_map(signed=signed)
    torch.testing.assert_close(values, expected.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("signed", [True, False])
def test_entries_become_the_nearest_share_of_their_blocks_largest(signed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 2 * BLOCK, generator=generator, dtype=torch.float64) ** 3  # over several powers of ten
    x = x if signed else x.square()
    book = codebook_for(signed, x.device, x.dtype)
    codes, scale = quantised(x, book)
    assert codes.dtype == torch.uint8 and codes.shape == x.shape and scale.shape == (3, 5, 2)
    blocks = x.view(3, 5, 2, BLOCK)
    assert torch.equal(scale, blocks.abs().amax(-1))
    shares = blocks / scale[..., None]
    nearest = (shares[..., None] - codebook(signed)).abs().argmin(-1).view(x.shape)
    kept = torch.ones_like(x, dtype=torch.bool) if signed else nearest > 0
    assert torch.equal(codes[kept].long(), nearest[kept])
    back = dequantised(codes, scale, book)
    widest = codebook(signed).diff().max() / 2
    assert ((back - x).abs() <= (widest + 1e-12) * scale.repeat_interleave(BLOCK, dim=-1)).all()


def test_zeros_stay_and_a_small_second_moment_does_not_become_zero() -> None:
    x = torch.zeros(2, BLOCK)
    x[0, 0], x[0, 1] = 1.0, 1e-12
    unsigned, signed = (codebook_for(each, x.device, x.dtype) for each in (False, True))
    back = dequantised(*quantised(x, unsigned), unsigned)
    assert back[0, 0] == 1.0 and 0 < back[0, 1] < 1e-6
    assert (back[0, 2:] == 0).all() and (back[1] == 0).all()
    back = dequantised(*quantised(-x, signed), signed)
    assert -1.0 <= back[0, 0] < -0.99 and (back[0, 1:] == 0).all() and (back[1] == 0).all()


def test_steps_are_those_of_torchao() -> None:
    """Whose blocks, run over whole matrices, are the same where rows are multiples of a block."""
    from torchao.optim import AdamW8bit

    torch.manual_seed(0)
    model, theirs = nn.Linear(4 * BLOCK, 24, bias=False), nn.Linear(4 * BLOCK, 24, bias=False)
    theirs.load_state_dict(model.state_dict())
    steps(model, optimizer_of(model), 8)
    peer = AdamW8bit(theirs.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, block_size=BLOCK)
    before = theirs.weight.detach().clone()
    with torch.compiler.set_stance("force_eager"):
        steps(theirs, peer, 8)
    moved = (theirs.weight - before).abs().mean()
    differences = (model.weight - theirs.weight).abs()
    # A number in the middle of two of the codebook goes to either.
    assert differences.median() < 1e-6 and differences.mean() < 1e-3 * moved


def test_what_has_no_whole_blocks_has_moments_as_before() -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(BLOCK - 1, 3), nn.Linear(BLOCK - 1, 3)
    plain.load_state_dict(model.state_dict())
    steps(model, optimizer_of(model), 4)
    steps(plain, optimizer_of(plain, "fp32"), 4)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_many_rows_are_stepped_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, again = nn.Linear(2 * BLOCK, 7), nn.Linear(2 * BLOCK, 7)
    again.load_state_dict(model.state_dict())
    steps(model, optimizer_of(model), 3)
    monkeypatch.setattr("stoker.train.optim.low_precision_adamw.AT_ONCE", 5 * BLOCK)
    optimizer = optimizer_of(again)
    steps(again, optimizer, 3)
    assert torch.equal(model.weight, again.weight) and torch.equal(model.bias, again.bias)
    assert optimizer.state[again.weight]["step"] == 3


def test_moments_take_a_quarter_of_the_memory() -> None:
    def held(states: str) -> int:
        model = nn.Linear(8 * BLOCK, 64, bias=False)
        optimizer = optimizer_of(model, states)
        steps(model, optimizer, 1)
        return sum(box.tensor.nbytes for boxes in moment_chunks(model, optimizer, WHOLE).values() for box in boxes) - 4

    entries = 8 * BLOCK * 64
    assert held("fp32") == 8 * entries and held("8bit") == 2 * entries + 2 * entries // BLOCK * 4


def test_a_part_without_whole_blocks_cannot_take_a_checkpoints() -> None:
    model = nn.Linear(BLOCK // 2, 4, bias=False)
    saved = {
        "optimizer/weight/exp_avg": Saved((4, BLOCK), torch.uint8),
        "optimizer/weight/exp_avg_scale": Saved((4, 1), torch.float32),
    }
    with pytest.raises(UserError, match="moments of weight are in blocks of 64 entries") as found:
        empty_moments(model, optimizer_of(model), saved, NamedShards({"weight": Piece(1, 0, BLOCK // 2, (4, BLOCK))}))
    assert found.value.problems[0].suggestion == "resume with a smaller `tensor`, or as the run was"


@pytest.mark.slow
def test_losses_are_those_of_float32_within_two_hundredths(base: Path, job: dict[str, Any]) -> None:
    """The means of 20 steps each, while the loss falls to a third."""
    means: dict[str, Tensor] = {}
    for states in ("fp32", "8bit"):
        ran = run(base, {**job, "output": states}, "steps=120", f"train.optimizer_states={states}")
        means[states] = torch.tensor(ran.losses).view(-1, 20).mean(1)
    assert means["fp32"][-1] < means["fp32"][0] / 3
    assert not torch.equal(means["8bit"], means["fp32"])
    torch.testing.assert_close(means["8bit"], means["fp32"], rtol=0.02, atol=0)


@pytest.mark.slow
def test_a_run_goes_on_to_the_bit(base: Path, job: dict[str, Any]) -> None:
    whole = run(base, {**job, "output": "whole"}, EIGHT_BIT)
    first = run(base, {**job, "output": "parts"}, EIGHT_BIT, "steps=7")
    kinds = {str(t.dtype) for name, t in first.last_state().tensors.items() if name.endswith("proj.weight/exp_avg")}
    assert kinds == {"torch.uint8"}
    assert run(base, {**job, "output": "parts"}, EIGHT_BIT).losses == whole.losses
    host = run(base, {**job, "output": "host"}, EIGHT_BIT, "parallel.offload=optimizer")
    assert host.losses == pytest.approx(whole.losses, rel=1e-6)
