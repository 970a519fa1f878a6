"""One GPU: what metrics, heartbeats and checkpoints add to a step of the Llama of one billion parameters.

    python benchmarks/gpu_overhead.py [--steps 30] [--rounds 2] [--json FILE]
    python benchmarks/gpu_overhead.py --tiny --cpu        # the same code on a small shape, to see that it runs

Both sides train the same job, compiled, in one process, in turns. ``without`` writes no metrics, heartbeats or
checkpoints. ``with`` writes metrics, the heartbeats that a supervisor's watchdog reads, and one checkpoint in the
middle, in the background. Printed for each side: the median step from the end of one to the end of the next, the time
between two steps in which the device has no work, and how long training waited for the checkpoint. The last line
relates both sides, with a checkpoint every 500 steps, the default of a long run.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
from gpu import LR, WARM, wait
from gpu_shapes import SHAPES, TINY, Shape, make_inputs

from stoker.cli.output.quiet_libraries import quiet_libraries
from stoker.hardware.process_device import choose_device, open_device
from stoker.job import load_job
from stoker.resilience.heartbeat import Heart
from stoker.runs.run_folder import RunFolder
from stoker.runs.step_metrics import StepMetrics
from stoker.train.hooks import Hook
from stoker.train.prepare import prepare
from stoker.train.records.metrics_log import MetricsLog
from stoker.train.run import train_run

INTERVAL = 500  # steps between two checkpoints
NEVER = 100000


@dataclass
class Result:
    """What one turn of a side measured, in seconds: the median step, its part between steps, and the wait for a
    checkpoint."""

    side: str
    device: str
    step_s: float
    between_s: float
    stall_s: float


def train(folder: Path, shape: Shape, side: str, arguments: argparse.Namespace) -> Result:
    """Trains one turn of a side from the start."""
    device = torch.device("cpu" if arguments.cpu else "cuda")
    kept = side == "with"
    every = arguments.steps // 2 if kept else NEVER
    job = folder / "job.yaml"
    job.write_text(
        f"task: pretrain\nmodel: {folder}/model\ndata: {folder}/rows.jsonl\nsteps: {arguments.steps}\ntune: full\n"
        f"evaluate: {{fraction: 0.0}}\ncheckpoint: {{every: {every}, keep: 1, best: false}}\n"
        f"train: {{lr: {LR}, schedule: constant, warmup: 0, weight_decay: 0.0, batch: {shape.batch}, "
        f"micro_batch: {shape.micro_batch}, seq_len: {shape.length + 1}, pack: false, clip: 1.0}}\n"
    )
    precision = "train.precision=fp32" if arguments.cpu else "train.compile=true"
    run = RunFolder(Path(tempfile.mkdtemp(dir=folder)))
    prepared = prepare(load_job(job, [precision, f"output={run.path}"]), folder)
    ends: list[float] = []
    steps: list[StepMetrics] = []

    def after_step(metrics: StepMetrics) -> None:
        wait(device)
        ends.append(time.perf_counter())
        steps.append(metrics)

    heart = Heart(folder) if kept else Heart()
    unwritten = nullcontext() if kept else patch.object(MetricsLog, "open", lambda _: None)
    with run.take(), unwritten:
        train_run(prepared, run, folder, quiet=True, hooks=[Hook(after_step=after_step)], heart=heart)
    walls = [end - begin for begin, end in zip(ends[WARM - 1 : -1], ends[WARM:], strict=True)]
    measured = steps[WARM:]
    between = [wall - step.seconds - step.stall for wall, step in zip(walls, measured, strict=True)]
    stall = sum(step.stall for step in measured)
    shutil.rmtree(run.path)  # checkpoints of 13 GB
    return Result(side, choose_device().name, statistics.median(walls), statistics.median(between), stall)


def main() -> None:
    """Runs both sides in turns, and prints each turn and their relation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a small shape")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, in float32")
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()
    if arguments.steps < 2 * WARM + 2:
        parser.error(f"--steps {arguments.steps}: the checkpoint in the middle must come after the first {WARM}")
    device = torch.device("cpu") if arguments.cpu else torch.device("cuda", 0)
    open_device(device)
    quiet_libraries()
    shape = SHAPES["pretrain-1b"]
    shape = replace(shape, **TINY) if arguments.tiny else shape
    results: list[Result] = []
    print(f"{'side':<8} {'step s':>9} {'between s':>10} {'checkpoint s':>13}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_inputs(folder, shape, shape.batch * arguments.steps, device)
        for side in ["without", "with"] * arguments.rounds:
            r = train(folder, shape, side, arguments)
            results.append(r)
            print(f"{side:<8} {r.step_s:>9.5f} {r.between_s:>10.6f} {r.stall_s:>13.4f}   {r.device}", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")
            gc.collect()  # the model of this turn
            if not arguments.cpu:
                torch.cuda.empty_cache()
    kept, plain = ([r for r in results if r.side == side] for side in ("with", "without"))
    step, alone = (min(r.step_s for r in side) for side in (kept, plain))
    stall = statistics.median(r.stall_s for r in kept)
    print(
        f"a step: {step / alone - 1:+.2%}; a checkpoint every {INTERVAL} steps: {stall / INTERVAL / alone:+.2%}; "
        f"between steps: {min(r.between_s for r in kept) / step:.2%} of a step"
    )


if __name__ == "__main__":
    main()
