"""Selects the layers of a model that get an adapter, and the modules that are trained in full.

Users name layers as transformers does. The name of a layer that is split for training selects all of its parts, whose
names extend it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from itertools import accumulate
from typing import Any

from peft import LoraConfig
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stoker.errors import UserError
from stoker.job.blocks.tune_block import TuneBlock
from stoker.job.keys.tune_keys import block_numbers
from stoker.models.blocks import blocks_path
from stoker.models.families import family_of
from stoker.models.families.facts import untrained_modules
from stoker.models.router_balance import routers_of
from stoker.models.split_fused import Parts
from stoker.models.tuning.packed_experts import stacks_of

WILD = frozenset("*?[")


@dataclass(frozen=True)
class AdaptableLayer:
    """A layer that can get an adapter.

    Attributes:
        name: in training.
        called: its name in transformers; for a part of a fused layer, that of the fused layer.
        stacked: whether it is a parameter with the matrices of all experts, and not a module.
        inner: whether a pattern can select it: neither the embedding nor the head.
        routes: whether it is a router of experts, or in one.
    """

    name: str
    called: str
    stacked: bool = False
    inner: bool = True
    routes: bool = False


def layers_of(model: PreTrainedModel) -> list[AdaptableLayer]:
    """Returns the layers of a model that can get an adapter."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    split = {name for name, module in model.named_modules() if isinstance(module, Parts)}
    routing = {layer for router in routers_of(model) for layer in router.modules()}
    untrained = _untrained(model)
    found = []
    for name, module in model.named_modules():
        if module in untrained:
            continue
        holder = name.rpartition(".")[0]
        called = holder if holder in split else name
        if isinstance(module, (nn.Linear, Conv1D)) or module is embedding:
            inner = module is not head and module is not embedding
            found.append(AdaptableLayer(name, called, inner=inner, routes=module in routing))
        found += [AdaptableLayer(stack, stack, stacked=True) for stack in stacks_of(module, name, recurse=False)]
    return found


def experts_to_train(model: PreTrainedModel, tune: TuneBlock) -> Iterator[str]:
    """Yields the stacked experts that get adapters from a ``tune:`` block, or may be trained in full."""
    named = [] if tune.targets == "all-linear" else list(tune.targets)
    adapts = _in_blocks(model, tune.layers)
    for stack in stacks_of(model):
        parents = accumulate(stack.split("."), lambda path, part: f"{path}.{part}")
        whole = any(matches_name(name, path) for path in parents for name in tune.modules_to_save)
        if whole or (adapts(stack) and any(matches_name(name, stack) for name in named)):
            yield stack


def layers_to_adapt(model: PreTrainedModel, tune: TuneBlock, whole: Collection[str]) -> list[AdaptableLayer]:
    """Returns the layers that get adapters from a ``tune:`` block, in the model's order.

    ``all-linear`` selects every linear layer except the head, routers and stacked experts; these get adapters only if
    they are named.

    Args:
        whole: names of the modules that are trained in full; they get none.

    Raises:
        UserError: a target or a number of blocks selects no layer that can have an adapter.
    """
    layers = layers_of(model)
    free = [layer for layer in layers if not is_within(layer.called, whole)]
    adaptable = _adaptable(model)
    if tune.targets == "all-linear":
        chosen = {layer for layer in free if layer.inner and not (layer.stacked or layer.routes) and adaptable(layer)}
    else:
        chosen = set()
        for target in tune.targets:
            chosen |= _meant(target, model, layers, free, adaptable)
    kept = _in_blocks(model, tune.layers)
    found = [layer for layer in layers if layer in chosen and kept(layer.name)]
    if not found:
        where = "" if tune.layers == "all" else f" in the blocks {tune.layers}"
        raise UserError(f"tune.targets: the model has no layer to adapt{where} that matches {tune.targets}")
    stacked = next((layer.name for layer in found if layer.stacked), None)
    if stacked is not None and (tune.dropout or tune.dora):
        key = "dropout" if tune.dropout else "dora"
        raise UserError(f"tune.{key}: the adapter of stacked experts ({stacked}) cannot have it; leave out one")
    return found


