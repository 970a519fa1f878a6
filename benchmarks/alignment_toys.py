"""Toy tasks that a policy has to learn, by PPO and by every loss of GRPO, on tiny random models.

    python benchmarks/alignment_toys.py [--tasks length,copy,avoid] [--algorithms ppo,grpo] [--seeds 0 1] [--steps 160]

A model of one block over 4 letters begins at random. The tasks: answers of five tokens (``length``), answers of the
prompt's letter alone (``copy``), answers without the letter a (``avoid``). The best score of each is 1. A cell is the
mean score of the last five rounds of answers, drawn at temperature 1, and the goal is above 0.95 with every seed. Each
cell is printed as it ends, then the table.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LETTERS = "abcd"
END, PAD = "<end>", "<pad>"
GOAL, LAST, PROMPTS, ANSWERS, TOKENS = 0.95, 5, 16, 8, 8
REWARDS = {"length": "length:5", "copy": "python:toy_rewards:copies", "avoid": "python:toy_rewards:avoids"}
FUNCTIONS = '''"""Rewards of the toy tasks."""


def copies(answer, expected, row):
    letters = answer.split()
    return sum(letter == expected for letter in letters) / len(letters) if letters else 0.0


def avoids(answer, expected, row):
    letters = answer.split()
    return float(bool(letters) and "a" not in letters)
'''
LOSSES = ("grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce++")
ALGORITHMS = ("ppo", *LOSSES)


def write_model(folder: Path, seed: int) -> Path:
    """A Llama of one block with random weights, and a tokenizer with a token for each letter."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = [END, PAD, "<unk>", *LETTERS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, unk_token="<unk>")
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(words), max_position_embeddings=64, eos_token_id=0, bos_token_id=None, pad_token_id=1, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_rows(folder: Path, rows: int) -> Path:
    """Prompts of one letter, which the answer is to repeat where the task is that."""
    path = folder / "rows.jsonl"
    draw = random.Random(0)
    asked = [draw.choice(LETTERS) for _ in range(rows)]
    path.write_text("".join(json.dumps({"prompt": letter, "expected": letter}) + "\n" for letter in asked))
    return path


def block_of(algorithm: str, task: str, model: Path) -> dict[str, Any]:
    """The task's block of the job; PPO's critic is a model of its own, of the policy's size."""
    shared = {
        "rewards": REWARDS[task],
        "prompts": PROMPTS,
        "answers": ANSWERS,
        "max_tokens": TOKENS,
        "kl": 0.0,
        "entropy": 0.01,
    }
    if algorithm == "ppo":
        return {"ppo": {**shared, "epochs": 2, "lam": 1.0, "critic": str(model)}}
    # Answers are short: GSPO's own bounds of its ratio are for hundreds of tokens.
    clips = {"clip": 0.2, "clip_high": 0.2} if algorithm == "gspo" else {}
    return {"grpo": {**shared, "loss": algorithm, "epochs": 2, **clips}}


def score(folder: Path, task: str, algorithm: str, seed: int, steps: int) -> list[float]:
    """The mean score of each round of answers of a run."""
    from stoker.cli.output.quiet_libraries import quiet_libraries

    quiet_libraries()
    from stoker.job import load_job
    from stoker.runs.run_folder import RunFolder
    from stoker.train.prepare import prepare
    from stoker.train.run import train_run

    model = write_model(folder / f"model-{seed}", seed)
    (folder / "toy_rewards.py").write_text(FUNCTIONS)
    job = {
        "task": "ppo" if algorithm == "ppo" else "grpo",
        "model": str(model),
        "data": str(write_rows(folder, 2 * PROMPTS)),
        "tune": "full",
        "steps": steps,
        "seed": seed,
        "output": f"{task}-{algorithm}-{seed}",
        "evaluate": {"fraction": 0.0},
        "checkpoint": {"every": 100_000, "best": False, "memory": 0},
        "train": {
            "batch": PROMPTS * ANSWERS // 2, "lr": 5e-3, "schedule": "linear", "warmup": 0, "seq_len": 32,
            "precision": "fp32",
        },
        **block_of(algorithm, task, model),
    }  # fmt: skip
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    loaded = load_job(path)
    run = RunFolder(folder / str(loaded.job.output))
    with run.take():
        train_run(prepare(loaded, folder), run, folder, quiet=True)
    return [line["score"] for line in run.read_metrics() if line["rollout_seconds"]]


def chosen(given: str, known: Sequence[str], option: str) -> list[str]:
    """The names of an option, each of which is known."""
    names = given.split(",")
    odd = [name for name in names if name not in known]
    if odd:
        sys.exit(f"{option} {odd[0]}: take of {', '.join(known)}")
    return names


def main(arguments: Sequence[str] | None = None) -> dict[tuple[str, str], list[float]]:
    """Prints the cells and the table; gives the last scores by (task, algorithm), one a seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(REWARDS))
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=160)
    given = parser.parse_args(arguments)
    tasks = chosen(given.tasks, list(REWARDS), "--tasks")
    algorithms = chosen(given.algorithms, ALGORITHMS, "--algorithms")
    found: dict[tuple[str, str], list[float]] = {}
    for seed in given.seeds:
        for task in tasks:
            for algorithm in algorithms:
                began = time.perf_counter()
                with tempfile.TemporaryDirectory() as folder:
                    scores = score(Path(folder), task, algorithm, seed, given.steps)
                last = sum(scores[-LAST:]) / len(scores[-LAST:])
                found.setdefault((task, algorithm), []).append(last)
                words = f"{task:7} {algorithm:12} seed {seed}: {scores[0]:.3f} -> {last:.3f}"
                print(f"{words} in {time.perf_counter() - began:.0f} s", flush=True)
    print(f"\n| task | {' | '.join(algorithms)} |\n|{' --- |' * (len(algorithms) + 1)}")
    for task in tasks:
        cells = (found[task, algorithm] for algorithm in algorithms)
        print(f"| {task} | {' | '.join(' '.join(f'{value:.3f}' for value in cell) for cell in cells)} |")
    missed = [f"{task} by {algorithm}" for (task, algorithm), cell in found.items() if min(cell) <= GOAL]
    print(
        f"\nabove {GOAL} with every seed: {len(found) - len(missed)} of {len(found)}"
        + (f"; not {', '.join(missed)}" if missed else "")
    )
    return found


if __name__ == "__main__":
    main()
