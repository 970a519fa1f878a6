"""Tokens for which a model has no embedding: an error in the data of a job, none in its tokenizer alone."""

from __future__ import annotations

from pathlib import Path

from stoker.data.corpus import Corpus
from stoker.errors import Problem
from stoker.job.load_job import LoadedJob
from stoker.models import offline_models
from stoker.models.hf_config import config_of
from stoker.models.model_files import settings_of
from stoker.models.model_source import require_model
from stoker.models.text import TextSide
from stoker.models.tokenizers.job_tokenizer import extension_of


def missing_rows(loaded: LoadedJob, text: TextSide, corpus: Corpus, rows: int) -> Problem | None:
    """Returns a problem if the data has tokens without an embedding, or if a stream may have them later.

    Args:
        rows: embeddings of the model.
    """
    tokens, sources = len(text.tokenizer), [*corpus.sources, *corpus.evaluation]
    if tokens <= rows:
        return None
    whole = not any(source.streams for source in sources)  # not how far it is: processes would disagree
    largest = max(text.tokenizer.eos_token_id or 0, *(source.cache.largest_id() for source in sources))
    if largest < rows and whole:
        return None
    message = f"the tokenizer has {tokens:,} tokens, and the model has embeddings of {rows:,}"
    if largest >= rows:
        message = f"{message}; the data has {text.tokenizer.convert_ids_to_tokens(largest)!r} with id {largest:,}"
    hint = "create one with `stoker tokenizer extend`, whose folder has the initial values of new rows"
    return loaded.problem("model.tokenizer", message, hint if whole else f"{hint}, or do not stream")


def missing_rows_of_job(loaded: LoadedJob, text: TextSide, corpus: Corpus, base: Path) -> Problem | None:
    """Returns the problem of `missing_rows` from the configuration of the job's model, without loading it."""
    block = loaded.job.model
    assert block is not None
    if extension_of(loaded.job, base) is not None:  # the model gets a row for each token
        return None
    source = require_model(block.name, base)
    if source.kind == "scratch":
        return missing_rows(loaded, text, corpus, offline_models.SCRATCH[source.where].vocabulary)
    where = settings_of(source, block.revision, own_code=block.trust_remote_code)
    rows = getattr(config_of(where, block).get_text_config(), "vocab_size", None)
    return missing_rows(loaded, text, corpus, rows) if isinstance(rows, int) else None
