"""The configuration of an adapter's folder in peft's format: data, of which nothing is run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.errors import Problem, UserError, user_file_errors

CONFIG = "adapter_config.json"
LARGEST = 1 << 20  # bytes
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of ``init_lora_weights`` with which peft leaves the weights of the base as they are."""


def is_adapter_folder(path: Path) -> bool:
    """Returns whether a folder holds an adapter and no model."""
    return (path / CONFIG).is_file() and not (path / "config.json").is_file()


def read_object(file: Path) -> dict[str, Any]:
    """Reads a JSON object beside an adapter.

    Raises:
        UserError: it cannot be read, is too large, or is no object.
    """
    with user_file_errors(str(file)):
        if file.stat().st_size > LARGEST:
            raise ValueError("it is too large for a configuration")
        found = json.loads(file.read_text())
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
        return found


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
