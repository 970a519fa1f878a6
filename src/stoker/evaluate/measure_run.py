"""Evaluation of a trained run on data, with and without its tuning."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stoker.checkpoint.export.write_export import check_quantisable, quantised_run
from stoker.checkpoint.load_run import TunedRun
from stoker.data.audit_gate import drop_reasons
from stoker.data.build_cache import Report
from stoker.data.corpus import Corpus, TokenisedSource, open_corpus, tokenise_source
from stoker.data.sequences import Document, by_length
from stoker.data.tokenizers.token_bytes import byte_lengths
from stoker.errors import Problem, UserError
from stoker.job.resolved import ResolvedSource
from stoker.job.task_spec import task_of, training_of, unit_size_of
from stoker.models.build_model import build_model
from stoker.models.language_model import lay_out_for
from stoker.models.prepare_architecture import training_form
from stoker.models.score_head import OFFSET, first_scores, score_head_of
from stoker.models.text import open_text_side
from stoker.models.tokenizers.job_tokenizer import extension_of
from stoker.models.tuning.adapters import unwrap, without_adapter
from stoker.parallel.float64_mode import arithmetic_of
from stoker.train.evaluate import Evaluation, evaluate
from stoker.train.language.batch_extras import BatchExtras
from stoker.train.language.language_task import LanguageTask
from stoker.train.language.measured_task import measured_training, objective_of
from stoker.train.single_process import SingleProcess


@dataclass(frozen=True)
class MeasuredLoss:
    """An evaluation and the number of rows behind it.

    Attributes:
        text_bytes: bytes of text that the targets encode, without special tokens; None if the tokenizer does not
            define them.
        details: further results of the run's task.
    """

    evaluation: Evaluation
    rows_used: int
    rows_dropped: int
    text_bytes: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bits_per_byte(self) -> float | None:
        """Loss per byte of text, which is comparable between models with different vocabularies."""
        nats = self.evaluation.loss * self.evaluation.targets
        return nats / math.log(2) / self.text_bytes if self.text_bytes and self.evaluation.perplexity else None

    def as_json(self) -> dict[str, Any]:
        """Returns the values for `--json`."""
        return {
            "loss": self.evaluation.loss,
            "perplexity": self.evaluation.perplexity,
            f"{self.evaluation.target}_accuracy": self.evaluation.accuracy,
            f"{self.evaluation.target}s": self.evaluation.targets,
            **self.evaluation.measures,
            **self.details,
            "text_bytes": self.text_bytes,
            "bits_per_byte": self.bits_per_byte,
            "rows_used": self.rows_used,
            "rows_dropped": self.rows_dropped,
        }


def measure(
    tuned: TunedRun,
    data: str | None,
    form: str,
    base: Path,
    *,
    compare: bool = False,
    quantise: str | None = None,
    report: Report | None = None,
) -> dict[str, MeasuredLoss]:
    """Evaluates the ``tuned`` model, and with ``compare`` the ``untuned`` one, on loss, perplexity and token accuracy.

    Where the run added new tokens, it also evaluates the ``original`` model with its own tokenizer on the same text:
    ``data`` or the job's ``evaluate.data``, as the split of held-out training data depends on the tokens.

    Args:
        data: a source; None for the rows that the run held out.
        form: the format of the source.
        quantise: also evaluates the merged model in this quantisation, under its name; consumes the run's own model.

    Raises:
        UserError: no row of the data has a trained token, the run held nothing out, or its base is quantised already.
    """
    if quantise is not None:
        check_quantisable(tuned, quantise)
    documents, used, dropped = _documents(tuned, data, form, base, report)
    results = {"tuned": _measured(tuned, tuned.model, documents, used, dropped, data)}
    if compare:
        with without_adapter(tuned.model), _first_head(tuned):
            model = untuned_model(tuned, base) if tuned.job.tune.method == "full" else tuned.model
            results["untuned"] = _measured(tuned, model, documents, used, dropped, data)
        if tuned.job.model and extension_of(tuned.job, base) and (data or tuned.job.evaluate.data):
            results["original"] = _original(tuned, data, form, base, report)
    if quantise is not None:
        held = quantised_run(tuned, quantise).model
        training_form(unwrap(held))
        results[quantise] = _measured(tuned, held, documents, used, dropped, data)
    return results


def _original(tuned: TunedRun, data: str | None, form: str, base: Path, report: Report | None) -> MeasuredLoss:
    """Evaluates the model as published, with its own tokenizer."""
    job = tuned.job
    assert job.model is not None
    model = job.model.model_copy(update={"tokenizer": None, "special_tokens": None, "stop": None})
    loaded = replace(tuned.loaded, job=job.model_copy(update={"model": model}))
    plain = replace(tuned, loaded=loaded, text=open_text_side(loaded, base))
    blocks = [source_like(plain, data, form)] if data is not None else job.evaluate.data
    documents, used, dropped = _documents_of(plain, blocks, base, report)
    return _measured(plain, untuned_model(plain, base), documents, used, dropped)


@contextmanager
def _first_head(tuned: TunedRun) -> Iterator[None]:
    """Gives a score head, which is trained beside an adapter, its first weights within the block."""
    model = unwrap(tuned.model)
    if task_of(tuned.job).model.head != "score" or (head := score_head_of(model)) is None:
        yield
        return
    (draw,) = first_scores(model, head, tuned.job.seed).values()
    offset: Tensor = getattr(head, OFFSET)
    trained = head.weight.data, offset.data
    head.weight.data, offset.data = draw().to(head.weight), torch.zeros_like(offset)
    try:
        yield
    finally:
        head.weight.data, offset.data = trained


def untuned_model(tuned: TunedRun, base: Path) -> nn.Module:
    """Returns the model of a run before its first step."""
    stop_id = tuned.tokenizer.eos_token_id
    with arithmetic_of(tuned.device):
        return build_model(tuned.job, base, tuned.device, stop_id=stop_id).eval()


def _documents(
    tuned: TunedRun, data: str | None, form: str, base: Path, report: Report | None
) -> tuple[list[Document], int, int]:
    if data is None:
        with closing(corpus_of(tuned, base, report)) as corpus:
            documents = corpus.evaluation_documents()
        if not documents:
            raise UserError(f"{tuned.folder.path} held no rows out: name data to evaluate on")
        return documents, len(documents) // unit_size_of(tuned.job), 0
    return _documents_of(tuned, [source_like(tuned, data, form)], base, report)


def corpus_of(tuned: TunedRun, base: Path, report: Report | None) -> Corpus:
    """Returns the rows of a run, which have a loss.

    Raises:
        UserError: they are prompts without answers.
    """
    corpus = open_corpus(tuned.job, tuned.text.codec, seq_len=tuned.text.seq_len, base=base, report=report)
    try:
        for source in (*corpus.sources, *corpus.evaluation):
            _check_answers(source)
    except UserError:
        corpus.close()
        raise
    return corpus


def tokenised_like(tuned: TunedRun, block: ResolvedSource, base: Path, report: Report | None) -> TokenisedSource:
    """Tokenises a source, whose rows have a loss, as a run does.

    Raises:
        UserError: every row is dropped, or they are prompts without answers.
    """
    source = tokenise_source(block, tuned.job, tuned.text.codec, tuned.text.seq_len, base, report, may_stream=False)
    if not source.cache.rows:
        reasons = ", ".join(drop_reasons(source.cache.summaries))
        raise UserError(f"{block.path}: every row is dropped: {reasons}")
    _check_answers(source)
    return source


def _check_answers(source: TokenisedSource) -> None:
    if source.format == "question":
        message = f"{source.source.name}: its rows are prompts without answers, which have no loss"
        raise UserError(Problem(message, "score the model's own answers with `stoker eval RUN --answers FILE`"))


def source_like(tuned: TunedRun, data: str, form: str) -> ResolvedSource:
    """Returns a source that is read with the settings of the run's first source."""
    like = tuned.job.data[0]
    return ResolvedSource(
        path=data,
        format=form,  # type: ignore[arg-type]
        template=like.template,
        template_arguments=like.template_arguments,
        train_on=like.train_on,
        special_tokens=like.special_tokens,
        too_long=like.too_long,
    )


