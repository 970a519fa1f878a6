"""Islands: groups of processes that train independently between two synchronisations (local SGD and DiLoCo).

With the weights w_i of island i and the weights a of the last synchronisation, d = a - mean_i w_i, and

    average (Stich, 2019)              a <- a - d
    nesterov (Douillard et al., 2023)  m <- momentum m + d;  a <- a - lr (d + momentum m)

All islands continue from a, each with the moments of its own optimizer. Floating-point buffers become their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from stoker.checkpoint.chunks import Held, chunk_of
from stoker.checkpoint.run_weights import optimized_parameters, saved_buffers
from stoker.checkpoint.state import Saved
from stoker.checkpoint.tensor_names import OUTER
from stoker.job.blocks.parallel_block import SyncBlock
from stoker.parallel.mesh import Mesh, sum_over
from stoker.parallel.shard_spec import NamedShards, local_shard
from stoker.runs.step_metrics import StepMetrics
from stoker.train.hooks import Hook
from stoker.train.training_state import FurtherState


class OuterStep(FurtherState):
    """Synchronisation of the islands; their weights and momentum are saved."""

    def __init__(self, model: nn.Module, sync: SyncBlock, mesh: Mesh, shards: NamedShards) -> None:
        """
        Args:
            model: a model with the weights that all islands start with.
        """
        self._sync, self._group, self._islands = sync, mesh.groups["island"], mesh.layout.islands
        self._model, self._shards = model, shards
        self._kept: dict[str, dict[str, Tensor]] = {}
        self._begins = False  # whether the restored state had no islands
        for name, parameter, _ in optimized_parameters(model, shards):
            self._kept[name] = {"weights": parameter.detach().clone()}
            if sync.outer == "nesterov":
                self._kept[name]["momentum"] = torch.zeros_like(parameter, requires_grad=False)

    def hook(self, last: Callable[[], int]) -> Hook:
        """Returns the loop's hook.

        Args:
            last: returns the run's last step, after which the islands are always synchronised.
        """

        def after_step(metrics: StepMetrics) -> None:
            if metrics.step % self._sync.every == 0 or metrics.step == last():
                self.synchronise()

        return Hook(after_step=after_step)

    @torch.no_grad()
    def synchronise(self) -> None:
        """Takes the outer step; a collective."""
        found = [
            (self._kept[name], parameter) for name, parameter, _ in optimized_parameters(self._model, self._shards)
        ]
        means = self._means([local_shard(parameter) for _, parameter in found])
        for (kept, parameter), mean in zip(found, means, strict=True):
            weights = local_shard(kept["weights"])
            if self._sync.outer == "average":
                weights.copy_(mean)
            else:
                change, momentum = weights - mean, local_shard(kept["momentum"])
                momentum.mul_(self._sync.outer_momentum).add_(change)
                weights.sub_(change.add_(momentum, alpha=self._sync.outer_momentum), alpha=self._sync.outer_lr)
            local_shard(parameter).copy_(weights)
        buffers = [b for b in saved_buffers(self._model).values() if b.is_floating_point()]
        for buffer, mean in zip(buffers, self._means([local_shard(b) for b in buffers]), strict=True):
            local_shard(buffer).copy_(mean)

    def _means(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the means over the islands."""
        means = [tensor.detach().clone() for tensor in tensors]
        sum_over(self._group, *means)
        return [mean.div_(self._islands) for mean in means]

    def now(self, step: int, is_whole: Callable[[int], bool] | None) -> Held:
        return self._held()

    def _held(self) -> Held:
        return {
            f"{OUTER}{name}/{kind}": [chunk_of(tensor, piece)]
            for name, _, piece in optimized_parameters(self._model, self._shards)
            for kind, tensor in self._kept[name].items()
        }

    def places(self, saved: Mapping[str, Saved]) -> Held:
        found = {name: chunks for name, chunks in self._held().items() if name in saved}
        self._begins = not found
        return found

    @torch.no_grad()
    def restored(self) -> None:
        """Initialises the outer state from the restored weights, if the saved run had no islands."""
        for name, parameter, _ in optimized_parameters(self._model, self._shards) if self._begins else ():
            for kind, tensor in self._kept[name].items():
                local_shard(tensor).copy_(local_shard(parameter)) if kind == "weights" else local_shard(tensor).zero_()
