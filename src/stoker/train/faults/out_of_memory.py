"""Reports of GPU out-of-memory errors: the phase, the memory that grew, and the smallest change that fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stoker.errors import CannotRun, Problem, UserError
from stoker.job.conflicts.conflict_view import View
from stoker.job.conflicts.layout_conflicts import LAYOUT_CHECKS
from stoker.job.conflicts.optimizer_conflicts import OPTIMIZER_CHECKS
from stoker.job.conflicts.tune_conflicts import TUNE_CHECKS
from stoker.job.document.yaml_document import JobDocument
from stoker.job.resolved import ResolvedJob
from stoker.job.task_spec import task_of
from stoker.parallel.shard_spec import local_shard
from stoker.plan.memory.memory_formulas import STATES
from stoker.resilience.heartbeat import Heart
from stoker.runs.plan_record import Predicted
from stoker.train.prepared import Prepared
from stoker.train.records.plan_prediction import predicted_for
from stoker.units import GIB

PHASES = {
    "restore": "as the run was set up",
    "data": "as a batch was laid out",
    "train": "in the forward pass",
    "optimizer": "in the optimizer's step",
    "rollouts": "as answers were sampled",
    "evaluate": "in the evaluation",
    "save": "as the state was saved",
}
PARTS = {  # by the name of a function on the stack
    "rollouts": {"_scored": "as answers were rewarded", "score_tokens": "as answers were scored"},
    "train": {"backward": "in the backward pass"},
}
MARGIN = 0.1  # share of the non-state memory by which a change must lower the prediction


@contextmanager
def reported_before_training(device: torch.device) -> Iterator[None]:
    """Turns `torch.OutOfMemoryError` into a `CannotRun` with what the device holds."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        where = "out of memory as the model was prepared"
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            own, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
            others = max(0, total - free - reserved)
            where += f": this process holds {own / GIB:.2f} of {total / GIB:.2f} GiB, and others {others / GIB:.2f} GiB"
        hint = "`stoker plan` predicts the memory of layouts; tune: qlora takes the least on one device"
        raise CannotRun(Problem(where, hint)) from error


