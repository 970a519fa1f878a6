"""Task ranking: samples of a click log and their loss, by default the cross entropy of each label."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Optimizer

from stoker.data.mix import shuffled_epochs
from stoker.data.ranking.click_log import ClickLog, RowSet
from stoker.models.objective import Loss
from stoker.models.ranking.model_inputs import RankingInputs, RankingShape
from stoker.parallel.data_parallel.batch_norm import without_batch_statistics
from stoker.sparse.embeddings import Embeddings
from stoker.sparse.jagged_ids import JaggedIds
from stoker.train.evaluate import Evaluation, evaluate
from stoker.train.ranking.evaluation_metrics import Scored, figures_of
from stoker.train.ranking.in_batch_softmax import InBatchSoftmax
from stoker.train.ranking.progressive import PREFIX, periods_of, write_period
from stoker.train.ranking.ranking_batch import RankingBatch, ids_looked_up, ranking_batch_of, ranking_inputs
from stoker.train.task import Part, Task

if TYPE_CHECKING:
    from stoker.runs.run_folder import RunFolder
    from stoker.train.engine import Engine

EVALUATION_SAMPLES = 4096  # per held-out forward pass


class RankingTask(Task):
    """Task whose samples are rows, in a new order each epoch or in time order; a target is a row.

    Args:
        tower: maps `RankingInputs` to logits of `Features.outputs`, [B, outputs].
        at: sizes k of NDCG and recall.
        in_order: whether rows are trained on in time order.
        evaluated: held-out rows that an evaluation uses, evenly spaced; None for all.
        probabilities: whether the sigmoid of a logit is a probability.
        softmax: the loss; None for the cross entropy.
        dtype: dtype of numbers and labels.
    """

    unit, target = "row", "sample"
    perplexity = False
    lays_out_ahead = True

    def __init__(
        self,
        tower: nn.Module,
        tables: Embeddings,
        shape: RankingShape,
        log: ClickLog,
        *,
        seed: int,
        at: Sequence[int],
        in_order: bool,
        evaluated: int | None,
        probabilities: bool,
        softmax: InBatchSoftmax | None = None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model, self.tables, self.shape, self.log = tower, tables, shape, log
        self.seed, self.at, self.in_order, self.device, self.dtype = seed, at, in_order, device, dtype
        self.root: Callable[..., Any] = tower  # the tower, or a layout's wrapper around it
        self._softmax, self._probabilities = softmax, probabilities
        held_out = log.held_out
        if held_out is not None and evaluated is not None and evaluated < len(held_out):
            spaced = np.arange(evaluated) * len(held_out) // evaluated
            held_out = replace(held_out, rows=held_out.rows[spaced])
        self.held_out = held_out
        self._periods = periods_of(log.training)[1:] if in_order else []
        self.folder: Path | None = None  # the run's folder, on the first process after the run has begun
        # Called before a long pause between steps, with its kind.
        self.before_pause: Callable[[str], None] = lambda kind: None
        self._scored: list[tuple[np.ndarray, np.ndarray]] | None = None  # positions and logits during an evaluation

    def epoch_samples(self, epochs: float) -> int:
        return int(len(self.log.training) * epochs + 1e-9)

    def positions(self, first: int, last: int) -> np.ndarray:
        """Returns the training rows' positions of a range of samples."""
        size = len(self.log.training)
        samples = np.arange(first, last)
        return samples % size if self.in_order else shuffled_epochs(samples, size, self.seed, 1)

    def parts(self, first: int, last: int) -> list[Part]:
        return [self.part_of(self.log.training, self.positions(first, last))]

    def part_of(self, rows: RowSet, positions: np.ndarray) -> Part:
        """Returns rows as a forward pass."""
        batch = ranking_batch_of(rows.batch(positions), positions, self.dtype)
        return Part(batch, targets=len(positions), tokens=len(positions))

    def nothing(self) -> Part:
        """Returns one row without ids, which looks nothing up."""
        labels, dense = torch.zeros(1, len(self.log.features.labels)), torch.zeros(1, self.shape.numbers)
        none, zero = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        ids = {
            c.name: JaggedIds(none, zero, torch.zeros(0, dtype=self.dtype) if c.weighted else None)
            for c in self.log.features.ids
        }
        batch = RankingBatch(
            labels.to(self.dtype), torch.zeros(1, dtype=self.dtype), dense.to(self.dtype), MappingProxyType(ids), zero
        )
        return Part(batch, targets=0, tokens=0).to(self.device)

    def around(self, part: Part) -> AbstractContextManager[None]:
        return nullcontext() if part.targets else without_batch_statistics()

    def inputs_of(self, batch: RankingBatch) -> RankingInputs:
        """Looks up the ids of a batch; a collective."""
        return ranking_inputs(batch, self.tables, self.shape, first_order=self._first_order, device=self.device)

    def ids_of(self, part: Part) -> dict[str, JaggedIds]:
        """Returns the ids that a pass looks up."""
        assert isinstance(part.inputs, RankingBatch)
        return ids_looked_up(part.inputs, self.shape, first_order=self._first_order)

    @property
    def _first_order(self) -> bool:
        return bool(getattr(self.model, "first_order", False))

    def loss(self, part: Part) -> Loss:
        batch = part.inputs
        assert isinstance(batch, RankingBatch)
        inputs = self.inputs_of(batch)
        if self._softmax is not None:
            users_BD, items_BD = (vectors.to(self.dtype) for vectors in self.root(inputs, apart=True))
            self._keep(part, (users_BD * items_BD).sum(1, keepdim=True))
            return Loss(self._softmax(users_BD, items_BD, batch), None)
        logits = self.root(inputs).to(self.dtype)
        self._keep(part, logits)
        losses = binary_cross_entropy_with_logits(self._of_labels(logits), batch.labels, reduction="none")
        return Loss((losses.mean(1) * batch.weights).sum(), None)

    def _of_labels(self, logits: Tensor) -> Tensor:
        """Returns the logits that have a label of their own."""
        features = self.log.features
        return logits[:, : len(features.labels)] if features.nested else logits

    def _keep(self, part: Part, logits: Tensor) -> None:
        """Keeps the logits of a part's rows during an evaluation."""
        if self._scored is not None and part.targets:
            assert isinstance(part.inputs, RankingBatch)
            self._scored.append((part.inputs.positions.cpu().numpy(), logits.detach().cpu().double().numpy()))

    def begin(self, engine: Engine, folder: RunFolder, optimizer: Optimizer) -> None:
        self.folder = folder.path if engine.first else None

    def reach(self, first: int, last: int, step: int, engine: Engine) -> Sequence[str]:
        """Evaluates the periods that begin within these samples; `figures` have their metrics, and the row counts of
        the tables.
        """
        self.figures = MappingProxyType({})
        for period in (period for period in self._periods if first <= period.start < last):
            self.before_pause("period")
            _, scored = self.score(self.log.training.part(period.start, period.stop), engine)
            found = figures_of(scored, self.log.features.outputs, self.at)
            self.figures = {PREFIX + name: value for name, value in found.means.items()} | self._table_rows()
            if self.folder is not None:
                write_period(self.folder, step, period, found)
        return ()

    @property
    def evaluates(self) -> bool:
        return self.held_out is not None

    def evaluate(self, engine: Engine) -> Evaluation | None:
        if self.held_out is None:
            return None
        self.before_pause("evaluation")
        found, scored = self.score(self.held_out, engine)
        means = figures_of(scored, self.log.features.outputs, self.at).means
        return replace(found, measures=means | self._table_rows())

    def _table_rows(self) -> dict[str, float]:
        """Returns the rows of all tables on all processes, and the ids admitted and evicted. A collective."""
        found = self.tables.admissions()
        return {"table_rows": found.rows, "ids_admitted": found.admitted, "ids_evicted": found.evicted}

    def score(self, rows: RowSet, engine: Engine) -> tuple[Evaluation, Scored]:
        """Returns the loss of rows and the scores of each row; a collective."""
        self._scored = []
        self.tables.eval()
        try:
            mine, _ = engine.share(0, engine.replicas, engine.replicas)
            found = evaluate(self, engine, self._parts_of(rows, mine, engine.replicas))
            scored = self._scored
        finally:
            self.tables.train()
            self._scored = None
        assert found is not None
        logits = np.zeros((len(rows), len(self.log.features.outputs)))
        for positions, values in engine.gather(lambda: scored):
            logits[positions] = values
        return found, scored_rows(rows, logits, probabilities=self._probabilities)

    def _parts_of(self, rows: RowSet, mine: int = 0, processes: int = 1) -> Iterator[Part]:
        """Yields rows as forward passes; those of other processes are only counted.

        Args:
            mine: number of the process, which evaluates one part in ``processes``.
        """
        # The candidates of the in-batch softmax are as many as in training.
        size = min(EVALUATION_SAMPLES, self._softmax.batch) if self._softmax else EVALUATION_SAMPLES
        for number, start in enumerate(range(0, len(rows), size)):
            stop = min(start + size, len(rows))
            if number % processes == mine:
                yield self.part_of(rows, np.arange(start, stop)).to(self.device)
            else:
                yield Part(None, targets=stop - start, tokens=stop - start)

    def evaluation(self) -> Iterator[Part]:
        if self.held_out is not None:
            yield from self._parts_of(self.held_out)

    def describe_samples(self, first: int, last: int) -> list[str]:
        return self.log.training.places(self.positions(first, last))


def scored_rows(rows: RowSet, logits: np.ndarray, *, probabilities: bool = True) -> Scored:
    """Combines rows with their scores, groups, slices and weights."""
    features = rows.features
    groups, grouped = (rows.column(name) if features.group is not None else None for name in ("group", "grouped"))
    slices: dict[str, Any] = {}
    absent = rows.absent
    for number, name in enumerate(features.slices):
        if name in absent:
            continue
        texts = np.array(rows.store.summary.slices[number] or [""], dtype=object)
        slices[name] = texts[rows.column(f"slice{number}")].astype(str)
    weights = rows.column("weight") if features.weight is not None else None
    return Scored(rows.labels, logits, groups, slices, grouped, probabilities, weights)
