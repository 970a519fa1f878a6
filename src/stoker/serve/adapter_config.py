"""The configuration of an adapter in peft's format: which ones fit the weights of the base as they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.errors import Problem, UserError

CONFIG = "adapter_config.json"
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of ``init_lora_weights`` with which peft leaves the weights of the base as they are."""


def check_start(path: Path, config: Mapping[str, Any]) -> None:
    """Rejects an adapter that was trained over weights which peft changed at its start.

    Raises:
        UserError: peft subtracts a part from the base for it (``pissa``, ``olora`` ...), or replaces it.
    """
    start = config.get("init_lora_weights")
    if start in PLAIN_STARTS:
        return
    raise UserError(
        Problem(
            f"{path} has init_lora_weights {str(start)[:40]}: it was trained over a base that peft had changed",
            "convert it with peft: save_pretrained(FOLDER, path_initial_model_for_weight_conversion=...)",
        )
    )
