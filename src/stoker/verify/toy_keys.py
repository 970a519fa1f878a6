"""Keys of a job's twin: its training and its tuning, with sizes for a small model."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from stoker.job.conflicts.all_conflicts import has_effect
from stoker.job.keys.tune_keys import ADAPTERS, keys_of
from stoker.job.resolved import ResolvedJob
from stoker.models.dropout import is_dropout_rate
from stoker.verify.toy_config import WIDTH

LR, EPS = 5e-3, 1e-6
RANK = 4
VIRTUAL_TOKENS = 5
LAYERS = "0,2-"  # where not all blocks have adapters
NEW_ROWS_FIRST = 2  # steps


def train_keys(job: ResolvedJob) -> dict[str, Any]:
    """Returns the job's training keys, with a learning rate that has an effect within a few steps."""
    train = job.train
    values: dict[str, Any] = {
        "precision": "fp64",
        "lr": LR,
        "optimizer": train.optimizer,
        "schedule": train.schedule,
        "warmup": train.warmup,
        "min_lr": train.min_lr,
        "weight_decay": train.weight_decay,
    }
    if train.optimizer == "sgd":
        values["beta1"] = train.beta1
    if train.optimizer in ("adamw", "muon"):
        # Adam divides by the gradient's size: a gradient that is zero up to rounding would become a full step.
        values |= {"beta1": train.beta1, "beta2": train.beta2, "eps": max(EPS, train.eps)}
    return values


def tune_keys(job: ResolvedJob) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the job's ``tune:`` block with a small rank, and other changes in it."""
    tune = job.tune
    if tune.method == "full":
        first = {"new_rows_first": min(tune.new_rows_first, NEW_ROWS_FIRST)} if tune.new_rows_first else {}
        return {"method": "full", **first}, ()
    facts = []
    if tune.method == "qlora" or (job.model is not None and job.model.quantise != "none"):
        facts.append("lora on a base in float64, as a quantised base cannot be compared exactly")
    method = "lora" if tune.method in ADAPTERS else tune.method
    rank = min(tune.rank, RANK)
    small: dict[str, Any] = {"rank": rank, "alpha": tune.alpha * rank / tune.rank, "width": WIDTH}
    small["tokens"] = min(tune.tokens, VIRTUAL_TOKENS)
    if tune.layers != "all":
        facts.append(f"adapters in the blocks {LAYERS} of a small model")
        small["layers"] = LAYERS
    values = {key: value for key, value in {**tune.model_dump(), **small}.items() if has_effect(job, ("tune", key))}
    return values | {"method": method}, tuple(facts)


def dropout_rates(job: ResolvedJob, config: PreTrainedConfig) -> frozenset[float]:
    """Returns the job's dropout rates."""
    rates = {v for k, v in config.get_text_config().to_dict().items() if is_dropout_rate(k, v)}
    rates |= {job.tune.dropout} if "dropout" in keys_of(job.tune.method, deep=job.tune.deep) else set()
    return frozenset(rates - {0.0})
