"""Fingerprints of what a language model's run reads: sources, tokenizer, templates, and files of rewards."""

from __future__ import annotations

from pathlib import Path

from stoker.data.corpus import Corpus
from stoker.data.files.file_digests import file_digest
from stoker.data.sources import open_source
from stoker.hardware.cache_folder import cache_folder
from stoker.job.blocks.source_block import SourceBlock
from stoker.job.inputs import scorer_files
from stoker.job.resolved import ResolvedJob
from stoker.job.task_spec import task_of
from stoker.models.text import TextSide


def input_fingerprints(corpus: Corpus, text: TextSide, job: ResolvedJob, base: Path) -> dict[str, str]:
    """Returns the fingerprints of the sources, of the tokenizer with each template, and of the files of rewards and
    environments; see `check_same_job`.
    """
    sources = (*corpus.sources, *corpus.evaluation)
    found = {s.source.name: s.source.fingerprint() for s in sources}
    found |= {
        f"the tokenizer or the template of {s.source.name}": text.codec.for_source(s.block, base).fingerprint
        for s in sources
    }
    named = [named.value for named in task_of(job).names(job) if named.kind == "source"]
    found |= {path: open_source(SourceBlock(path=path), base).fingerprint() for path in named}
    files = {str(f.relative_to(base) if f.is_relative_to(base) else f): f for f in scorer_files(job, base)}
    digests = file_digest(list(files.values()), cache_folder() / "fingerprints.json")
    return found | dict(zip(files, digests, strict=True))
