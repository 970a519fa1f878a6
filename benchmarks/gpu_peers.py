"""One GPU: LoRA on an 8B shape beside TRL: short conversations, preference pairs (DPO), answers of its own (GRPO).

    python benchmarks/gpu_peers.py [--tasks chat dpo grpo] [--sides stoker trl] [--steps 12] [--json FILE]
    python benchmarks/gpu_peers.py --tiny --cpu        # the same code on small shapes, to see that it runs

Both sides begin with the same random weights in bfloat16 and train LoRA r=16 on all linear layers with AdamW on the
same rows. TRL's trainers use no recompute, Liger's kernels with ``--liger``, and for conversations TRL's packing, in
whose rows documents attend to each other unless flash-attn is installed. Each side runs in a fresh process. Measured
by the clock over all steps but the first ones: trained tokens per second (of ``dpo`` pairs, of ``grpo`` tokens of its
answers), seconds of a step, and peak memory. Lengths of rows are spread like those of short chat data: questions of 10
to 80 tokens, answers of 20 to 250.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu import wait
from gpu_shapes import RANK, SHAPES, TINY, WORDS, Shape, make_model
from own_process import in_own_process

LR, WARM, LONGEST = 1e-5, 3, 4096
ROWS = {"chat": 2048, "dpo": 256, "grpo": 256}
PAIRS, PROMPTS, ANSWERS, TOKENS = 16, 8, 8, 128  # of a step
PACKED = 4  # rows of the longest length of a step of chat
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


@dataclass
class Result:
    """What one side of a task measured."""

    task: str
    side: str
    device: str
    rate: float
    step_s: float
    peak_gib: float
    notes: list[float]


@dataclass
class Clock:
    """Steps by the clock: when each ended, and the tokens it trained."""

    device: torch.device
    ends: list[float]
    tokens: list[int]

    def step(self) -> None:
        """Notes the end of a step."""
        wait(self.device)
        self.ends.append(time.perf_counter())

    def seconds(self) -> float:
        """Returns the seconds of the measured steps."""
        return self.ends[-1] - self.ends[WARM - 1]


def write_rows(folder: Path, task: str) -> None:
    """Rows of a task as JSON lines."""
    chance = random.Random(0)

    def words(least: int, most: int) -> str:
        return " ".join(f"w{chance.randrange(WORDS - 10)}" for _ in range(chance.randint(least, most)))

    def said(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    with (folder / f"{task}.jsonl").open("w") as out:
        for _ in range(ROWS[task]):
            row: dict[str, Any] = {"prompt": said("user", words(10, 80))}
            if task == "chat":
                row["completion"] = said("assistant", words(20, 250))
            elif task == "dpo":
                row |= {side: said("assistant", words(20, 250)) for side in ("chosen", "rejected")}
            out.write(json.dumps(row) + "\n")


def stoker(folder: Path, task: str, arguments: argparse.Namespace, clock: Clock) -> list[float]:
    """Stoker's own loop, as ``stoker train`` runs it; returns the losses."""
    from stoker.cli.output.quiet_libraries import quiet_libraries

    quiet_libraries()
    from stoker.job import load_job
    from stoker.runs.run_folder import RunFolder
    from stoker.train.hooks import Hook
    from stoker.train.prepare import prepare
    from stoker.train.run import train_run

    sizes = {
        "chat": f"batch: {PACKED}, micro_batch: {PACKED // 2}, seq_len: {LONGEST}, pack: true",
        "dpo": f"batch: {PAIRS}, micro_batch: {PAIRS // 2}, seq_len: 512",
        "grpo": f"batch: {PROMPTS * ANSWERS}, micro_batch: 32, seq_len: 512",
    }[task]
    path = folder / "job.yaml"
    path.write_text(
        f"task: {'sft' if task == 'chat' else task}\nmodel: {folder}/model\ndata: {folder}/{task}.jsonl\n"
        f"steps: {arguments.steps}\noutput: {folder}/{task}-stoker\n"
        f"tune: {{method: lora, rank: {RANK}, alpha: {2 * RANK}}}\nevaluate: {{fraction: 0.0}}\n"
        "checkpoint: {every: 100000, best: false}\nparallel: {recompute: none}\n"
        f"train: {{lr: {LR}, schedule: constant, warmup: 0, weight_decay: 0.0, clip: 1.0, {sizes}}}\n"
        + (
            f"grpo: {{rewards: 'regex:w1', prompts: {PROMPTS}, answers: {ANSWERS}, max_tokens: {TOKENS}, kl: 0.0}}\n"
            if task == "grpo"
            else ""
        )
    )
    loaded = load_job(path, [*(["train.precision=fp32"] if arguments.cpu else []), *arguments.set])
    run = RunFolder(folder / f"{task}-stoker")
    with run.take():
        train_run(prepare(loaded, folder), run, folder, quiet=True, hooks=[Hook(after_step=lambda _: clock.step())])
    metrics = run.read_metrics()
    answers = "response_tokens"
    clock.tokens += [round(m[answers] * PROMPTS * ANSWERS) if answers in m else m["trained_tokens"] for m in metrics]
    return [m["loss"] for m in metrics]


