"""DPO and GRPO of SmolLM2-135M on a CPU, Stoker beside TRL's trainers: of DPO the same real pairs in the same order.

    python benchmarks/alignment.py [PAIRS.jsonl] [--rounds 1] [--steps 4]

Without PAIRS only GRPO is measured; see `alignment_grpo`. PAIRS holds rows with conversations, chosen and rejected.
Both sides of DPO tune the same model (float32, LoRA r=16 on all linear layers, AdamW, constant 1e-5, beta 0.1, at
most 512 tokens, 4 pairs a step). Rows whose prompt leaves no room for an answer are left out beforehand. Each side
runs in a fresh process, one after the other, in rounds. Printed are medians over the rounds: seconds of a step (of
all but the first) and peak resident memory. On stderr are the loss of each step, which is the same up to the line
feed after an answer's end, which TRL trains too, and of GRPO the mean tokens of an answer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import alignment_grpo

PAIRS, RANK, LR, LONGEST, WARM, ROOM = 4, 16, 1e-5, 512, 1, 64
SIDES = ("stoker", "trl")
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


@dataclass
class Result:
    """What one run of a side measured."""

    seconds: float
    peak_gib: float
    beside: list[float]


def messages_of(turns: Any) -> list[dict[str, str]]:
    """Turns of a row as messages."""
    turns = turns if isinstance(turns, list) else [turns]
    return [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in turns]


def rows(source: Path, folder: Path, steps: int) -> Path:
    """As many pairs as the steps take, as JSON lines."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folders(folder)[0])
    found: list[str] = []
    for line in source.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt, sides = messages_of(row["conversations"]), {s: messages_of(row[s]) for s in ("chosen", "rejected")}
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        if len(ids) <= LONGEST - ROOM and len(found) < PAIRS * (steps + WARM):
            found.append(json.dumps({"prompt": prompt, **sides}))
    if len(found) < PAIRS * (steps + WARM):
        sys.exit(f"{source} has {len(found)} pairs that fit, and {PAIRS * (steps + WARM)} are needed")
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(found) + "\n", encoding="utf-8")
    return path


def model_folders(folder: Path) -> tuple[Path, Path]:
    """(tokenizer, weights) of the model, as transformers loads them."""
    from stoker.models.gguf_model import tokenizer_of_gguf, weights_of_gguf
    from stoker.models.model_source import find_model

    source = find_model("smollm2-135m", folder)
    assert source is not None
    return tokenizer_of_gguf(Path(source.where)), weights_of_gguf(Path(source.where))


def stoker(folder: Path, steps: int) -> tuple[list[float], list[float]]:
    """Stoker's own loop, as ``stoker train`` runs it."""
    from stoker.cli.output.quiet_libraries import quiet_libraries

    quiet_libraries()
    from stoker.job import load_job
    from stoker.runs.run_folder import RunFolder
    from stoker.train.prepare import prepare
    from stoker.train.run import train_run

    path = folder / "dpo.yaml"
    path.write_text(
        f"task: dpo\nmodel: smollm2-135m\ndata: {folder}/pairs.jsonl\nsteps: {steps + WARM}\n"
        f"tune: {{method: lora, rank: {RANK}, alpha: {2 * RANK}}}\nevaluate: {{fraction: 0.0}}\n"
        "checkpoint: {every: 100000, best: false}\n"
        f"train: {{lr: {LR}, schedule: constant, warmup: 0, weight_decay: 0.0, batch: {PAIRS}, micro_batch: 2, "
        f"seq_len: {LONGEST}, precision: fp32}}\n"
    )
    loaded = load_job(path, [f"output={folder}/run-{os.getpid()}"])
    prepared = prepare(loaded, folder)
    run = RunFolder(Path(str(loaded.job.output)))
    with run.take():
        train_run(prepared, run, folder, quiet=True)
    metrics = run.read_metrics()
    return [line["seconds"] for line in metrics], [line["loss"] for line in metrics]


def trl(folder: Path, steps: int) -> tuple[list[float], list[float]]:
    """TRL's trainer, its rows in the order in which Stoker draws them."""
    import numpy as np
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    from stoker.data.mix import proportional, shuffled_epochs

    class Rows:
        def __init__(self, rows: int) -> None:
            self.rows = rows

        def nth_rows(self, draws: np.ndarray, key: int) -> np.ndarray:
            return shuffled_epochs(draws, self.rows, key)

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.begin)

    class InOrder(DPOTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any, **__: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    torch.manual_seed(0)
    tokenizer_folder, weights = model_folders(folder)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.pad_token = "<|endoftext|>"
    found = [json.loads(line) for line in (folder / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    _, order = proportional([Rows(len(found))], seed=0).draws(np.arange(len(found)))
    clock = Clock()
    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(weights),
        args=DPOConfig(
            output_dir=str(folder / "peer"),
            max_steps=steps + WARM,
            per_device_train_batch_size=PAIRS,
            learning_rate=LR,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            beta=0.1,
            max_length=LONGEST,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([found[int(i)] for i in order]),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[clock],
    )
    trainer.train()
    return clock.seconds, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def run_side(what: str, side: str, folder: Path, steps: int) -> Result:
    """One side, in this process."""
    if what == "dpo":
        seconds, beside = {"stoker": stoker, "trl": trl}[side](folder, steps)
    else:
        seconds, beside = getattr(alignment_grpo, side)(folder, steps + WARM)
    from stoker.hardware.process_device import peak_resident

    return Result(statistics.mean(seconds[WARM:]), peak_resident(), beside)


def main() -> None:
    """Runs every side in its own process, in rounds, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--what", choices=("dpo", "grpo"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        result = run_side(arguments.what, arguments.side, arguments.folder, arguments.steps)
        print("RESULT " + json.dumps(asdict(result)))
        return
    for what in ("dpo", "grpo") if arguments.pairs else ("grpo",):
        compare(what, arguments)


def compare(what: str, arguments: argparse.Namespace) -> None:
    """Runs the sides of one comparison, and prints its table."""
    results: dict[str, list[Result]] = {side: [] for side in arguments.sides}
    with tempfile.TemporaryDirectory() as temporary:
        if what == "dpo":
            rows(arguments.pairs, Path(temporary), arguments.steps)
        for number in range(arguments.rounds):
            for side in arguments.sides:
                command = [sys.executable, __file__, "--what", what, "--side", side, "--folder", temporary]
                command += ["--steps", str(arguments.steps)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
                if not lines:
                    sys.exit(f"{side} failed:\n{done.stderr[-2000:]}")
                results[side].append(Result(**json.loads(lines[-1].removeprefix("RESULT "))))
                print(f"round {number + 1} {side:<7} {results[side][-1]}", file=sys.stderr)
    print(f"{what:<8} s/step   faster   peak GiB   of its memory")
    own = results.get("stoker", [])
    mine = {name: statistics.median(getattr(r, name) for r in own) for name in ("seconds", "peak_gib") if own}
    for side, runs in results.items():
        seconds, peak = (statistics.median(getattr(r, name) for r in runs) for name in ("seconds", "peak_gib"))
        ratios = (seconds / mine["seconds"], mine["peak_gib"] / peak) if mine else (float("nan"),) * 2
        print(f"{side:<8} {seconds:6.2f} {ratios[0]:8.2f} {peak:10.2f} {ratios[1]:15.2f}")


if __name__ == "__main__":
    main()
