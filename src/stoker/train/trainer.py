"""Training from Python: a module, a loss and a dataset as objects, under the same schema as a job file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stoker.errors import UserError
from stoker.hardware.process_device import choose_device
from stoker.job.document.yaml_document import JobDocument, Mark
from stoker.job.keys.key_paths import KeyPath, parse_key
from stoker.job.load_job import check_document
from stoker.job.resolved import ResolvedJob
from stoker.parallel.float64_mode import arithmetic_of
from stoker.runs.run_folder import RunFolder
from stoker.train.evaluate import Evaluation, evaluate
from stoker.train.module.prepare_module import prepare_module
from stoker.train.run import train_run

CALLER = "stoker.Trainer"  # shown as the place of a problem's key


@dataclass(frozen=True)
class FitResult:
    """Result of a run.

    Attributes:
        state: ``done``, or ``stopped`` by a signal; `Trainer.fit` then resumes.
        step: optimizer steps done.
        loss: loss of the last step; None if no step was done.
        evaluation: evaluation of the current weights on the held-out data; None without any.
        folder: the run's folder: metrics, events, checkpoints.
        model: the trained module.
    """

    state: str
    step: int
    loss: float | None
    evaluation: Evaluation | None
    folder: Path
    model: nn.Module


class Trainer:
    """Trains any ``torch.nn.Module`` with a run's metrics, exact resume and evaluation.

    Args:
        model: a module, or a callable that returns one (called under the job's seed).
        loss: ``loss(outputs, targets)``, the mean over the samples.
        data: a dataset of (inputs, targets), or a tuple of tensors, sample by sample.
        evaluate: the held-out data, in the same form.
        epochs, steps: length of the run; one epoch by default.
        batch: samples per optimizer step.
        lr: the peak learning rate.
        output: the run's folder. `fit` resumes a stopped run of the same job in it.
        quiet: whether to print nothing.
        more: any other key of the job file, as nested blocks (``train={"clip": 0}``) or dotted
            (``**{"train.schedule": "constant"}``).

    Raises:
        UserError: keys or values are wrong, with the messages for a job file; all of them at once.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss: Callable[[Any, Any], torch.Tensor],
        data: Any,
        evaluate: Any = None,
        *,
        epochs: float | None = None,
        steps: int | None = None,
        batch: int | None = None,
        lr: float | None = None,
        output: str | Path = "runs/module",
        quiet: bool = False,
        **more: Any,
    ) -> None:
        given = {"epochs": epochs, "steps": steps, "train.batch": batch, "train.lr": lr}
        objects = {"model": model, "loss": loss, "data": data, "evaluate": evaluate}
        keys: dict[str, Any] = {"task": "module", "output": str(output)}
        keys |= {f"module.{name}": _name_of(value) for name, value in objects.items() if value is not None}
        keys |= {key: value for key, value in given.items() if value is not None}
        self.job: ResolvedJob = check_document(_document({**keys, **more})).job
        self.quiet = quiet
        self._base = Path.cwd()
        torch.manual_seed(self.job.seed)
        built = model if isinstance(model, nn.Module) else model()
        if not isinstance(built, nn.Module):
            raise UserError(f"{CALLER}: model gives a {type(built).__name__}, not a torch.nn.Module")
        device = choose_device(self.job.train.precision)
        self._prepared = prepare_module(self.job, built, loss=loss, data=data, held_out=evaluate, device=device)

    def fit(self) -> FitResult:
        """Trains to the end; resumes an earlier run in the same folder.

        Raises:
            UserError: another process trains in the folder, or it holds a run of another job.
            RunFailed: the loss is not finite, or a checkpoint could not be written.
        """
        folder = RunFolder(self._base / self.job.output)
        with folder.take():
            result, loop = train_run(self._prepared, folder, self._base, quiet=self.quiet)
        task = self._prepared.task
        with arithmetic_of(self._prepared.device):
            evaluation = loop.evaluation or evaluate(task, self._prepared.engine)
        return FitResult(result.state, result.step, result.last_loss, evaluation, folder.path, task.model)


def _document(keys: Mapping[str, Any]) -> JobDocument:
    """Converts keyword arguments to the document of a job file."""
    data: dict[str, Any] = {}
    for key, value in keys.items():
        *parents, last = parse_key(key)
        holder: Any = data
        for parent in parents:
            holder = holder.setdefault(parent, {})
            if not isinstance(holder, dict):
                raise UserError(f"{CALLER}: `{key}` and `{parent}` are given, and only one of them can be")
        if isinstance(value, Mapping) and isinstance(holder.get(last), dict):
            holder[last].update(value)
        else:
            holder[last] = dict(value) if isinstance(value, Mapping) else value
    return JobDocument(CALLER, data, dict.fromkeys(_paths(data), Mark(CALLER, (0, 0), (0, 0))))


def _paths(value: Any, path: KeyPath = ()) -> list[KeyPath]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    below = [found for key, item in items for found in _paths(item, (*path, key))]
    return [path, *below] if path else below


def _name_of(thing: Any) -> str:
    """Returns an import path that describes an object in the run's folder; importing it may not give the object."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    name = re.sub(r"\W", "_", named.__qualname__.rsplit(".", 1)[-1])
    return f"{named.__module__}:{name}"
