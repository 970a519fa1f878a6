"""The layout of an architecture's tensors in a GGUF."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from stoker.checkpoint.export.gguf_changes import Change

if TYPE_CHECKING:
    from gguf import GGUFWriter


@dataclass(frozen=True)
class GgufFamily:
    """An architecture in a GGUF.

    Attributes:
        name: ``general.architecture``.
        changes: changes of weights, by the end of transformers' name.
        parts: names of the parts of fused weights that llama.cpp stores apart, and of weights that the package gguf
            does not name, by the end of transformers' name.
        keys: writers of the keys besides those of all families.
        needs: values that keys of the configuration must have, as llama.cpp assumes them.
        problems: other reasons why a configuration cannot be written.
        activations: activations that llama.cpp computes in this family.
        ropes: scalings of the rotation that it computes; empty for families without rotation.
        partial: whether only a part of each head may be rotated.
        windows: whether it computes sliding windows.
    """

    name: str
    changes: Mapping[str, Change] = field(default_factory=dict)
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    keys: tuple[Callable[[GGUFWriter, Any], None], ...] = ()
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    problems: tuple[Callable[[dict[str, Any]], Iterator[str]], ...] = ()
    activations: tuple[str, ...] = ("silu",)
    ropes: tuple[str, ...] = ("default", "linear")
    partial: bool = False
    windows: bool = False


class StoredTensor(NamedTuple):
    """A weight and its tensors in a GGUF.

    Attributes:
        key: transformers' name.
        names: GGUF names of its parts.
        change: the change of its values; None if there is none.
    """

    key: str
    names: tuple[str, ...]
    change: Change | None


def stored_tensors(model: Any, family: GgufFamily) -> list[StoredTensor]:
    """Returns the weights of a model and their tensors, in the model's order."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    config = model.config
    arch = next(arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == family.name)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    found = []
    for key in model.state_dict():
        if config.tie_word_embeddings and key == "lm_head.weight":
            continue
        parts = _of_end(family.parts, key)
        if parts is None:
            known = (names.get_name(k, (".weight", ".bias")) for k in (key, key.removeprefix("transformer.")))
            name = next(filter(None, known), None)
            assert name is not None, f"{key} has no name in a {family.name} GGUF"
            stored: tuple[str, ...] = (name,)
        else:
            block = next(part for part in key.split(".") if part.isdecimal())
            stored = tuple(f"blk.{block}.{part}" for part in parts)
        found.append(StoredTensor(key, stored, _of_end(family.changes, key)))
    return found


def head_size(config: Any) -> int:
    """Returns the rows of one attention head (K)."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _of_end(by_end: Mapping[str, Any], key: str) -> Any:
    return next((value for end, value in by_end.items() if key.endswith(end)), None)
