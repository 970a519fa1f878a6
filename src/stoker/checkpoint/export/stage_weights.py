"""Weights of a finished stage as a model folder, from which a later stage starts.

An adapter is merged into its base in float32, so that the reference of the next stage is the model after this one. The
folder's name depends on the weights: a run that started from other weights does not find these in their place.
"""

from __future__ import annotations

from pathlib import Path

from stoker.checkpoint.export.export_run import export_run
from stoker.checkpoint.export.write_export import Export
from stoker.checkpoint.load_run import open_run
from stoker.job.resolved import ResolvedJob
from stoker.job.stage import weights_folder


def stage_weights(run: str, digest: str, job: ResolvedJob, base: Path) -> str:
    """Writes the weights of a run's last checkpoint beside its folder, unless they exist; verified as any export.

    Args:
        digest: digest of the checkpoint; see `stoker.train.records.lineage.weights_digest`.
        job: the stage's job from the user's file; only code that it trusts may run.

    Returns:
        The result of the verification; empty if the folder existed.

    Raises:
        UserError: the run cannot be merged.
        RunFailed: the disk is full, or the folder does not give the run's answers.
    """
    folder = base / weights_folder(run, digest, base)
    if folder.is_dir():
        return ""
    trusted = [
        f"model.{key}=true"
        for key in ("trust_remote_code", "allow_pickle")
        if job.model is not None and getattr(job.model, key)
    ]
    return export_run(open_run(run, base, trusted=trusted), Export("merged", folder), base).verified.line
