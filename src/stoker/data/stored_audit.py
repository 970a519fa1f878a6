"""The audit before training, computed once for all processes of a run and cached with the tokens."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, fields, replace

from pydantic import TypeAdapter

from stoker.data.audit import Audit, audit
from stoker.data.corpus import Corpus
from stoker.data.files.cache_lock import lock
from stoker.data.text_codec import TextCodec
from stoker.errors import RunFailed
from stoker.files import write_json
from stoker.hardware.cache_folder import cache_folder
from stoker.job.load_job import LoadedJob

# The blocks of a job that its audit depends on, in addition to the tokens.
_DECIDES = {"task", "data", "evaluate", "mix", "seed", "steps", "epochs", "train"}


def audited(corpus: Corpus, codec: TextCodec, loaded: LoadedJob) -> Audit:
    """Returns the audit of a run's data, without samples and dropped rows.

    The first process computes it and the others wait. An audit with problems is not cached, since it names lines of the
    job file; neither is that of a stream, which grows.
    """
    path = cache_folder() / "audits" / f"{_key(corpus, loaded)}.json"
    if not all(source.cache.complete for source in (*corpus.sources, *corpus.evaluation)):
        return audit(corpus, codec, loaded, 0)
    try:
        with lock(path):
            with suppress(OSError, ValueError):  # missing, or damaged
                return TypeAdapter(Audit).validate_json(path.read_bytes())
            found = replace(audit(corpus, codec, loaded, 0), dropped=())
            if not found.problems:
                write_json(path, asdict(found))
            return found
    except (OSError, RunFailed):  # a cache that cannot be written
        return audit(corpus, codec, loaded, 0)


def _key(corpus: Corpus, loaded: LoadedJob) -> str:
    caches = [source.cache.folder.name for source in (*corpus.sources, *corpus.evaluation)]
    job = loaded.job.model_dump(mode="json", include=_DECIDES)
    content = json.dumps([caches, job, [field.name for field in fields(Audit)]], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
