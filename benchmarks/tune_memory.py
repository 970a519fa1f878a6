"""What each way to tune takes of memory, predicted and measured on this processor; and what was published of GPUs.

    python benchmarks/tune_memory.py [--model smollm2-135m] [--seq-len 256] [--micro-batch 2] [--only NAME ...]
    python benchmarks/tune_memory.py --published FILE

Each method trains some steps of the same rows in a process of its own, with one thread. Its memory is the process'
largest resident size (VmHWM), from its beginning: Python, the libraries and the reading of the model included. The
second form prints peft's published table beside what the planner says of its rows; FILE has a row a line, as
`planner_runs.cases` describes them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner_here import GIB, WORDS

STEPS = 3
PEFT = "huggingface/peft README.md"  # the source of the published rows


@dataclass(frozen=True)
class Method:
    """A way to tune: the job's `tune`, and how its base is held."""

    name: str
    tune: dict[str, Any] = field(default_factory=dict)
    quantise: str | None = None


METHODS = (
    Method("full", {"method": "full"}),
    Method("lora", {"method": "lora"}),
    Method("qlora (nf4)", {"method": "qlora"}),
    Method("lora on 8bit", {"method": "lora"}, "8bit"),
    Method("lora on int8", {"method": "lora"}, "int8"),
    Method("lora on int4", {"method": "lora"}, "int4"),
    *(Method(name, {"method": name}) for name in ("prompt", "p-tuning", "prefix")),
)


def job_of(method: Method, arguments: argparse.Namespace) -> dict[str, Any]:
    """A job of the method."""
    model = {"name": arguments.model} | ({"quantise": method.quantise} if method.quantise else {})
    train = {"seq_len": arguments.seq_len, "batch": arguments.micro_batch, "micro_batch": arguments.micro_batch}
    return {
        "task": "pretrain",
        "model": model,
        "data": [{"path": "words.jsonl"}],
        "tune": method.tune,
        "train": train,
        "steps": STEPS,
        "evaluate": {"every": 1000, "fraction": 0.01},
        "checkpoint": {"every": 1000},
    }


def write_words(path: Path) -> None:
    """Documents longer than a row."""
    import random

    draw = random.Random(0)
    texts = (" ".join(draw.choices(WORDS, k=1500)) for _ in range(40))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def train(path: Path) -> dict[str, Any]:
    """Trains a job in this process; predicted and measured bytes, and what is trained."""
    from stoker.hardware.process_device import peak_resident
    from stoker.job.load_job import load_job
    from stoker.runs.plan_record import read_comparison
    from stoker.runs.run_folder import RunFolder
    from stoker.train.prepare import prepare
    from stoker.train.run import train_run

    loaded = load_job(path, [f"output={path.stem}"])
    folder = RunFolder(path.parent / path.stem)
    with folder.take():
        prepared = prepare(loaded, path.parent)
        train_run(prepared, folder, path.parent, quiet=True)
    comparison = read_comparison(folder)
    assert comparison is not None and comparison.predicted is not None, comparison
    parts = comparison.predicted.memory
    trained = sum(p.numel() for p in prepared.task.model.parameters() if p.requires_grad)
    losses = [line["loss"] for line in folder.read_metrics()]
    return {"measured": peak_resident() * GIB, "parts": parts, "trained": trained, "loss": [losses[0], losses[-1]]}


def measure(method: Method, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The same in a process of its own."""
    path = folder / f"{''.join(c if c.isalnum() else '-' for c in method.name)}.yaml"
    path.write_text(json.dumps(job_of(method, arguments)))  # JSON is YAML
    command = [sys.executable, __file__, "--train", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{method.name}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def here(arguments: argparse.Namespace) -> None:
    """Each method's peak."""
    print(f"{arguments.model}, {arguments.micro_batch} rows of {arguments.seq_len} tokens, {STEPS} steps, one thread")
    print(f"{'method':14} {'trained':>12} {'GiB: predicted':>15} {'measured':>9} {'':>7}  predicted parts, MiB")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_words(folder / "words.jsonl")
        for method in METHODS:
            if arguments.only and not any(part in method.name for part in arguments.only):
                continue
            found = measure(method, folder, arguments)
            predicted, measured = sum(found["parts"].values()), found["measured"]
            parts = ", ".join(f"{part} {size / 2**20:.0f}" for part, size in found["parts"].items())
            print(
                f"{method.name:14} {found['trained']:12,} {predicted / GIB:15.2f} {measured / GIB:9.2f} "
                f"{predicted / measured - 1:+7.1%}  {parts}",
                flush=True,
            )


def published(path: Path) -> None:
    """What was published of methods on GPUs, beside the planner's estimate and its bound."""
    from planner_runs.cases import predict
    from planner_runs.rows import read_rows

    print(f"{'model':40} {'published':>9} {'predicted':>10} {'':>7} {'at most':>8}")
    for _, row in read_rows(path):
        tuned = row.get("source") == PEFT or "lora" in str(row.get("model_name")).lower()
        if not tuned or not row.get("memory_gib"):
            continue
        found = predict(row)
        assert found.memory_gib is not None and found.memory_upper_gib is not None
        off = found.memory_gib / float(row["memory_gib"]) - 1
        print(
            f"{row['model_name']:40} {row['memory_gib']:9.2f} {found.memory_gib:10.2f} {off:+7.1%} "
            f"{found.memory_upper_gib:8.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of methods")
    parser.add_argument("--published", type=Path, metavar="FILE")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        print(json.dumps(train(arguments.train)))
    elif arguments.published:
        published(arguments.published)
    else:
        here(arguments)


if __name__ == "__main__":
    main()
