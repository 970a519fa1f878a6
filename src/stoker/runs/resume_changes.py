"""What a job changes in the run that its output folder already has, and whether the run resumes with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.errors import UserError
from stoker.job.changed_keys import Change, changed_keys, with_effect
from stoker.job.load_job import LoadedJob, load_job
from stoker.runs.run_folder import RunFolder

SET_BY_RUN = ("train.seq_len",)  # keys whose default a run lowers to the limit of its model


@dataclass(frozen=True)
class ResumeChanges:
    """The changes with which a run resumes, and those that it refuses; its data is not compared.

    Attributes:
        folder: the run's, as the job names it.
    """

    folder: str
    accepted: list[Change]
    refused: list[Change]

    def as_json(self) -> dict[str, Any]:
        """Returns it as JSON types; a value is text, None if it is not set."""
        kinds = {"accepted": self.accepted, "refused": self.refused}
        return {"folder": self.folder, **{kind: [each.as_json() for each in found] for kind, found in kinds.items()}}


def resume_changes(loaded: LoadedJob, base: Path) -> ResumeChanges | None:
    """Compares a job with the run in its output folder; returns None if there is none, or its job cannot be read.

    Args:
        base: the folder in which relative paths begin.
    """
    folder = RunFolder(base / loaded.job.output)
    if not folder.job.is_file():
        return None
    try:
        before = load_job(folder.job).job
    except UserError:
        return None
    old, new = with_effect(before, loaded.job)
    for key, value in new.items():
        if value == "auto" or (key in SET_BY_RUN and loaded.origins[key].source == "default"):
            new[key] = old.get(key)
    del old["output"], new["output"]  # the same folder, which each may name in another way
    accepted, refused = changed_keys(old, new)
    has_state = any(event.get("event") == "saved" for event in folder.read_events())
    if not has_state and before.checkpoint.to == loaded.job.checkpoint.to:  # it begins again with any job
        accepted, refused = accepted + refused, []
    return ResumeChanges(loaded.job.output, accepted, refused)
