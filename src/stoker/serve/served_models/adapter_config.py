"""The configuration of an adapter's folder in peft's format: data, of which nothing is run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.errors import Problem, UserError, user_file_errors

CONFIG = "adapter_config.json"
LARGEST = 1 << 20  # bytes
NOT_SHARED = (
    *("modules_to_save", "target_parameters", "trainable_token_indices", "use_dora", "lora_bias"),
    *("alora_invocation_tokens", "layer_replication"),
)  # keys of adapters that are more than two matrices beside a layer
PATTERN_KEY = re.compile(r"[\w.^]{1,300}")
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


def check_lora(path: Path, config: Mapping[str, Any]) -> None:
    """Rejects an adapter that is not LoRA of a kind that can share a base with others.

    Raises:
        UserError: it is of another kind, or a value that is used has another type.
    """
    if config.get("peft_type") != "LORA":
        method = str(config.get("peft_type"))[:40]
        raise UserError(f"{path} is an adapter of type {method}; only LORA is served over a shared base")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        task = str(config["task_type"])[:40]
        raise UserError(f"{path} is an adapter for the task {task}; only CAUSAL_LM is served")
    for key in NOT_SHARED:
        if config.get(key):
            raise UserError(
                f"{path} has {key}, which cannot share a base; serve its run, or an export with merged weights"
            )
    check_start(path, config)
    alphas = config.get("alpha_pattern") or {}
    if not isinstance(alphas, dict) or not all(
        PATTERN_KEY.fullmatch(key) and _is_number(value) for key, value in alphas.items()
    ):
        raise UserError(f"{path / CONFIG}: alpha_pattern is not a number by the name of each layer")
    if not _is_number(config.get("lora_alpha")):
        raise UserError(f"{path / CONFIG}: lora_alpha is not a number")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e6
