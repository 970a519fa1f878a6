"""Merges the layouts of several files: divides the processes among the axes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from stoker.errors import Problem, UserError
from stoker.job.importers.key_outcomes import ENGINE, Carried, Dropped

AXES = ("parallel.tensor", "parallel.pipeline", "parallel.context")
SHARDING = ("parallel.shard", "parallel.shard_size", "parallel.offload")
UNSAID = "the number of processes is not stated: import with `--processes N`, or also write `data: N`"


@dataclass(frozen=True)
class Aside:
    """A line of the job that is written switched off, and why."""

    target: str
    value: Any
    why: str


def settle_layout(
    values: dict[str, Carried], processes: int | None, origin: str
) -> tuple[dict[str, Carried], list[Aside], list[Dropped]]:
    """Divides the processes among the axes; sets a sharding aside if there are no processes known to shard over.

    Raises:
        UserError: the processes cannot be divided by tensor x pipeline x context.
    """
    values = dict(values)
    if processes is not None and "parallel.data" not in values and "parallel.devices" not in values:
        values |= _data_parallel(values, processes, origin)
    shard, context = values.get("parallel.shard"), values.get("parallel.context")
    if shard is None or shard.value == "none":
        idle = values.pop("parallel.shard_size", None)
        return values, [], [idle.lost("nothing is sharded")] if idle else []
    data, devices = values.get("parallel.data"), values.get("parallel.devices")
    known = data.value if data is not None else len(devices.value) if devices is not None else None
    if (known or 1) > 1 or (context is not None and context.value > 1):
        return values, [], []
    why = UNSAID if known is None else "there is one process: nothing to spread over"
    sharding = [values[target] for target in SHARDING if target in values]
    aside = [entry for entry in sharding if entry.target != "parallel.offload" or entry.value == "params"]
    for entry in aside:
        del values[entry.target]
    return values, [Aside(entry.target, entry.value, why) for entry in aside], [entry.lost(why) for entry in aside]


def _data_parallel(values: dict[str, Carried], processes: int, origin: str) -> dict[str, Carried]:
    """Returns the data-parallel size that is left of all processes; nothing for a single process."""
    others = prod(max(1, values[axis].value) for axis in AXES if axis in values)  # the schema refuses values below 1
    if processes % others:
        message = f"{processes} processes are not a multiple of tensor x pipeline x context = {others}"
        raise UserError(Problem(message, f"`--processes {max(1, processes // others) * others}`"))
    if processes == 1:
        return {}
    key, note = "parallel.data", f"{processes} processes / (tensor x pipeline x context)" if others > 1 else ""
    data = processes // others
    return {key: Carried(target=key, value=data, key=origin, given=processes, note=note, strength=ENGINE)}
