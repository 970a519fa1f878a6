"""Whether a job may go on in a folder: the same mathematics on the same data, or one clear word why not."""

from __future__ import annotations

import json
from typing import Any

from ruamel.yaml import YAML

from stoker.errors import UserError
from stoker.job.schema import Job
from stoker.runs.folder import RunFolder

MAY_CHANGE = ("steps", "epochs", "output", "target", "evaluate.every", "checkpoint", "train.tensorboard", "train.compile")


def check_same_job(job: Job, fingerprints: dict[str, str], folder: RunFolder, *, resuming: bool) -> None:
    """Compares the job and its data with those that the folder's checkpoints come from.

    Raises:
        UserError: another job trained here, or the data has changed since.
    """
    if not resuming or not folder.job.is_file():
        return
    before = YAML(typ="safe").load(folder.job.read_text(encoding="utf-8"))
    old, new = _flat(Job.model_validate(before).model_dump()), _flat(job.model_dump())
    differing = [
        f"{key} was {old.get(key)!r} and is {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not any(key == k or key.startswith(f"{k}.") for k in MAY_CHANGE)
    ]
    how = "give another `output`, or --fresh to put the old run aside and start anew"
    if differing:
        raise UserError(f"{folder.path} holds a run of another job ({'; '.join(differing[:5])}): {how}")
    was = json.loads(folder.environment.read_text(encoding="utf-8")).get("data", {}) if folder.environment.is_file() else {}
    changed = [name for name in was if fingerprints.get(name) != was[name]]
    if changed:
        raise UserError(f"{changed[0]} has changed since the run in {folder.path} began: {how}")


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = dict(enumerate(value)).items()  # type: ignore[assignment]
    else:
        return {prefix: value}
    return {k: v for name, item in items for k, v in _flat(item, f"{prefix}.{name}" if prefix else str(name)).items()}
