"""SmolLM2-135M tuned in every way on the same rows: held-out loss, time, memory and size, side by side.

    python benchmarks/tune_methods.py [--steps 60] [--only NAME ...] [--markdown]

Every run is `stoker train` in a process of its own, with the method's default rate, the same rows in the same order and
the same held-out ones. Memory is the process' largest resident size; of a step's time the median is taken.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

METHODS: dict[str, str] = {
    "full": "full",
    "lora": "lora",
    "rslora": "{method: lora, rslora: true}",
    "dora": "{method: lora, dora: true}",
    "lora+": "{method: lora, loraplus_ratio: 4}",
    "qlora": "qlora",
    "prefix": "prefix",
    "p-tuning v2": "{method: p-tuning, deep: true}",
    "p-tuning": "p-tuning",
    "prompt": "prompt",
}
JOB = """
task: sft
model: smollm2-135m
data: chatterbot-corpus
tune: {tune}
steps: {steps}
train: {{batch: 8}}
evaluate: {{every: {steps}}}
checkpoint: {{every: {steps}, keep: 1, best: false}}
output: {output}
"""


@dataclass(frozen=True)
class Tuned:
    """What a method gave.

    Attributes:
        before, after: held-out loss.
        trained: parameters.
        tokens: trained ones, of all steps.
        seconds: of a step.
        memory: GiB.
    """

    name: str
    before: float
    after: float
    trained: str
    tokens: int
    seconds: float
    memory: float


def tune(name: str, steps: int, folder: Path) -> Tuned:
    """One run."""
    output = folder / name.replace(" ", "-")
    job = folder / f"{output.name}.yaml"
    job.write_text(JOB.format(tune=METHODS[name], steps=steps, output=output), encoding="utf-8")
    command = [sys.executable, "-m", "stoker", "train", str(job), "--json"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=os.environ)
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "evaluated"]
    facts = json.loads((output / "environment.json").read_text())["facts"]
    return Tuned(
        name,
        losses[0],
        losses[-1],
        facts["model"].rsplit("parameters, ", 1)[-1],
        sum(step["trained_tokens"] for step in metrics),
        median(step["seconds"] for step in metrics),
        metrics[-1]["memory_gib"],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", nargs="*", default=list(METHODS), choices=list(METHODS))
    arguments = parser.parse_args()
    print("| method | held-out loss | after | trained | s a step | GiB |\n| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        for method in arguments.only:
            t = tune(method, arguments.steps, Path(name))
            figures = f"{t.before:.3f} | {t.after:.3f} | {t.trained} | {t.seconds:.2f} | {t.memory:.2f}"
            print(f"| {t.name} | {figures} |  <!-- {t.tokens:,} trained tokens -->", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
