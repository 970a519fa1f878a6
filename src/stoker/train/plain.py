"""A plain PyTorch loop, written from the documentation of the job's keys: what Stoker's own process is held against.

It imports nothing of Stoker. Model and adapters are transformers' and peft's, rows go through them one by one, and the
schedule, the decay, the clipping and the loss are written out here a second time (the order of the data in
`plain_rows`), so that a mistake in Stoker cannot be made on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

Row = tuple[Tensor, Tensor]  # token ids and the mask of trained tokens
Numbers = dict[tuple[int, str], float]  # by step and name
Tensors = dict[tuple[int, str], Tensor]  # by step and parameter


@dataclass(frozen=True)
class Setting:
    """What the loop needs of a job.

    Attributes:
        model: a folder.
        train: the job's keys ``train``, resolved.
        warmup, evaluate_every: in steps.
        lora: peft's keys; empty where the whole model is trained.
        loraplus_ratio: how many times as fast the second LoRA matrix learns.
        first: the values that training begins with, of parameters that are drawn and not read.
    """

    model: str
    train: Any
    steps: int
    warmup: int
    evaluate_every: int
    lora: dict[str, Any] = field(default_factory=dict)
    loraplus_ratio: float = 1.0
    first: dict[str, Tensor] = field(default_factory=dict)


def train(
    setting: Setting, batches: Sequence[Sequence[Sequence[Row]]], held_out: Sequence[Row]
) -> tuple[Numbers, Tensors, dict[str, Tensor]]:
    """Trains on one batch a step: samples of one or, packed, several rows.

    Returns:
        (numbers of the steps; gradients of the first and the last step, clipped; the last weights).
    """
    model, job = build(setting), setting.train
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = optimizer_of(trained, setting)
    numbers, gradients = evaluation(model, held_out, 0), {}
    done = 0
    for step, samples in enumerate(batches, start=1):
        done += len(samples)
        batch = [row for sample in samples for row in sample]
        targets = sum(int(mask[1:].sum()) for _, mask in batch)
        optimizer.zero_grad()
        loss = 0.0
        for row in batch:
            part = summed_loss(model, row)[0] / targets
            part.backward()
            loss += float(part.detach())
        grads = {name: p.grad for name, p in trained.items() if p.grad is not None}
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
        if job.clip and norm > job.clip:
            for grad in grads.values():
                grad.mul_(job.clip / (norm + 1e-6))
        if step in (1, setting.steps):
            gradients |= {(step, name): grad.clone() for name, grad in grads.items()}
        rate = lr_of(step, setting)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["ratio"]
        optimizer.step()
        numbers |= {(step, "loss"): loss, (step, "gradient norm"): norm, (step, "learning rate"): rate}
        numbers |= {(step, "samples"): done, (step, "targets"): targets}
        if step % setting.evaluate_every == 0 or step == setting.steps:
            numbers |= evaluation(model, held_out, step)
    return numbers, gradients, {name: p.detach().clone() for name, p in trained.items()}


def build(setting: Setting) -> Any:
    """transformers' model, with peft's matrices where the job tunes adapters."""
    model = AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.float64)
    if setting.lora:
        model = get_peft_model(model, LoraConfig(**setting.lora))
        for name, parameter in model.named_parameters():  # what is trained whole beside the matrices
            parameter.requires_grad_(parameter.requires_grad or name in setting.first)
    model.load_state_dict({n: w for n, w in setting.first.items() if ".lora_B." not in n}, strict=False)  # B is zero
    return model.train()


def optimizer_of(trained: dict[str, Tensor], setting: Setting) -> torch.optim.Optimizer:
    """torch's. Matrices are decayed, vectors are not; the second LoRA matrix has its own rate."""
    job = setting.train
    groups = []
    for name, parameter in trained.items():
        ratio = setting.loraplus_ratio if ".lora_B." in name else 1.0
        groups.append({"params": [parameter], "weight_decay": job.weight_decay * (parameter.dim() > 1), "ratio": ratio})
    if job.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=job.lr, betas=(job.beta1, job.beta2), eps=job.eps, foreach=False)
    if job.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=job.lr, momentum=job.beta1, foreach=False)
    return torch.optim.Adafactor(groups, lr=job.lr, foreach=False)


def lr_of(step: int, setting: Setting) -> float:
    """Up in a line to the peak, then down by the shape: what is left of the way goes from 1 to 0 over the steps."""
    job, steps = setting.train, setting.steps
    if step <= setting.warmup:
        return job.lr * step / setting.warmup
    left = 1 - (step - setting.warmup - 1) / (steps - setting.warmup)
    shapes = {"constant": 1.0, "linear": left, "cosine": math.sin(left * math.pi / 2) ** 2, "wsd": min(1, left * 5)}
    return job.lr * (job.min_lr + (1 - job.min_lr) * shapes[job.schedule])


def summed_loss(model: Any, row: Row) -> tuple[Tensor, int]:
    """The cross entropy of a row's trained tokens, summed, and how many of them were the most likely."""
    ids, mask = row
    logits, expected = model(input_ids=ids[None]).logits[0, :-1][mask[1:]], ids[1:][mask[1:]]
    return F.cross_entropy(logits, expected, reduction="sum"), int((logits.argmax(-1) == expected).sum())


@torch.no_grad()
def evaluation(model: Any, rows: Sequence[Row], step: int) -> Numbers:
    """Mean loss and accuracy over all trained tokens of the rows."""
    model.eval()
    losses, right = zip(*(summed_loss(model, row) for row in rows), strict=True)
    model.train()
    count = sum(int(mask[1:].sum()) for _, mask in rows)
    loss = sum(map(float, losses)) / count
    return {(step, "evaluation loss"): loss, (step, "evaluation accuracy"): sum(right) / count}
