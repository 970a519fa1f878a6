"""LoRA+: the second matrices learn faster; which they are, at what rate, by every optimizer, and over a resumption."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from running import run

from stoker.job.blocks.train_block import TrainBlock
from stoker.job.blocks.tune_block import TuneBlock
from stoker.models.tuning.adapters import add_adapter
from stoker.train.optim.optimizer import build_optimizer, set_rate

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))
from families import tiny

RATIO = 16.0


def adapted(**changes: Any) -> torch.nn.Module:
    return add_adapter(tiny("llama"), TuneBlock.model_validate({"method": "lora", "alpha": 8.0, **changes}))


def block(**changes: object) -> TrainBlock:
    return TrainBlock.model_validate({"lr": 1e-2, "weight_decay": 0.1, "beta2": 0.95, "eps": 1e-8, **changes})


def rates(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    return {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize("changes", [{}, {"modules_to_save": ["lm_head"]}, {"targets": ["mlp.*"], "layers": "1"}])
def test_the_rates_are_pefts(changes: dict[str, object]) -> None:
    model = adapted(**changes)
    expected = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=RATIO)  # type: ignore[arg-type]
    given = rates(build_optimizer(model, block(), loraplus_ratio=RATIO))
    assert given == pytest.approx(rates(expected)) and set(given.values()) == {1e-2, 1e-2 * RATIO}


def test_an_embeddings_second_matrix_and_no_magnitude_is_among_them() -> None:
    model = adapted(targets=["embed_tokens", "q_proj"], dora=True)
    given = rates(build_optimizer(model, block(), loraplus_ratio=RATIO))
    fast = {n for n, p in model.named_parameters() if given.get(id(p), 0.0) > 1e-2}
    assert (
        len(fast) == 3 and sum(".lora_B." in n for n in fast) == 2 and sum(".lora_embedding_B." in n for n in fast) == 1
    )


@pytest.mark.parametrize(("name", "on_host"), [("adamw", False), ("adamw", True), ("adafactor", False), ("sgd", False)])
def test_a_step_is_that_of_two_optimizers(name: str, on_host: bool) -> None:
    """One over the first matrices at the base rate, one over the second ones at a multiple of it."""
    model = adapted(rank=4)
    reference = copy.deepcopy(model)
    optimizer = build_optimizer(model, block(optimizer=name), on_host=on_host, loraplus_ratio=RATIO)
    slow, fast = (build_optimizer(reference, block(optimizer=name, lr=lr)) for lr in (3e-3, 3e-3 * RATIO))
    for _ in range(3):
        for part in (model, reference):
            part(input_ids=torch.arange(2, 22)[None], labels=torch.arange(2, 22)[None]).loss.backward()
        set_rate(optimizer.param_groups, 3e-3)
        optimizer.step()
        gradients = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
        for part, second in ((slow, False), (fast, True)):
            for n, p in reference.named_parameters():
                p.grad = gradients.get(n) if (".lora_B." in n) == second else None
            part.step()
        optimizer.zero_grad()
        reference.zero_grad()
    for (n, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-9, msg=n)


def test_metrics_hold_the_base_rate(sft: dict[str, Any], base: Path) -> None:
    job = sft | {"steps": 3, "tune": {"method": "lora", "rank": 4, "loraplus_ratio": RATIO}}
    ran = run(base, job)
    assert max(line["lr"] for line in ran.folder.read_metrics()) == pytest.approx(1e-2)
    plain = run(base, job | {"output": "plain", "tune": {"method": "lora", "rank": 4}})
    assert plain.losses[0] == ran.losses[0] and plain.losses[-1] != ran.losses[-1]
