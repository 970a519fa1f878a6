"""What the tools say of adapters beside rank and scaling: targets, blocks, modules trained whole, LoRA+."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from stoker.job.importers.ledger import Ledger

REGULAR = frozenset("()|\\^$+{}")
PATTERNS = "a regular expression: write names or patterns under `targets`, such as *.self_attn.*"


@dataclass(frozen=True)
class AdapterKeys:
    """A tool's names for what LoRA has; empty for what it has not.

    Attributes:
        targets: names of layers.
        every: a word among the targets that means all linear layers.
        parameters: names of parameters that are no layers, stacked experts.
        modules: what is trained whole.
        loraplus: the ratio of the learning rates.
        layers: numbers of the blocks.
        others: further keys of adapters, which the tool's own file reads.
    """

    targets: str
    every: str
    modules: str
    parameters: str = ""
    loraplus: str = ""
    layers: str = ""
    others: str = ""

    @property
    def all(self) -> list[str]:
        """Every key, to be told idle where there is no adapter."""
        names = (self.targets, self.modules, self.parameters, self.loraplus, self.layers)
        return [*self.others.split(), *(name for name in names if name)]


def read_adapter(ledger: Ledger, keys: AdapterKeys, *, linear: bool = False, default: str = "") -> None:
    """Carries what an adapter is put on and what is trained beside it.

    Args:
        linear: whether another key asked for all linear layers.
        default: what the tool does where no target is written, for people; all linear layers are taken.
    """
    _targets(ledger, keys, linear, default)
    modules = ledger.words(keys.modules)
    if modules:
        ledger.carry(keys.modules, "tune.modules_to_save", modules)
    if keys.loraplus:
        ledger.number_to(keys.loraplus, "tune.loraplus_ratio")
    if keys.layers:
        _layers(ledger, keys.layers)


def _targets(ledger: Ledger, keys: AdapterKeys, linear: bool, default: str) -> None:
    targets, parameters = ledger.words(keys.targets), ledger.words(keys.parameters) if keys.parameters else []
    if isinstance(ledger.value(keys.targets), str) and any(REGULAR & set(word) or ".*" in word for word in targets):
        ledger.drop(keys.targets, PATTERNS, matters=True)
    elif linear or targets == [keys.every]:
        if targets and not linear:
            ledger.carry(keys.targets, "tune.targets", "all-linear")
        if parameters:
            why = "beside all linear layers: name the layers too, under `targets`"
            ledger.drop(keys.parameters, why, matters=True)
    elif targets or parameters:
        first = keys.targets if targets else keys.parameters
        ledger.carry(first, "tune.targets", [*targets, *parameters])
        if targets and parameters:
            ledger.drop(keys.parameters, "`targets` holds them")
    elif default:
        ledger.default("tune.targets", "all-linear", default)


def _layers(ledger: Ledger, key: str) -> None:
    value = ledger.value(key)
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in numbers):
        ledger.problem(key, f"`{key}` must be numbers of blocks", "[0, 1, 2]")
    elif numbers:
        ledger.carry(key, "tune.layers", ranges(numbers))


def ranges(numbers: Sequence[int]) -> str:
    """Numbers as ``tune.layers`` writes them: ``0-3,20``."""
    ordered = sorted(set(numbers))
    starts = [ordered[0], *(after for before, after in pairwise(ordered) if after > before + 1)]
    ends = [*(before for before, after in pairwise(ordered) if after > before + 1), ordered[-1]]
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
