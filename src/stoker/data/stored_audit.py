"""The audit before training, made once for all processes of a run and kept beside the tokens."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path

from stoker.data.audit import Audit, Ignored, audit
from stoker.data.corpus import Corpus
from stoker.data.mixture_report import Drawn
from stoker.data.sources import cache_folder
from stoker.data.token_cache import lock, write_json
from stoker.data.tokenise import TextCodec
from stoker.errors import RunFailed
from stoker.job.load_job import LoadedJob

# What of a job decides its audit, beside the tokens.
_DECIDES = {"task", "data", "evaluate", "mix", "seed", "steps", "epochs", "train"}


def audited(corpus: Corpus, codec: TextCodec, loaded: LoadedJob) -> Audit:
    """The audit of a run's data, without samples and dropped rows.

    The first process that asks makes it, the others wait for it. One with problems is not kept: it names lines of the
    job file. Neither is that of a stream, which grows.
    """
    path = cache_folder() / "audits" / f"{_key(corpus, loaded)}.json"
    if not all(source.cache.complete for source in (*corpus.sources, *corpus.evaluation)):
        return audit(corpus, codec, loaded, 0)
    try:
        with lock(path):
            with suppress(OSError, ValueError, KeyError, TypeError):  # not there, or damaged
                return _read(path)
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


def _read(path: Path) -> Audit:
    content = json.loads(path.read_text(encoding="utf-8"))
    content |= {
        "length_histogram": {int(bound): count for bound, count in content["length_histogram"].items()},
        "evaluation_rows": tuple(content["evaluation_rows"]),
        "special_tokens": tuple(map(tuple, content["special_tokens"])),
        "drawn": tuple(Drawn(**part) for part in content["drawn"]),
        "fields_ignored": tuple(Ignored(**ignored) for ignored in content["fields_ignored"]),
        **dict.fromkeys(("dropped", "samples", "problems"), ()),
    }
    return Audit(**content)
