"""Checks that what a job names of the hub and at URLs exists, by requesting it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from stoker.data.sources import request_source
from stoker.errors import Problem, RunFailed, UserError
from stoker.job.inputs import by_source_key
from stoker.job.load_job import ReadJob
from stoker.job.task_spec import task_of
from stoker.models.model_source import find_model
from stoker.node_cache.hub import require_repository


def requested_problems(
    loaded: ReadJob, known: Sequence[Problem], coming: Collection[str], *, weights: bool
) -> list[Problem]:
    """Returns the problems of models and sources of the hub and at URLs by requesting them.

    Args:
        known: problems of the job so far; what they are about is not requested.
        coming: runs of earlier stages, which need not exist yet.
        weights: whether the weights of models are needed.

    Raises:
        RunFailed: the hub or a store does not answer, and nothing else is wrong.
    """
    requests = _model_requests(loaded, Path.cwd(), coming, weights=weights)
    sources = by_source_key(loaded.job.data, loaded.job.evaluate.data)
    requests |= {f"{key}.path": partial(request_source, block, Path.cwd()) for key, block in sources.items()}
    problems: list[Problem] = []
    wrong = {problem.key for problem in known}
    for key, request in requests.items():
        if key in wrong:
            continue
        try:
            with loaded.errors_at(key):
                request()
        except RunFailed:
            if not known and not problems:
                raise
            break
        except UserError as error:
            problems += error.problems
    return problems


def _model_requests(loaded: ReadJob, base: Path, coming: Collection[str], *, weights: bool) -> dict[str, partial[None]]:
    """Returns the requests of the models and tokenizers of the hub that a job names, by their keys."""
    block = loaded.job.model
    found = {} if block is None else {"model.name": find_model(block.name, base)}
    if block is not None and block.tokenizer is not None:
        found["model.tokenizer"] = find_model(block.tokenizer, base)
    for named in task_of(loaded.job).names(loaded.job):
        needed = named.is_model if weights else named.kind == "model"
        if needed and named.value not in coming:
            found[named.key] = find_model(named.value, base, or_run=True)
    without = {"model.tokenizer"} | ({"model.name"} if block is not None and block.weights == "random" else set())
    revisions = {} if block is None else dict.fromkeys(("model.name", "model.tokenizer"), block.revision)
    return {
        key: partial(
            require_repository,
            source.where,
            "model",
            revision=revisions.get(key),
            weights=weights and key not in without,
        )
        for key, source in found.items()
        if source is not None and source.kind == "hub"
    }