def _documents_of(
    tuned: TunedRun, blocks: Sequence[ResolvedSource], base: Path, report: Report | None
) -> tuple[list[Document], int, int]:
    documents: list[Document] = []
    used = dropped = 0
    for number, block in enumerate(blocks):
        source = tokenised_like(tuned, block, base, report)
        read = sum(s.rows_in for s in source.cache.summaries)
        lost = drop_reasons(source.cache.summaries).total()
        documents += [Document(source.cache[row], number, row) for row in range(source.cache.rows)]
        used, dropped = used + read - lost, dropped + lost
    return by_length(documents, unit_size_of(tuned.job)), used, dropped


def _measured(
    tuned: TunedRun, model: nn.Module, documents: list[Document], used: int, dropped: int, data: str | None = None
) -> MeasuredLoss:
    lengths = byte_lengths(json.loads(tuned.text.codec.definition))
    size = None
    if lengths is not None:
        size = sum(int(lengths[d.row.ids[1:][d.row.trained[1:]]].sum()) for d in documents)
    details_of = training_of(tuned.job).details
    with arithmetic_of(tuned.device):
        task = _task_of(tuned, model, documents)
        engine = SingleProcess(task, tuned.device, ())
        evaluation = evaluate(task, engine, task.evaluation_parts(documents))
        assert evaluation is not None
        names = [data] if data is not None else [s.path for s in (*tuned.job.data, *tuned.job.evaluate.data)]
        details = details_of(task, engine, documents, names) if details_of is not None else {}
    return MeasuredLoss(evaluation, used, dropped, size, details)


def _task_of(tuned: TunedRun, model: nn.Module, documents: list[Document]) -> LanguageTask:
    training = measured_training(tuned.job)
    with tuned.device.autocast():
        language = lay_out_for(unwrap(model))
    extras = training.extras(tuned.loaded, tuned.base) if training.extras else BatchExtras()
    extras.before_evaluation(documents)
    return LanguageTask(
        model,
        language,
        None,
        tuned.device.torch,
        training=training,
        objective=objective_of(tuned.job),
        extras=extras,
        unit_size=unit_size_of(tuned.job),
    )
