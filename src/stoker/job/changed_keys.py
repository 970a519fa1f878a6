"""Changed keys of a job: those with which its run resumes, and those that need another run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.job.conflicts.all_conflicts import has_effect
from stoker.job.keys.key_paths import KeyPath, dotted, field_at, flat
from stoker.job.resolved import ResolvedJob

# Length, frequencies, layout and limits: none of these changes the result of a step. Keys are without list indices.
MAY_CHANGE = (
    "steps",
    "epochs",
    "output",
    "target",
    "export",
    "data.max_dropped",
    "evaluate.data.max_dropped",
    "evaluate.every",
    "evaluate.rows",
    "evaluate.samples",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.best",
    "checkpoint.keep_every",
    "checkpoint.full_every",
    "checkpoint.background",
    "checkpoint.memory",
    "faults",
    "parallel",
    "train.micro_batch",
    "train.accumulation",
    "train.tensorboard",
    "train.wandb",
    "train.mlflow",
    "train.compile",
    "train.deterministic",
    "ranking.servers",
    "ranking.table.memory_rows",
)
BLOCK = "a block"


@dataclass(frozen=True)
class Change:
    """A key with its value in two jobs, None if it is not set; `BLOCK` is a block that one of them has."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        if BLOCK in (self.before, self.after) and None in (self.before, self.after):
            return f"{self.key} was {'added' if self.before is None else 'removed'}"
        return f"{self.key} was {_shown(self.before)} and is {_shown(self.after)}"

    def as_json(self) -> dict[str, str | None]:
        """Returns the key and both values as text; None if a value is not set."""
        values = {"before": self.before, "after": self.after}
        return {"key": self.key, **{name: None if value is None else str(value) for name, value in values.items()}}


def with_effect(*jobs: ResolvedJob) -> list[dict[str, Any]]:
    """Returns the leaves of jobs by dotted key, without those that have no effect in one of them."""
    leaves = [flat(job.model_dump()) for job in jobs]
    idle = {key for job, own in zip(jobs, leaves, strict=True) for key in own if not changes_run(job, key)}
    return [{key: value for key, value in own.items() if key not in idle} for own in leaves]


def changes_run(job: ResolvedJob, key: str) -> bool:
    """Returns whether a dotted key, as in `flat`, has an effect in a job."""
    return has_effect(job, _path(key))


def _path(key: str) -> KeyPath:
    """Returns the path of a dotted key, as in `flat`. A name of the user's own, such as `regex:[0-9]+`, is its last."""
    parts = key.split(".")
    known = field_at(tuple(int(part) if part.isdigit() else part for part in parts))[1]
    own = ".".join(parts[len(known) :])
    return (*known, *([int(own) if own.isdigit() else own] if own else []))


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Describes the changes that a run refuses; see `changed_keys`."""
    return [str(change) for change in changed_keys(old, new)[1]]


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[Change], list[Change]]:
    """Returns the differences of two jobs by dotted key: those with which a run resumes, and those that it refuses.

    A block that only one of them has is one difference, and so is a list of plain values.
    """
    keys = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    before, after = _with_blocks(old), _with_blocks(new)
    may, may_not = ([key for key in keys if _may_change(key) is accepted] for accepted in (True, False))
    return _changes(may, before, after), _changes(may_not, before, after)


def _changes(keys: list[str], before: Mapping[KeyPath, Any], after: Mapping[KeyPath, Any]) -> list[Change]:
    found = {}
    for path in map(_path, keys):
        heads = (path[:end] for end in range(1, len(path)))
        place = next((head for head in heads if before.get(head) != after.get(head)), path)
        named = dotted(place) + _names_at(place, before, after)
        found[place] = Change(named, before.get(place), after.get(place))
    return list(found.values())


def _names_at(path: KeyPath, *jobs: Mapping[KeyPath, Any]) -> str:
    """Returns `` (NAME, ...)`` of the named entries of a list that a key is in, or that are in it; else empty."""
    names = [
        str(value)
        for job in jobs
        for (*entry, last), value in job.items()
        if last == "name"
        and entry
        and isinstance(entry[-1], int)
        and all(a == b for a, b in zip(entry, path, strict=False))
    ]
    return f" ({', '.join(dict.fromkeys(names))})" if names else ""


def _with_blocks(leaves: Mapping[str, Any]) -> dict[KeyPath, Any]:
    """Returns the values of leaves by path, the values of each list that has no blocks, and `BLOCK` for each block."""
    values = {_path(key): value for key, value in leaves.items()}
    blocks = dict.fromkeys((path[:end] for path in values for end in range(1, len(path))), BLOCK)
    lists: dict[KeyPath, list[Any]] = {}
    for path, value in values.items():
        if isinstance(path[-1], int):
            lists.setdefault(path[:-1], []).append(value)
    return blocks | lists | values


def _shown(value: Any) -> str:
    return "not set" if value is None else BLOCK if value is BLOCK else repr(value)


def _may_change(key: str) -> bool:
    plain = re.sub(r"\.\d+(?=\.)", "", key)
    return any(plain == other or plain.startswith(f"{other}.") for other in MAY_CHANGE)
