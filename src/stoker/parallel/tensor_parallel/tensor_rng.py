"""Random numbers under tensor parallelism: the same for replicated activations, different for split ones.

The default generator has the same state on all tensor processes, so that dropout on replicated activations agrees.
Between the column and the row layers of a region each process has other heads or neurons: there the state is derived
from the default one and the process' index. Recompute restores the default state at the start of a block, and so
derives the same state again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stoker.models.dropout import has_dropout


class Apart:
    """Hooks that make each process draw different random numbers inside a region."""

    def __init__(self, model: nn.Module, index: int, device: torch.device) -> None:
        self._index, self._device = index, device
        self._before: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._needed = model.training and has_dropout(model)

    def around(self, last_column: nn.Module, row: nn.Module) -> None:
        """Registers the hooks from the end of a region's last column layer to the end of its row layer."""
        if self._needed:
            last_column.register_forward_hook(self._begin)
            row.register_forward_hook(self._end)

    def _begin(self, module: nn.Module, *_: Any) -> None:
        if not module.training:
            return
        seed = int(torch.randint(2**62, ())) + self._index  # the same on all but for the index
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        # Regions are not nested; a recompute stops as soon as it can, before the end of the last one.
        self._before = torch.get_rng_state(), cuda
        torch.manual_seed(seed)

    def _end(self, module: nn.Module, *_: Any) -> None:
        if self._before is not None and module.training:
            (cpu, cuda), self._before = self._before, None
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, self._device)
