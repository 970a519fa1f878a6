"""Checks that the run or the model of a command line exists, before any heavy import."""

from __future__ import annotations

from pathlib import Path

from stoker.errors import Problem, UserError
from stoker.job.blocks.model_block import ModelBlock
from stoker.models.model_source import find_model, model_problem
from stoker.node_cache.hub import require_repository
from stoker.node_cache.urls import is_url
from stoker.runs.find_run import find_run


def require_run_or_model(name: str, base: Path) -> None:
    """Checks that a run of that name exists, or the model that `open_model` would open.

    Raises:
        UserError: neither exists.
        RunFailed: the name is a model of the hub, which does not answer.
    """
    if is_url(name):  # requested when it is opened
        return
    if find_model(name, base, or_run=True) is None:
        find_run(name, base)
    else:
        require_hub_model(name, base)


def require_hub_model(name: str, base: Path) -> None:
    """Checks that a model exists if its name is one of the hub; does nothing for other names.

    Raises:
        UserError: the hub does not have it.
        RunFailed: the hub does not answer.
    """
    source = None if is_url(name) else find_model(name, base, or_run=True)
    if source is None or source.kind != "hub":
        return
    if problem := model_problem(ModelBlock(name=name), base):
        raise UserError(Problem(*problem))
    require_repository(source.where, "model", weights=True)


def require_run(name: str, base: Path) -> None:
    """Checks that a run exists whose loss can be measured.

    Raises:
        UserError: it does not exist, or is a model.
    """
    try:
        find_run(name, base)
    except UserError as error:
        if error.problems[0].suggestion or is_url(name) or find_model(name, base, or_run=True) is None:
            raise
        hint = "`stoker eval` evaluates a model with --answers FILE or --tasks NAME"
        raise UserError(Problem(error.problems[0].message, hint)) from error
