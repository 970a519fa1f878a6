"""Finds the shape of a model by its name in a job: a folder, a name of the catalogue, or a hub id."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.errors import Problem, UserError, reason_of
from stoker.node_cache.hub import require_repository
from stoker.plan.shape import Shape
from stoker.plan.shapes.changed_config import changed_config
from stoker.plan.shapes.model_names import known_shape, shape_named
from stoker.plan.shapes.shape_of_config import shape_of_config


def shape_of_model(model: str, changes: Mapping[str, Any] | None = None) -> Shape:
    """Returns the shape of a local folder or ``config.json``, of a well-known name, or of a model of the hub.

    Only a hub id that the catalogue does not have needs a network: its ``config.json`` is fetched, not its weights.

    Args:
        changes: changed keys of the configuration.

    Raises:
        UserError: the name is unknown, or its configuration cannot be read.
    """
    path = Path(model).expanduser()
    if path.is_dir() or path.suffix == ".json":
        return _shape_of_file(path if path.suffix == ".json" else path / "config.json", changes or {})
    shape = known_shape(model, changes)
    if shape is not None:
        return shape
    if model.count("/") == 1:
        return _shape_of_file(_fetched(model), changes or {}, name=model)
    return shape_named(model)


def _shape_of_file(path: Path, changes: Mapping[str, Any], *, name: str = "") -> Shape:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(Problem(f"cannot read {path}: {error.strerror}", file=str(path))) from error
    except UnicodeDecodeError as error:
        raise UserError(Problem("the configuration is not UTF-8 text", file=str(path))) from error
    except json.JSONDecodeError as error:
        text = f"the configuration is not valid JSON: {error.msg}"
        raise UserError(Problem(text, file=str(path), line=error.lineno, column=error.colno)) from error
    except (ValueError, RecursionError) as error:  # a number with too many digits, or too many brackets
        raise UserError(Problem(f"the configuration cannot be read: {reason_of(error)}", file=str(path))) from error
    if not isinstance(config, dict):
        raise UserError(Problem("the configuration is not a JSON object", file=str(path)))
    return shape_of_config(changed_config(config, changes), name=name or path.parent.name, place=str(path))


def _fetched(model: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    require_repository(model, "model")
    try:
        return Path(hf_hub_download(model, "config.json"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        text = f"`{model}` is not a known model, and its configuration cannot be fetched from the hub"
        raise UserError(Problem(text, "give a folder with its config.json")) from error
