"""Refuses jobs that balance the routers of a model without any. No heavy import here."""

from __future__ import annotations

from pathlib import Path

from stoker.errors import Problem, UserError
from stoker.job.load_job import ReadJob
from stoker.models.model_source import find_model


def router_problem(loaded: ReadJob, base: Path) -> Problem | None:
    """Returns the problem of a job that balances routers of a local model without any; None if it is unknown yet."""
    assert loaded.job.model is not None
    source = find_model(loaded.job.model.name, base)
    if loaded.job.train.router_aux_loss in ("auto", 0.0) or source is None or source.kind == "hub":
        return None
    from stoker.plan.planned_job import shape_of_name

    try:
        shape = shape_of_name(source.where, base)
    except UserError:  # its shape is unknown without transformers
        return None
    return no_routers(loaded) if shape.mixture is None else None


def no_routers(loaded: ReadJob) -> Problem:
    """Returns the problem that the job's model has no routers."""
    assert loaded.job.model is not None
    message = f"`train.router_aux_loss` balances the experts of a mixture, and {loaded.job.model.name} has none"
    return loaded.problem("train.router_aux_loss", message, "remove it")


def other_routers(loaded: ReadJob) -> Problem:
    """Returns the problem that the routers of the job's model do not choose by their softmax alone."""
    assert loaded.job.model is not None
    message = (
        f"`train.router_aux_loss` is of routers that choose the largest softmax, and those of {loaded.job.model.name} "
        "choose by other scores or among groups"
    )
    return loaded.problem("train.router_aux_loss", message, "remove it")
