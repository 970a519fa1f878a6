"""How long a run takes to train again after kill -9 of a process, where the time goes, and what faults cost a run.

    python benchmarks/recovery.py             # one run, every rank killed in turn: seconds to the next step
    python benchmarks/recovery.py --goodput   # a fault every 60 s of a 10-minute run: the share of its time that counts

The processes are real and are killed from outside. Times are the supervisor's own events, and the death's as this
program saw it.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

ROWS = 4000
JOB = """
task: pretrain
model: llama-10m
data: rows.jsonl
steps: {steps}
output: run
train: {{batch: 4, seq_len: 128, precision: fp32}}
evaluate: {{fraction: 0.0}}
checkpoint: {{every: {every}}}
parallel: {{data: {processes}}}
faults: {{restarts: 3, back_off: 0}}
"""
SENTENCE = "the fire of a furnace is fed by a stoker who keeps it burning while the ship goes on through the night"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="times that each rank is killed")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints on the disk")
    parser.add_argument("--goodput", action="store_true", help="a fault every --apart seconds, for --seconds")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--apart", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        write_rows(base)
        steps = 10**6 if arguments.goodput else 200 * (1 + arguments.rounds * arguments.processes)
        (base / "job.yaml").write_text(JOB.format(steps=steps, every=arguments.every, processes=arguments.processes))
        answer = goodput(base, arguments) if arguments.goodput else recovery(base, arguments)
    if arguments.json:
        print(json.dumps(answer))


def write_rows(base: Path) -> None:
    """Random sentences: what is learnt does not matter."""
    made = random.Random(0)
    with (base / "rows.jsonl").open("w") as file:
        for _ in range(ROWS):
            file.write(json.dumps({"text": " ".join(made.choices(SENTENCE.split(), k=120))}) + "\n")


def recovery(base: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Kills every rank in turn."""
    begun = time.monotonic()
    process = started(base)
    run = base / "run"
    wait_for_step(process, run, 5)
    start = time.monotonic() - begun
    measured: list[dict[str, Any]] = []
    for _ in range(arguments.rounds):
        for rank in range(arguments.processes):
            before = steps_done(run)
            measured.append({"rank": rank, **killed_and_back(process, run, rank), "before": before})
            wait_for_step(process, run, steps_done(run) + 10)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    print(f"start of the run to its fifth step: {start:.1f} s\n")
    columns = ("seconds", "noticed", "started", "restored", "stepped", "lost")
    print(" rank " + "".join(f"{name:>10}" for name in columns))
    for row in measured:
        print(f"{row['rank']:>5} " + "".join(f"{row[name]:>10.2f}" for name in columns))
    middle = {name: median(row[name] for row in measured) for name in columns}
    print("median" + "".join(f"{middle[name]:>10.2f}" for name in columns))
    print("\nseconds: from the kill to the end of the next step; noticed: until the supervisor knew; started: the")
    print("processes ended and started again; restored: tested, model and state; stepped: the first step. lost: steps")
    return {"start": start, "measured": measured, "median": middle}


def goodput(base: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The time of the steps that count, of a time with faults; a step that is done again counts once."""
    process = started(base)
    run = base / "run"
    wait_for_step(process, run, 20)
    first, began = steps_done(run), time.monotonic()
    made, faults = random.Random(1), 0
    while (now := time.monotonic() - began) < arguments.seconds:
        if now > (faults + 0.5) * arguments.apart:  # the first one in the middle of its stretch
            faults += 1
            kill(process, made.randrange(arguments.processes))
        time.sleep(0.2)
        assert process.poll() is None
    done, seconds = steps_done(run) - first, time.monotonic() - began
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    productive = sum(line["seconds"] for line in lines if first < line["step"] <= first + done)
    share = productive / seconds
    print(f"{faults} faults in {seconds:.0f} s: {done} new steps, {productive:.0f} s: goodput {share:.1%}")
    back = [event["seconds"] for event in events(run, "restarted")]
    print(f"from each death to the next step: {', '.join(f'{value:.1f}' for value in back)} s")
    return {"faults": faults, "seconds": seconds, "steps": done, "goodput": share, "recovery": back}


def started(base: Path) -> subprocess.Popen[bytes]:
    with (base / "out").open("wb") as out:
        command = [sys.executable, "-m", "stoker", "train", "job.yaml", "--json"]
        return subprocess.Popen(command, cwd=base, stdout=out, stderr=out)


def killed_and_back(process: subprocess.Popen[bytes], run: Path, rank: int) -> dict[str, float]:
    """Seconds from the kill on, by what they were spent on; and the steps that were done again."""
    count = len(events(run, "restarted"))
    died = time.time()
    kill(process, rank)
    while len(events(run, "restarted")) == count:
        assert process.poll() is None, (run.parent / "out").read_text()
        time.sleep(0.02)
    event = events(run, "restarted")[-1]
    fault, resumed = events(run, "fault")[-1], events(run, "resumed")[-1]
    split = {**event["split"], "noticed": event["time"] - died - sum(list(event["split"].values())[1:])}
    return {"seconds": event["time"] - died, **split, "lost": fault["step"] - resumed["step"]}


def kill(process: subprocess.Popen[bytes], rank: int) -> None:
    """kill -9 of a rank: the first process that writes into its log."""
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(OSError):
            if str(Path(f"/proc/{child.pid}/fd/1").readlink()).endswith(f"rank-{rank}.log"):
                child.kill()
                return


def steps_done(run: Path) -> int:
    path = run / "metrics.jsonl"
    return json.loads(path.read_text().splitlines()[-1])["step"] if path.is_file() and path.stat().st_size else 0


def wait_for_step(process: subprocess.Popen[bytes], run: Path, step: int) -> None:
    while steps_done(run) < step:
        assert process.poll() is None, (run.parent / "out").read_text()
        time.sleep(0.05)


def events(run: Path, name: str) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == name]


if __name__ == "__main__":
    main()
