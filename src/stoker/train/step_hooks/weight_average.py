"""Exponential moving average of the trained weights, as DeepSpeed-Chat keeps one of its policy."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from stoker.checkpoint.run_weights import AVERAGE
from stoker.parallel.shard_spec import local_shard
from stoker.runs.step_metrics import StepMetrics
from stoker.train.hooks import Hook


class WeightAverage:
    """Averages the weights after each step: ``a <- decay * a + (1 - decay) * w``, starting from those after the first
    step. A step that the optimizer skips changes no average.

    The averages, at least in float32, are stored with the optimizer's moments: they are sharded, offloaded, saved and
    restored as these are.
    """

    def __init__(self, optimizer: Optimizer, decay: float) -> None:
        self._optimizer, self._decay = optimizer, decay
        self._stateless = optimizer.defaults.get("momentum") == 0
        self._taken = False  # whether the optimizer took the current step

    def hook(self) -> Hook:
        """Returns the loop's hook."""
        return Hook(after_optimizer=self._note, after_step=self._add)

    def _note(self, _: float, taken: bool) -> None:
        self._taken = taken

    @torch.no_grad()
    def _add(self, _: StepMetrics) -> None:
        if not self._taken:
            return
        for parameter in (p for group in self._optimizer.param_groups for p in group["params"]):
            state = self._optimizer.state.get(parameter, {})
            if AVERAGE in state:
                average = local_shard(state[AVERAGE])
                average.lerp_(local_shard(parameter).to(average), 1 - self._decay)
            elif state or self._stateless:  # else no step has been taken on it, and it has no moments yet
                kept = torch.promote_types(parameter.dtype, torch.float32)
                self._optimizer.state[parameter] = {**state, AVERAGE: parameter.detach().to(kept, copy=True)}
