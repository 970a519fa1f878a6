"""Reads the tools' keys of adapters: rank and scaling, targets, blocks, modules trained whole, LoRA+."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from stoker.job.importers.config_reader import ConfigReader

REGULAR = frozenset("()|\\^$+{}")
PATTERNS = "a regular expression: write names or patterns under `targets`, such as *.self_attn.*"


@dataclass(frozen=True)
class AdapterKeys:
    """A tool's names for the settings of LoRA; empty for those it does not have.

    Attributes:
        targets: names of layers.
        every: the value of ``targets`` that means all linear layers.
        modules: modules that are trained in full.
        parameters: names of parameters that are not layers, such as stacked experts.
        loraplus: the ratio of the learning rates.
        layers: numbers of the blocks.
        others: further keys of adapters, which the tool's own importer reads.
        defaults: the tool's rank, alpha and dropout; None if they are Stoker's.
    """

    rank: str
    rslora: str
    dora: str
    targets: str
    every: str
    modules: str
    parameters: str = ""
    loraplus: str = ""
    layers: str = ""
    others: str = ""
    defaults: tuple[int | None, float | None, float | None] = (None, None, None)

    @property
    def all(self) -> list[str]:
        """Returns every key, to be dropped where there is no adapter."""
        names = (self.rank, "lora_alpha", "lora_dropout", self.rslora, self.dora, *self.others.split())
        return [*names, *filter(None, (self.targets, self.modules, self.parameters, self.loraplus, self.layers))]


def read_adapter(config: ConfigReader, keys: AdapterKeys, *, all_linear: str = "", default: str = "") -> None:
    """Carries an adapter's numbers, its target layers, and the modules trained in full.

    Args:
        all_linear: the tool's flag for all linear layers.
        default: a note on the tool's default targets; all linear layers are used.
    """
    rank, alpha, dropout = keys.defaults
    taken = config.take(keys.rank, "tune.rank", rank)
    if rank and alpha is None:
        alpha, note = 2.0 * (taken or rank), "" if config.value("lora_alpha") else "twice the rank"
        config.take("lora_alpha", "tune.alpha", alpha, note)
    else:
        config.take("lora_alpha", "tune.alpha", alpha)
    config.take("lora_dropout", "tune.dropout", dropout)
    config.take_all((keys.rslora, "tune.rslora"), (keys.dora, "tune.dora"))
    linear = bool(all_linear and config.switch(all_linear, "tune.targets", "all-linear"))
    _targets(config, keys, linear, default)
    modules = config.words(keys.modules)
    if modules:
        config.carry(keys.modules, "tune.modules_to_save", modules)
    if keys.loraplus:
        config.take(keys.loraplus, "tune.loraplus_ratio")
    if keys.layers:
        _layers(config, keys.layers)


def carry_bits(config: ConfigReader, *, four: bool | None, eight: bool | None) -> None:
    """Carries ``load_in_8bit``, and drops the keys that the tuning method implies."""
    if eight:
        config.carry("load_in_8bit", "model.quantise", "8bit")
    config.idle("`tune: qlora` holds it" if four else "off", "load_in_4bit")
    config.idle("off", "load_in_8bit")


def _targets(config: ConfigReader, keys: AdapterKeys, linear: bool, default: str) -> None:
    targets, parameters = config.words(keys.targets), config.words(keys.parameters) if keys.parameters else []
    if isinstance(config.value(keys.targets), str) and any(REGULAR & set(word) or ".*" in word for word in targets):
        config.drop(keys.targets, PATTERNS, matters=True)
    elif linear or targets == [keys.every]:
        if targets and not linear:
            config.carry(keys.targets, "tune.targets", "all-linear")
        if parameters:
            why = "beside all linear layers: name the layers too, under `targets`"
            config.drop(keys.parameters, why, matters=True)
    elif targets or parameters:
        first = keys.targets if targets else keys.parameters
        config.carry(first, "tune.targets", [*targets, *parameters])
        if targets and parameters:
            config.drop(keys.parameters, "`targets` holds them")
    elif default:
        config.default("tune.targets", "all-linear", default)


def _layers(config: ConfigReader, key: str) -> None:
    value = config.value(key)
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in numbers):
        config.problem(key, f"`{key}` must be numbers of blocks", "[0, 1, 2]")
    elif numbers:
        config.carry(key, "tune.layers", ranges(numbers))


def ranges(numbers: Sequence[int]) -> str:
    """Numbers as ``tune.layers`` writes them: ``0-3,20``."""
    ordered = sorted(set(numbers))
    starts = [ordered[0], *(after for before, after in pairwise(ordered) if after > before + 1)]
    ends = [*(before for before, after in pairwise(ordered) if after > before + 1), ordered[-1]]
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
