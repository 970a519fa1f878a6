"""Jobs that the tests submit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.cluster.chosen_target import ChosenTarget, choose_target
from stoker.cluster.slurm.slurm_target import SlurmTarget, open_target
from stoker.cluster.submission import Submission, submission_of
from stoker.job import load_job

JOB: dict[str, Any] = {"task": "sft", "model": "llama-tiny", "data": "rows.jsonl", "steps": 2}


def write_job(folder: Path, **keys: Any) -> Path:
    """A job file with one row of data beside it."""
    (folder / "rows.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    path = folder / "job.yaml"
    path.write_text(json.dumps({**JOB, **keys}))
    return path


def submission_in(folder: Path, *, hosts: int | None = None, **keys: Any) -> Submission:
    """The submission of such a job."""
    loaded = load_job(write_job(folder, **keys))
    return submission_of(loaded, choose_target(loaded, None), folder, hosts=hosts)


def write_programs(folder: Path, programs: Mapping[str, str]) -> None:
    """Writes programs of the shell, by name, into a folder."""
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)


def slurm_target_in(folder: Path, /, **keys: Any) -> tuple[SlurmTarget, ChosenTarget]:
    """The Slurm target of such a job, and what it was chosen from."""
    chosen = choose_target(load_job(write_job(folder, target={"slurm": keys})), None)
    return open_target(chosen), chosen
