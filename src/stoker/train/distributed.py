"""The engine of a layout: each process has its share of the samples, of the rows, or of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from stoker.checkpoint.object_collectives import run_on_all_ranks
from stoker.hardware.process_device import Device
from stoker.models.attention.collate import Inputs, pad_with_document
from stoker.models.objective import Reading, likeliest
from stoker.parallel.context_parallel import own_part, parts_of_row
from stoker.parallel.data_parallel.shard import micro_batch, reshard
from stoker.parallel.gradients import Gradients
from stoker.parallel.mesh import Mesh
from stoker.train.engine import Counts, Totals
from stoker.train.part_passes import evaluating, forward, forward_backward, read, totals_of, zero_loss
from stoker.train.task import Part, Task

if TYPE_CHECKING:
    from stoker.generate.decoder import Decoder
    from stoker.parallel.pipeline import Pipeline

T = TypeVar("T")
LENGTHS = 64  # tokens: rows of a pipeline are padded to multiples of this, so that buffer sizes seldom change


class Distributed:
    """The engine of a layout: each process has its share of the samples, of the rows, or of the model."""

    def __init__(
        self,
        task: Task,
        device: Device,
        mesh: Mesh,
        *,
        root: nn.Module | None,
        pipeline: Pipeline | None,
        gradients: Gradients,
    ) -> None:
        self._task, self._device, self._mesh = task, device, mesh
        self._root, self._pipeline, self._gradients = root, pipeline, gradients
        self.first, self.replicas = mesh.is_first, mesh.layout.data

    def share(self, first: int, last: int, batch: int) -> tuple[int, int]:
        # The shares differ where an earlier version's run has prompts that its processes cannot share equally.
        place, count = self._mesh.data_index, self._mesh.layout.data
        start, end = first + place * batch // count, first + (place + 1) * batch // count
        return min(last, start), min(last, end)

    def rng_stream(self) -> int:
        mesh, layout = self._mesh, self._mesh.layout
        alike = mesh.at("tensor") if layout.sequence else 0  # else tensor ranks drop alike
        place = (mesh.at("pipe") * layout.data + mesh.data_index) * layout.context + mesh.at("context")
        return place * layout.tensor + alike

    def gather(self, mine: Callable[[], list[T]]) -> list[T]:
        mesh = self._mesh
        counts = not any(mesh.at(axis) for axis in ("tensor", "context", "pipe"))
        found = run_on_all_ranks(lambda: (mesh.data_index, mine()) if counts else None)
        return [one for _, some in sorted(filter(None, found), key=lambda pair: pair[0]) for one in some]

    def count(self, parts: Sequence[Part]) -> Counts:
        mesh, layout = self._mesh, self._mesh.layout
        own = sum(p.targets for p in parts)
        mine = Counts(own, sum(p.tokens for p in parts), len(parts), own)
        if layout.data == 1:
            return self._fitting(mine)
        # On the CPU: the number of passes determines the launched kernels, and the host must not wait for the device.
        everybody = torch.zeros(layout.data, 3, dtype=torch.int64)
        if mesh.at("context") == 0:
            everybody[mesh.data_index] = torch.tensor([mine.targets, mine.tokens, mine.passes])
        dist.all_reduce(everybody, group=mesh.groups["data"])
        targets, tokens, _ = everybody.sum(0).tolist()
        of_island = int(everybody.view(layout.islands, -1, 3)[mesh.at("island"), :, 0].sum())
        return self._fitting(Counts(targets, tokens, int(everybody[:, 2].max()), of_island))

    def _fitting(self, counts: Counts) -> Counts:
        """Raises the number of passes to one that the pipeline's schedule accepts."""
        passes = counts.passes
        while self._pipeline is not None and not self._mesh.layout.takes(passes):
            passes += 1
        return replace(counts, passes=passes)

    def train(self, parts: Sequence[Part], counts: Counts, scaler: torch.amp.GradScaler) -> Tensor:
        parts = [*parts, *[self._task.nothing()] * (counts.passes - len(parts))]
        total = zero_loss(self._device)
        if self._pipeline is not None:
            rows = [part.inputs for part in self._laid_out(parts, alike=True)]
            with self._device.autocast():
                losses = self._pipeline.train(rows, 1.0 / max(1, counts.of_island))  # type: ignore[arg-type]
            self._gradients.finish()
            return sum((loss.to(total) for loss in losses), total)
        laid_out = self._laid_out(parts)
        for part, following in zip(laid_out, [*laid_out[1:], None], strict=True):
            with self._synchronising(last=following is None or following.other_model != part.other_model):
                total += forward_backward(self._task, self._device, part, counts, scaler).to(total)
        self._gradients.finish()
        return total

    def _synchronising(self, *, last: bool) -> AbstractContextManager[None]:
        if isinstance(self._root, FSDPModule):
            return micro_batch(self._root, self._mesh.layout, last=last)
        if isinstance(self._root, DistributedDataParallel) and not last:
            return self._root.no_sync()
        return nullcontext()

    def clip(self, limit: float) -> Tensor:
        norm = self._gradients.norm()
        self._gradients.clip(norm, limit)
        return norm

    def add_up(self, alike: Tensor, each: Tensor) -> Tensor:
        sums = torch.cat([torch.zeros_like(alike) if self._mesh.at("tensor") else alike, each])
        dist.all_reduce(sums)
        return sums

    def evaluate(self, parts: Sequence[Part]) -> Totals:
        size = self._mesh.layout.data
        padded = [*parts, *[self._task.nothing()] * (-len(parts) % size)]
        own = padded[self._mesh.data_index :: size]
        mine = self._laid_out(self._task.complete(own, self, len(own)))
        if self._pipeline is not None:
            with self._device.autocast():
                losses = self._pipeline.forward([part.inputs for part in mine])  # type: ignore[misc]
        else:
            losses = [forward(self._task, self._device, part) for part in mine]
        sums = totals_of(losses, sum(part.targets for part in parts))
        self._reshard()
        # Processes that compute no loss, as those of a pipeline's earlier stages, do not know whether others count.
        numbers = torch.tensor([sums.loss, sums.correct or 0, sums.correct is None], dtype=torch.float64)
        loss, correct, uncounted = self.add_up(numbers, numbers[:0]).tolist()
        return Totals(loss, None if uncounted else round(correct), sums.targets)

    @torch.no_grad()
    def read(self, parts: Sequence[Part], reading: Reading, passes: int, *, tuned: bool = True) -> list[Tensor]:
        padded = [*parts, *[self._task.nothing()] * (passes - len(parts))]
        with evaluating(self._task.model, tuned=tuned), self._device.autocast():
            found = [self._read(part.inputs, reading) for part in self._laid_out(padded)]  # type: ignore[arg-type]
        self._reshard()
        return [one for one in found if one is not None][: len(parts)]

    def _read(self, inputs: Inputs, reading: Reading) -> Tensor | None:
        if self._pipeline is not None:
            return self._pipeline.read(inputs, reading)
        assert self._root is not None
        return read(self._root, inputs, reading)

    def decoder(self, context: int | None) -> Decoder | None:
        language, layout, root = self._task.language, self._mesh.layout, self._root
        if language is None or root is None or layout.context > 1:
            return None
        from stoker.generate.decoder import Decoder, blocked_weights, directly
        from stoker.models.tuning.virtual_tokens import has_prefix

        shares = isinstance(root, FSDPModule)
        if shares and has_prefix(self._task.model):
            return None  # the encoder's weights are gathered only during a pass
        return Decoder(
            self._task.model,
            language,
            self._device,
            context,
            within=self._whole_rows if shares or layout.tensor > 1 else directly,
            others=self._any if shares else None,
            release=self._reshard if shares else None,
            blocked=None if shares else blocked_weights(self._task.model, self._device),
        )

    def _whole_rows(self, work: Callable[[], T]) -> T:
        with self._mesh.whole_rows():
            return self._root(work) if isinstance(self._root, FSDPModule) else work()

    def _any(self, mine: bool) -> bool:
        """Returns whether a condition holds on any process that shares the weights."""
        found = torch.tensor(float(mine))
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._mesh.groups["batch"])
        return bool(found)

    def continue_rows(self, rows: Sequence[np.ndarray]) -> list[int]:
        language = self._task.language
        assert language is not None
        chosen = torch.full((len(rows),), -1)
        asked = [Part(inputs, targets=0, tokens=0) for inputs in language.ask(rows, self._device.torch)]
        for part in self._laid_out(asked):
            inputs = part.row
            with self._device.autocast():
                tokens = self._read(inputs, likeliest)
            if tokens is not None:
                chosen[inputs.targets.to("cpu")] = tokens.to("cpu")
        self._reshard()
        # Each row's last token lies on one of the context processes, and on the last stage of the pipeline.
        dist.all_reduce(chosen, op=dist.ReduceOp.MAX)
        return [int(token) for token in chosen]

    def _reshard(self) -> None:
        """Reshards the weights: gathered ones would be mistaken for the parameters."""
        for root in [self._root] if self._pipeline is None else self._pipeline.stages:
            reshard(root)

    def _laid_out(self, parts: Sequence[Part], *, alike: bool = False) -> list[Part]:
        """Returns this process' tokens of each part, with row lengths padded so that they can be split.

        Args:
            alike: whether all rows get one length.
        """
        unit = parts_of_row(self._mesh)
        if unit == 1 and not alike:
            return list(parts)
        unit = math.lcm(unit, LENGTHS) if alike else unit
        rows = [part.inputs for part in parts]
        lengths = [-(-row.ids.shape[1] // unit) * unit for row in rows if isinstance(row, Inputs)]
        if alike:
            lengths = [max(lengths)] * len(rows)
        return [
            replace(part, inputs=own_part(pad_with_document(row, length), self._mesh))  # type: ignore[arg-type]
            for part, row, length in zip(parts, rows, lengths, strict=True)
        ]
