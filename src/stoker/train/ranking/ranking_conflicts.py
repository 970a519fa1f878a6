"""Checks of the block ``ranking``, of its keys with each other and with the other keys of a job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from stoker.data.ranking.ranking_block import IN_BATCH, KINDS_OF_KEYS, NAMES, FeatureBlock, LogQBlock
from stoker.sockets import parse_address
from stoker.train.ranking.engine_conflicts import engine_conflicts

if TYPE_CHECKING:
    from stoker.errors import Problem
    from stoker.job.conflicts.conflict_view import View

MODELS_OF_KEYS = {"layers": ("dcn",), "experts": ("mmoe", "ple"), "levels": ("ple",), "item": ("two-tower",)}
OPTIMIZERS_OF_KEYS = {
    "eps": ("rowwise-adagrad", "adagrad", "adam"),
    "initial": ("rowwise-adagrad", "adagrad", "ftrl"),
    "beta1": ("adam",),
    "beta2": ("adam",),
    "ftrl_beta": ("ftrl",),
    "l1": ("ftrl",),
    "l2": ("ftrl",),
}
IMPLIED = {"separator": "ids", "buckets": "buckets", "boundaries": "buckets"}  # with `kind: auto`


def _models(view: View) -> Iterator[Problem]:
    from difflib import get_close_matches

    model = view.value("ranking.model")
    package, colon, attribute = model.partition(":")
    if not colon and model not in NAMES:
        near = get_close_matches(model, NAMES, 1)
        hint = f"write {near[0]}" if near else f"write one of {', '.join(NAMES)}, or package.module:name"
        yield from view.at_each(["ranking.model"], f"there is no ranking model `{model}`", hint)
    if colon and not all(word.isidentifier() for word in [*package.split("."), *attribute.split(".")]):
        yield from view.at_each(["ranking.model"], f"`{model}` is not an import path", "write `package.module:name`")
    if model == "two-tower" and not view.value("ranking.item"):
        message = "`model: two-tower` needs to know which features are the item's"
        yield view.document.problem(("ranking", "item"), message, "write `item: [item_id]`, its id first")
    if model == "two-tower" and isinstance(view.value("ranking.label"), list) and len(view.value("ranking.label")) > 1:
        message = "`model: two-tower` has one score, and there are several labels"
        yield from view.at_each(["ranking.label", "ranking.model"], message, "name one label, or write `model: mmoe`")
    label = view.value("ranking.label")
    if model == "esmm" and (not isinstance(label, list) or len(label) != 2):
        message = "`model: esmm` needs two labels, a click and the conversion that follows it"
        yield view.document.problem(("ranking", "label"), message, "write `label: [clicked, bought]`")


def _labels(view: View) -> Iterator[Problem]:
    label = view.value("ranking.label")
    if isinstance(label, list) and (not label or len(set(label)) < len(label)):
        yield from view.at_each(["ranking.label"], "`label` needs columns, each once", "write `label: clicked`")


def _features(view: View) -> Iterator[Problem]:
    features = view.value("ranking.features")
    names = [feature.name for feature in features]
    for index, feature in enumerate(features):
        key = f"ranking.features[{index}]"
        if sorted(set(feature.boundaries)) != feature.boundaries:
            message = "boundaries rise from one to the next"
            yield from view.at_each([f"{key}.boundaries"], message, "write them in order, each once")
        if (first := names.index(feature.name)) < index:
            message = f"`{feature.name}` has an entry in `features` already, number {first + 1}"
            yield from view.at_each([f"{key}.name"], message, "write all of its keys there")
        yield from _keys_of_other_kinds(view, key, feature)


def _keys_of_other_kinds(view: View, key: str, feature: FeatureBlock) -> Iterator[Problem]:
    """Yields keys of a feature that its kind does not use; those of `kind: auto` are known once the data is read."""
    given = [name for name in KINDS_OF_KEYS if getattr(feature, name) not in (None, [])]
    if feature.kind == "auto":
        implied = {IMPLIED[name]: name for name in given if name in IMPLIED}
        if len(implied) > 1:
            one, other = implied.values()
            message = f"`{one}` and `{other}` are keys of different kinds of features"
            yield from view.at_each([f"{key}.{other}"], message, "keep one")
            return
    kind: str = feature.kind
    if kind == "auto":
        kind = "buckets" if feature.buckets is not None or feature.boundaries else ""
    for name in given:
        if kind and kind not in KINDS_OF_KEYS[name]:
            message = f"`{name}` has no effect on a feature of `kind: {kind}`"
            hint = f"write `kind: {KINDS_OF_KEYS[name][0]}`, or remove it"
            yield from view.at_each([f"{key}.{name}"], message, hint)
    if feature.buckets is not None and feature.boundaries:
        message = "`buckets` is the number of quantiles, and `boundaries` are given"
        yield from view.at_each([f"{key}.buckets"], message, "keep one")


def _keys_of_other_models(view: View) -> Iterator[Problem]:
    """Yields keys whose value differs from the default and has no effect on the model or the optimizer."""
    model = view.value("ranking.model")
    for name, models in MODELS_OF_KEYS.items():
        key = f"ranking.{name}"
        if model in NAMES and model not in models and view.differs(key):
            message = f"`{name}` has no effect with `model: {model}`"
            yield from view.at_each([key], message, f"remove it, or write `model: {models[0]}`")
    optimizer = view.value("ranking.table.optimizer")
    for name, owners in OPTIMIZERS_OF_KEYS.items():
        key = f"ranking.table.{name}"
        if optimizer not in owners and view.differs(key):
            message = f"`table.{name}` has no effect with `optimizer: {optimizer}`"
            hint = f"remove it, or write `optimizer: {owners[0]}`"
            yield from view.at_each([key], message, hint)


def _in_batch(view: View) -> Iterator[Problem]:
    """Yields the conflicts of the loss over all items of a step."""
    from stoker.job.resolution.batch_solver import BatchError
    from stoker.job.resolution.batch_triangle import TRIANGLE, triangle_of

    loss, keys = view.value("ranking.loss"), ["ranking.loss", "ranking.model"]
    if loss != IN_BATCH:
        for name in LogQBlock.model_fields:
            if view.differs(key := f"ranking.logq.{name}"):
                message = f"`logq.{name}` has no effect with `loss: {loss}`"
                yield from view.at_each([key], message, f"remove it, or write `loss: {IN_BATCH}`")
        return
    for name in ("cells", "rate"):
        if not view.value("ranking.logq.enabled") and view.differs(key := f"ranking.logq.{name}"):
            message = f"`logq.{name}` has no effect with `logq.enabled: false`"
            yield from view.at_each([key, "ranking.logq.enabled"], message, "remove one of them")
    if (model := view.value("ranking.model")) != "two-tower":
        message = f"`loss: {IN_BATCH}` needs a vector of the user and one of the item, and `model: {model}` has none"
        yield from view.at_each(keys, message, "write `model: two-tower`, or `loss: cross-entropy`")
    for key in TRIANGLE:
        view.value(key)
    try:
        solved = triangle_of(view.job)
    except BatchError:  # reported elsewhere
        return
    if solved.accumulation > 1:
        message = f"the items of `loss: {IN_BATCH}` are those of one pass, and a step has {solved.accumulation} passes"
        hint = f"write `micro_batch: {solved.micro_batch * solved.accumulation}`, or a smaller batch"
        yield from view.at_each(["train.accumulation", "train.micro_batch", "ranking.loss"], message, hint)


def _order(view: View) -> Iterator[Problem]:
    if not view.value("ranking.progressive"):
        return
    epochs = view.value("epochs")
    if epochs is not None and epochs > 1:
        message = "`progressive` trains on each row once, and there are several epochs"
        yield from view.at_each(["epochs", "ranking.progressive"], message, "write `epochs: 1`")


def _admission(view: View) -> Iterator[Problem]:
    rule = view.value("ranking.table.admission")
    if rule is None:
        return
    if rule.count == 1 and rule.probability == 1:
        message = "`admission` needs to know which ids get a row"
        yield from view.at_each(["ranking.table.admission"], message, "write `count: 2` or `probability: 0.5`")
    elif rule.count == 1 and view.differs("ranking.table.admission.cells"):
        message = "`cells` are the counters of `count`, which is not given"
        hint = "also write `count: 2`, or remove it"
        yield from view.at_each(["ranking.table.admission.cells"], message, hint)


def _eviction(view: View) -> Iterator[Problem]:
    rule = view.value("ranking.table.eviction")
    if rule is not None and rule.age is None and rule.max_rows is None:
        message = "`eviction` needs to know which rows go"
        yield from view.at_each(["ranking.table.eviction"], message, "write `age: 10000` or `max_rows: 1000000`")
    if rule is not None and rule.max_rows is None and view.differs("ranking.table.eviction.score"):
        message = "`score` ranks rows, but `max_rows` is not given"
        hint = "write `max_rows: 1000000`, or remove `score`"
        yield from view.at_each(["ranking.table.eviction.score"], message, hint)


def _servers(view: View) -> Iterator[Problem]:
    servers = view.value("ranking.servers")
    for index, address in enumerate(servers.addresses if servers else ()):
        try:
            parse_address(address)
        except ValueError as error:
            yield from view.at_each([f"ranking.servers.addresses[{index}]"], str(error), "write it as 10.0.0.7:29500")


def _precision(view: View) -> Iterator[Problem]:
    if view.task.ranks and view.value("train.precision") == "fp16":
        message = "`precision: fp16` scales the loss, and rows of tables are not scaled back"
        yield from view.at_each(["train.precision", "task"], message, "write bf16 or fp32")
    key = "ranking.table.dtype"
    if view.value("train.precision") == "fp64" and view.differs(key) and not view.is_recorded(key):
        message = f"`dtype: {view.value(key)}` has no effect with `precision: fp64`, which has rows of float64"
        yield from view.at_each([key, "train.precision"], message, "remove one of them")


def _engine(view: View) -> Iterator[Problem]:
    if view.task.ranks:
        yield from engine_conflicts(view)


RANKING_CHECKS = (
    *(_models, _labels, _features, _keys_of_other_models, _in_batch, _order),
    *(_admission, _eviction, _servers, _precision, _engine),
)
