"""Layouts to verify: the job's own, a file's, or the matrix of all kinds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stoker.job.layout import LOOPED
from stoker.job.load_job import LoadedJob
from stoker.verify.toy_config import ToyShape

MICRO_BATCH = 2  # most sequences of the twin per pass
FEWEST_BLOCKS = 4


@dataclass(frozen=True)
class Cell:
    """A layout to verify, with other changes of the twin's job.

    Attributes:
        name: name for people.
        parallel: the job's ``parallel:`` block as written.
        accumulation: passes per step; by default one, or twice the number of pipeline stages, which suits every
            schedule.
        micro_batch: sequences per pass.
        tune, train: keys that replace the twin's.
    """

    name: str
    parallel: dict[str, Any]
    accumulation: int | None = None
    micro_batch: int = MICRO_BATCH
    tune: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)

    def number(self, key: str) -> int:
        """Returns an integer of the ``parallel:`` block; 1 if it is missing or no integer."""
        value = self.parallel.get(key, 1)
        return value if isinstance(value, int) and not isinstance(value, bool) else 1

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.number("data") * self.number("tensor") * self.number("pipeline") * self.number("context")

    @property
    def blocks(self) -> int:
        """Blocks of the twin's model: at least one per pipeline stage."""
        stages = self.parallel.get("stages")
        if isinstance(stages, list) and all(isinstance(n, int) for n in stages):
            return sum(stages)
        looped = self.parallel.get("schedule") in LOOPED
        return max(FEWEST_BLOCKS, self.number("pipeline") * (2 if looped else 1))

    @property
    def shape(self) -> ToyShape:
        """Sizes of the twin's model that this layout splits over processes."""
        exchanged = self.number("context") if self.parallel.get("context_by") == "ulysses" else 1
        return ToyShape(self.blocks, self.number("tensor"), exchanged)

    @property
    def batch(self) -> dict[str, int]:
        """Batch size, micro-batch size and gradient accumulation."""
        pipeline = self.number("pipeline")
        accumulation = self.accumulation or (2 * pipeline if pipeline > 1 else 1)
        return {
            "batch": self.micro_batch * accumulation * self.number("data"),
            "micro_batch": self.micro_batch,
            "accumulation": accumulation,
        }


LORA = {"method": "lora", "rank": 4}
MATRIX = (
    Cell("DDP", {"data": 2}),
    Cell("zero1", {"data": 2, "shard": "zero1"}),
    Cell("zero2", {"data": 2, "shard": "zero2"}),
    Cell("zero3", {"data": 2, "shard": "zero3"}),
    Cell("hybrid 2 x 2", {"data": 4, "shard": "zero3", "shard_size": 2}),
    Cell("tensor 2", {"tensor": 2, "sequence": False}),
    Cell("tensor 2 + sequence", {"tensor": 2, "sequence": True}),
    Cell("tensor 4", {"tensor": 4}),
    Cell("gpipe", {"pipeline": 2, "schedule": "gpipe"}),
    Cell("1f1b", {"pipeline": 2, "schedule": "1f1b"}),
    Cell("interleaved", {"pipeline": 2, "schedule": "interleaved"}),
    Cell("zero-bubble", {"pipeline": 2, "schedule": "zero-bubble"}),
    Cell("zbv", {"pipeline": 2, "schedule": "zbv"}),
    Cell("context 2, gather", {"context": 2, "context_by": "gather"}),
    Cell("context 2, ulysses", {"context": 2, "context_by": "ulysses"}),
    Cell("3D 2 x 2 x 2", {"data": 2, "shard": "zero2", "tensor": 2, "pipeline": 2}),
    Cell("zero3 + tensor + LoRA", {"data": 2, "shard": "zero3", "tensor": 2}, tune=LORA),
    Cell("recompute full", {"data": 2, "shard": "zero3", "recompute": "full"}),
    Cell("accumulation 4", {"data": 2, "shard": "zero2"}, accumulation=4),
    Cell("uneven tokens", {"data": 4, "shard": "zero3"}, micro_batch=1),
    Cell("packed rows", {"data": 2, "tensor": 2}, train={"pack": True}),
)


def job_case(loaded: LoadedJob) -> Cell:
    """Returns the job's own layout, with as few blocks per stage as a twin has."""
    job = loaded.job
    written = loaded.document.data.get("parallel")
    parallel = dict(written) if isinstance(written, dict) else {}
    for key in ("devices", "async_tensor"):  # place and speed, not what is computed
        parallel.pop(key, None)
    if job.parallel.data > 1:
        parallel["data"] = job.parallel.data
    stages = parallel.get("stages")
    if isinstance(stages, list):
        parallel["stages"] = [1 if n == min(stages) else 2 for n in stages]
    micro_batch = min(job.train.micro_batch, MICRO_BATCH)
    return Cell("the job's own", parallel, accumulation=job.train.accumulation, micro_batch=micro_batch)


def reference_of(cell: Cell) -> Cell:
    """Returns the same steps in one process with one pass each: no parallelism, no recomputation."""
    batch = cell.batch["batch"]
    return Cell("one process", {}, accumulation=1, micro_batch=batch, tune=cell.tune, train=cell.train)
