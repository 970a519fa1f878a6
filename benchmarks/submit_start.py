"""Seconds from the command to the end of the first step: `stoker train` here, `stoker submit` over ssh and by Slurm.

Three hosts on this machine (tests/cluster/lab.sh), three processes in each case. Slurm's own time, from its acceptance
of the job to the job's start, is taken off and shown apart.

The hosts share this machine's cores, and each loads PyTorch and what else a process needs, which three processes of one
machine load once. So there are two local starts: of one run with three processes, and of three runs with one process at
the same moment, until the last of them has done its first step. The second is what a start on three hosts takes here
without submission. Three processes on one host over ssh do what the first does, besides submission.

    python benchmarks/submit_start.py [--repeat 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests/cluster")]

from lab import PATH, Lab, missing  # noqa: E402

STEPS = 3


def first_step(run: Path) -> float:
    """When the first step ended, seconds since 1970."""
    return float(json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["time"])


def three_at_once(lab: Lab, number: int) -> float:
    """Seconds until the last of three runs with one process has done its first step."""
    outputs = [lab.folder / f"one-of-three-{number}-{run}" for run in range(3)]
    began = time.time()
    with ThreadPoolExecutor() as threads:
        alone = ["parallel.data=1", "train.batch=1"]
        runs = [threads.submit(lab.stoker, "train", "job.yaml", *alone, f"output={output}") for output in outputs]
    for run in runs:
        run.result()
    return max(map(first_step, outputs)) - began


def scheduled(lab: Lab, job: str) -> float:
    """Seconds that Slurm took from the submission to the start of a job."""
    environment = {"PATH": PATH, "SLURM_CONF": str(lab.folder / "slurm.conf")}
    out = subprocess.run(
        ["scontrol", "show", "job", job, "-o"], env=environment, capture_output=True, text=True, check=True
    )
    times = dict(word.split("=", 1) for word in out.stdout.split() if "=" in word)
    begin, submitted = (
        time.mktime(time.strptime(times[key], "%Y-%m-%dT%H:%M:%S")) for key in ("StartTime", "SubmitTime")
    )
    return begin - submitted


def measure(lab: Lab, repeat: int) -> dict[str, list[float]]:
    """Seconds of each start."""
    found: dict[str, list[float]] = {
        name: [] for name in ("local", "three local", "ssh one host", "ssh", "slurm", "slurm's own")
    }
    for number in range(repeat):
        output = lab.folder / f"local-{number}"
        began = time.time()
        lab.stoker("train", "job.yaml", f"output={output}")
        found["local"].append(first_step(output) - began)
        found["three local"].append(three_at_once(lab, number))
        for target in ("ssh one host", "ssh", "slurm"):
            name = f"{target.replace(' ', '-')}-{number}"
            output, began = lab.folder / name, time.time()
            record = json.loads(
                lab.stoker("submit", "job.yaml", "--on", target.replace(" ", "-"), f"output={output}", "--json")
            )
            lab.stoker("logs", name, "-f")
            own = scheduled(lab, record["handle"]["job"]) if target == "slurm" else 0.0
            found[target].append(first_step(output) - began - own)
            if target == "slurm":
                found["slurm's own"].append(own)
    return found


def main() -> int:
    """Prints the median of each, and its ratio to both local starts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    if lacking := missing():
        print(f"error: {lacking}", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory(prefix="submit-start-") as folder:
        lab = Lab(Path(folder) / "lab", Path(folder) / "base")
        lab.folder.mkdir(), lab.base.mkdir()
        lab.prepare(steps=STEPS, parallel={"data": 3}, train={"batch": 3, "precision": "fp64", "seq_len": 64})
        lab.do("up")
        try:
            lab.do("sshd")
            lab.do("slurm")
            hosts = {"hosts": ["h1", "h2", "h3"], "config": str(lab.folder / "ssh_config")}
            place = {"folder": str(lab.folder / "own/st"), "shared": lab.kind == "loopback"}
            lab.target("ssh", ssh={**hosts, **place, "python": sys.executable, "forward": ["OMP_NUM_THREADS"]})
            one = {**hosts, **place, "hosts": ["h1"], "devices": 3}
            lab.target("ssh-one-host", ssh={**one, "python": sys.executable, "forward": ["OMP_NUM_THREADS"]})
            lab.target("slurm", slurm={"nodes": 3, "gres": "none", "python": lab.python})
            kind, found = lab.kind, measure(lab, arguments.repeat)
        finally:
            lab.do("down")
    local, three = statistics.median(found["local"]), statistics.median(found["three local"])
    for name, seconds in found.items():
        median = statistics.median(seconds)
        listed = " ".join(f"{value:.1f}" for value in seconds)
        print(f"{name:<12} {median:6.1f} s  {median / local:5.2f} x local  {median / three:5.2f} x three  ({listed})")
    if arguments.json:
        arguments.json.write_text(json.dumps({"kind": kind, **found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
