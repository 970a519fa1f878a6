"""LoRA instruction tuning of SmolLM2-135M on a CPU: Stoker against TRL's SFTTrainer and transformers' Trainer.

    python benchmarks/finetune.py [--rounds 3] [--steps 10]

Every side tunes the same model (float32, LoRA r=16 on all linear layers, AdamW, constant 2e-4) on the same rows in
the same order (single questions and answers of chatterbot-corpus through the model's own chat template, 8 a step),
each in a fresh process, one after the other, in rounds. Printed are medians over the rounds: trained tokens per second
(tokens of the answers with their stop tokens, by the time of all steps but the first two), peak resident memory, the
loss on held-out rows after the same tokens, the matrix ceiling of the machine in the same minutes, and the share of it
that the arithmetic of the plain way (every token of every row through every layer) would be: above what the machine
can do where work is left out.
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

BATCH, RANK, LR, PACKED, WARM = 8, 16, 2e-4, 512, 2
HELD_OUT = 64
SIDES = ("stoker", "trl", "trl-packed", "trainer")


@dataclass
class Result:
    """What one run of a side measured."""

    trained_per_s: float
    tokens_per_s: float
    peak_gib: float
    trained: int
    held_out_loss: float
    ceiling_gflops: float
    model_gflops: float


def rows(folder: Path, steps: int) -> tuple[Path, Path]:
    """The training and held-out rows as JSON lines, made once."""
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    if not train.exists():
        from stoker.data.files.rows import Raw
        from stoker.data.offline.offline_corpora import files
        from stoker.data.offline.offline_corpora import rows as corpus_rows
        from stoker.data.order import permute

        found = []
        for raw in corpus_rows("chatterbot-corpus", files("chatterbot-corpus")):
            if isinstance(raw, Raw) and isinstance(raw.value, dict) and len(raw.value["messages"]) == 2:
                found.append(json.dumps({"messages": raw.value["messages"]}))
        found = [found[int(i)] for i in permute(range(len(found)), len(found), 1)]
        held_out.write_text("\n".join(found[:HELD_OUT]) + "\n")
        train.write_text("\n".join(found[HELD_OUT : HELD_OUT + BATCH * (steps + WARM)]) + "\n")
    return train, held_out


def job_file(folder: Path, steps: int) -> Path:
    """The same job for Stoker; it reads the rows in the order that it shuffles them into."""
    path = folder / "job.yaml"
    path.write_text(
        f"task: sft\nmodel: smollm2-135m\ndata: {folder}/train.jsonl\nsteps: {steps + WARM}\n"
        f"evaluate: {{data: {folder}/held_out.jsonl, every: 100000}}\n"
        f"checkpoint: {{every: 100000, best: false}}\n"
        f"tune: {{method: lora, rank: {RANK}, alpha: {2 * RANK}}}\n"
        f"train: {{lr: {LR}, schedule: constant, warmup: 0, weight_decay: 0.0, batch: {BATCH}, clip: 1.0}}\n"
    )
    return path


def ceiling() -> float:
    """GFLOP/s of a 1024^3 float32 matrix product now: the best of five."""
    import torch

    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best = 0.0
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(8):
            a @ b
        best = max(best, 8 * 2 * 1024**3 / (time.perf_counter() - begin) / 1e9)
    return best


def useful_gflop(tokens: float, trained: float) -> float:
    """GFLOP that LoRA tuning of this model needs: forward and input gradient of 106 M weights a token, and of the
    28 M weights of the head a trained token (the weight gradients of the adapters, under 2 %, left out)."""
    return 4 * 0.1062 * tokens + 4 * 0.0283 * trained


def stoker(folder: Path, steps: int) -> tuple[list[float], int, int, Any, Any]:
    """Stoker's own loop, as ``stoker train`` runs it."""
    from stoker.cli.output.quiet_libraries import quiet_libraries

    quiet_libraries()
    from stoker.job import load_job
    from stoker.runs.run_folder import RunFolder
    from stoker.train.prepare import prepare
    from stoker.train.run import train_run

    loaded = load_job(job_file(folder, steps), [f"output={folder}/run-{os.getpid()}"])
    prepared = prepare(loaded, folder)
    run = RunFolder(Path(str(loaded.job.output)))
    with run.take():
        _, loop = train_run(prepared, run, folder, quiet=True)
    metrics = run.read_metrics()[WARM:]
    model = loop.task.model
    return (
        [m["seconds"] for m in metrics],
        sum(m["tokens"] for m in metrics),
        sum(m["trained_tokens"] for m in metrics),
        model,
        prepared.text.tokenizer,
    )


