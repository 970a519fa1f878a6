"""Task ``module``: any torch.nn.Module with a loss and a dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from stoker.data.mix import shuffled_epochs
from stoker.errors import UserError
from stoker.models.objective import Loss
from stoker.parallel.data_parallel.batch_norm import without_batch_statistics
from stoker.train.evaluate import Evaluation, evaluate
from stoker.train.module.shared_buffers import unchanged_buffers
from stoker.train.task import Part, Task, with_tensors

if TYPE_CHECKING:
    from stoker.train.engine import Engine

EVALUATION_SAMPLES = 256  # per held-out forward pass

LossFunction = Callable[[Any, Any], Tensor]
"""loss(outputs, targets) -> the mean over the samples."""


class ModuleTask(Task):
    """Task whose samples are the dataset's (inputs, targets) pairs, in a new order each epoch; a target is a sample.

    Args:
        model: outputs = model(inputs).
        loss: loss(outputs, targets), the mean over the samples.
        data: a map-style dataset of (inputs, targets), or a tuple of tensors, sample by sample.
        evaluation: the held-out data, in the same form.
        seed: seed of the order.
        device: the model's device.
    """

    unit = target = "sample"
    perplexity = True

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        data: Any,
        evaluation: Any,
        *,
        seed: int,
        device: torch.device,
    ) -> None:
        self.model, self.loss_function, self.seed, self.device = model, loss, seed, device
        types = {parameter.dtype for parameter in model.parameters()}
        self.dtype = types.pop() if len(types) == 1 else None
        self.root: Callable[[Any], Any] = model  # the model, or a layout's wrapper around it
        self.data = as_dataset(data, "data")
        self.held_out = as_dataset(evaluation, "evaluate") if evaluation is not None else None
        self.lays_out_ahead = type(self.data) is TensorDataset  # other datasets may draw random numbers

    def epoch_samples(self, epochs: float) -> int:
        return int(len(self.data) * epochs + 1e-9)  # type: ignore[arg-type]

    def _indices(self, first: int, last: int) -> np.ndarray:
        return shuffled_epochs(np.arange(first, last), len(self.data), self.seed, 1)  # type: ignore[arg-type]

    def parts(self, first: int, last: int) -> list[Part]:
        return [self._part(self.data, self._indices(first, last))]

    def _part(self, data: Dataset, indices: np.ndarray) -> Part:
        inputs, targets = with_tensors(default_collate([data[int(i)] for i in indices]), self._typed)
        return Part((inputs, targets), targets=len(indices), tokens=len(indices))

    def _typed(self, values: Tensor) -> Tensor:
        """Returns samples in the type of the model's parameters, if it represents them exactly."""
        if self.dtype is None or values.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return values
        return values.to(self.dtype) if torch.promote_types(values.dtype, self.dtype) == self.dtype else values

    @contextmanager
    def around(self, part: Part) -> Iterator[None]:
        with ExitStack() as idle:
            if not part.targets:
                idle.enter_context(without_batch_statistics())
                idle.enter_context(unchanged_buffers(self.model))
            yield

    def loss(self, part: Part) -> Loss:
        assert isinstance(part.inputs, tuple)
        inputs, targets = part.inputs
        outputs = self.root(inputs)
        mean = self.loss_function(outputs, targets)
        if not isinstance(mean, Tensor) or mean.dim():
            shape = f"a tensor of shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else f"a {type(mean).__name__}"
            raise UserError(f"the loss must give the mean over the samples as one number (a 0-d tensor), not {shape}")
        correct = _correct(outputs, targets)
        return Loss(mean * part.targets, correct if part.targets or correct is None else correct * 0)

    @property
    def evaluates(self) -> bool:
        return self.held_out is not None

    def evaluate(self, engine: Engine) -> Evaluation | None:
        return evaluate(self, engine)

    def nothing(self) -> Part:
        return replace(self._part(self.data, np.zeros(1, dtype=np.int64)), targets=0, tokens=0).to(self.device)

    def evaluation(self) -> Iterator[Part]:
        if self.held_out is None:
            return
        size = len(self.held_out)  # type: ignore[arg-type]
        for start in range(0, size, EVALUATION_SAMPLES):
            yield self._part(self.held_out, np.arange(start, min(start + EVALUATION_SAMPLES, size))).to(self.device)

    def describe_samples(self, first: int, last: int) -> list[str]:
        return [f"data:{int(i)}" for i in self._indices(first, last)]


def as_dataset(data: Any, name: str) -> Dataset:
    """Returns a map-style dataset of (inputs, targets).

    Raises:
        UserError: the data is neither a dataset nor a tuple of tensors, or it is empty.
    """
    if isinstance(data, tuple) and data and all(isinstance(t, Tensor) for t in data):
        sizes = [len(t) if t.dim() else 0 for t in data]
        if len(set(sizes)) > 1:
            raise UserError(f"the tensors of {name} differ in length: {', '.join(f'{size:,}' for size in sizes)}")
        if not sizes[0]:
            raise UserError(f"{name} holds no samples")
        data = TensorDataset(*data)
    kind = type(data).__name__
    if not (hasattr(data, "__getitem__") and isinstance(data, Sized)):
        raise UserError(f"{name} must be a dataset with len() and [index], or a tuple of tensors, not {kind}")
    if len(data) == 0:
        raise UserError(f"{name} holds no samples")
    sample = data[0]  # type: ignore[index]
    if not (isinstance(sample, (tuple, list)) and len(sample) == 2):
        raise UserError(f"a sample of {name} must be (inputs, targets), not {type(sample).__name__}")
    return data  # type: ignore[return-value]


def fingerprint_of(data: Dataset) -> str:
    """Returns a fingerprint of a dataset without reading it: its size, and its content if it consists of tensors."""
    size = f"{len(data)} samples"  # type: ignore[arg-type]
    if not isinstance(data, TensorDataset):
        return size
    digest = hashlib.blake2b(digest_size=16)
    for tensor in data.tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return f"{size}, {digest.hexdigest()}"


def _correct(outputs: Any, targets: Any) -> Tensor | None:
    """Counts the correctly classified samples; None if outputs and targets are not those of a classification."""
    classified = isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.dim() == 2
    if not classified or targets.dim() != 1 or targets.is_floating_point():
        return None
    return (outputs.detach().argmax(1) == targets).sum()
