"""The sides of an iteration of GRPO: 2 prompts x 8 answers of at most 48 tokens, sampled, scored and learnt from.

SmolLM2-135M in float32, LoRA r=16 on all linear layers, no KL, one step on each iteration. The reward is whether an
answer has the word "the". TRL answers with transformers' static generation, which is its faster way here.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

PROMPTS, ANSWERS, TOKENS, RANK, LR = 2, 8, 48, 16, 1e-5
SUBJECTS = ["the sea", "the wind", "an old house", "a long road", "copper", "bread", "a river in spring", "the moon"]


def write_prompts(folder: Path, iterations: int) -> Path:
    """As many prompts as the iterations take, as JSON lines."""
    path = folder / "prompts.jsonl"
    asked = [f"Write two sentences about {SUBJECTS[i % len(SUBJECTS)]}." for i in range(PROMPTS * iterations)]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked), encoding="utf-8")
    return path


def stoker(folder: Path, iterations: int) -> tuple[list[float], list[float]]:
    """Seconds of each iteration, and the mean tokens of an answer in it."""
    from stoker.cli.output.quiet_libraries import quiet_libraries

    quiet_libraries()
    from stoker.job import load_job
    from stoker.runs.run_folder import RunFolder
    from stoker.train.prepare import prepare
    from stoker.train.run import train_run

    path = folder / "grpo.yaml"
    path.write_text(
        f"task: grpo\nmodel: smollm2-135m\ndata: {write_prompts(folder, iterations)}\nsteps: {iterations}\n"
        f"tune: {{method: lora, rank: {RANK}, alpha: {2 * RANK}}}\nevaluate: {{fraction: 0.0}}\n"
        "checkpoint: {every: 100000, best: false}\n"
        f"train: {{lr: {LR}, schedule: constant, warmup: 0, seq_len: 256, precision: fp32}}\n"
        f"grpo: {{rewards: 'regex:\\bthe\\b', prompts: {PROMPTS}, answers: {ANSWERS}, max_tokens: {TOKENS}, kl: 0.0}}\n"
    )
    loaded = load_job(path, [f"output={folder}/run-{os.getpid()}"])
    run = RunFolder(Path(str(loaded.job.output)))
    with run.take():
        train_run(prepare(loaded, folder), run, folder, quiet=True)
    lines = run.read_metrics()
    return [m["seconds"] + m["rollout_seconds"] for m in lines], [m["response_tokens"] for m in lines]


def trl(folder: Path, iterations: int) -> tuple[list[float], list[float]]:
    """The same by TRL's GRPOTrainer."""
    import torch
    from alignment import model_folders
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.begin)

    def has_the(completions: list[Any], **_: Any) -> list[float]:
        return [float("the" in completion[0]["content"].split()) for completion in completions]

    torch.manual_seed(0)
    tokenizer_folder, weights = model_folders(folder)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.pad_token = "<|endoftext|>"
    asked = [json.loads(line)["prompt"] for line in write_prompts(folder, iterations).read_text().splitlines()]
    clock = Clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(weights),
        reward_funcs=has_the,
        args=GRPOConfig(
            output_dir=str(folder / "peer"),
            max_steps=iterations,
            per_device_train_batch_size=PROMPTS * ANSWERS,
            num_generations=ANSWERS,
            max_completion_length=TOKENS,
            learning_rate=LR,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            beta=0.0,
            loss_type="grpo",
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in asked]),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[clock],
    )
    trainer.train()
    lengths = [e["completions/mean_length"] for e in trainer.state.log_history if "completions/mean_length" in e]
    return clock.seconds, lengths
