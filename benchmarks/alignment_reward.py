"""Accuracy of a reward model on held-out pairs after one epoch, Stoker beside TRL's RewardTrainer, over seeds.

    python benchmarks/alignment_reward.py [--seeds 0 1 2] [--layers 6]

The packaged pairs of `chatterbot-preferences`, the last fifth held out: a rejected answer is the next question's
own, so questions apart from each other would meet their answers in training. Both sides tune the
first layers of SmolLM2-135M whole (float32, AdamW, linear from 5e-5 to 0 after 10 % of warm-up, 8 pairs a step), from
the same weights and a score head that each draws from its seed, in the order that each draws. Each run is a process of
its own. Printed is the share of the held-out pairs whose chosen answer scores higher.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from alignment import model_folders

PAIRS, LR, WARM_UP, HELD_OUT = 8, 5e-5, 0.1, 5
SIDES = ("stoker", "trl")


def prepare(folder: Path, layers: int) -> int:
    """Writes the model's first layers and the pairs; gives the steps of an epoch."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from stoker.data.offline import offline_corpora

    tokenizer, weights = model_folders(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(weights)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:layers]
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder / "model")

    name = "chatterbot-preferences"
    pairs: list[Any] = [raw.value for raw in offline_corpora.rows(name, offline_corpora.files(name))]
    rows = []
    for pair in pairs:
        sides = {side: [{"role": "assistant", "content": pair[side]}] for side in ("chosen", "rejected")}
        rows.append(json.dumps({"prompt": [{"role": "user", "content": pair["prompt"]}], **sides}))
    end = len(rows) - len(rows) // HELD_OUT
    parts = rows[:end], rows[end:]
    for part, file in zip(parts, ("train.jsonl", "held_out.jsonl"), strict=True):
        (folder / file).write_text("\n".join(part) + "\n", encoding="utf-8")
    print(f"{len(parts[0])} pairs, {len(parts[1])} held out", file=sys.stderr)
    return len(parts[0]) // PAIRS


def stoker(folder: Path, steps: int, seed: int) -> float:
    """``stoker train`` and ``stoker eval``."""
    job, run = folder / f"reward-{seed}.yaml", folder / f"run-{seed}"
    job.write_text(
        f"task: reward\nmodel: {folder}/model\ndata: {folder}/train.jsonl\nsteps: {steps}\nseed: {seed}\n"
        f"output: {run}\ntune: full\nevaluate: {{fraction: 0.0}}\ncheckpoint: {{every: 100000, best: false}}\n"
        f"train: {{lr: {LR}, schedule: linear, warmup: {WARM_UP}, weight_decay: 0.0, batch: {PAIRS}, "
        "precision: fp32}\n"
    )
    subprocess.run([sys.executable, "-m", "stoker", "train", str(job)], check=True, stdout=sys.stderr)
    command = [sys.executable, "-m", "stoker", "eval", str(run), str(folder / "held_out.jsonl"), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    accuracy: float = json.loads(done.stdout)["accuracy"]
    return accuracy


def trl(folder: Path, steps: int, seed: int) -> float:
    """TRL's trainer and its own evaluation."""
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
    from trl import RewardConfig, RewardTrainer

    def rows(file: str) -> Any:
        return Dataset.from_list([json.loads(line) for line in (folder / file).read_text("utf-8").splitlines()])

    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.pad_token = "<|endoftext|>"
    trainer = RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1),
        args=RewardConfig(
            output_dir=str(folder / f"peer-{seed}"),
            max_steps=steps,
            per_device_train_batch_size=PAIRS,
            learning_rate=LR,
            lr_scheduler_type="linear",
            warmup_steps=round(WARM_UP * steps),
            weight_decay=0.0,
            seed=seed,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        ),
        train_dataset=rows("train.jsonl"),
        eval_dataset=rows("held_out.jsonl"),
        processing_class=tokenizer,
    )
    trainer.train()
    return float(trainer.evaluate()["eval_accuracy"])


def main() -> None:
    """Runs every side and seed in a process, and prints the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--layers", type=int, default=6, help="how many of the model's 30 layers")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS, metavar=("SIDE", "FOLDER", "STEPS", "SEED"))
    arguments = parser.parse_args()
    if arguments.run:
        side, folder, steps, seed = arguments.run
        accuracy = {"stoker": stoker, "trl": trl}[side](Path(folder), int(steps), int(seed))
        print(f"RESULT {accuracy}")
        return
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as temporary:
        steps = prepare(Path(temporary), arguments.layers)
        for seed in arguments.seeds:
            for side in SIDES:
                command = [sys.executable, __file__, "--run", side, temporary, str(steps), str(seed)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
                if done.returncode or not results:
                    sys.exit(f"{side}: {done.stderr[-3000:]}")
                found[side].append(float(results[-1].split()[1]))
                print(f"seed {seed} {side}: {found[side][-1]:.4f}", file=sys.stderr, flush=True)
    for side, accuracies in found.items():
        spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        print(f"{side:<8} {statistics.mean(accuracies):.4f} (deviation {spread:.4f}): {accuracies}")


if __name__ == "__main__":
    main()
