"""The size of the model that a configuration describes, checked before any of it is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from stoker.errors import Problem, UserError

MOST_ASKED = 2  # times the stored parameters; below it, the weight that is missing or too large is named
MOST_BUFFERS = 1 << 30  # bytes that masks and tables may take in a model with fewer bytes of weights


def check_size(model: PreTrainedModel, files: Sequence[Path], name: str) -> None:
    """Checks a model on the meta device.

    Args:
        files: its safetensors files; empty if they are quantised or do not exist.
        name: of the model, for messages.

    Raises:
        UserError: it has many more parameters than the files, more bytes of buffers than a model needs, or a wrong
            number of rotary factors.
    """
    asked = sum(parameter.numel() for parameter in model.parameters())
    held = _parameters_in(files, name)
    if files and asked > MOST_ASKED * held:
        what = f"the configuration of the model {name} asks for {asked:,} parameters, and its files have {held:,}"
        raise UserError(Problem(what, "mend its config.json, or save the model again"))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    if buffers > max(MOST_BUFFERS, weights):
        what = f"the configuration of the model {name} asks for {buffers:,} bytes of buffers beside its weights"
        raise UserError(Problem(what, "lower the largest number of positions in its config.json"))
    _check_factors(model, name)


def _check_factors(model: PreTrainedModel, name: str) -> None:
    """Rejects lists of rotary factors that are not as long as the frequencies: the first forward pass would fail."""
    rope: Any = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    pairs = {buffer.numel() for key, buffer in model.named_buffers() if key.endswith("inv_freq")}
    for key in ("short_factor", "long_factor"):
        factors = rope.get(key)
        if pairs and isinstance(factors, list) and len(factors) not in pairs:
            what = f"`{key}` of the model {name} has {len(factors)} numbers, and a head has {max(pairs)} pairs"
            raise UserError(Problem(what, "mend its config.json"))


def _parameters_in(files: Sequence[Path], name: str) -> int:
    """Returns the number of elements of all tensors, from the headers of the files."""
    total = 0
    try:
        for file in files:
            with safe_open(file, "np") as opened:
                tensors = opened.keys()
                total += sum(math.prod(opened.get_slice(tensor).get_shape()) for tensor in tensors)
    except (SafetensorError, OSError) as error:
        raise UserError(f"the model {name} cannot be loaded: {error}") from error
    return total
