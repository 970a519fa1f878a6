"""New tokens first: a stage in which only their rows of the embedding and the head are trained.

All other gradients are dropped before clipping, so the optimizer neither steps nor decays those weights and has no
states for them. Within the embedding and the head the old rows' gradients are zeros, of which every optimizer makes
steps of zero while their moments are zero too; nothing is decayed in this stage, for a decay would take all rows.
Then everything is trained, from fresh moments: the step counter of a matrix is one for all of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from stoker.checkpoint.weights import NONE, stepped
from stoker.models.resize import NewRows
from stoker.parallel.materialise import rows_held
from stoker.parallel.pieces import Piece


class NewRowsFirst:
    """The stage, as this process sees it.

    Args:
        new: which rows are new, by the names of the whole model.
        steps: that the stage lasts.
        pieces, aliases: what this process holds of the model's parameters; see `stoker.parallel.spread.Spread`.
    """

    def __init__(
        self,
        model: nn.Module,
        new: NewRows,
        steps: int,
        pieces: Mapping[str, Piece] = NONE,
        aliases: Mapping[str, str] = NONE,
    ) -> None:
        self._steps = steps
        self._old: dict[Parameter, int] = {}  # the first rows that a process holds of a parameter, as far as old
        self._others: list[Parameter] = []
        for name, parameter, piece in stepped(model, pieces, aliases):
            if name not in new.names:
                self._others.append(parameter)
                continue
            held = rows_held(parameter, piece)[0]
            self._old[parameter] = min(max(0, new.first - held.start), held.stop - held.start)
        self._decays: list[float] | None = None

    def begin(self, step: int, optimizer: Optimizer) -> None:
        """Before the passes of a step: what is decayed, and at the end of the stage fresh moments."""
        if self._decays is None:
            self._decays = [group["weight_decay"] for group in optimizer.param_groups]
        for group, decay in zip(optimizer.param_groups, self._decays, strict=True):
            group["weight_decay"] = 0.0 if step <= self._steps else decay
        if step == self._steps + 1:
            for parameter in self._old:
                optimizer.state.pop(parameter, None)

    def mask(self, step: int) -> None:
        """After the passes of a step: leaves the gradients of new rows."""
        if step > self._steps:
            return
        for parameter in self._others:
            parameter.grad = None
        for parameter, old in self._old.items():
            grad = parameter.grad
            if grad is not None:
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                local[:old].zero_()