def held_out_loss(model: Any, tokenizer: Any, folder: Path) -> float:
    """The mean loss of the held-out answers, by plain transformers, row by row: the same judge for every side."""
    import torch
    from peers import encode

    total, count = 0.0, 0
    model.eval()
    with torch.inference_mode():
        for line in (folder / "held_out.jsonl").read_text().splitlines():
            ids, labels = encode(tokenizer, json.loads(line)["messages"])
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
            targets = torch.tensor(labels[1:])
            total += float(torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"))
            count += int((targets != -100).sum())
    return total / count


def run_side(side: str, folder: Path, steps: int) -> Result:
    """One side, in this process."""
    before = ceiling()
    if side == "stoker":
        seconds, tokens, trained, model, tokenizer = stoker(folder, steps)
    else:
        import peers

        seconds, tokens, trained, model, tokenizer = peers.run(side, folder, steps + WARM, WARM)
    from stoker.hardware.process_device import peak_resident

    peak = peak_resident()  # before the held-out loss, whose full logits are not the side's doing
    spent = sum(seconds)  # of all steps: what long rows cost is part of it
    return Result(
        trained / spent,
        tokens / spent,
        peak,
        trained,
        held_out_loss(model, tokenizer, folder),
        (before + ceiling()) / 2,
        useful_gflop(tokens, trained) / spent,
    )


def main() -> None:
    """Runs every side in its own process, in rounds, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print("RESULT " + json.dumps(asdict(run_side(arguments.side, arguments.folder, arguments.steps))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows(folder, arguments.steps)
        results: dict[str, list[Result]] = {side: [] for side in arguments.sides}
        for number in range(arguments.rounds):
            for side in arguments.sides:
                command = [
                    sys.executable,
                    __file__,
                    "--side",
                    side,
                    "--folder",
                    temporary,
                    "--steps",
                    str(arguments.steps),
                ]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
                if not lines:
                    sys.exit(f"{side} failed:\n{done.stderr[-2000:]}")
                results[side].append(Result(**json.loads(lines[-1].removeprefix("RESULT "))))
                print(f"round {number + 1} {side:<10} {results[side][-1]}", file=sys.stderr)
    print_table(results)


def print_table(results: dict[str, list[Result]]) -> None:
    """Medians over the rounds, and ratios to Stoker."""

    def middle(side: str, name: str) -> float:
        return statistics.median(getattr(result, name) for result in results[side])

    print(f"{'':<11} trained/s   ratio   tokens/s   peak GiB   ratio   held-out loss   plain arithmetic / ceiling")
    for side, runs in results.items():
        speed, peak = middle(side, "trained_per_s"), middle(side, "peak_gib")
        faster = middle("stoker", "trained_per_s") / speed if "stoker" in results else float("nan")
        leaner = middle("stoker", "peak_gib") / peak if "stoker" in results else float("nan")
        share = statistics.median(r.model_gflops / r.ceiling_gflops for r in runs)
        print(
            f"{side:<11} {speed:9.1f} {faster:7.2f} {middle(side, 'tokens_per_s'):10.1f} {peak:10.2f} {leaner:7.2f} "
            f"{middle(side, 'held_out_loss'):15.4f}   {share:6.0%} of {middle(side, 'ceiling_gflops'):.0f} GFLOP/s"
        )


if __name__ == "__main__":
    main()
