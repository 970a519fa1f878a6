"""The tables' rows in checkpoints: tensors by the row's id, of which each process writes its own rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stoker.checkpoint.chunks import Chunk, Held
from stoker.checkpoint.collective import rank, together
from stoker.checkpoint.state import Saved
from stoker.sparse.sparse_embeddings import SparseEmbeddings
from stoker.sparse.sparse_state import SparseState

if TYPE_CHECKING:
    from stoker.train.ranking.ranking_task import RankingTask

PREFIX = "sparse/"
STEP = "step"


class SavedTables:
    """Rows as `stoker.train.training_state.FurtherState`: ``sparse/TABLE/ids`` and what else a table has for each.

    Rows of the processes lie one process after another. A process reads all of them and keeps those that it owns, so
    any number of processes restores what any other number has saved.
    """

    def __init__(self, task: RankingTask, make: Callable[[], SparseEmbeddings]) -> None:
        """
        Args:
            make: tables without rows, for a run that goes back to an earlier state.
        """
        self._task, self._make = task, make
        self._read: dict[str, Tensor] = {}

    def now(self) -> Held:
        self._task.before_pause()
        tensors = self._task.tables.state(is_base=not self._task.is_followed).tensors()
        sizes = {name: tensor.shape[0] for name, tensor in tensors.items() if name != STEP}
        shares = together(lambda: sizes)
        before = rank()
        held = {PREFIX + STEP: [Chunk.whole(tensors[STEP])]}
        for name, size in sizes.items():
            tensor = tensors[name]
            every = [share.get(name, 0) for share in shares]
            if size:
                offsets = (sum(every[:before]), *(0,) * (tensor.dim() - 1))
                held[PREFIX + name] = [Chunk(tensor, offsets, (sum(every), *tensor.shape[1:]))]
        return held

    def places(self, saved: Mapping[str, Saved]) -> Held:
        own = {name: entry for name, entry in saved.items() if name.startswith(PREFIX)}
        self._read = {name.removeprefix(PREFIX): torch.empty(e.shape, dtype=e.dtype) for name, e in own.items()}
        return {PREFIX + name: [Chunk.whole(tensor)] for name, tensor in self._read.items()}

    def restored(self) -> None:
        if self._task.tables.version:
            self._task.tables = self._make()
        load_rows(self._task.tables, self._read)
        self._read = {}


def load_rows(tables: SparseEmbeddings, tensors: Mapping[str, Tensor]) -> None:
    """Gives tables that have none the rows of a checkpoint, by names without the prefix."""
    empty = tables.state().tensors()
    whole = {name: tensor[:0] if name != STEP else tensor for name, tensor in empty.items()} | dict(tensors)
    tables.load([SparseState.from_tensors(whole)])
