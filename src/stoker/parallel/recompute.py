"""Recompute (activation checkpointing): saves a block's input only (Chen et al., 2016)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from stoker.errors import UserError
from stoker.job.layout import Recompute
from stoker.models import router_balance
from stoker.models.attention.packed_row import current_row
from stoker.models.blocks import blocks_of
from stoker.models.families.facts import Family, submodule
from stoker.parallel.data_parallel.batch_norm import keep_running_averages

# The region of a block that is computed again, in its family's order; docs/extending.md adds one.
PARTS: dict[Recompute, int] = {"selective": -1}


def recompute_blocks(model: nn.Module, which: Recompute = "full", family: Family | None = None) -> int:
    """Makes every block recompute, with the same random numbers (dropout); returns their number.

    Args:
        which: ``full`` recomputes whole blocks; ``selective`` only their feed-forward part, whose activations are the
            widest.
        family: gives the path of the feed-forward part.

    Raises:
        UserError: the model has no list of blocks, or their feed-forward part is unknown.
    """
    modules = blocks_of(model)
    if not modules:
        raise UserError("parallel.recompute: the model has no list of blocks to recompute; write none")
    if which in PARTS:
        path = family.regions[PARTS[which]].enter if family is not None else ""
        parts = [submodule(block, path) for block in modules] if path else []
        if not parts or any(part is None or isinstance(part, nn.Linear) for part in parts):
            raise UserError("parallel.recompute: what to select is not known for this model; write full or none")
        modules = [part for part in parts if part is not None]
    for module in modules:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, context_fn=partial(_contexts, module))
    return len(modules)


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of the first and the second computation of a module.

    The second restores the row of the first, as pipelines have several micro-batches in flight, and counts no samples
    again.
    """
    return nullcontext(), _again(module, current_row(), router_balance.current_pass())


@contextmanager
def _again(
    module: nn.Module, row: AbstractContextManager[None], routers: AbstractContextManager[None]
) -> Iterator[None]:
    with row, routers, keep_running_averages(module):
        yield
