"""The weights of a finished stage as a model's folder, which a later stage begins with.

An adapter is merged into its base in float32, so that the reference of the next stage is the model after this one.
The folder is written once for a checkpoint, verified as any export is.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from stoker.checkpoint.export import Export
from stoker.checkpoint.export_check import export_run
from stoker.checkpoint.load_run import open_run
from stoker.files import read_file, replace_file
from stoker.job.resolved import ResolvedJob
from stoker.job.stage import WEIGHTS

RECORD = "merged.json"


def stage_weights(run: str, digest: str, job: ResolvedJob, base: Path) -> str:
    """Writes the weights of a run's last checkpoint into its folder, unless they are there.

    Args:
        digest: of the checkpoint; see `stoker.train.lineage.weights_digest`.
        job: the stage's, of the user's own file: what it trusts may run.

    Returns:
        How the folder was verified; empty where it was there.

    Raises:
        UserError: the run cannot be merged.
        RunFailed: the disk is full, or the folder does not answer as the run does.
    """
    folder, record = base / run / WEIGHTS, base / run / RECORD
    if folder.is_dir() and _read(record) == digest:
        return ""
    record.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    trusted = [
        f"model.{key}=true"
        for key in ("trust_remote_code", "allow_pickle")
        if job.model is not None and getattr(job.model, key)
    ]
    tuned = open_run(run, base, trusted=trusted)
    done = export_run(tuned, Export("merged", folder), base)
    values = {"digest": digest, "step": tuned.step, "verified": done.verified.line}
    replace_file(record, json.dumps(values, indent=2) + "\n")
    return done.verified.line


def _read(record: Path) -> str:
    try:
        return str(json.loads(read_file(record))["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