@contextmanager
def reported_memory_errors(
    prepared: Prepared, optimizer: Optimizer, heart: Heart, predicted: Predicted | None
) -> Iterator[None]:
    """Turns `torch.OutOfMemoryError` into a `CannotRun` with the phase, what grew, and a change that fits."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        pulse = heart.pulse
        phase, step = (pulse.phase, pulse.step) if pulse is not None else ("start", 0)
        where = f"out of memory in step {step}, {_moment(phase, error.__traceback__)}"
        held = _held(prepared, optimizer)
        parts = [f"{name} {size / GIB:.2f} GiB" for name, size in held.items()]
        if predicted is not None:
            grown, more = _grown(held, predicted)
            what = f"{grown} grew {more / GIB:.2f} GiB" if more > 0 else "nothing grew"
            parts.append(f"{what} beyond the prediction ({predicted.peak / GIB:.2f} GiB in all)")
        problem = Problem(f"{where}: {', '.join(parts)}", smallest_change(prepared, predicted))
        raise CannotRun(problem) from error


def smallest_change(prepared: Prepared, predicted: Predicted | None) -> str:
    """Returns the first change to the job that lowers the predicted memory enough; the cheapest in time come first.

    The limit is the device's memory, or the prediction where that fitted already, less a margin.
    """
    job = prepared.job
    if predicted is None:
        length = f" or train.seq_len (now {job.train.seq_len})" if task_of(job).text else ""
        return f"lower train.micro_batch (now {job.train.micro_batch}){length}"
    processes = predicted.machines * predicted.per_machine
    moving = sum(size for name, size in predicted.memory.items() if name not in STATES)
    limit = min(predicted.upper, _capacity(prepared, predicted.upper)) - MARGIN * moving
    for settings, changed in _changes(job):
        try:
            found = predicted_for(replace(prepared, job=changed), processes, predicted.per_machine)
        except UserError:
            continue
        if found.upper <= limit:
            return f"by prediction {settings} fits ({found.upper / GIB:.2f} GiB at most)"
    return "no change of the micro-batch, recomputation, offload or length fits; `stoker plan` looks at other layouts"


def _changes(job: ResolvedJob) -> Iterator[tuple[str, ResolvedJob]]:
    """Yields settings in command-line form, and the job with them applied."""
    size, length, rollouts = job.train.micro_batch, job.train.seq_len, task_of(job).work.rollouts(job)
    if rollouts is not None and not rollouts.idle_on_host:
        yield _changed(job, **{job.task: {"offload_idle": True}})
    for smaller in (n for n in range(size - 1, 0, -1) if size % n == 0):
        yield _changed(job, train={"micro_batch": smaller})
    least = {} if size == 1 else {"micro_batch": 1}
    recomputed = {} if job.parallel.recompute == "full" else _allowed(job, recompute="full")
    ways = ("optimizer", "activations") if job.parallel.offload == "none" else ()
    offloaded = [keys for way in ways if (keys := _allowed(job, offload=way))]
    if recomputed:
        yield _changed(job, train=least, parallel=recomputed)
    for keys in offloaded:
        yield _changed(job, train=least, parallel=recomputed | keys)
    if rollouts is None:
        yield _changed(job, train=least | {"seq_len": length // 2}, parallel=recomputed)
    else:  # rows are as long as prompts with their answers
        yield _changed(job, train=least, parallel=recomputed, **{job.task: {"max_tokens": rollouts.tokens // 2}})


def _allowed(job: ResolvedJob, **keys: Any) -> dict[str, Any]:
    """Returns keys of `parallel`; none if they conflict with others of the job."""
    view = View(_changed(job, parallel=keys)[1], JobDocument("", {}, {}), set())
    return {} if any(any(check(view)) for check in (*LAYOUT_CHECKS, *OPTIMIZER_CHECKS, *TUNE_CHECKS)) else keys


def _changed(job: ResolvedJob, **blocks: dict[str, Any]) -> tuple[str, ResolvedJob]:
    settings = [f"{block}.{key}={value}" for block, keys in blocks.items() for key, value in keys.items()]
    changed = {block: getattr(job, block).model_copy(update=keys) for block, keys in blocks.items()}
    return " ".join(settings), job.model_copy(update=changed)


def _capacity(prepared: Prepared, otherwise: float) -> float:
    device = prepared.device.torch
    return float(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else otherwise


def _moment(phase: str, trace: TracebackType | None) -> str:
    """Returns the part of the step, from the phase and, within the passes, from the traceback's functions."""
    parts = PARTS.get(phase, {})
    while trace is not None:
        if (name := trace.tb_frame.f_code.co_name) in parts:
            return parts[name]
        trace = trace.tb_next
    return PHASES.get(phase, f"in {phase}")


def _held(prepared: Prepared, optimizer: Optimizer) -> dict[str, float]:
    """Returns bytes by kind: the training state, and everything else that is allocated."""
    device = prepared.device.torch
    parameters = list(prepared.task.model.parameters())
    states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    held = {
        "weights": _bytes(parameters, device),
        "gradients": _bytes([p.grad for p in parameters if p.grad is not None], device),
        "optimizer": _bytes(states, device),
    }
    if device.type == "cuda":
        held["activations and buffers"] = max(0.0, torch.cuda.memory_allocated(device) - sum(held.values()))
    return held


def _bytes(tensors: Iterable[Tensor], device: torch.device) -> float:
    """Returns the bytes of this process' shards on a device; gradients may be views of one bucket."""
    return float(sum(shard.nbytes for shard in map(local_shard, tensors) if shard.device.type == device.type))


def _grown(held: dict[str, float], predicted: Predicted) -> tuple[str, float]:
    """Returns the part that exceeds its prediction most, and by how many bytes."""
    known = {name: predicted.memory.get(name, 0.0) for name in held}
    known["activations and buffers"] = sum(size for name, size in predicted.memory.items() if name not in known)
    return max(((name, size - known[name]) for name, size in held.items()), key=lambda grown: grown[1])
