"""Scores rows with a trained ranking model: a run's in memory, or an export with its tables in a store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from stoker.data.ranking.encode_rows import BadRowError, concatenate_batches, encode_rows
from stoker.data.ranking.features import Features
from stoker.data.ranking.log_batch import RowBatch
from stoker.errors import Problem, UserError
from stoker.models.ranking.build import MODELS
from stoker.models.ranking.model_inputs import RankingInputs, RankingShape
from stoker.online_store.row_backends import StoreError
from stoker.online_store.row_reader import TRIES, RowReader
from stoker.scoring.ranking_metrics import probabilities as probabilities_of
from stoker.sparse.fused_tables import Feature
from stoker.sparse.jagged_ids import JaggedIds
from stoker.sparse.stored_embeddings import StoredEmbeddings
from stoker.sparse.table_settings import TableSettings
from stoker.train.ranking.exported_tower import GRAPH, WEIGHTS, loaded_graph, rebuild_tower, tower_arguments
from stoker.train.ranking.ranking_batch import ranking_batch_of, ranking_inputs


class Tables(Protocol):
    """Tables that features are looked up in: `SparseEmbeddings` or `StoredEmbeddings`."""

    def __call__(self, ids: Mapping[str, JaggedIds], /) -> Mapping[str, Tensor]: ...

    def found(self, ids: Mapping[str, JaggedIds], /) -> Mapping[str, np.ndarray]: ...


@dataclass(frozen=True)
class RowScores:
    """The scores of the rows of a request.

    Attributes:
        logits: float64 [rows, outputs].
        outputs: their names; see `Features.outputs`.
        unknown: fields that are not columns, with the number of rows that have them.
        step: step of the run.
        probabilities: whether the sigmoid of a logit is a probability.
    """

    logits: np.ndarray
    outputs: tuple[str, ...]
    unknown: Mapping[str, int]
    step: int
    probabilities: bool = True

    @property
    def scores(self) -> np.ndarray:
        """The probability of each output, or the logit if that gives none; [rows, outputs]."""
        return probabilities_of(self.logits) if self.probabilities else self.logits


Answer = RowScores | BadRowError
"""Result of a request: its scores, or an error for the first of its rows that cannot be used."""


class RankingScorer:
    """A tower with its tables.

    Attributes:
        features: features that rows are parsed by.
        step: step of the run that these weights and rows come from.
    """

    def __init__(
        self,
        tower: Callable[[RankingInputs], Tensor],
        look_up: Tables,
        shape: RankingShape,
        features: Features,
        *,
        first_order: bool,
        dtype: torch.dtype,
        step: int,
        probabilities: bool = True,
        ignored: Sequence[str] = (),
    ) -> None:
        self.features, self.step, self._probabilities = features, step, probabilities
        self._tower, self._look_up, self._shape, self._dtype = tower, look_up, shape, dtype
        self._first_order, self._ignored = first_order, tuple(ignored)

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> tuple[RowBatch, dict[str, int]]:
        """Encodes rows; see `stoker.data.ranking.encode_rows.encode_rows`.

        Raises:
            BadRowError: a row cannot be used, or has no column of the model.
        """
        columns = {column.name for column in self.features.columns if column.stored}
        for number, row in enumerate(rows):
            if columns.isdisjoint(row):
                raise BadRowError(number, "no column of the model")
        return encode_rows(rows, self.features, self._ignored)

    def score(self, requests: Sequence[Sequence[Mapping[str, Any]]]) -> list[Answer]:
        """Scores rows of several requests in one pass."""
        answers: list[Answer | None] = [None] * len(requests)
        good: list[tuple[int, RowBatch, dict[str, int]]] = []
        for number, rows in enumerate(requests):
            try:
                good.append((number, *self.encode(rows)))
            except BadRowError as error:
                answers[number] = error
        if good:
            logits = self.logits(concatenate_batches([batch for _, batch, _ in good]))
            ends = np.cumsum([len(batch.dense) for _, batch, _ in good])[:-1]
            for (number, batch, unknown), own in zip(good, np.split(logits, ends), strict=True):
                answers[number] = self._overflow(batch, own) or RowScores(
                    own, self.features.outputs, unknown, self.step, self._probabilities
                )
        return [answer for answer in answers if answer is not None]

    def _overflow(self, batch: RowBatch, logits: np.ndarray) -> BadRowError | None:
        """Returns the first row whose score is not finite; None if there is none."""
        is_finite = np.isfinite(logits).all(1)
        if is_finite.all():
            return None
        row = int(is_finite.argmin())
        reason = "its score is not finite"
        if batch.dense.shape[1]:
            column = self.features.dense[int(np.abs(batch.dense[row]).argmax())]
            mean = "" if column.log else f", {column.mean:.4g}"  # of logarithms
            reason += f"; {column.name} is furthest from its mean{mean}"
        return BadRowError(row, reason)

    def lookups(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, tuple[int, int]]]:
        """Counts, for each feature of a row, the ids with a row in its table and those without one.

        Raises:
            BadRowError: a row cannot be used.
        """
        ids = self._ids(self.encode(rows)[0])
        counts: list[dict[str, tuple[int, int]]] = [{} for _ in rows]
        for name, there in self._look_up.found(ids).items():
            lengths = ids[name].lengths.numpy()
            found = np.bincount(np.repeat(np.arange(len(rows)), lengths), there, len(rows)).astype(int)
            for row, have, of in zip(counts, found.tolist(), lengths.tolist(), strict=True):
                row[name] = (have, of - have)
        return counts

    def _ids(self, batch: RowBatch) -> dict[str, JaggedIds]:
        return dict(ranking_batch_of(batch, np.arange(len(batch.dense)), self._dtype).ids)

    @torch.no_grad()  # FBGEMM's lookups refuse inference mode
    def logits(self, batch: RowBatch) -> np.ndarray:
        """Returns the logits, float64 [rows, outputs]."""
        return self._tower(self.inputs(batch)).double().numpy()

    def inputs(self, batch: RowBatch) -> RankingInputs:
        """Returns the tower's inputs for rows."""
        rows = ranking_batch_of(batch, np.arange(len(batch.dense)), self._dtype)
        host = torch.device("cpu")
        return ranking_inputs(rows, self._look_up, self._shape, first_order=self._first_order, device=host)


