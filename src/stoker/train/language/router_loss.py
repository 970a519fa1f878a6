"""The auxiliary loss that balances the routers of a mixture of experts."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from stoker.checkpoint.object_collectives import by_first
from stoker.errors import UserError
from stoker.job.load_job import LoadedJob
from stoker.job.resolved import ResolvedJob
from stoker.models.router_balance import RouterBalance, chooses_otherwise, hook_routers, routers_of
from stoker.models.router_check import no_routers, other_routers
from stoker.runs.run_folder import RunFolder


def open_router_loss(loaded: LoadedJob, base: Path, model: PreTrainedModel) -> RouterBalance | None:
    """Hooks the routers of a model; None without routers that are balanced.

    Raises:
        UserError: ``train.router_aux_loss`` is set, and the model has no routers, or they choose experts otherwise.
    """
    balance = hook_routers(model, _coefficient(loaded.job, model))
    if loaded.job.train.router_aux_loss in ("auto", 0.0):
        return balance
    if chooses_otherwise(model) and not by_first(RunFolder(base / loaded.job.output).has_begun):
        raise UserError(other_routers(loaded))
    if balance is None:
        raise UserError(no_routers(loaded))
    return balance


def _coefficient(job: ResolvedJob, model: PreTrainedModel) -> float:
    """Returns the factor of the loss: the job's, or the model's own if its routers are trained."""
    given = job.train.router_aux_loss
    if given != "auto":
        return given
    trained = any(p.requires_grad for router in routers_of(model) for p in router.parameters())
    own = getattr(model.config.get_text_config(), "router_aux_loss_coef", None)
    return float(own or 0.0) if trained else 0.0
