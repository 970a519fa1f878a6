"""What a task declares that trains a model of its own instead of a language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # every command loads this file, so it imports no torch
    from pathlib import Path

    from stoker.hardware.process_device import Device
    from stoker.job.load_job import LoadedJob
    from stoker.parallel.mesh import Mesh
    from stoker.train.prepared import Prepared


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """The model of a task and its small copy.

    Attributes:
        prepare: makes model, data and samples; the path is the base of relative ones.
        instead: the suggestion in place of a key without effect.
        toy: (keys of the job's small copy, samples of an epoch, what it leaves out) for `stoker verify`.
    """

    prepare: Callable[[LoadedJob, Device, Mesh | None, Path], Prepared]
    instead: Mapping[str, str] = field(default_factory=dict)
    toy: Callable[[LoadedJob], tuple[dict[str, Any], int, tuple[str, ...]]]
