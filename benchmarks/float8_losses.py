"""Losses of float8 products beside those of bfloat16: a small Llama on the catalogue's speeches, by `stoker train`.

    python benchmarks/float8_losses.py [--sides bf16 tensorwise rowwise fp32] [--steps 500] [--model llama-3m]
                                       [--batch 2] [--length 128] [--json FILE]

All sides train the same random weights on the same rows in the same order. ``tensorwise`` and ``rowwise`` are bf16
with ``train.float8``, which a CPU emulates; ``fp32`` is float32 without it, the measure of what rounding does anyway.
Printed for each side: the mean loss of every 50 steps, and over the last 100 the mean difference from bf16, with the
standard deviation of a step's. A side is printed when it is done.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from stoker.runs.run_folder import RunFolder

EVERY, LAST = 50, 100
SIDES = {
    "bf16": ["train.precision=bf16"],
    "tensorwise": ["train.precision=bf16", "train.float8=tensorwise"],
    "rowwise": ["train.precision=bf16", "train.float8=rowwise"],
    "fp32": ["train.precision=fp32"],
}


def losses(folder: Path, side: str) -> list[float]:
    """Trains one side in its own process; returns the loss of each step."""
    command = [sys.executable, "-m", "stoker", "train", "job.yaml", f"output={side}", *SIDES[side]]
    environment = {**os.environ, "STOKER_CACHE": str(folder / "cache")}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        sys.exit(f"{side} failed: {(done.stdout + done.stderr)[-3000:]}")
    return [line["loss"] for line in RunFolder(folder / side).read_metrics()]


def difference(side: list[float], reference: list[float]) -> tuple[float, float]:
    """The mean difference of two runs' losses over the last steps, and a step's standard deviation."""
    differences = [a - b for a, b in zip(side[-LAST:], reference[-LAST:], strict=True)]
    return statistics.mean(differences), statistics.stdev(differences)


def main() -> None:
    """Trains each side and prints its losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--model", default="llama-3m")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--json", type=Path, help="also write the losses there")
    arguments = parser.parse_args()
    ran: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "job.yaml").write_text(
            f"task: pretrain\nmodel: {arguments.model}\ndata: sotu\nsteps: {arguments.steps}\n"
            f"evaluate: {{fraction: 0.0}}\ncheckpoint: {{every: 100000, best: false}}\n"
            f"train: {{batch: {arguments.batch}, micro_batch: {arguments.batch}, seq_len: {arguments.length}}}\n"
        )
        for side in arguments.sides:
            found = ran[side] = losses(folder, side)
            means = [statistics.mean(found[i : i + EVERY]) for i in range(0, len(found), EVERY)]
            line = f"{side:<10} " + " ".join(f"{mean:.4f}" for mean in means)
            if side != "bf16" and "bf16" in ran:
                mean, deviation = difference(found, ran["bf16"])
                line += f"   from bf16: {mean:+.5f}, deviation {deviation:.5f}"
            print(line, flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(ran) + "\n")


if __name__ == "__main__":
    main()
