"""Reference model beside the trained one: opened whole in each process while it is used, then dropped.

Shapes: N targets, R rows (answers).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stoker.checkpoint.load_run import open_run
from stoker.checkpoint.object_collectives import by_first, rank
from stoker.data.sequences import Document
from stoker.errors import UserError
from stoker.grouping import grouped
from stoker.job.load_job import LoadedJob
from stoker.job.resolved import ResolvedJob
from stoker.models.attention.collate import Inputs
from stoker.models.attention.packed_row import row_of
from stoker.models.build_model import build_meta, build_model
from stoker.models.head import Head, LogitsHead
from stoker.models.language_model import LanguageModel, lay_out_for
from stoker.models.model_source import find_model
from stoker.models.text import TextSide, open_text_side
from stoker.models.tuning.adapters import unwrap
from stoker.models.tuning.quantise import device_for
from stoker.models.weight_source import all_rows
from stoker.train.preference.preference_objective import answer_scores
from stoker.train.task import Part

PASS_TOKENS = 4096  # per forward pass without gradients: no activations are kept
KEY = "dpo.reference"
PLACE = "place"  # in `Inputs.given`: index of each document


class ReferenceModel:
    """The reference that a job names: ``precomputed`` for the job's own base model, else a model or a run.

    Args:
        device: device of this process; None for the job's.
    """

    def __init__(self, loaded: LoadedJob, base: Path, named: str, device: torch.device | None = None) -> None:
        self._loaded, self._base, self._named = loaded, base, named
        self._own = named == "precomputed"
        self._device = device_for(loaded.job, device)

    def digest(self, float8: str = "none") -> str:
        """Digests its weights, its configuration and its in-memory format; a collective.

        Args:
            float8: `train.float8` of the passes that compute its log-probabilities.
        """
        return by_first(lambda: self._digest("" if float8 == "none" else f" float8 {float8}"))

    def compute(self, documents: Sequence[Document]) -> np.ndarray:
        """Returns the summed log-probability of each document; a collective of all processes.

        Raises:
            UserError: the model cannot be opened, has another tokenizer, or a context shorter than a document.
        """
        size = dist.get_world_size() if dist.is_initialized() else 1
        values = torch.zeros(len(documents), dtype=torch.float64)
        model, text = self._model
        if text is not None:
            longest = max((len(document.row.ids) for document in documents), default=0)
            text.check_fits(longest, self._loaded, KEY, self._named)
        with self._device.autocast():
            language = lay_out_for(unwrap(model))
        for part in forward_passes(language, documents[rank() :: size], self._device.torch):
            with row_of(part.row), self._device.autocast():
                read = language.read(part.row, sums)
            values[part.row.given[PLACE].cpu() * size + rank()] = read.cpu().double()
        if size > 1:
            dist.all_reduce(values)
        return values.numpy()

    @cached_property
    def _job(self) -> ResolvedJob | None:
        """A job of this model without tuning; None if it is a run."""
        job = self._loaded.job
        assert job.model is not None
        update: dict[str, object] = {"tune": job.tune.model_copy(update={"method": "full", "new_rows_first": 0})}
        if not self._own:
            if find_model(self._named, self._base, or_run=True) is None:
                return None
            update["model"] = job.model.of_other(self._named)
        return job.model_copy(update=update)

    def _digest(self, more: str) -> str:
        job, device = self._job, self._device
        if job is None:
            model = open_run(self._named, self._base).model
            settings = f"{self._named} {unwrap(model).config.to_json_string()} {device.precision}{more}"
            return _digest_of(((n, p.detach()) for n, p in model.named_parameters()), settings)
        assert job.model is not None
        held = job.model.quantise
        plain = job.model_copy(update={"model": job.model.model_copy(update={"quantise": "none"})})
        built = build_meta(plain, self._base, device)
        read = ((name, built.weights.read(name, all_rows(p.shape))) for name, p in built.model.named_parameters())
        return _digest_of(read, f"{unwrap(built.model).config.to_json_string()} {device.precision} {held}{more}")

    @cached_property
    def _model(self) -> tuple[nn.Module, TextSide | None]:
        """The model, and its text side if it is not the job's own."""
        job = self._job
        if job is None:
            run = open_run(self._named, self._base)
            self._check(run.text)
            return run.model, run.text
        text = None if self._own else open_text_side(replace(self._loaded, job=job), self._base)
        if text is not None:
            self._check(text)
        return build_model(job, self._base, self._device).eval(), text

    def _check(self, text: TextSide) -> None:
        own = open_text_side(self._loaded, self._base)
        if own.tokenizer.get_vocab() != text.tokenizer.get_vocab():
            message = f"the reference {self._named} has another tokenizer than the model"
            hint = "name a model of the same tokenizer, such as the one that the model was tuned from"
            raise UserError(self._loaded.problem(KEY, message, hint))


def forward_passes(language: LanguageModel, documents: Sequence[Document], device: torch.device) -> list[Part]:
    """Lays documents out as forward passes without gradients; each pass is given its documents' places."""
    parts: list[Part] = []
    start = 0
    for group in grouped(documents, lambda document: len(document.row.ids), PASS_TOKENS):
        rows = [(d.row.ids, d.row.trained) for d in group]
        places = np.arange(start, start + len(group))
        laid_out = language.lay_out(rows, device, share=True, given={PLACE: places})
        parts += [Part(inputs, targets=0, tokens=0) for inputs in laid_out]
        start += len(group)
    return parts


def sums(hidden_ND: Tensor, inputs: Inputs, head: Head | LogitsHead) -> Tensor:
    """Returns the summed log-probability of each document, shape (R,), on one of the processes that share the row."""
    return inputs.counted_once(answer_scores(hidden_ND, inputs, head)[0])


def _digest_of(named: Iterable[tuple[str, Tensor]], also: str) -> str:
    digest = hashlib.blake2b(also.encode(), digest_size=16)
    for name, tensor in named:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
