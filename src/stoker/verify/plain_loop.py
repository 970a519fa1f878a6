"""A plain PyTorch loop, written from the documentation of the job's keys: the reference for Stoker's single process.

It imports nothing of Stoker but `plain_router_loss`: schedule, decay, clipping and loss are implemented a second time.
Rows pass one by one through transformers' model and peft's adapters; `plain_rows` has their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from peft import get_peft_config, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from stoker.verify.plain_router_loss import balance

Row = tuple[Tensor, Tensor]  # token ids and the mask of trained tokens
Numbers = dict[tuple[int, str], float]  # by step and name
Tensors = dict[tuple[int, str], Tensor]  # by step and parameter


@dataclass(frozen=True)
class PlainSetting:
    """The loop's settings from a job."""

    model: str  # a folder
    train: Any  # the job's keys of that name, resolved
    steps: int
    warmup: int  # steps
    evaluate_every: int  # steps
    peft: dict[str, Any] = field(default_factory=dict)  # its keys; empty if the whole model is trained
    loraplus_ratio: float = 1.0  # learning rate of the second LoRA matrix over the first
    first: dict[str, Tensor] = field(default_factory=dict)  # initial values, if they are random
    known: int = 0  # tokens that the model knows; 0 where there are no new ones
    vocabulary: int = 0  # rows, including those for new tokens
    new_rows_first: int = 0  # steps that train only those


def train(
    setting: PlainSetting, batches: Sequence[Sequence[Sequence[Row]]], held_out: Sequence[Row]
) -> tuple[Numbers, Tensors, dict[str, Tensor]]:
    """Trains on one batch per step; returns numbers, gradients of the first and the last step, and final weights."""
    model, job = build(setting), setting.train
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = optimizer_of(trained, setting)
    numbers, gradients = evaluation(model, held_out, 0), Tensors()
    for step, samples in enumerate(batches, start=1):
        batch = [row for sample in samples for row in sample]
        targets = sum(int(mask[1:].sum()) for _, mask in batch)
        stage, loss = step <= setting.new_rows_first, 0.0
        optimizer.zero_grad()
        for row in batch:
            part = summed_loss(model, row)[0] / targets
            (part + balance(model, row, job.router_aux_loss) / targets).backward()
            loss += float(part.detach())
        if stage:
            only_new_rows(model, trained, setting.known)
        grads = {name: p.grad for name, p in trained.items() if p.grad is not None}
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
        if job.clip and norm > job.clip:
            for grad in grads.values():
                grad.mul_(job.clip / (norm + 1e-6))
        if step in (1, setting.steps):
            gradients |= {(step, name): grad.clone() for name, grad in grads.items()}
        rate = lr_of(step, setting)
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = rate * group["ratio"], 0.0 if stage else group["decay"]
        if step == setting.new_rows_first + 1:  # fresh moments for all rows
            optimizer.state.clear()
        optimizer.step()
        numbers |= {(step, "loss"): loss, (step, "gradient norm"): norm, (step, "learning rate"): rate}
        numbers |= {(step, "samples"): sum(map(len, batches[:step])), (step, "targets"): targets}
        if step % setting.evaluate_every == 0 or step == setting.steps:
            numbers |= evaluation(model, held_out, step)
    return numbers, gradients, {name: p.detach().clone() for name, p in trained.items()}


def build(setting: PlainSetting) -> Any:
    """Builds transformers' model, with peft's parameters where the job tunes those."""
    model: Any = AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.float64)
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # transformers 5.17 chooses `sdpa`, which ignores the bound
    if setting.known:
        model.resize_token_embeddings(setting.vocabulary, mean_resizing=False)
    if setting.peft:
        model = get_peft_model(model, get_peft_config({"task_type": "CAUSAL_LM", **setting.peft}))
        for name, parameter in model.named_parameters():  # modules trained whole beside them
            parameter.requires_grad_(parameter.requires_grad or name in setting.first)
    model.load_state_dict({n: w for n, w in setting.first.items() if ".lora_B." not in n}, strict=False)  # B is zero
    return model.train()


def optimizer_of(trained: dict[str, Tensor], setting: PlainSetting) -> torch.optim.Optimizer:
    """Returns torch's optimizer. Matrices are decayed, vectors are not; the second LoRA matrix has its own rate."""
    job = setting.train
    groups = []
    for name, parameter in trained.items():
        ratio = setting.loraplus_ratio if ".lora_B." in name else 1.0
        groups.append({"params": [parameter], "decay": job.weight_decay * (parameter.dim() > 1), "ratio": ratio})
    if job.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=job.lr, betas=(job.beta1, job.beta2), eps=job.eps, foreach=False)
    if job.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=job.lr, momentum=job.beta1, foreach=False)
    return torch.optim.Adafactor(groups, lr=job.lr, foreach=False)


def lr_of(step: int, setting: PlainSetting) -> float:
    """Returns the learning rate: linear warm-up to the peak, then the shape, with ``left`` going from 1 to 0."""
    job, steps = setting.train, setting.steps - setting.new_rows_first
    if step <= setting.new_rows_first:  # its own warm-up
        return job.lr * min(1.0, step / max(1, setting.warmup))
    step -= setting.new_rows_first
    if step <= setting.warmup:
        return job.lr * step / setting.warmup
    left = 1 - (step - setting.warmup - 1) / (steps - setting.warmup)
    shapes = {"constant": 1.0, "linear": left, "cosine": math.sin(left * math.pi / 2) ** 2, "wsd": min(1, left * 5)}
    return job.lr * (job.min_lr + (1 - job.min_lr) * shapes[job.schedule])


def summed_loss(model: Any, row: Row) -> tuple[Tensor, int]:
    """Returns the summed cross entropy of a row's trained tokens, and how many of them were the most likely."""
    ids, mask = row
    logits = model(input_ids=ids[None]).logits[0, -len(ids) : -1][mask[1:]]  # virtual tokens come first
    expected = ids[1:][mask[1:]]
    return F.cross_entropy(logits, expected, reduction="sum"), int((logits.argmax(-1) == expected).sum())


def only_new_rows(model: Any, trained: dict[str, Tensor], known: int) -> None:
    """Drops all gradients but those of new tokens' rows."""
    rows = {id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) for p in m.parameters()}
    for parameter in trained.values():
        parameter.grad = parameter.grad if id(parameter) in rows else None
        if parameter.grad is not None:
            parameter.grad[:known] = 0.0


@torch.no_grad()
def evaluation(model: Any, rows: Sequence[Row], step: int) -> Numbers:
    """Returns mean loss and accuracy over all trained tokens of the rows."""
    model.eval()
    losses, right = zip(*(summed_loss(model, row) for row in rows), strict=True)
    model.train()
    count = sum(int(mask[1:].sum()) for _, mask in rows)
    return {(step, "evaluation loss"): float(sum(losses)) / count, (step, "evaluation accuracy"): sum(right) / count}
