"""Reads the phrases of a table about a run's types and settings by their parts.

A phrase is cut into clauses; a clause names a type (``bf16``, ``MXFP8``, ``8-bit``) and what is kept or computed in it
(``gradients``, ``optimizer``); a type alone is that of the matrix products. What is not understood is handed back as a
note, and nothing is concluded from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

# Types by their names, with the bytes of a number. The order is that of products' speed, the slowest first.
TYPES: dict[str, tuple[float, str]] = {
    "fp32": (4, r"(?:fp|float)_?32|single precision|32[ -]?bit"),
    "tf32": (4, r"tf_?32"),
    "bf16": (2, r"bf(?:loat)?_?16|brain ?float"),
    "fp16": (2, r"(?:fp|float)_?16|half(?: precision)?"),
    "16bit": (2, r"(?:mixed[ -]?)?16[ -]?bits?"),
    "8bit": (1, r"8[ -]?bits?|int_?8|\d*adamw?_?8bit"),
    "fp8": (1, r"(?:mx|ds|nv)?(?:fp|float)_?8\w*|e[45]m[32]\w*"),
    "4bit": (0.5, r"4[ -]?bits?|int_?4|nf_?4"),
    "fp4": (0.5, r"(?:mx|nv)?(?:fp|float)_?4"),
}
PRODUCTS = ("fp32", "tf32", "bf16", "fp16", "16bit", "fp8", "fp4")
# What is kept or sent in a type.
ROLES = {
    "master": r"masters?|main",
    "gradients": r"grad(?:ient)?s?|accum(?:ulat\w*)?",
    "states": r"optim(?:izer)?s?|moments?|states?|adam\w*|lion|sgd|muon|momentum|paged\w*",
    "wire": r"all[ -]?gather|reduc\w*|comm\w*|all[ -]?reduce|exchang\w*",
    "base": r"base|frozen|quantis\w*|quantiz\w*",
    "weights": r"params?|parameters?|weights?|model",
}
# Words that say nothing that is counted here.
SILENT = {
    "mixed", "precision", "training", "amp", "autocast", "pure", "default", "mp", "full", "with", "in", "of",
    "and", "the", "is", "are", "for", "o1", "o2", "compute", "matmul", "gemm", "gemms", "products", "product",
    "hybrid", "delayed", "current", "tensorwise", "rowwise", "blockwise", "block", "scaling", "cs", "mx", "sc",
    "ds", "recipe", "te", "transformer", "engine", "apex", "native", "dynamic", "loss", "linear", "layers",
    "only", "low", "stochastic", "rounding", "true", "tensor", "per", "dtype", "type", "data", "fsdp",
    "attention", "sdpa", "norm", "norms", "logits", "fp", "sub", "channel", "fused", "memory", "efficient",
    "kept", "held", "first", "last",
}  # fmt: skip
_CLAUSE = re.compile(r"[()\[\];,+/|&]|\band\b|\bwith\b|\bplus\b")

Recomputed = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Numbers:
    """The types in which a run computes and keeps its numbers; None where nothing is said.

    Attributes:
        products: of matrix products: ``fp32``, ``tf32``, ``bf16``, ``fp16``, ``16bit`` (either of the two), ``fp8``,
            ``fp4``.
        weights: bytes of a weight of the copy that is trained.
        gradients: bytes of a gradient's sum.
        moments: bytes of each of the optimizer's states.
        master: bytes of a master weight; 0 where it is said, or follows, that there is none.
        notes: what was not understood.
    """

    products: str | None = None
    weights: float | None = None
    gradients: float | None = None
    moments: float | None = None
    master: float | None = None
    notes: tuple[str, ...] = ()


def numbers_of(phrase: object) -> Numbers:
    """The types that a phrase such as ``bf16 (params and optimizer bf16)`` names."""
    text = str(phrase or "").strip().lower()
    if text in ("", "none", "unknown", "null"):
        return Numbers()
    text = re.sub(r"(?<=[a-z])(?=[48][ -]?bit)", " ", text.replace("_", " ")).replace("16-mixed", "16bit")
    products: list[str] = []
    kept: dict[str, str] = {}
    notes = []
    waiting: set[str] = set()  # roles whose type follows: "params and optimizer bf16"
    leading = ""  # a type for the next clauses: "fp32 master weights and Adam states"
    for clause in _CLAUSE.split(text):
        types, rest = _taken(clause, {name: pattern for name, (_, pattern) in TYPES.items()})
        roles, rest = _taken(rest, ROLES)
        unknown = [word for word in re.findall(r"[a-z][a-z0-9]*|\d+", rest) if word not in SILENT]
        if unknown and not (types or roles):
            notes.append(" ".join(unknown))
        if "master" in roles:  # master weights are not those that compute, main gradients not master weights
            roles = roles - {"master"} if "gradients" in roles else roles - {"weights"}
        if not types and leading and roles:
            kept |= dict.fromkeys(roles, leading)
            continue
        if not types:
            waiting |= roles
            continue
        lowest = max(types, key=list(TYPES).index)
        leading = lowest if roles and re.match(TYPES[lowest][1], clause.strip()) else ""
        if re.search(r"\b(?:mixed|amp|autocast)\b", clause) or roles == {"wire"}:
            roles = roles & {"wire"}
        roles, waiting = roles | waiting, set()
        if "gradients" in roles:
            roles -= {"wire"}
        products += [name for name in types if name in PRODUCTS and (not roles or name != lowest)]
        kept |= dict.fromkeys(roles or ({"base"} if lowest in ("8bit", "4bit") else set()), lowest)
    return _concluded(products, kept, pure=bool(re.search(r"\bpure\b(?<!mp pure)|\bno master", text)), notes=notes)


def _concluded(products: list[str], kept: dict[str, str], *, pure: bool, notes: list[str]) -> Numbers:
    size = {role: TYPES[name][0] for role, name in kept.items()}
    if pure:
        size = {"weights": 2.0, "states": 2.0, **size}
    weights, moments = size.get("weights"), size.get("states")
    # Short weights with short states: the optimizer works on them as they are.
    alone = weights is not None and weights < 4 and moments is not None and moments <= 2
    master = size.get("master", 0.0 if alone else None)
    if not products and kept.get("weights") in PRODUCTS:
        products = [kept["weights"]]
    return Numbers(
        max(products, key=PRODUCTS.index) if products else None,
        weights,
        size.get("gradients", weights if master == 0 else None),
        moments,
        master,
        tuple(notes),
    )


def _taken(text: str, names: dict[str, str]) -> tuple[set[str], str]:
    """(the names whose pattern the text has, the rest of it)."""
    found = set()
    for name, pattern in names.items():
        text, count = re.subn(rf"(?<![a-z0-9])(?:{pattern})(?![a-z0-9])", " ", text)
        if count:
            found.add(name)
    return found, text


def recomputed(value: object) -> tuple[Recomputed | None, tuple[str, ...]]:
    """(what is computed again in the backward pass, notes); None where it is not said."""
    text = re.sub(r"[^a-z0-9]+", " ", str(value).lower()).strip()
    if value is None or re.search(r"\b(unknown|unstated|null|auto|not (stated|published|said|given))\b", text):
        return None, ()
    if text in ("", "none"):
        return ("none" if text else None), ()
    words = set(text.split())
    if words & {"no", "off", "false", "without", "disabled"} or text == "0":
        return "none", ()
    if re.search(
        r"selective|\bsac\b|\bop\b|partial|core|attention only|\battn\b|every|\bmlp\b|\bmoe\b|some|norm", text
    ):
        return "selective", ()
    if re.search(r"full|block|uniform|whole|true|yes|\bon\b|\b1\b|\ball\b|\bac\b|checkpoint|recompute|layer", text):
        return "full", ()
    return None, (f"`recompute`: `{value}` is not known",)


@dataclass(frozen=True)
class Sharing:
    """How a data-parallel copy is sharded.

    Attributes:
        zero: ZeRO's stage; None where it is not said.
        group: processes of a copy; ``"node"`` for those of a node; None for all.
        notes: what was not understood.
    """

    zero: int | None = None
    group: int | Literal["node"] | None = None
    notes: tuple[str, ...] = ()


def zero_stage(value: object) -> tuple[int | None, tuple[str, ...]]:
    """(ZeRO's stage, notes) of a number or a phrase such as ``ZeRO-1`` or ``stage 2``; None where it is not said."""
    text = str(value).strip().lower()
    if value is None or re.fullmatch(r"|unknown|null|unstated|auto|not \w+", text):
        return None, ()
    if text in ("none", "no", "false", "off", "ddp"):
        return 0, ()
    found = re.search(r"(?:zero|stage|^)[ _+-]*([0-3])(?:\.0)?\b", text)
    if found:
        return int(found[1]), ()
    if re.search(r"distributed optimi[sz]er|dist[ _-]?opt", text):
        return 1, ()
    return None, (f"`zero_stage`: `{value}` is not known",)


def sharing(value: object) -> Sharing:
    """Reads the field ``fsdp``: ``FULL_SHARD``, ``HSDP``, ``HYBRID_SHARD 16x8``, ``64``, True, ..."""
    text = re.sub(r"[_\s]+", " ", str(value).strip().lower())
    if value is None or text in ("", "unknown", "null", "unstated", "auto"):
        return Sharing()
    if text in ("false", "no", "none", "0", "off", "no shard", "disabled", "ddp"):
        return Sharing(0)
    sizes = re.search(r"(\d+) ?[x×*] ?(\d+)", text)  # replicas x processes of a copy
    one = re.search(r"\b(\d{1,6})\b", text)
    if re.search(r"hsdp|hybrid", text):
        group = int(sizes[2]) if sizes else int(one[1]) if one else "node"
        return Sharing(2 if "zero2" in text or "grad op" in text else 3, group)
    if re.search(r"grad op|zero ?-?2", text):
        return Sharing(2)
    if re.search(r"full|true|yes|on\b|fsdp|zero ?-?3|shard|^\d+$", text):
        return Sharing(3, int(text) if text.isdigit() and int(text) > 3 else None)
    return Sharing(3, notes=(f"`fsdp`: `{value}` is not known, taken as full sharding",))
