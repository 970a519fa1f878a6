"""Merges the layouts of several files: divides the processes among the axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.errors import Problem, UserError
from stoker.job.importers.key_outcomes import ENGINE, Carried, Dropped

UNSAID = "the number of processes is not stated: import with `--processes N`, or also write `data: N`"


@dataclass(frozen=True)
class Aside:
    """A line of the job that is written switched off, and why."""

    target: str
    value: Any
    why: str


def settle_layout(
    values: dict[str, Carried], processes: int | None, said_by: str
) -> tuple[dict[str, Carried], list[Aside], list[Dropped]]:
    """Divides the processes among the axes; sets a sharding aside if its number of processes is unknown.

    Raises:
        UserError: the processes cannot be divided by tensor x pipeline x context.
    """
    values = dict(values)
    asides: list[Aside] = []
    dropped: list[Dropped] = []
    others = 1
    for axis in ("tensor", "pipeline", "context"):
        entry = values.get(f"parallel.{axis}")
        others *= max(1, entry.value) if entry is not None else 1  # the schema refuses values below 1
    if processes is not None and "parallel.data" not in values and "parallel.devices" not in values:
        if processes % others:
            message = f"{processes} processes are not a multiple of tensor x pipeline x context = {others}"
            raise UserError(Problem(message, f"`--processes {max(1, processes // others) * others}`"))
        if processes > 1:
            note = f"{processes} processes / (tensor x pipeline x context)" if others > 1 else ""
            data = processes // others
            values["parallel.data"] = Carried(
                target="parallel.data",
                value=data,
                key=said_by,
                given=processes,
                note=note,
                where="",
                tool="",
                strength=ENGINE,
            )
    shard = values.get("parallel.shard")
    if shard is None or shard.value == "none":
        if "parallel.shard_size" in values:
            _remove(values, "parallel.shard_size", "nothing is sharded", dropped)
        return values, asides, dropped
    held, devices, context = (values.get(f"parallel.{key}") for key in ("data", "devices", "context"))
    known = held.value if held is not None else len(devices.value) if devices is not None else None
    if (known or 1) > 1 or (context is not None and context.value > 1):
        return values, asides, dropped
    why = UNSAID if known is None else "there is one process: nothing to spread over"
    for target in ("parallel.shard", "parallel.shard_size", "parallel.offload"):
        entry = values.get(target)
        if entry is None or (target == "parallel.offload" and entry.value != "params"):
            continue
        asides.append(Aside(target, entry.value, why))
        _remove(values, target, why, dropped)
    return values, asides, dropped


def _remove(values: dict[str, Carried], target: str, why: str, dropped: list[Dropped]) -> None:
    dropped.append(values.pop(target).lost(why))
