"""A job's twin in the plain loop: its input, and the cases without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any

from tqdm import tqdm

from stoker.job.blocks.tune_block import TuneBlock
from stoker.job.keys.tune_keys import ADAPTERS, VIRTUAL
from stoker.job.resolved import ResolvedJob
from stoker.job.task_spec import training_of
from stoker.models.families import family_of
from stoker.parallel.float64_mode import in_float64
from stoker.verify import plain_loop
from stoker.verify.difference import Computed
from stoker.verify.layout_cases import Cell
from stoker.verify.plain_rows import batches_of, read
from stoker.verify.toy_job import Twin
from stoker.verify.toy_rows import CHARACTERS, END_ID, KNOWN
from stoker.verify.verify_run import Trace


@dataclass(frozen=True)
class PlainJob:
    """Input of the plain loop's process.

    Attributes:
        rows, held_out: files; ``rows`` has one per source.
        sizes: number of samples of each step.
    """

    setting: plain_loop.PlainSetting
    rows: Sequence[str]
    held_out: str
    sizes: Sequence[int]
    seed: int


def in_other_form(twin: Twin) -> tuple[str, ...]:
    """Returns parts of the names of layers that Stoker trains split or transposed, unlike the plain loop."""
    family = family_of(twin.config) if twin.config is not None else None
    if family is None:
        return ()
    return tuple(f".{path}." for path in (*family.transposed, *(layer.path for layer in family.fused)))


def why_not(twin: Twin, job: ResolvedJob, reference: Trace) -> str | None:
    """Returns why the plain loop cannot run a job; None if it can."""
    return next(_reasons(twin, job, reference), None)


def _reasons(twin: Twin, job: ResolvedJob, reference: Trace) -> Iterator[str]:
    if twin.config is None:
        yield "a module of one's own has no plain loop beside its own"
        return
    if training_of(job).objective is not None:
        yield f"the plain loop's loss is the cross entropy, and task {job.task} has its own"
    if job.train.optimizer == "muon":
        yield "the plain loop has torch's optimizers, whose Muon computes in bfloat16"
    lora = job.tune.method in ADAPTERS
    if in_other_form(twin) and (lora or job.train.optimizer == "adafactor"):
        yield f"{twin.config.model_type} has fused layers, which Stoker trains in parts"
    if job.tune.new_rows_first and family_of(twin.config) is None:
        yield f"which rows of a {twin.config.model_type} belong to tokens is not known"
    if any(".experts." in name and ".lora_" in name for name in reference.weights):
        yield "adapters of experts are not among the names that peft takes layers by"


def plain_job(twin: Twin, cell: Cell, job: ResolvedJob, reference: Trace) -> PlainJob:
    """Returns the plain loop's input for verifying a layout.

    Args:
        job: job of the run in one process.
        reference: trace of that run.
    """
    assert job.model is not None
    steps, tune = twin.steps(cell), job.tune
    counted = steps - tune.new_rows_first
    setting = plain_loop.PlainSetting(
        model=job.model.name,
        train=job.train,
        steps=steps,
        warmup=job.train.warmup if isinstance(job.train.warmup, int) else round(job.train.warmup * counted),
        evaluate_every=twin.saves_at(cell),
        peft=_peft(tune, reference),
        loraplus_ratio=tune.loraplus_ratio if tune.method in ADAPTERS else 1.0,
        first={_peft_name(tune, name): weight for name, weight in reference.first.items()},
        known=KNOWN if tune.new_rows_first else 0,
        vocabulary=len(reference.first[_embedding(twin)]) if tune.new_rows_first else 0,
        new_rows_first=tune.new_rows_first,
    )
    return PlainJob(
        setting, [str(path) for path in twin.rows(cell)], str(twin.held_out(cell)), twin.samples(cell), job.seed
    )


def _embedding(twin: Twin) -> str:
    family = family_of(twin.config)
    assert family is not None
    return f"{family.embedding}.weight"


def as_plain(tune: TuneBlock, run: Trace) -> Computed:
    """Renames a run's parameters to peft's names; leaves out buffers, which training does not change."""
    gradients = {(step, _peft_name(tune, name)): gradient for (step, name), gradient in run.gradients.items()}
    weights = {name: weight for name, weight in run.weights.items() if not name.startswith("buffer/")}
    return Computed(run.numbers, gradients, {_peft_name(tune, name): weight for name, weight in weights.items()})


def _peft_name(tune: TuneBlock, name: str) -> str:
    _, inside, rest = name.partition(".encoder.")
    if tune.method not in VIRTUAL or not inside:
        return name
    return f"prompt_encoder.default.{'embedding.weight' if rest == 'weight' else rest}"


def _peft(tune: TuneBlock, reference: Trace) -> dict[str, Any]:
    """Returns peft's keys for a job's tuning."""
    if tune.method == "full":
        return {}
    if tune.method in ADAPTERS:
        names = (name.removeprefix("base_model.model.").split(".lora_") for name in reference.first)
        adapted = {layer for layer, *matrix in names if matrix}
        numbers = {"r": tune.rank, "lora_alpha": tune.alpha, "use_rslora": tune.rslora, "use_dora": tune.dora}
        return {"peft_type": "LORA", "target_modules": sorted(adapted), **numbers}
    width = {} if tune.width == "auto" else {"encoder_hidden_size": tune.width}
    if tune.method == "prompt":
        kind: dict[str, Any] = {"peft_type": "PROMPT_TUNING"}
    elif tune.method == "prefix" or tune.deep:
        kind = {"peft_type": "PREFIX_TUNING", "prefix_projection": tune.projection and not tune.deep, **width}
    else:
        kind = {"peft_type": "P_TUNING", "encoder_reparameterization_type": tune.encoder.upper(), **width}
    return {**kind, "num_virtual_tokens": tune.tokens}


def run_plain(given: PlainJob) -> Computed:
    """Runs the plain loop in float64."""
    tqdm.set_lock(RLock())  # else it creates a semaphore, which a killed process leaves behind
    setting, length = given.setting, given.setting.train.seq_len
    *sources, held_out = (read(path, CHARACTERS, END_ID, length) for path in (*given.rows, given.held_out))
    capacity = length if setting.train.pack else None
    batches = batches_of(sources, given.sizes, seed=given.seed, capacity=capacity)
    with in_float64():
        return Computed(*plain_loop.train(setting, batches, held_out))
