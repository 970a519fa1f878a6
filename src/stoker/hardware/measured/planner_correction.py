"""Corrections of the planner for a device, learnt from finished runs: two factors and a constant, stored as JSON.

A prediction is corrected as

- seconds: computation is multiplied by ``compute``; communication is unchanged;
- memory: estimates (activations and related buffers) are multiplied by ``memory``; and ``constant`` bytes are added.

Model states are exact, and `stoker plan --calibrate` measures collectives: the rest is corrected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from stoker.errors import Problem, UserError
from stoker.files import replace_file
from stoker.hardware.cache_folder import device_file

FORMAT = 1
COPIES = "checkpoint copies"
# Components of memory whose size is known; the others are estimated.
STATES = (
    "weights", "frozen copies", "gradients", "optimizer", "outer step", "compression error", "host copies", "process",
    "workspaces", "keys and values", "replaced weights",
)  # fmt: skip
COUNTED = (*STATES, COPIES)
TRAVEL = ("pipeline sends", "data parallel", "activation copies")  # parts of a step that devices do not compute in
LEAST, MOST = 0.5, 2.0  # limits of one run's factor of activations; a larger error counts as constant
SHORTEST = 0.05  # share of the predicted computation that a measured step leaves for it at least


@dataclass(frozen=True)
class Correction:
    """The correction for one kind of run on one kind of device.

    Attributes:
        device: the catalogue's name of a GPU, the maker's of a processor.
        threads: of a process, on a processor; 0 on a GPU.
        precision, tuning: of the run.
        compute: factor of the seconds of computation.
        memory: factor of the estimated bytes.
        constant: bytes added to them.
        calibration: date of the measurements behind the predictions; None if there are none.
        run, model, date: its source, for the reader.
        stoker: version of the planner that it corrects.
    """

    device: str
    threads: int
    precision: str
    tuning: str
    compute: float = 1.0
    memory: float = 1.0
    constant: float = 0.0
    calibration: str | None = None
    run: str = ""
    model: str = ""
    date: str = ""
    stoker: str = ""

    def memory_parts(self, parts: Mapping[str, float]) -> dict[str, float]:
        """Bytes by component, corrected."""
        found = {name: size * (1.0 if name in COUNTED else self.memory) for name, size in parts.items()}
        return {**found, "as measured": self.constant} if self.constant else found

    def time_parts(self, parts: Mapping[str, float]) -> dict[str, float]:
        """Returns the corrected seconds by cause."""
        return {name: seconds * (1.0 if name in TRAVEL else self.compute) for name, seconds in parts.items()}


def fitted(
    correction: Correction,
    *,
    memory_parts: Mapping[str, float],
    time_parts: Mapping[str, float],
    memory: float,
    seconds: float,
) -> Correction:
    """Returns the correction that turns a run's prediction into its measurement.

    Args:
        correction: supplies the device, precision and other keys.
        memory_parts, time_parts: as predicted without a correction, in bytes and seconds.
        memory, seconds: as measured.
    """
    counted = sum(size for name, size in memory_parts.items() if name in COUNTED)
    estimated = sum(memory_parts.values()) - counted
    travel = sum(spent for name, spent in time_parts.items() if name in TRAVEL)
    computed = sum(time_parts.values()) - travel
    factor = min(MOST, max(LEAST, (memory - counted) / estimated)) if estimated else 1.0
    return replace(
        correction,
        compute=max(SHORTEST, (seconds - travel) / computed),
        memory=factor,
        constant=memory - counted - factor * estimated,
    )


def kept_corrections(device: str, threads: int) -> tuple[Correction, ...]:
    """Returns the corrections of a device, for each precision and tuning, of this version of the planner.

    Raises:
        UserError: the file is damaged.
    """
    path = device_file("correction", device, threads)
    if not path.is_file():
        return ()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = [Correction(**item) for item in data["corrections"]] if data["format"] == FORMAT else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = Problem("the corrections are damaged, and are not used", "remove the file", file=str(path))
        raise UserError(problem) from error
    return tuple(item for item in found if item.stoker == version("stoker"))


def keep(correction: Correction) -> Path:
    """Replaces the correction of its device, precision and tuning; returns the file."""
    path = device_file("correction", correction.device, correction.threads)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):  # two runs may end together
        kept, kind = kept_corrections(correction.device, correction.threads), (correction.precision, correction.tuning)
        others = [item for item in kept if (item.precision, item.tuning) != kind]
        items = [asdict(item) for item in (*others, correction)]
        replace_file(path, json.dumps({"format": FORMAT, "corrections": items}, indent=1) + "\n")
    return path


def forget(device: str, threads: int) -> None:
    """Drops the corrections of a device: they do not apply once the device is measured again."""
    device_file("correction", device, threads).unlink(missing_ok=True)
