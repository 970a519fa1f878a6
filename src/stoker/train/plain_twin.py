"""A job's twin in the plain loop: what it is given, and when it is not asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any

from tqdm import tqdm

from stoker.job.schema import Job
from stoker.job.tuning import VIRTUAL
from stoker.models.families import family_of
from stoker.parallel.exactly import in_float64
from stoker.train import plain
from stoker.train.cells import Cell
from stoker.train.difference import Computed
from stoker.train.plain_rows import batches_of, read
from stoker.train.trace import Trace
from stoker.train.twin import Twin
from stoker.train.twin_rows import CHARACTERS, END_ID


@dataclass(frozen=True)
class PlainJob:
    """What a process needs to run the plain loop.

    Attributes:
        rows, held_out: files.
        sizes: samples of each step.
    """

    setting: plain.Setting
    rows: str
    held_out: str
    sizes: Sequence[int]
    seed: int


def in_other_form(twin: Twin) -> tuple[str, ...]:
    """Parts of the names of layers that Stoker trains split or transposed, which the plain loop does not."""
    family = family_of(twin.config) if twin.config is not None else None
    if family is None:
        return ()
    return tuple(f".{path}." for path in (*family.transposed, *(layer.path for layer in family.fused)))


def why_not(twin: Twin, job: Job, reference: Trace) -> str | None:
    """Why a job is not run by the plain loop; None where it is."""
    if twin.config is None:
        return "a module of one's own has no plain loop beside its own"
    if job.tune.method in VIRTUAL:
        return "virtual tokens are laid out by Stoker itself"
    if job.tune.new_rows_first:
        return "a stage that trains new tokens first is Stoker's own"
    if in_other_form(twin) and (job.tune.method != "full" or job.train.optimizer == "adafactor"):
        return f"{twin.config.model_type} has fused layers, which Stoker trains in parts"
    if any(".experts." in name and ".lora_" in name for name in reference.weights):
        return "adapters of experts are not among the names that peft takes layers by"
    return None


def plain_job(twin: Twin, cell: Cell, job: Job, reference: Trace) -> PlainJob:
    """The plain loop's part in verifying a layout.

    Args:
        job: of the run in one process.
        reference: that run.
    """
    assert job.model is not None
    steps, tune = twin.steps(cell), job.tune
    lora: dict[str, Any] = {}
    if tune.method != "full":
        names = (name.removeprefix("base_model.model.").split(".lora_") for name in reference.first)
        adapted = {layer for layer, *matrix in names if matrix}
        lora = {"r": tune.rank, "lora_alpha": tune.alpha, "use_rslora": tune.rslora, "use_dora": tune.dora}
        lora["target_modules"] = sorted(adapted)
    setting = plain.Setting(
        job.model.name,
        job.train,
        steps,
        job.train.warmup if isinstance(job.train.warmup, int) else round(job.train.warmup * steps),
        twin.saves_at(cell),
        lora,
        tune.loraplus_ratio if lora else 1.0,
        dict(reference.first),
    )
    return PlainJob(setting, str(twin.rows(cell)), str(twin.held_out(cell)), twin.samples(cell), job.seed)


def run_plain(given: PlainJob) -> Computed:
    """What the plain loop computes, in float64."""
    tqdm.set_lock(RLock())  # else it makes a semaphore, which a process that is killed leaves behind
    setting, length = given.setting, given.setting.train.seq_len
    rows, held_out = (read(path, CHARACTERS, END_ID, length) for path in (given.rows, given.held_out))
    capacity = length if setting.train.pack else None
    batches = batches_of(rows, given.sizes, seed=given.seed, capacity=capacity)
    with in_float64():
        return Computed(*plain.train(setting, batches, held_out))
