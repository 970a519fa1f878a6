"""What a task declares that trains a model of its own instead of a language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # of rooms above too; see the import contract
    from pathlib import Path

    from stoker.data.ranking.log_audit import LogAudit
    from stoker.hardware.machines.cluster import Cluster
    from stoker.hardware.process_device import Device
    from stoker.job.load_job import LoadedJob
    from stoker.parallel.mesh import Mesh
    from stoker.runs.run_folder import RunFolder
    from stoker.train.prepared import Prepared
    from stoker.train.ranking.evaluation_metrics import RankingFigures
    from stoker.train.ranking.export_ranking import RankingExport
    from stoker.train.ranking.plan_ranking import RankingPlan


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """The model of a task, its data, its evaluation and its export.

    Attributes:
        prepare: makes model, data and samples; the path is the base of relative ones.
        sources: whether the task reads rows of ``data``; else it brings its data, too.
        instead: the suggestion in place of a key without effect.
        plan: predicts memory and communication.
        gate: with sources, raises on invalid data; called once, before processes start.
        audit: with sources, the report of `stoker data`; gets the rows to show.
        measure: the result of `stoker eval` for a run: called with the run, the data (None for the held-out rows), its
            format, the checkpoint, the keys that may run code, and the base of relative paths.
        toy: (keys of the job's small copy, samples of an epoch, what it leaves out) for `stoker verify`.
        export: exports a run: called with the run, the target, the checkpoint, the keys that may run code, the base of
            relative paths, the number of a store's versions to keep, and a function that is called with each stage.
    """

    prepare: Callable[[LoadedJob, Device, Mesh | None, Path], Prepared]
    sources: bool = False
    instead: Mapping[str, str] = field(default_factory=dict)
    plan: Callable[[LoadedJob, Path, Cluster], RankingPlan] | None = None
    gate: Callable[[LoadedJob, Path], None] | None = None
    audit: Callable[[LoadedJob, Path, Sequence[tuple[str, int]]], LogAudit] | None = None
    measure: Callable[[str, str | None, str, str, Sequence[str], Path], RankingFigures] | None = None
    toy: Callable[[LoadedJob], tuple[dict[str, Any], int, tuple[str, ...]]]
    export: (
        Callable[[str, str, str, Sequence[str], Path, int, Callable[[str], None]], tuple[RunFolder, RankingExport]]
        | None
    ) = None
