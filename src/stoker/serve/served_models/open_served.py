"""Opening of the models named on the command line; shared bases are loaded once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from peft import PeftModel

from stoker.checkpoint.load_run import open_run
from stoker.errors import Problem, UserError, placed_errors
from stoker.generate.decoder import decoder_of
from stoker.generate.open_model import OpenModel, block_of_model, of_tuned, open_model, untuned_model
from stoker.generate.request import BASE
from stoker.job.load_job import load_job
from stoker.job.paths import absolute
from stoker.job.task_spec import task_of
from stoker.models.model_source import find_model
from stoker.models.tokenizers.job_tokenizer import extension_of
from stoker.models.tuning.virtual_tokens import virtual_of
from stoker.node_cache.urls import is_url
from stoker.runs.find_run import find_run
from stoker.serve.served_models.adapter_config import is_adapter_folder
from stoker.serve.served_models.adapter_weights import AdapterWeights, is_plain_lora, weights_of_folder
from stoker.serve.served_models.load_adapter import adapter_of_run, add_adapter, with_own_text
from stoker.serve.served_models.served import Models, Served, ServedBase
from stoker.train.preference.answer_scores import AnswerScores
from stoker.train.rollouts.scoring_model import names_classifier, open_classifier

NAME = re.compile(r"[\w.:/@+-]{1,200}")  # of a served model


def open_served(
    names: Sequence[str],
    folder: Path,
    *,
    at: str = "last",
    trusted: Sequence[str] = (),
    base: str | None = None,
    rows: int | None = None,
) -> Models:
    """Loads models by ``NAME=RUN`` or ``RUN``.

    Args:
        folder: start of relative paths.
        at: the checkpoint of runs.
        trusted: keys that may run code; see `stoker.checkpoint.load_run.open_run`.
        base: the base of adapter folders, instead of the one that they name.
        rows: most answers in a pass.

    Raises:
        UserError: a model cannot be loaded, or two have the same name.
    """
    opener = _Opener(folder, at, trusted, base, rows)
    for written in names:
        opener.open(*name_and_place(written, folder))
    return opener.models


def name_and_place(written: str, folder: Path) -> tuple[str, str]:
    """Splits ``NAME=RUN`` into (name or empty, place)."""
    name, equals, place = written.partition("=")
    if not equals or "://" in name or absolute(written, folder).exists():
        return "", written
    if not NAME.fullmatch(name) or not place:
        raise UserError(Problem(f"{written!r} is not a NAME=RUN", "a name has letters, digits, and . : / @ + -"))
    return name, place


def _with_base_option(problem: Problem) -> Problem:
    """Adds how to name another base to a problem of the one that an adapter names."""
    return replace(problem, suggestion=problem.suggestion or "name the base with --base MODEL")


class _Opener:
    """Loads models one by one, and keeps the bases that later ones may share."""

    def __init__(self, folder: Path, at: str, trusted: Sequence[str], base: str | None, rows: int | None) -> None:
        self.models = Models(folder)
        self._rows = rows
        self._folder, self._at, self._trusted, self._base = folder, at, trusted, base
        self._bases: dict[str, ServedBase] = {}  # by source

    def open(self, name: str, place: str) -> None:
        """Loads one model."""
        path = absolute(place, self._folder)
        if is_adapter_folder(path):
            self._adapter_folder(name or path.name, path)
        elif find_model(place, self._folder, or_run=True) is not None:
            if not self._classifier(name, place):
                self._model(name, place)
        elif not self._scorer(name, place) and not self._shared_run(name, place):
            self._run(name, place)

    def _model(self, name: str, place: str) -> None:
        host = self._base_of_run(place) or self._base_of(place)
        of_run = host.run is not None
        opened = untuned_model(host.opened, place, self._folder, self._trusted) if of_run else host.opened
        bases = [served for served in self.models if served.host is host and served.adapter == BASE]
        listed = [served for served in bases if name in ("", served.name)]
        for served in listed:  # until now with the texts of the run
            served.opened = opened
        if not listed:
            self.models.add(Served(name or host.base, host, BASE, opened, root=place))

    def _source(self, place: str) -> str:
        source = find_model(place, self._folder)
        return place if source is None else source.where

    def _base_of(self, place: str) -> ServedBase:
        """Loads a model from files, once."""
        key = self._source(place)
        if key not in self._bases:
            opened = open_model(place, self._folder, trusted=self._trusted)
            self._bases[key] = ServedBase(opened.engine(rows=self._rows), opened.name, opened)
        return self._bases[key]

    def _base_of_run(self, place: str) -> ServedBase | None:
        """Returns the base of an earlier run, if it is this model as it is in its files."""
        for host in self.models.hosts:
            block = None if host.run is None else host.run.job.model
            if host.run is None or block is None or extension_of(host.run.job, self._folder) is not None:
                continue
            plain = (block.quantise, block.revision, block.tokenizer) == ("none", None, None)
            plain = plain and block.weights == "stored" and not block.config
            if plain and self._source(block.name) == self._source(place):
                return host
        return None

    def _free(self, base: str, name: str) -> str:
        """Returns the name for the base of a model with a name: its own, unless another model has it."""
        return f"{base}@{name}" if base == name or base in self.models else base

    def _adapter_folder(self, name: str, path: Path) -> None:
        weights = weights_of_folder(path)
        place = self._base or self._named_base(weights, path)
        with nullcontext() if self._base else placed_errors(_with_base_option):
            host = self._base_of(place)
        adapter, own = add_adapter(host, with_own_text(host.opened, path), weights)
        if unnamed := host not in self.models.hosts:
            host.base = self._free(host.base, name)
        self.models.add(Served(name, host, adapter, own, parent=host.base, removable=True, root=str(path)))
        if unnamed:
            self.models.add(Served(host.base, host, BASE, host.opened, root=place))

    def _named_base(self, weights: AdapterWeights, path: Path) -> str:
        # A URL in a foreign file is never requested.
        if not weights.base or is_url(weights.base) or find_model(weights.base, self._folder) is None:
            what = f"{path} was trained over {weights.base!r}, which is not here"
            raise UserError(Problem(what, "name the base with --base MODEL"))
        return weights.base

    def _scorer(self, name: str, place: str) -> bool:
        """Loads a reward run; returns False for a run of another task."""
        run = find_run(place, self._folder)
        if task_of(load_job(run.job, self._trusted).job).model.head != "score":
            return False
        tuned = open_run(place, self._folder, at=self._at, trusted=self._trusted)
        self._add_scorer(name, place, of_tuned(tuned, self._folder), AnswerScores(tuned))
        return True

    def _classifier(self, name: str, place: str) -> bool:
        """Loads a sequence classifier; returns False for another model."""
        block = block_of_model(place, self._trusted)
        if not names_classifier(block, self._folder):
            return False
        scoring = open_classifier(block, self._folder)
        text = scoring.text
        decoder = decoder_of(scoring.model, scoring.device, context=text.context, frozen=True)
        opened = OpenModel(Path(place).name, decoder, text.codec, chats=True)
        self._add_scorer(name, place, opened, AnswerScores(scoring), whole_text=not scoring.ends_at_stop)
        return True

    def _add_scorer(
        self, name: str, place: str, opened: OpenModel, scores: AnswerScores, *, whole_text: bool = False
    ) -> None:
        host = ServedBase(opened.engine(rows=self._rows), opened.name, opened)
        name = name or opened.name
        self.models.add(Served(name, host, None, opened, root=place, scores=scores, scores_whole_text=whole_text))

    def _run(self, name: str, place: str) -> None:
        opened = open_model(place, self._folder, at=self._at, trusted=self._trusted)
        assert opened.run is not None
        block = opened.run.job.model
        assert block is not None
        tuned, name = opened.untuned, name or opened.name
        base = self._free(Path(block.name).name, name) if tuned else opened.name
        host = ServedBase(opened.engine(rows=self._rows), base, opened)
        # A model without adapters is its own base, so adapters can be added to it later.
        adapter = None if tuned or virtual_of(opened.decoder.model) is not None else BASE
        parent = host.base if tuned else None
        removable = is_plain_lora(opened.run.job.tune) and extension_of(opened.run.job, self._folder) is None
        self.models.add(Served(name, host, adapter, opened, root=place, parent=parent, removable=removable))
        if tuned:
            self.models.add(Served(host.base, host, BASE, opened, root=block.name))
        if isinstance(opened.decoder.model, PeftModel):
            host.run = opened.run.loaded

    def _shared_run(self, name: str, place: str) -> bool:
        """Loads the adapter of a run over the base of an earlier run, where both have the same base."""
        if not any(host.run for host in self.models.hosts):
            return False
        run = find_run(place, self._folder)
        found = adapter_of_run(run, load_job(run.job, self._trusted), self._at, self._folder, self.models)
        if found is None:
            return False
        host, weights, opened = found
        adapter, opened = add_adapter(host, opened, weights)
        name = name or opened.name
        self.models.add(Served(name, host, adapter, opened, parent=host.base, removable=True, root=place))
        return True
