"""Extra inputs of `task: dpo`: the reference's log-probabilities, labels, and KTO's KL estimate.

The reference is evaluated with the adapter off, in a forward pass of the same rows before that of the loss; or its
log-probabilities are computed once, before the first step, and cached on disk (`reference_table`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stoker.checkpoint.object_collectives import by_first
from stoker.data.sequences import Document
from stoker.grouping import grouped
from stoker.hardware.process_device import move_to
from stoker.job.keys.tune_keys import VIRTUAL
from stoker.job.load_job import LoadedJob
from stoker.models.attention.collate import Inputs
from stoker.models.head import Head, LogitsHead
from stoker.models.language_model import LanguageModel
from stoker.models.tuning.quantise import device_for
from stoker.parallel.float64_mode import arithmetic_of
from stoker.train.engine import Engine
from stoker.train.language.batch_extras import BatchExtras
from stoker.train.preference.kto_mismatched import mismatched_pairs
from stoker.train.preference.preference_objective import GOOD, KL, REFERENCE, answer_scores
from stoker.train.preference.reference_model import PASS_TOKENS, PLACE, ReferenceModel, forward_passes, sums
from stoker.train.preference.reference_table import ReferenceTable, row_key
from stoker.train.task import Part

if TYPE_CHECKING:
    from stoker.train.language.language_task import LanguageTask
    from stoker.train.tasks.dpo import ResolvedDpoBlock

CHUNK = 64 * PASS_TOKENS  # tokens between two saves of computed values


class ReferenceScores(BatchExtras):
    """Adds the reference's log-probabilities to the inputs; for judged answers also their labels and the KL
    estimate.
    """

    def __init__(self, loaded: LoadedJob, base: Path, block: ResolvedDpoBlock) -> None:
        self._loaded, self._base, self._block = loaded, base, block
        self._judged = block.loss == "kto"
        self._precomputed = block.reference not in ("none", "adapter-off")
        self._table = ReferenceTable()
        self.needs_following = self._judged

    def beside(self, documents: Sequence[Document], following: Document | None) -> Sequence[Document]:
        return mismatched_pairs(documents, following) if self._judged and following is not None else ()

    def of_rows(self, documents: Sequence[Document]) -> Mapping[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        if self._judged:
            found[GOOD] = np.array([document.row.good for document in documents])
        if self._precomputed:
            found[REFERENCE] = self._table.of(documents)
        return found

    def of_passes(self, parts: Sequence[Part], engine: Engine, passes: int) -> Sequence[Part]:
        if self._block.reference == "adapter-off":
            parts = _with_reference(parts, engine, passes)
        return self._with_divergence(parts, engine) if self._judged else parts

    def _with_divergence(self, parts: Sequence[Part], engine: Engine) -> list[Part]:
        """Estimates KTO's KL divergence: the mean log-ratio of mismatched answers over the whole step, at least 0
        (Ethayarajh et al., 2024, section 3.2).
        """
        beside = [Part(inputs, targets=0, tokens=0) for part in parts for inputs in part.beside]
        passes = engine.count(beside).passes
        if not self._precomputed:
            beside = _with_reference(beside, engine, passes)
        found = engine.read(beside, partial(_log_ratios, normalise=self._block.length_normalise), passes)
        own = torch.stack(found).sum(0).cpu().double() if found else torch.zeros(2, dtype=torch.float64)
        total, rows = engine.add_up(own, own[:0]).tolist()
        kl = max(0.0, total / max(1.0, rows))
        return [_given(part, KL, torch.full((part.row.rows,), kl, dtype=torch.float64)) for part in parts]

    def begin(self, task: LanguageTask, engine: Engine) -> None:
        if not self._precomputed:
            return
        # The trained model has virtual tokens before every row; its reference has none.
        if self._block.reference == "precomputed" and self._loaded.job.tune.method not in VIRTUAL:
            own = ReferenceModel(self._loaded, self._base, self._block.reference, task.device)
            digest = own.digest(self._loaded.job.train.float8)
            self._fill(self._documents(task), digest, partial(_by_engine, task.language, engine, task.device))
        else:
            self._fill_by_another(self._documents(task), task.device)

    def before_evaluation(self, documents: Sequence[Document]) -> None:
        if self._precomputed:
            others = mismatched_pairs(documents, documents[0]) if self._judged else []
            self._fill_by_another([*documents, *others], None)

    def _documents(self, task: LanguageTask) -> list[Document]:
        """Returns all documents that the run may use: its rows, those held out, and for judged answers the mismatched
        ones.
        """
        job, sequences = self._loaded.job, task.corpus.sequences
        held_out = task.corpus.evaluation_documents()
        if not self._judged:
            rows = [Document(c[i], source, i) for source, c in enumerate(sequences.caches) for i in range(c.rows)]
            return rows + held_out
        # Pairs of mismatched answers depend on the order; a run that skips samples continues with later ones.
        samples = job.steps * job.train.batch if job.steps else sequences.total(job.epochs or 1.0)
        leaves_out = job.faults.spike or job.faults.not_finite == "roll-back"
        drawn = [document for index in range(samples * (1 + bool(leaves_out)) + 1) for document in sequences[index]]
        others = mismatched_pairs(held_out, held_out[0]) if held_out else []
        return [*drawn, *mismatched_pairs(drawn[:-1], drawn[-1]), *held_out, *others]

    def _fill_by_another(self, documents: Sequence[Document], device: torch.device | None) -> None:
        other = ReferenceModel(self._loaded, self._base, self._block.reference, device)
        self._fill(documents, other.digest(), other.compute)

    def _fill(
        self, documents: Sequence[Document], digest: str, compute: Callable[[Sequence[Document]], np.ndarray]
    ) -> None:
        """Completes the table. A collective; its first process reads and writes the file.

        Args:
            compute: returns the summed log-probability of each document.
        """
        self._table = ReferenceTable(by_first(lambda: ReferenceTable.read(digest).entries))
        missing = sorted(self._table.missing(documents), key=lambda d: (-len(d.row.ids), row_key(d.row)))
        with torch.no_grad(), arithmetic_of(device_for(self._loaded.job)):
            for group in grouped(missing, lambda document: len(document.row.ids), CHUNK):
                self._table.add([row_key(document.row) for document in group], compute(group))
                by_first(lambda: self._table.write(digest))


def _by_engine(
    language: LanguageModel, engine: Engine, device: torch.device, documents: Sequence[Document]
) -> np.ndarray:
    """Returns the summed log-probability of each document under the current model; a collective."""
    size = -(-len(documents) // engine.replicas) * engine.replicas
    first, last = engine.share(0, len(documents), size)
    parts = forward_passes(language, documents[first:last], device)
    values = torch.zeros(len(documents), dtype=torch.float64)
    found = engine.read(parts, sums, engine.count(parts).passes)
    for part, read in zip(parts if found else [], found, strict=True):
        values[first + part.row.given[PLACE].cpu()] = read.cpu().double()
    return engine.add_up(values, values[:0]).numpy()


def _with_reference(parts: Sequence[Part], engine: Engine, passes: int) -> list[Part]:
    found = engine.read(parts, _log_probabilities, passes, tuned=False)
    if not found:  # an earlier pipeline stage, which computes no loss
        return list(parts)
    return [_given(part, REFERENCE, values) for part, values in zip(parts, found, strict=True)]


def _log_probabilities(hidden_ND: Tensor, inputs: Inputs, head: Head | LogitsHead) -> Tensor:
    return answer_scores(hidden_ND, inputs, head)[0]


def _log_ratios(hidden_ND: Tensor, inputs: Inputs, head: Head | LogitsHead, *, normalise: bool) -> Tensor:
    """Returns (summed log-ratio of the documents, their number), shape (2,)."""
    log_p_R, tokens_R = answer_scores(hidden_ND, inputs, head)
    ratio_R = log_p_R - inputs.given[REFERENCE].to(log_p_R) if inputs.rows else log_p_R
    ratio_R = ratio_R / tokens_R.clamp(min=1) if normalise else ratio_R
    return inputs.counted_once(torch.stack([ratio_R.sum(), ratio_R.new_tensor(inputs.rows)]))


def _given(part: Part, name: str, values: Tensor) -> Part:
    given = {**part.row.given, name: move_to(values, part.row.ids.device)}
    return replace(part, inputs=replace(part.row, given=given))