def trl(folder: Path, task: str, arguments: argparse.Namespace, clock: Clock) -> list[float]:
    """TRL's trainer of the task; returns the losses."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    class Ends(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step()

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    dtype = torch.float32 if arguments.cpu else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype, attn_implementation="sdpa")
    model = model.to(clock.device)
    common: dict[str, Any] = {
        "output_dir": str(folder / "peer"),
        "max_steps": arguments.steps,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "use_cpu": arguments.cpu,
        "bf16": not arguments.cpu,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "use_liger_kernel": arguments.liger,
    }
    rows = [json.loads(line) for line in (folder / f"{task}.jsonl").read_text().splitlines()]
    if task == "grpo":
        rows = [{"prompt": row["prompt"]} for row in rows]
    trainer = _trainer(task, common)(
        model=model,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[Ends()],
    )
    if task == "chat":
        _count_labels(trainer, clock)
    trainer.train()
    log = trainer.state.log_history
    if task == "grpo":
        lengths = [e["completions/mean_length"] for e in log if "completions/mean_length" in e]
        clock.tokens += [round(length * PROMPTS * ANSWERS) for length in lengths]
    elif task == "dpo":
        clock.tokens += [PAIRS] * arguments.steps
    return [e["loss"] for e in log if "loss" in e]


def _trainer(task: str, common: dict[str, Any]) -> Callable[..., Any]:
    from functools import partial

    if task == "chat":
        from trl import SFTConfig, SFTTrainer

        sizes = {"per_device_train_batch_size": PACKED // 2, "gradient_accumulation_steps": 2}
        return partial(SFTTrainer, args=SFTConfig(packing=True, max_length=LONGEST, **sizes, **common))
    if task == "dpo":
        from trl import DPOConfig, DPOTrainer

        sizes = {"per_device_train_batch_size": PAIRS // 2, "gradient_accumulation_steps": 2}
        return partial(DPOTrainer, args=DPOConfig(beta=0.1, max_length=512, **sizes, **common))
    from trl import GRPOConfig, GRPOTrainer

    def has_w1(completions: list[Any], **_: Any) -> list[float]:
        return [float("w1" in completion[0]["content"]) for completion in completions]

    settings = GRPOConfig(
        per_device_train_batch_size=32,
        gradient_accumulation_steps=PROMPTS * ANSWERS // 32,
        num_generations=ANSWERS,
        max_completion_length=TOKENS,
        beta=0.0,
        loss_type="grpo",
        **common,
    )
    return partial(GRPOTrainer, args=settings, reward_funcs=has_w1)


def _count_labels(trainer: Any, clock: Clock) -> None:
    """Notes the trained tokens of each step of TRL's trainer of conversations."""
    step, every = trainer.training_step, trainer.args.gradient_accumulation_steps
    counts: list[int] = []

    def counted(model: Any, inputs: dict[str, Any], *rest: Any, **options: Any) -> Any:
        counts.append(int((inputs["labels"][..., 1:] != -100).sum()))
        if len(counts) == every:
            clock.tokens.append(sum(counts))
            counts.clear()
        return step(model, inputs, *rest, **options)

    trainer.training_step = counted


def run_side(task: str, side: str, arguments: argparse.Namespace) -> Result:
    """One side of a task, in this process."""
    device = torch.device("cpu" if arguments.cpu else "cuda")
    from stoker.hardware.process_device import choose_device, open_device

    open_device(device if arguments.cpu else torch.device("cuda", 0))
    clock = Clock(device, [], [])
    notes = {"stoker": stoker, "trl": trl}[side](arguments.folder, task, arguments, clock)
    measured, steps = choose_device(), len(clock.ends) - WARM
    return Result(
        task,
        side,
        measured.name,
        sum(clock.tokens[WARM : WARM + steps]) / clock.seconds(),
        clock.seconds() / steps,
        measured.peak_memory(),
        notes,
    )


def make(folder: Path, shape: Shape, device: torch.device) -> None:
    """The model's folder and the rows of all tasks."""
    make_model(folder, shape, device, template=TEMPLATE)
    for task in ROWS:
        write_rows(folder, task)


def main() -> None:
    """Runs every side of every task in its own process, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--sides", nargs="+", default=["stoker", "trl"], choices=["stoker", "trl"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--liger", action="store_true", help="TRL with Liger's kernels")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, in float32")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="more keys of Stoker's job")
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print("RESULT " + json.dumps(asdict(run_side(*arguments.side, arguments))))
        return
    if arguments.make:
        shape = replace(SHAPES["lora-8b"], **TINY) if arguments.tiny else SHAPES["lora-8b"]
        make(arguments.folder, replace(shape, length=LONGEST), torch.device("cpu" if arguments.cpu else "cuda"))
        return
    results: list[Result] = []
    failed = False
    print(f"{'task':<6} {'side':<7} {'rate/s':>9} {'step s':>8} {'peak GiB':>9}   losses, device")
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(failure := in_own_process(__file__, "--make", "--folder", folder, cpu=arguments.cpu), str):
            sys.exit(failure)
        for task in arguments.tasks:
            for side in arguments.sides:
                found = in_own_process(__file__, "--side", task, side, "--folder", folder, cpu=arguments.cpu)
                if not isinstance(found, dict):
                    print(f"{task:<6} {side:<7} failed: {found}", flush=True)
                    failed = True
                    continue
                r = Result(**found)
                results.append(r)
                print(
                    f"{task:<6} {side:<7} {r.rate:>9,.0f} {r.step_s:>8.3f} {r.peak_gib:>9.2f}   "
                    f"{r.notes[0]:.4f} to {r.notes[-1]:.4f}, {r.device}",
                    flush=True,
                )
                if arguments.json:
                    arguments.json.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
