"""The record of a run that starts or resumes: its job, its environment and its first event."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from stoker.job.document.job_to_yaml import dump_job
from stoker.job.resolved import ResolvedJob
from stoker.runs.run_folder import RunFolder
from stoker.train.prepared import Prepared
from stoker.train.records.recorded_environment import environment
from stoker.train.run_schedule import RunLength

AUDITED = ("rows_in", "rows_used", "rows_cut", "rows_dropped", "tokens", "trained_tokens")  # in the first event


def record_start(
    prepared: Prepared,
    folder: RunFolder,
    length: RunLength,
    facts: dict[str, str],
    *,
    resumed: int,
    where: str | None,
    began: float,
) -> None:
    """Writes the job, the environment and the first event of a run that starts or resumes."""
    job = prepared.job
    folder.write_job(dump_job(job))
    folder.write_json(folder.environment, environment(prepared.device, facts, prepared.fingerprints))
    for name, text in prepared.records.items():
        folder.write_text(folder.path / name, text)
    repeated = folder.forget_after(resumed)
    common: dict[str, Any] = {"task": job.task, "model": _model_name(job), "steps": length.steps}
    common["began"] = round(began, 3)
    if (slurm_job := os.environ.get("SLURM_JOB_ID")) is not None:
        common["slurm_job"] = slurm_job  # so that `--fresh` knows a restart; see `stoker.cli.train.start_over`
    if prepared.audit is not None:
        common["sources"] = [asdict(part) for part in prepared.audit.mixture]
        common["audit"] = {name: getattr(prepared.audit, name) for name in AUDITED}
    if resumed:
        folder.event("resumed", step=resumed, repeated=repeated, where=where, **common)
    else:
        folder.event("started", **common, plan=_plan(job, length))


def _plan(job: ResolvedJob, length: RunLength) -> dict[str, Any]:
    """Returns the value of ``plan`` in the event of a start."""
    train, checkpoint = job.train, job.checkpoint
    return asdict(length) | {
        "batch": train.batch,
        "micro_batch": train.micro_batch,
        "clip": train.clip,
        "seed": job.seed,
        "keep": checkpoint.keep,
        "keep_every": checkpoint.keep_every,
        "keep_best": checkpoint.best,
    }


def _model_name(job: ResolvedJob) -> str:
    return job.model.name if job.model is not None else str(getattr(job, job.task).model)
