"""A tuned run measured on data, with and without its tuning."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from stoker.checkpoint.export import check_quantisable, quantised_run
from stoker.checkpoint.tuned import TunedRun
from stoker.data.build import Report
from stoker.data.corpus import open_corpus, tokenise_source
from stoker.data.sequences import Document
from stoker.errors import UserError
from stoker.job.schema import SourceBlock
from stoker.models.adapters import unwrap, without_adapter
from stoker.models.build import build_model
from stoker.models.form import training_form
from stoker.models.layout import lay_out_for
from stoker.train.evaluate import Evaluation, evaluate
from stoker.train.passes import Alone
from stoker.train.tasks.language import LanguageTask


@dataclass(frozen=True)
class Measured:
    """An evaluation, and of how many rows."""

    evaluation: Evaluation
    rows_used: int
    rows_dropped: int

    def as_json(self) -> dict[str, Any]:
        """As other programs read it."""
        return {
            "loss": self.evaluation.loss,
            "perplexity": self.evaluation.perplexity,
            "token_accuracy": self.evaluation.accuracy,
            "tokens": self.evaluation.targets,
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
) -> dict[str, Measured]:
    """Loss, perplexity and token accuracy: ``tuned``, and with ``compare`` the model ``untuned`` too.

    Args:
        data: a source; None for the rows that the run held out.
        form: the format of the source.
        quantise: measures the merged model so held as well, under this name; the run's own model is gone afterwards.

    Raises:
        UserError: no row of the data has a trained token, the run held nothing out, or its base is quantised already.
    """
    if quantise is not None:
        check_quantisable(tuned, quantise)
    documents, used, dropped = _documents(tuned, data, form, base, report)
    results = {"tuned": Measured(_evaluate(tuned, tuned.model, documents), used, dropped)}
    if compare:
        with without_adapter(tuned.model):
            model = tuned.model if tuned.job.tune.method != "full" else untuned_model(tuned, base)
            results["untuned"] = Measured(_evaluate(tuned, model, documents), used, dropped)
    if quantise is not None:
        held = quantised_run(tuned, quantise).model
        training_form(unwrap(held))
        results[quantise] = Measured(_evaluate(tuned, held, documents), used, dropped)
    return results


def untuned_model(tuned: TunedRun, base: Path) -> nn.Module:
    """The model of a run as it was before its first step."""
    stop_id = tuned.tokenizer.eos_token_id
    return build_model(tuned.job, base, tuned.device, stop_id=stop_id).eval()


def _documents(
    tuned: TunedRun, data: str | None, form: str, base: Path, report: Report | None
) -> tuple[list[Document], int, int]:
    if data is None:
        corpus = open_corpus(tuned.job, tuned.text.codec, seq_len=tuned.text.seq_len, base=base, report=report)
        documents = corpus.evaluation_documents()
        if not documents:
            raise UserError(f"{tuned.folder.path} held no rows out: name data to evaluate on")
        return documents, len(documents), 0
    like = tuned.job.data[0]
    block = SourceBlock(
        path=data,
        format=form,  # type: ignore[arg-type]
        template=like.template,
        train_on=like.train_on,
        too_long=like.too_long,
    )
    source = tokenise_source(block, tuned.job, tuned.text.codec, tuned.text.seq_len, base, report, may_stream=False)
    rows = source.cache.rows
    read = sum(s.rows_in for s in source.cache.summaries)
    dropped = sum(sum(s.reasons.values()) for s in source.cache.summaries)
    if not rows:
        raise UserError(f"{data}: all {read} rows are dropped: {', '.join(source.cache.summaries[0].reasons)}")
    documents = [Document(source.cache[row], 0, row) for row in range(rows)]
    return sorted(documents, key=lambda d: len(d.row.ids)), read - dropped, dropped


def _evaluate(tuned: TunedRun, model: nn.Module, documents: list[Document]) -> Evaluation:
    task = LanguageTask(model, lay_out_for(unwrap(model)), None, tuned.device.torch)
    evaluation = evaluate(task, Alone(task, tuned.device, ()), task.evaluation_parts(documents))
    assert evaluation is not None
    return evaluation
