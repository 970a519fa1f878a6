"""The keys of a job and the recipes, in the form that the page needs."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, get_origin

from stoker.job.document.job_to_yaml import scalar
from stoker.job.keys.annotations import accepts, alternatives, block_of, choices, describe
from stoker.job.keys.key_paths import TARGET, KeyPath, dotted, field_at, schema_paths, target_paths
from stoker.job.recipes import FOLDER
from stoker.job.resolution.default_reasons import OF_TARGET, REASONS, UNDECIDED

USUAL = {  # keys that a form shows first; the others are folded
    *("task", "model.name", "data.path", "tune.method", "tune.rank", "steps", "epochs", "output", "train.lr"),
    *("train.batch", "train.seq_len", "evaluate.every", "parallel"),
}


def recipe_text(name: str) -> str:
    """Returns a recipe as it is stored, with its few keys."""
    return (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


@cache
def job_keys() -> list[dict[str, Any]]:
    """Returns every key of the schema that has a value."""
    found = []
    for path in (*schema_paths(), *target_paths()):
        field, _ = field_at(_with_index(path))
        if field is None or (block_of(field.annotation)[0] is not None and path != ("evaluate", "data")):
            continue
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        key = dotted(path)
        switch = ["true", "false"] if accepts(field.annotation, bool) else []
        why = OF_TARGET if path[0] == TARGET and len(path) > 1 else REASONS.get(key) or UNDECIDED.get(key, "")
        found.append(
            {
                "path": key,
                "type": describe(field),
                "choices": [*switch, *choices(field.annotation)],
                "only_choices": all(
                    part is bool or get_origin(part) is Literal for part in alternatives(field.annotation)
                ),
                "default": None if default is None else scalar(default),
                "required": field.is_required(),
                "reason": why,
                "meaning": str(field.description or ""),
                "advanced": key not in USUAL,
            }
        )
    return found


def _with_index(path: KeyPath) -> KeyPath:
    """Inserts an index after each list of blocks in a path, as `field_at` requires."""
    whole: KeyPath = ()
    for part in path:
        whole = (*whole, part)
        field, _ = field_at(whole)
        if field is not None and block_of(field.annotation)[1] and whole != path:
            whole = (*whole, 0)
    return whole if len(whole) > len(path) else path
