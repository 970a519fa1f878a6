"""Runs against hand-written loops of torch and peft over the same data, in float64."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from running import Ran, run
from torch import nn
from transformers import AutoModelForCausalLM

from stoker.models.init_weights import initial_adapter
from stoker.parallel.float64_mode import in_float64
from stoker.train.optim.lr_schedule import Schedule
from stoker.train.prepared import Prepared

LR, STEPS, BATCH = 1e-2, 10, 4


def run64(base: Path, job: dict[str, Any]) -> Ran:
    """Runs a job in float64, from when its model has been loaded."""
    with ExitStack() as stack:

        def before(prepared: Prepared) -> None:
            prepared.task.model.double()
            stack.enter_context(in_float64())

        return run(base, job, before=before)


def plain_loop(ran: Ran, model: nn.Module, *, clip: float, decay: float, optimizer: str = "adamw") -> list[float]:
    """The textbook loop: each document through the model by itself, one summed loss a step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = ([p for p in parameters if (p.dim() > 1) == large] for large in (True, False))
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizers: dict[str, Any] = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8, fused=False),
        "sgd": lambda: torch.optim.SGD(groups, lr=LR, momentum=0.9),
        "adafactor": lambda: torch.optim.Adafactor(groups, lr=LR),
    }
    update = optimizers[optimizer]()
    schedule = Schedule(LR, STEPS, 2, "cosine")
    sequences = ran.prepared.corpus.sequences  # type: ignore[union-attr]
    losses = []
    for step in range(1, STEPS + 1):
        total, targets = torch.zeros((), dtype=torch.float64), 0
        for index in range((step - 1) * BATCH, step * BATCH):
            for document in sequences[index]:
                ids = torch.from_numpy(document.row.ids.astype(np.int64))
                trained = torch.from_numpy(document.row.trained[1:])
                logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1][trained]
                total = total + nn.functional.cross_entropy(logits, ids[1:][trained], reduction="sum")
                targets += int(trained.sum())
        update.zero_grad()
        (total / targets).backward()
        nn.utils.clip_grad_norm_(parameters, clip)
        for group in update.param_groups:
            group["lr"] = schedule.lr(step)
        update.step()
        losses.append(float((total / targets).detach()))
    return losses


def assert_same(ran: Ran, model: nn.Module, losses: list[float]) -> None:
    assert ran.losses == pytest.approx(losses, rel=1e-10)
    for (name, p), q in zip(ran.prepared.task.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10, msg=name)


def job_of(sft: dict[str, Any], **train: Any) -> dict[str, Any]:
    return {**sft, "steps": STEPS, "train": {**sft["train"], "warmup": 2, "lr": LR, "batch": BATCH, **train}}


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
def test_lora_is_a_plain_peft_loop(targets: Any, base: Path, sft: dict[str, Any], tiny_model: Path) -> None:
    tune = {"method": "lora", "rank": 4, "alpha": 16.0, "targets": targets}
    ran = run64(base, {**job_of(sft), "tune": tune})

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=16, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM")
    peer = get_peft_model(model, config)
    for name, p in peer.named_parameters():
        if "lora_A" in name:  # other random numbers of the same distribution
            p.data.copy_(initial_adapter(name, p.shape, ran.prepared.job.seed))
    peer = peer.double().train()
    with in_float64():
        losses = plain_loop(ran, peer, clip=1.0, decay=0.01)

    assert all(p.any() for name, p in peer.named_parameters() if "lora_B" in name)  # it has left its zeros
    assert_same(ran, peer, losses)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
def test_full_tuning_is_a_plain_torch_loop(optimizer: str, base: Path, sft: dict[str, Any], tiny_model: Path) -> None:
    clip = 0.05  # below every gradient of these steps
    ran = run64(base, job_of(sft, clip=clip, weight_decay=0.1, optimizer=optimizer))

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).double().train()
    with in_float64():
        losses = plain_loop(ran, model, clip=clip, decay=0.1, optimizer=optimizer)

    assert all(line["grad_norm"] > clip for line in ran.folder.read_metrics())  # as it was before clipping
    assert_same(ran, model, losses)


def test_accumulation_changes_nothing(base: Path, sft: dict[str, Any]) -> None:
    weights = []
    for micro_batch in (1, 2, 8):
        job = job_of(sft, batch=8, micro_batch=micro_batch) | {"steps": 5, "output": f"run{micro_batch}"}
        ran = run64(base, job)
        assert ran.loop.batches._micro_batch == micro_batch
        weights.append([p.detach() for p in ran.prepared.task.model.parameters()])
    for other in weights[1:]:
        for p, q in zip(weights[0], other, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_recompute_changes_nothing(base: Path, sft: dict[str, Any]) -> None:
    tune = {"method": "lora", "rank": 4, "dropout": 0.2}
    plain = run64(base, {**sft, "tune": tune, "output": "plain"})
    again = run64(base, {**sft, "tune": tune, "parallel": {"recompute": "full"}})
    assert again.losses == plain.losses
