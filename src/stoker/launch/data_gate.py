"""Audits a job's data once, before its processes start."""

from __future__ import annotations

from stoker.data.build_cache import Report
from stoker.data.corpus import open_corpus
from stoker.data.stored_audit import audited
from stoker.errors import UserError
from stoker.job.task_spec import task_of
from stoker.launch.run_spec import RunSpec
from stoker.models.text import open_text_side


def check_data(spec: RunSpec, report: Report | None = None) -> None:
    """Tokenises and audits the job's data, so that each problem is reported once and every process finds the result.

    Raises:
        UserError: the tokenizer cannot be loaded, or the data does not pass the audit.
    """
    task = task_of(spec.loaded.job)
    if task.ranks:
        from stoker.train.ranking.check_log import check_log

        check_log(spec.loaded, spec.base)
    if not task.text:
        return
    text = open_text_side(spec.loaded, spec.base)
    job = spec.loaded.job
    job = job.model_copy(update={"train": job.train.model_copy(update={"seq_len": text.seq_len})})
    corpus = open_corpus(job, text.codec, seq_len=text.seq_len, base=spec.base, report=report, loaded=spec.loaded)
    try:
        problems = audited(corpus, text.codec, spec.loaded).problems
    finally:
        corpus.close()
    if problems:
        raise UserError(*problems)
