"""Embedding warm-up: a first stage that trains only the rows of new tokens, in embedding and head.

All other gradients are dropped before clipping, so the optimizer neither steps nor decays those weights and keeps no
states for them. Within the embedding and the head, the gradients of old rows are set to zero: while their moments are
zero too, every optimizer takes steps of zero. Weight decay is off in this stage, as it would change all rows.

Then everything is trained, from fresh moments, as all rows of a matrix share one step counter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from stoker.checkpoint.run_weights import optimized_parameters
from stoker.parallel.materialise import rows_held
from stoker.parallel.shard_spec import NamedShards, local_shard
from stoker.train.hooks import Hook

if TYPE_CHECKING:
    from stoker.models.resize_embeddings import NewRows


class EmbeddingWarmup:
    """The first stage, as this process sees it.

    Args:
        optimizer: its weight decay is zero during the stage.
        new: the new rows, by the names of the whole model.
        steps: steps of the stage.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, new: NewRows, steps: int, shards: NamedShards) -> None:
        self._optimizer, self._steps = optimizer, steps
        self._decays = [group["weight_decay"] for group in optimizer.param_groups]
        self._old: dict[Parameter, int] = {}  # number of old rows at the start of this process' shard
        self._others: list[Parameter] = []
        for name, parameter, piece in optimized_parameters(model, shards):
            if name not in new.names:
                self._others.append(parameter)
                continue
            held = rows_held(parameter, piece)[0]
            self._old[parameter] = min(max(0, new.first - held.start), held.stop - held.start)

    def hook(self) -> Hook:
        """Returns the loop's hook."""
        return Hook(before_passes=self._begin, after_passes=self._mask)

    def _begin(self, step: int) -> None:
        """Sets the weight decay; drops the moments after the stage's last step."""
        for group, decay in zip(self._optimizer.param_groups, self._decays, strict=True):
            group["weight_decay"] = 0.0 if step <= self._steps else decay
        if step == self._steps + 1:
            for parameter in self._old:
                self._optimizer.state.pop(parameter, None)

    def _mask(self, step: int, loss: Tensor) -> Tensor:
        """Drops all gradients but those of new rows."""
        if step > self._steps:
            return loss
        for parameter in self._others:
            parameter.grad = None
        for parameter, old in self._old.items():
            grad = parameter.grad
            if grad is not None:
                local_shard(grad)[:old].zero_()
        return loss
