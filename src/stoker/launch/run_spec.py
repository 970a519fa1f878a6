"""The input of a run's processes, and the paths of their logs.

Light to import: a process opens its log before any heavy import, and the supervisor never needs one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from stoker.job import LoadedJob
from stoker.job.document.yaml_document import JobDocument
from stoker.job.layout import Layout, layout_of
from stoker.launch.first_failure import Failure
from stoker.node_cache.cache_stats import CacheStats
from stoker.node_cache.run_start import run_start


@dataclass(frozen=True)
class RunSpec:
    """A run to train: its job and its folders.

    Attributes:
        base: the folder that the job's relative paths start from.
        output: the run's folder.
        quiet: whether no progress is shown.
        read: the job as it was read, if the planner has chosen its layout since; else None.
        cached: counts of the node cache on this node before the processes started.
        began: start of the run on this node, for content whose origin reports no version; see `run_start`.
    """

    loaded: LoadedJob
    base: Path
    output: Path
    quiet: bool = False
    read: JobDocument | None = None
    cached: CacheStats = field(default_factory=CacheStats)
    began: float = field(default_factory=run_start)

    @property
    def layout(self) -> Layout:
        return layout_of(self.loaded.job)

    @property
    def devices(self) -> Sequence[int] | None:
        """The GPUs that the job selects; None without."""
        devices = self.loaded.job.parallel.devices
        return None if devices == "auto" else devices

    @property
    def logs(self) -> Path:
        """The folder of each rank's output and failure."""
        return self.output / "logs"

    def log_of(self, rank: int) -> Path:
        """Returns the path of a rank's log."""
        return self.logs / f"rank-{rank}.log"

    def failure_of(self, rank: int) -> Path:
        """Returns the path of a rank's failure."""
        return self.logs / f"rank-{rank}.error.json"

    def forget_failures(self) -> None:
        """Removes the failures of an earlier start."""
        for path in self.logs.glob("rank-*.error.json"):
            path.unlink(missing_ok=True)

    def failures(self, ranks: Iterable[int]) -> list[Failure]:
        """Returns the failures that ranks have reported in files that can be read."""
        found = []
        for rank in ranks:
            with suppress(OSError):
                found.append(Failure.read(self.failure_of(rank)))
        return found
