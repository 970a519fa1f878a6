"""Random initial weights that are independent of the layout and of the order in which they are drawn.

Each tensor is drawn whole, on the CPU and in float32, from a generator seeded by the job's seed and the tensor's name;
a process then takes its part. So every layout starts from the same bits as one process.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from stoker.models.meta_model import CONSTRUCTED


@contextmanager
def drawn_for(seed: int, name: str) -> Iterator[None]:
    """Seeds torch's CPU generator by a tensor's name, within the block."""
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest, "big") >> 1)  # seeds have 63 bits
        yield


class Initial:
    """The first weights of a model from scratch, by transformers' own rules for its architecture."""

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self._model = copy.deepcopy(model)  # the caller modifies its own; on the meta device this costs nothing
        self._seed = seed

    def read(self, name: str, rows: tuple[slice, ...]) -> Tensor:
        """Returns the part ``rows`` of a parameter of that name."""
        *path, leaf = name.split(".")
        modules: list[nn.Module] = [self._model]
        for part in path:
            modules.append(modules[-1].get_submodule(part))
        blank = modules[-1]._parameters[leaf]
        assert blank is not None and blank.is_meta, name
        whole = nn.Parameter(torch.full(blank.shape, math.nan))
        modules[-1]._parameters[leaf] = whole
        # From the innermost module outwards, as in transformers: an outer one may redraw an inner one's weights, such
        # as GPT-2's residual projections. All other tensors are on the meta device, where nothing is drawn.
        with drawn_for(self._seed, name), guard_torch_init_functions():
            for depth in range(len(modules), 0, -1):
                rules = next(m for m in reversed(modules[:depth]) if isinstance(m, PreTrainedModel))
                rules._init_weights(modules[depth - 1])
        modules[-1]._parameters[leaf] = blank
        drawn = whole.detach()
        if drawn.isnan().any():  # xIELU's two numbers have no rule, and keep the values of its constructor
            constructed = vars(modules[-1]).get(CONSTRUCTED, {})
            assert leaf in constructed, f"{type(self._model).__name__} has no rule for {name}"
            drawn = constructed[leaf]
        return drawn[rows]


def initial_adapter(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Returns the first value of a LoRA matrix, as peft draws it: one of the two random, their product zero."""
    whole = torch.zeros(shape)
    with drawn_for(seed, name):
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
        elif ".lora_embedding_B." in name:
            nn.init.normal_(whole)
    return whole
