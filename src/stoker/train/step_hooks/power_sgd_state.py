"""PowerSGD's state in checkpoints, with which a run with the same layout resumes bit-identically."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stoker.checkpoint.chunks import Chunk, Held
from stoker.checkpoint.run_weights import trainable
from stoker.checkpoint.state import Saved
from stoker.checkpoint.tensor_names import POWER_SGD
from stoker.parallel.data_parallel.power_sgd import Memory, PowerSgd
from stoker.parallel.mesh import Mesh
from stoker.train.training_state import FurtherState

STEPS, ERROR, RIGHT = "steps", "/error", "/right"


class PowerSgdState(FurtherState):
    """PowerSGD's errors, right factors and steps.

    Errors differ between processes, so a checkpoint grows by the size of the trained parameters times the number of
    processes that sum their gradients.
    """

    def __init__(self, model: nn.Module, memories: PowerSgd, mesh: Mesh) -> None:
        self._parameters, self._memories = trainable(model), memories
        self._row, self._rows, layout = dist.get_rank(mesh.groups["batch"]), mesh.size("batch"), mesh.layout
        sizes = (layout.islands, layout.data, layout.context, layout.tensor, layout.compress_rank)
        where = (mesh.at("island"), mesh.at("tensor"))
        self._prefix = f"{POWER_SGD}{'-'.join(map(str, sizes))}/{'-'.join(map(str, where))}/"
        self._places: dict[str, Tensor] = {}

    def now(self, step: int, is_whole: Callable[[int], bool] | None) -> Held:
        found, memories = {STEPS: torch.tensor([self._memories.iter])}, self._memories.memories()
        for name, parameter in self._parameters.items():
            error, right = memories.get(parameter, (None, None))
            found |= {} if error is None else {f"{name}{ERROR}": error}
            found |= {} if right is None else {f"{name}{RIGHT}": right}
        return self._held(found)

    def _held(self, tensors: Mapping[str, Tensor]) -> Held:
        return {
            f"{self._prefix}{name}": [self._row_of(tensor) if name.endswith(ERROR) else Chunk.whole(tensor)]
            for name, tensor in tensors.items()
        }

    def _row_of(self, error: Tensor) -> Chunk:
        """Returns this process' error as a row of a tensor of all processes' errors."""
        return Chunk(error.unsqueeze(0), (self._row, *[0] * error.dim()), (self._rows, *error.shape))

    def places(self, saved: Mapping[str, Saved]) -> Held:
        own = {n.removeprefix(self._prefix): entry for n, entry in saved.items() if n.startswith(self._prefix)}
        self._places = {
            name: torch.zeros(entry.shape[1:] if name.endswith(ERROR) else entry.shape, dtype=entry.dtype)
            for name, entry in own.items()
        }
        return self._held(self._places)

    def restored(self) -> None:
        memories: dict[Tensor, Memory] = {
            parameter: (self._places[f"{name}{ERROR}"].to(parameter.device), self._right(name, parameter))
            for name, parameter in self._parameters.items()
            if f"{name}{ERROR}" in self._places
        }
        steps = int(self._places[STEPS]) if STEPS in self._places else 0
        self._memories.restore(steps, memories)
        self._places = {}

    def _right(self, name: str, parameter: Tensor) -> Tensor | None:
        right = self._places.get(f"{name}{RIGHT}")
        return None if right is None else right.to(parameter.device)
