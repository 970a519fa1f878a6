"""Whole runs of `task: dpo` and `task: reward` against TRL's trainers on the same pairs in the same order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from running import run
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from stoker.train.prepared import Prepared

pytestmark = pytest.mark.slow  # TRL's imports and data sets take seconds
ROWS, STEPS, BATCH, LR = 16, 4, 4, 1e-3
WORDS = ["sea", "wind", "poem", "capital"]


@pytest.fixture
def pairs(base: Path, sft: dict[str, Any]) -> dict[str, Any]:
    """A job of full tuning on plain text, so that both sides have the same tokens."""
    with (base / "pairs.jsonl").open("w") as file:
        for i in range(ROWS):
            answers = {"chosen": f" it is {WORDS[i % 4]}" * (1 + i % 3), "rejected": f" no {i}"}
            file.write(json.dumps({"prompt": f"What is {i}:", **answers}) + "\n")
    train = {**sft["train"], "lr": LR, "batch": BATCH, "schedule": "constant", "warmup": 0, "weight_decay": 0.0}
    data = {"path": "pairs.jsonl", "template": "none"}
    return {**sft, "data": [data], "steps": STEPS, "train": train, "evaluate": {"fraction": 0.0}, "tune": "full"}


def ordered(prepared: Prepared, base: Path) -> list[dict[str, str]]:
    """The rows in the order in which Stoker draws them."""
    rows = [json.loads(line) for line in (base / "pairs.jsonl").read_text().splitlines()]
    sequences = prepared.corpus.sequences  # type: ignore[union-attr]
    return [rows[sequences.origin(sequences[i][0])[1] - 1] for i in range(STEPS * BATCH)]


def settings(base: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(base / "peer"), "max_steps": STEPS, "per_device_train_batch_size": BATCH, "learning_rate": LR,
        "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0, "report_to": [], "bf16": False,
        "save_strategy": "no", "logging_steps": 1, "use_cpu": True, "max_length": 64, "gradient_checkpointing": False,
        "disable_tqdm": True, "adam_beta2": 0.999, **more,
    }  # fmt: skip


def in_order(trainer: type) -> type:
    class InOrder(trainer):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, *_: Any, **__: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    return InOrder


def losses_of(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge", "robust"])
def test_dpo_is_that_of_trl(loss: str, pairs: dict[str, Any], base: Path, tiny_model: Path) -> None:
    import trl
    from datasets import Dataset

    smoothing = 0.1 if loss == "robust" else 0.0
    ran = run(base, {**pairs, "task": "dpo", "dpo": {"loss": loss, "label_smoothing": smoothing}})
    trainer = in_order(trl.DPOTrainer)(
        model=AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32),
        args=trl.DPOConfig(**settings(base, beta=0.1, loss_type=[loss], label_smoothing=smoothing)),
        train_dataset=Dataset.from_list(ordered(ran.prepared, base)),
        processing_class=AutoTokenizer.from_pretrained(tiny_model),
    )
    assert losses_of(trainer) == pytest.approx(ran.losses, rel=2e-3, abs=2e-4)  # TRL logs few digits
    assert ran.losses[-1] < ran.losses[0]


def test_reward_is_that_of_trl(pairs: dict[str, Any], base: Path, tiny_model: Path) -> None:
    import trl
    from datasets import Dataset

    ran = run(base, {**pairs, "task": "reward", "reward": {"center": 0.01}, "train": {**pairs["train"], "eps": 1e-8}})
    first = run(
        base, {**pairs, "task": "reward", "steps": 1, "output": "first", "train": {**pairs["train"], "lr": 1e-12}}
    )
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.copy_(first.prepared.task.model.get_output_embeddings().weight)
    trainer = in_order(trl.RewardTrainer)(
        model=model,
        args=trl.RewardConfig(**settings(base, center_rewards_coefficient=0.01)),
        train_dataset=Dataset.from_list(ordered(ran.prepared, base)),
        processing_class=AutoTokenizer.from_pretrained(tiny_model),
    )
    assert losses_of(trainer) == pytest.approx(ran.losses, rel=2e-3, abs=2e-4)
