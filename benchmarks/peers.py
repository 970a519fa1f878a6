"""The other sides of finetune.py: TRL's SFTTrainer as its rows come and packed, and transformers' Trainer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from finetune import BATCH, LR, PACKED, RANK
from peft import LoraConfig, get_peft_model
from torch.utils.data import SequentialSampler
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from stoker.data.mix import proportional, shuffled_epochs
from stoker.models.gguf_model import tokenizer_of_gguf, weights_of_gguf
from stoker.models.model_source import find_model

Times = tuple[list[float], int, int, Any, Any]


class _Rows:
    """A source with a number of rows, as Stoker's mixture sees it."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def nth_rows(self, draws: np.ndarray, key: int) -> np.ndarray:
        return shuffled_epochs(draws, self.rows, key)


def ordered_rows(folder: Path) -> list[list[dict[str, str]]]:
    """The conversations in the order in which Stoker draws them, so that every side sees the same batches."""
    found = [json.loads(line)["messages"] for line in (folder / "train.jsonl").read_text().splitlines()]
    _, order = proportional([_Rows(len(found))], seed=0).draws(np.arange(len(found)))
    return [found[int(i)] for i in order]


def encode(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """(ids, labels) of a conversation: the answer up to its stop token is trained."""
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    labels = [-100] * len(prompt) + ids[len(prompt) :]
    labels[-1] = -100  # the line feed behind the stop token
    return ids, labels


class _Clock(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begin = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.begin)


def run(side: str, folder: Path, steps: int, warm: int) -> Times:
    """Trains some steps; (seconds of each but the first ones, their tokens, trained tokens, model, tokenizer)."""
    source = find_model("smollm2-135m", folder)
    assert source is not None
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of_gguf(Path(source.where)))
    tokenizer.pad_token = "<|endoftext|>"  # its own pad token is its end token, which would then never be trained
    model = AutoModelForCausalLM.from_pretrained(weights_of_gguf(Path(source.where)))
    torch.manual_seed(0)
    clock, counts = _Clock(), []

    def counted(base: type) -> type:
        class Counted(base):  # type: ignore[misc, valid-type]
            def _get_train_sampler(self, *_: Any, **__: Any) -> SequentialSampler:
                return SequentialSampler(self.train_dataset)

            def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any, **options: Any) -> Any:
                mask = inputs.get("attention_mask")
                tokens = int(mask.sum()) if mask is not None else inputs["input_ids"].numel()
                trained = inputs["labels"][..., 1:] != -100
                # TRL also trains the line feed behind a stop token; counted are the answers, as on every side.
                behind = trained & (inputs["labels"][..., :-1] == tokenizer.eos_token_id)
                counts.append((tokens, int((trained & ~behind).sum())))
                return super().training_step(model, inputs, *rest, **options)

        return Counted

    build = _trainer if side == "trainer" else _trl
    trainer = build(counted, model, tokenizer, folder, steps, side == "trl-packed", clock)
    trainer.train()
    measured = counts[warm : len(clock.seconds)]
    return (
        clock.seconds[warm:],
        sum(t for t, _ in measured),
        sum(t for _, t in measured),
        trainer.model,
        tokenizer,
    )


def _common(folder: Path, steps: int) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "peer"),
        "max_steps": steps,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "optim": "adamw_torch",
    }


def _lora() -> LoraConfig:
    return LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


def _trainer(counted: Any, model: Any, tokenizer: Any, folder: Path, steps: int, packed: bool, clock: _Clock) -> Any:
    encoded = [encode(tokenizer, messages) for messages in ordered_rows(folder)]
    data = Dataset.from_list([{"input_ids": ids, "labels": labels} for ids, labels in encoded])
    arguments = TrainingArguments(
        per_device_train_batch_size=BATCH, gradient_checkpointing=False, **_common(folder, steps)
    )
    return counted(Trainer)(
        model=get_peft_model(model, _lora()),
        args=arguments,
        train_dataset=data,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        callbacks=[clock],
    )


def _trl(counted: Any, model: Any, tokenizer: Any, folder: Path, steps: int, packed: bool, clock: _Clock) -> Any:
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"prompt": m[:-1], "completion": m[-1:]} for m in ordered_rows(folder)])
    arguments = SFTConfig(
        per_device_train_batch_size=1 if packed else BATCH,
        packing=packed,
        max_length=PACKED,
        gradient_checkpointing=False,
        **_common(folder, steps),
    )
    return counted(SFTTrainer)(
        model=model,
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=_lora(),
        callbacks=[clock],
    )
