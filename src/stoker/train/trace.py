"""What a run of a twin computed, step by step, and how far two of them are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from stoker.checkpoint.gather import gather_whole
from stoker.checkpoint.weights import held_gradients, held_weights
from stoker.job.layout import layout_of
from stoker.job.load import LoadedJob, load_job
from stoker.parallel.exactly import in_float64
from stoker.parallel.mesh import Mesh
from stoker.runs.folder import RunFolder, StepMetrics
from stoker.train.prepare import prepare
from stoker.train.run import start


@dataclass(frozen=True)
class Trace:
    """What one run computed.

    Attributes:
        losses, grad_norms: of each step.
        gradients: whole ones by ``step N: parameter``, of the first and the last step, as the optimizer got them.
        weights: whole ones by parameter, after the last step.
        remark: on the model, where a difference may be its own doing.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    remark: str = ""


@dataclass(frozen=True)
class Difference:
    """The largest difference of one quantity, relative to its largest value where that is above 1.

    Attributes:
        size: NaN where one side is not a number.
        where: the step or the parameter.
    """

    size: float
    where: str

    def within(self, bound: float) -> bool:
        return self.size <= bound  # NaN is not


@dataclass(frozen=True)
class Comparison:
    """How far a run is from the reference."""

    loss: Difference
    grad_norm: Difference
    gradient: Difference
    weight: Difference

    def first_beyond(self, bound: float) -> str | None:
        """The first quantity that differs by more than ``bound``, in words; None where none does."""
        named = {
            "the gradient of": self.gradient,
            "the weight": self.weight,
            "the loss of": self.loss,
            "the gradient norm of": self.grad_norm,
        }
        for what, difference in named.items():
            if not difference.within(bound):
                return f"{what} {difference.where} differs by {difference.size:.2e}, and at most {bound:.0e} is allowed"
        return None


def compare(run: Trace, reference: Trace) -> Comparison:
    """The largest differences of a run from the reference."""
    return Comparison(
        _numbers(run.losses, reference.losses),
        _numbers(run.grad_norms, reference.grad_norms),
        _tensors(run.gradients, reference.gradients),
        _tensors(run.weights, reference.weights),
    )


def _numbers(values: tuple[float, ...], reference: tuple[float, ...]) -> Difference:
    if len(values) != len(reference):
        return Difference(math.inf, f"step {min(len(values), len(reference)) + 1} (one of them has no such step)")
    sizes = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(values, reference, strict=True)]
    return _largest({f"step {i + 1}": size for i, size in enumerate(sizes)})


def _tensors(values: dict[str, Tensor], reference: dict[str, Tensor]) -> Difference:
    odd = sorted(values.keys() ^ reference.keys())
    if odd:
        return Difference(math.inf, f"{odd[0]} (only {'one process' if odd[0] in reference else 'the layout'} has it)")
    sizes = {}
    for name, expected in reference.items():
        value = values[name]
        if value.shape != expected.shape:
            return Difference(math.inf, f"{name} (shape {tuple(value.shape)}, not {tuple(expected.shape)})")
        scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        sizes[name] = float((value - expected).abs().max()) / scale if expected.numel() else 0.0
    return _largest(sizes)


def _largest(sizes: dict[str, float]) -> Difference:
    """The largest; a NaN is larger than every number."""
    if not sizes:
        return Difference(0.0, "nothing")
    where = max(sizes, key=lambda name: math.inf if math.isnan(sizes[name]) else sizes[name])
    return Difference(sizes[where], where)


def trace(job_file: str, device_type: str = "cpu") -> Trace | None:
    """Runs a twin's job file under its layout, in this process and its peers; the trace is rank 0's.

    Args:
        device_type: ``cpu`` or ``cuda``; a layout of one process takes the best device that is here.

    Raises:
        UserError: the layout cannot be.
    """
    path = Path(job_file)
    losses: list[float] = []
    norms: list[float] = []
    gradients: dict[str, Tensor] = {}
    with in_float64():
        loaded = load_job(path)
        mesh = _mesh(loaded, device_type)
        prepared = prepare(loaded, path.parent, mesh=mesh)
        own = (prepared.task.model, prepared.pieces, prepared.aliases)
        _without_dropout(prepared.task.model)

        def on_step(metrics: StepMetrics) -> None:
            losses.append(metrics.loss)
            norms.append(metrics.grad_norm)
            if metrics.step in (1, loaded.job.steps):
                whole = gather_whole(held_gradients(*own))
                gradients.update({f"step {metrics.step}: {name}": gradient for name, gradient in whole.items()})

        assert loaded.job.output is not None
        folder = RunFolder(path.parent / loaded.job.output)
        folder.path.mkdir(exist_ok=True)
        start(prepared, folder, path.parent, quiet=True, on_step=on_step)
        weights = {name.removeprefix("model/"): w for name, w in gather_whole(held_weights(*own)).items()}
    if mesh is not None and not mesh.is_first:
        return None
    return Trace(tuple(losses), tuple(norms), gradients, weights, _remark(prepared.task.model))


def _mesh(loaded: LoadedJob, device_type: str) -> Mesh | None:
    layout = layout_of(loaded.job)
    if layout.one_process:
        return None
    device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    return Mesh(layout, device)


def _without_dropout(model: nn.Module) -> None:
    """The numbers that dropout draws depend on how the work is cut."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _remark(model: nn.Module) -> str:
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return "; its BatchNorm takes its statistics over the samples of one pass, which the layout changes"
    return ""