def modules_trained_whole(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Returns the modules that ``tune.modules_to_save`` selects, by transformers' names and in its order.

    Tied weights stay tied: naming one of two layers that share a matrix trains it in both.

    Raises:
        UserError: a name selects no module with parameters.
    """
    split = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Parts))
    untrained = _untrained(model)
    modules = {
        name: module
        for name, module in model.named_modules()
        if name
        and not name.startswith(split)
        and module not in untrained
        and next(module.parameters(), None) is not None
    }
    chosen: set[str] = set()
    for name in names:
        meant = {module for module in modules if matches_name(name, module)}
        if not meant:
            _refuse_untrained("tune.modules_to_save", name, model)
            raise UserError(_unknown("tune.modules_to_save", "module", name, modules))
        chosen |= meant
    trained = {id(p) for name in chosen for p in modules[name].parameters()}
    for name, module in modules.items():
        if any(id(p) in trained for p in module.parameters(recurse=False)):
            chosen.add(name)
    return [name for name in modules if name in chosen and not is_within(name.rpartition(".")[0], chosen)]


def _untrained(model: PreTrainedModel) -> set[nn.Module]:
    """Returns the modules that get no gradient, such as indexers, and those within them."""
    family = family_of(model.config)
    return {part for module in untrained_modules(model, family) for part in module.modules()} if family else set()


def _refuse_untrained(key: str, written: str, model: PreTrainedModel) -> None:
    untrained = _untrained(model)
    if any(module in untrained and matches_name(written, name) for name, module in model.named_modules()):
        raise UserError(f"{key}: {written!r} gets no gradient in this model, and cannot be trained; leave it out")


def matches_name(written: str, name: str) -> bool:
    """Returns whether a name or pattern matches a full name, or its end after a dot."""
    if WILD.intersection(written):
        return fnmatchcase(name, written) or fnmatchcase(name, f"*.{written}")
    return name == written or name.endswith(f".{written}")


def _in_blocks(model: PreTrainedModel, written: str) -> Callable[[str], bool]:
    if written == "all":
        return lambda _: True
    path = blocks_path(model)
    if path is None:
        raise UserError("tune.layers: this model has no list of blocks; write all")
    numbers = block_numbers(written, len(list(model.get_submodule(path).children())))
    inside = tuple(f"{path}.{number}." for number in numbers)
    return lambda name: name.startswith(inside)


def _meant(
    target: str,
    model: PreTrainedModel,
    layers: list[AdaptableLayer],
    free: list[AdaptableLayer],
    adaptable: Callable[[AdaptableLayer], bool],
) -> set[AdaptableLayer]:
    pattern = bool(WILD.intersection(target))
    able = [layer for layer in layers if layer.inner or not pattern]
    found = {layer for layer in able if matches_name(target, layer.called) or matches_name(target, layer.name)}
    if not found:
        _refuse_untrained("tune.targets", target, model)
        raise UserError(_unknown("tune.targets", "layer", target, [layer.called for layer in layers]))
    if not found.intersection(free):
        raise UserError(f"tune.targets: {target!r} is trained whole by modules_to_save, and gets no adapter")
    reached = {layer for layer in found.intersection(free) if adaptable(layer)}
    if not reached:
        raise UserError(
            f"tune.targets: peft takes the name {target!r} for that of this model's experts, and cannot adapt a dense "
            "layer of this name; leave it out, or train the layer whole by modules_to_save"
        )
    return reached


def _adaptable(model: PreTrainedModel) -> Callable[[AdaptableLayer], bool]:
    """Returns a predicate of the layers that peft's file can name.

    For some mixtures of experts, peft mistakes the names of the experts' single matrices (``gate_proj``) for
    those of the stacked ones, so its file cannot name a dense layer with such a name.
    """

    @cache
    def kept(leaf: str) -> bool:
        config: Any = LoraConfig(target_modules=[leaf])
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # one of two names that are one matrix now
            return False
        return config.target_modules == {leaf}

    return lambda layer: layer.stacked or kept(layer.name.rpartition(".")[2])


def is_within(name: str, modules: Collection[str]) -> bool:
    """Returns whether a module is one of these, or inside one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _unknown(key: str, kind: str, written: str, names: Iterable[str]) -> str:
    """Returns the message about an unknown name, with the nearest known one."""
    leaves = sorted({name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdigit()})
    parts = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
    near = written
    for word in written.split("."):
        if word and word not in parts and not WILD.intersection(word) and not word.isdigit():
            close = get_close_matches(word, leaves, 1) or get_close_matches(word, parts, 1)
            near = near.replace(word, close[0]) if close else ""
    if near == written and written in parts and any(matches_name(f"{written}.*", name) for name in names):
        near = f"{written}.*"
    hint = f"did you mean {near!r}? " if near and near != written else ""
    return f"{key}: the model has no {kind} {written!r}; {hint}it has {', '.join(leaves)}"
