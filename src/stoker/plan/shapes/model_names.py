"""Finds models by the informal names that people and tables use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from stoker.errors import Problem, UserError
from stoker.job.keys.suggest_key import nearest
from stoker.plan.shape import Shape
from stoker.plan.shapes.changed_config import changed_config
from stoker.plan.shapes.known_models import CATALOGUE
from stoker.plan.shapes.shape_of_config import shape_of_config

# Other names of the same shape.
ALIASES = {
    "llama-3-405b": "llama3.1-405b",
    "llama-3.1-8b": "llama3-8b",
    "llama-3.1-70b": "llama3-70b",
    "llama-3.3-70b": "llama3-70b",
    "llama-30b": "llama-33b",
    "codellama-34b": "llama2-34b",
    "gpt2-small": "gpt2",
    "gpt-175b": "gpt3-175b",
    "gpt-3": "gpt3-175b",
    "mt-nlg": "mt-nlg-530b",
    "gpt-neox": "gpt-neox-20b",
    "gpt-j": "gpt-j-6b",
    "bloom": "bloom-176b",
    "deepseek-r1": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3",
    "mt0-xl": "mt5-xl",
    "mt0-xxl": "mt5-xxl",
    "mt0-xxl-12b": "mt5-xxl",
    "t0": "t0-11b",
    "nemotron-3.5-lightning": "nemotron3-nano",
    "nemotron-3-5-lightning": "nemotron3-nano",
    "nemotron-3-nano-30b-a3b": "nemotron3-nano",
    "nemotron-3-super-120b-a12b": "nemotron3-super",
    "nemotron-3-ultra-550b-a55b": "nemotron3-ultra",
    "zero-example-7.5b": "gpt-7.5b",
}

# Parts of a name that describe training or a file, not the shape.
NOT_THE_SHAPE = re.compile(
    r"[-_ ](hf|chat|instruct|it|base|pt|v0\.\d|(4|8|32|64|128)k|deduped|lora|qlora|full|sft|fp8|bf16)(?=$|[-_ ])", re.I
)


def _squeezed(name: str) -> str:
    """Returns the letters and digits of the last part of a path, without parts that do not affect the shape.

    A point between digits stays, so that 14B is not 1.4B.
    """
    last = name.rstrip("/").rsplit("/", 1)[-1]
    while (shorter := NOT_THE_SHAPE.sub("", last)) != last:
        last = shorter
    plain = re.sub(r"(?!(?<=\d)\.(?=\d))[^a-z0-9]", "", last.lower())
    return re.sub(r"^meta(?=llama)", "", plain).replace("bloomz", "bloom")


@cache
def _by_squeezed_name() -> dict[str, str]:
    return {_squeezed(other): name for other, name in [*((name, name) for name in CATALOGUE), *ALIASES.items()]}


@cache
def _shape_in_catalogue(name: str) -> Shape:
    return shape_of_config(CATALOGUE[name], name=name)


def known_shape(name: str, changes: Mapping[str, Any] | None = None) -> Shape | None:
    """Returns the catalogue's shape for a name; None if it has none.

    Upper case, hyphens and text after the model's name do not matter: ``meta-llama/Llama-3.1-8B``, ``LLAMA3_8B`` and
    ``llama3-8b LoRA`` are one. ``truncated to 4 layers`` after the name gives 4 layers.

    Args:
        changes: changed keys of its configuration.
    """
    words = name.split()
    for count in range(len(words), 0, -1):
        found = _by_squeezed_name().get(_squeezed(" ".join(words[:count])))
        if found is not None:
            cut = re.search(r"truncated to (\d+) layers", name)
            shape = _shape_in_catalogue(found)
            if changes:
                shape = shape_of_config(changed_config(CATALOGUE[found], changes), name=found)
            return shape.with_layers(int(cut[1])) if cut else shape
    return None


def shape_named(name: str) -> Shape:
    """Returns the catalogue's shape of a name.

    Raises:
        UserError: none; with the name most like it.
    """
    shape = known_shape(name)
    if shape is None:
        near = nearest(name.lower(), CATALOGUE)
        text = f"no well-known shape is called `{name}`"
        raise UserError(Problem(text, f"write `{near}`" if near else f"known are {', '.join(CATALOGUE)}"))
    return shape
