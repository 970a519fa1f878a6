"""Runs the pipeline stages of this process with PyTorch's schedules.

GPipe (Huang et al., 2019), 1F1B and interleaved 1F1B (Narayanan et al., 2021), zero bubble and its V form (Qi et
al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from stoker.job.layout import ScheduleName
from stoker.models.attention.collate import Inputs
from stoker.models.objective import Loss, Reading
from stoker.parallel.mesh import Mesh
from stoker.parallel.model_stage import ModelStage

SCHEDULES: dict[ScheduleName, Callable[..., Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


@dataclass
class Pipeline:
    """The stages of this process and their schedules.

    Attributes:
        stages: in order.
        width: of the hidden states.
        dtype: of the hidden states that are sent between stages.
    """

    stages: Sequence[ModelStage]
    mesh: Mesh
    width: int
    dtype: torch.dtype
    _schedules: dict[tuple[int, int], Any] = field(default_factory=dict)

    def train(self, rows: Sequence[Inputs], scale: float | Tensor) -> list[Tensor]:
        """Runs forward and backward passes of a step's micro-batches, rows of one length.

        Args:
            scale: factor of the losses.

        Returns:
            The unscaled losses on the process of the last stage, in order; else an empty list.
        """
        self._give(rows, scale)
        numbers = torch.arange(len(rows))
        first = [numbers] if any(stage.is_first for stage in self.stages) else []
        self._schedule(len(rows), self._tokens(rows[0])).step(*first, target=numbers, number=numbers)
        last = self._last()
        return [last.losses[i].total for i in range(len(rows))] if last else []

    @torch.no_grad()
    def forward(self, rows: Sequence[Inputs]) -> list[Loss]:
        """Returns the losses of rows on the last stage, else an empty list; rows may differ in length."""
        self._give(rows, 1.0)
        for index, row in enumerate(rows):
            self.through(index, self._tokens(row))
        last = self._last()
        return [last.losses[i] for i in range(len(rows))] if last else []

    @torch.no_grad()
    def read(self, row: Inputs, reading: Reading) -> Tensor | None:
        """Runs the forward pass of a row; returns the reading on the process of the last stage."""
        self._give([row], 1.0)
        for stage in self.stages:
            stage.reading = reading
        try:
            return self.through(0, self._tokens(row))
        finally:
            for stage in self.stages:
                stage.reading = None

    @torch.no_grad()
    def through(self, index: int, tokens: int) -> Tensor | None:
        """Runs one row through all stages; returns the last stage's output, where that is."""
        out: Tensor | None = None
        mine = dict(zip(self.mesh.layout.stages_of(self.mesh.at("pipe")), self.stages, strict=True))
        for number in range(self.mesh.layout.stage_count):
            owner, before = self._owner(number), self._owner(number - 1) if number else None
            if before is not None and before != owner and self.mesh.at("pipe") in (owner, before):
                if self.mesh.at("pipe") == before:
                    assert out is not None
                    dist.send(out.contiguous(), group=self.mesh.groups["pipe"], group_dst=owner)
                else:
                    out = torch.empty(1, tokens, self.width, dtype=self.dtype, device=self.mesh.device)
                    dist.recv(out, group=self.mesh.groups["pipe"], group_src=before)
            if number in mine:
                given = torch.zeros(1) if out is None or number == 0 else out
                out = mine[number](given, torch.tensor([index]))
        return out if self._last() else None

    def _owner(self, stage: int) -> int:
        layout = self.mesh.layout
        return next(pipe for pipe in range(layout.pipeline) if stage in layout.stages_of(pipe))

    def _give(self, rows: Sequence[Inputs], scale: float | Tensor) -> None:
        for stage in self.stages:
            stage.rows, stage.scale, stage.losses = list(rows), scale, {}

    def _tokens(self, row: Inputs) -> int:
        """Tokens of the hidden states between stages."""
        return row.ids.shape[1] // (self.mesh.layout.tensor if self.mesh.layout.sequence else 1)

    def _last(self) -> ModelStage | None:
        return next((stage for stage in self.stages if stage.is_last), None)

    def _schedule(self, micro_batches: int, tokens: int) -> Any:
        """Returns the schedule for rows of a length; its buffers have a fixed size."""
        key = (micro_batches, tokens)
        if key not in self._schedules:
            layout, device = self.mesh.layout, self.mesh.device
            hidden = torch.empty(1, tokens, self.width, dtype=self.dtype, device="meta", requires_grad=True)
            summed = torch.promote_types(self.dtype, torch.float32)  # the loss of the last stage
            numbers = layout.stages_of(self.mesh.at("pipe"))
            stages = [
                PipelineStage(
                    stage,
                    number,
                    layout.stage_count,
                    device,
                    input_args=torch.zeros(1, dtype=torch.int64) if stage.is_first else hidden,
                    output_args=torch.zeros(1, dtype=summed, device="meta") if stage.is_last else hidden,
                    group=self.mesh.groups["pipe"],
                )
                for number, stage in zip(numbers, self.stages, strict=True)
            ]
            chosen = SCHEDULES[layout.schedule]
            given = stages if layout.stages_per_process > 1 else stages[0]
            schedule = chosen(given, n_microbatches=micro_batches, loss_fn=_its_output, scale_grads=False)
            self._schedules = {key: schedule}  # of the current length only; others would keep their buffers
        return self._schedules[key]


def _its_output(loss: Tensor, _: Tensor) -> Tensor:
    """Returns the sum of the last stage's losses, which are its output."""
    return loss.sum()
