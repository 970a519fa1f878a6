"""Seconds from the command to the end of the first step: `stoker train` here, `stoker submit` over ssh and by Slurm.

Three hosts on this machine (tests/cluster/lab.sh), three processes in each case, so the same work on the same cores.
Slurm's own time, from its acceptance of the job to the job's start, is taken off and shown apart.

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
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests/cluster")]

from lab import PATH, Lab, missing  # noqa: E402

STEPS = 3


def first_step(run: Path) -> float:
    """When the first step ended, seconds since 1970."""
    return float(json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["time"])


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
    found: dict[str, list[float]] = {"local": [], "ssh": [], "slurm": [], "slurm's own": []}
    for number in range(repeat):
        output = lab.folder / f"local-{number}"
        began = time.time()
        lab.stoker("train", "job.yaml", f"output={output}")
        found["local"].append(first_step(output) - began)
        for target in ("ssh", "slurm"):
            name = f"{target}-{number}"
            output, began = lab.folder / name, time.time()
            record = json.loads(lab.stoker("submit", "job.yaml", "--on", target, f"output={output}", "--json"))
            lab.stoker("logs", name, "-f")
            own = scheduled(lab, record["handle"]["job"]) if target == "slurm" else 0.0
            found[target].append(first_step(output) - began - own)
            if target == "slurm":
                found["slurm's own"].append(own)
    return found


def main() -> int:
    """Prints the median of each, and its ratio to the local start."""
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
            lab.target("slurm", slurm={"nodes": 3, "gres": "none", "python": lab.python})
            kind, found = lab.kind, measure(lab, arguments.repeat)
        finally:
            lab.do("down")
    local = statistics.median(found["local"])
    for name, seconds in found.items():
        median = statistics.median(seconds)
        listed = " ".join(f"{value:.1f}" for value in seconds)
        print(f"{name:<12} {median:6.1f} s  {median / local:5.2f} x  ({listed})")
    if arguments.json:
        arguments.json.write_text(json.dumps({"kind": kind, **found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
