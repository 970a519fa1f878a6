"""The memory that `stoker plan` predicts for a ranking run against what its processes take at most.

    python benchmarks/ranking_memory.py --ids 300000 --width 64

Every row of the log has an id that no other has, so the tables grow to the last step; checkpoints are made on the way.
What is measured is the largest sum of the own memory (`RssAnon`) of the processes that train, which are the
largest, and of what the run has in shared memory, less that of the same job on a log of few ids (Linux).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import yaml

from stoker.runs.shm_folder import shared_folder

BATCH, CHECKPOINTS = 4096, 6


def write(path: Path, rows: int, ids: int) -> None:
    """A log in which each id returns after a number of rows."""
    with path.open("w") as file:
        for n in range(rows):
            file.write(json.dumps({"label": n % 3 % 2, "user_id": n % ids, "price": n % 97 / 4, "timestamp": n}) + "\n")


def own_memory(process: psutil.Process) -> int:
    """Bytes of a process that no file has."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
    except (OSError, StopIteration):
        return 0


def shared(folder: Path) -> int:
    """Bytes in a run's folder in shared memory."""
    total = 0
    with suppress(OSError):  # what has just gone
        for path in folder.rglob("*"):
            with suppress(OSError):
                total += path.stat().st_blocks * 512
    return total


def most_memory(command: list[str], folder: Path, count: int) -> int:
    """Bytes that the largest ``count`` processes of a command take at most, with shared memory."""
    with (folder / "log.txt").open("w") as log:
        run = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        most, found, ended = 0, [0], threading.Event()
        while not ended.is_set():
            if run.poll() is not None:
                ended.set()
            try:
                processes = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
            except psutil.Error:
                continue
            parts = [*sorted(map(own_memory, processes), reverse=True)[:count], shared(shared_folder(folder / "run"))]
            if sum(parts) > most:
                most, found = sum(parts), [round(part / 2**20) for part in parts]
            time.sleep(0.02)
    if run.returncode:
        raise SystemExit((folder / "log.txt").read_text()[-2000:])
    print(f"at most {found} MiB: processes, and shared memory", file=sys.stderr)
    return most


def job_of(width: int, rows: int, processes: int, background: bool) -> dict[str, object]:
    steps = rows // BATCH
    return {
        "task": "ranking",
        "data": "log.jsonl",
        "ranking": {"model": "dcn", "width": width, "table": {"optimizer": "adam", "lr": 0.01}},
        "epochs": 1,
        "output": "run",
        "train": {"batch": BATCH, "precision": "fp32"},
        "evaluate": {"fraction": 0.01, "every": steps},
        "checkpoint": {"every": steps // CHECKPOINTS, "keep": 1, "background": background},
        "parallel": {"data": processes},
        "faults": {"check": False},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=int, default=300_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--foreground", action="store_true", help="checkpoint.background: false")
    given = parser.parse_args()
    found = {}
    for name, ids in (("few ids", 100), ("all ids", given.ids)):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            write(folder / "log.jsonl", given.ids, ids)
            job = job_of(given.width, given.ids, given.processes, not given.foreground)
            (folder / "job.yaml").write_text(yaml.safe_dump(job))
            stoker = [sys.executable, "-m", "stoker"]
            words = [*stoker, "plan", "job.yaml", "--json", "--on", f"1x{given.processes}xh100"]
            plan = json.loads(subprocess.run(words, cwd=folder, check=True, capture_output=True).stdout)
            found[name] = {
                "predicted": plan["on_host"],
                "measured": most_memory([*stoker, "train", "job.yaml"], folder, given.processes),
            }
            found[name] |= {"rows": plan["memory"]["total"], "checkpoint": plan["checkpoint"]}
    more = {key: found["all ids"][key] - found["few ids"][key] for key in ("predicted", "measured")}
    print(json.dumps({"more MiB": {k: round(v / 2**20) for k, v in more.items()}, "of": given.ids, **found}))


if __name__ == "__main__":
    main()