class StoredScorer:
    """Scorer of an export or of a store's current version. A change of the tower there takes effect with the next
    batch.

    Args:
        trusted: whether a graph of the user's own module may be loaded.

    Raises:
        UserError: the tower needs its graph, which may not be loaded.
        StoreError: there is nothing to read.
    """

    def __init__(self, reader: RowReader, *, trusted: bool = False, graph: bool = False) -> None:
        self._reader, self._trusted, self._graph = reader, trusted, graph
        self._lock, self._head = threading.Lock(), ""
        self._follow()

    @property
    def scorer(self) -> RankingScorer:
        """The scorer of the head that was read last."""
        return self._scorer

    @property
    def features(self) -> Features:
        """Features that rows are parsed by."""
        return self._scorer.features

    @property
    def step(self) -> int:
        """Step of the run that the tower comes from."""
        return self._scorer.step

    def score(self, requests: Sequence[Sequence[Mapping[str, Any]]]) -> list[Answer]:
        """Scores rows of several requests in one pass; tower, features and rows are of one version.

        Raises:
            StoreError: the store cannot be read.
        """
        with self._lock:
            for _ in range(TRIES):
                version = self._reader.version
                try:
                    found = self._scorer.score(requests)
                except StoreError:  # a new version has other tables
                    if self._reader.version == version:
                        raise
                else:
                    if self._reader.head == self._head:
                        return found
                self._follow()
            raise StoreError(f"{self._reader.place} changes faster than rows can be scored")

    def lookups(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, tuple[int, int]]]:
        """Counts ids as `RankingScorer.lookups` does; raises StoreError where the store cannot be read."""
        with self._lock:
            return self._scorer.lookups(rows)

    def _follow(self) -> None:
        self._reader.refresh()
        head, manifest = self._reader.head or "", self._reader.manifest
        try:
            self._scorer = self._opened(manifest)
        except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:  # of torch, too
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise StoreError(f"the contents of {self._reader.place} cannot be used: {reason}") from error
        self._head = head

    def _opened(self, manifest: Mapping[str, Any]) -> RankingScorer:
        shape = shape_from(manifest["shape"])
        dtype = torch.float64 if manifest["precision"] == "fp64" else torch.float32
        tables = [TableSettings(t["name"], t["width"], dtype=t["dtype"]) for t in manifest["tables"]]
        looked_up = {name: Feature(*entry) for name, entry in manifest["looked_up"].items()}
        weights, model = self._reader.file(WEIGHTS), manifest["model"]
        tower: Callable[[RankingInputs], Tensor]
        if model in MODELS and not self._graph:
            tower = rebuild_tower(model, shape, dtype, weights)
        elif self._trusted:
            graph = loaded_graph(self._reader.file(GRAPH), weights)
            names, sequences = list(looked_up), list(shape.sequences)

            def tower(inputs: RankingInputs) -> Tensor:
                found: Tensor = graph(*tower_arguments(inputs, names, sequences))
                return found
        else:
            message = f"this export is of a module of its own, {model}, whose graph can run code as it is loaded"
            raise UserError(Problem(message, "add --trust-remote-code if you trust who has made it"))
        return RankingScorer(
            tower,
            StoredEmbeddings(tables, looked_up, self._reader, dtype),
            shape,
            Features.from_json(manifest["features"]),
            first_order=manifest["first_order"],
            dtype=dtype,
            step=manifest["step"],
            probabilities=manifest.get("probabilities", True),  # exports of earlier versions lack it
            ignored=manifest["ignored"],
        )


def shape_from(values: Mapping[str, Any]) -> RankingShape:
    """Reads the shape from a manifest."""
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return replace(RankingShape(()), **{**values, **lists})


def module_scorer(
    tower: nn.Module,
    tables: Tables,
    shape: RankingShape,
    features: Features,
    *,
    step: int,
    probabilities: bool,
    ignored: Sequence[str],
) -> RankingScorer:
    """Returns the scorer of a run's own modules."""
    dtype = next((p.dtype for p in tower.parameters()), torch.float32)
    first_order = bool(getattr(tower, "first_order", False))
    return RankingScorer(
        tower,
        tables,
        shape,
        features,
        first_order=first_order,
        dtype=dtype,
        step=step,
        probabilities=probabilities,
        ignored=ignored,
    )
