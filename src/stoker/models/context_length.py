"""The context length of a model, and jobs that exceed it. No heavy import here."""

from __future__ import annotations

from pathlib import Path

from stoker.errors import Problem
from stoker.job.blocks.model_block import ModelBlock
from stoker.job.keys.tune_keys import virtual_tokens
from stoker.job.load_job import ReadJob
from stoker.models import offline_models
from stoker.models.model_folder import read_config
from stoker.models.model_source import find_model
from stoker.plan.shapes.changed_config import changed_config

POSITIONS = ("max_position_embeddings", "n_positions", "seq_length")
ENDLESS = ("bloom",)  # ALiBi has no end
LEAST = 8  # tokens of a sequence, as in train.seq_len


def stated_context(block: ModelBlock, base: Path) -> int | None:
    """Returns the context length of a local model; None for a model elsewhere, or where positions have no end.

    Raises:
        UserError: the configuration cannot be read.
    """
    source = find_model(block.name, base)
    if source is None or source.kind not in ("scratch", "folder"):
        return None
    if source.kind == "scratch":
        return offline_models.SCRATCH[source.where].context
    config = changed_config(read_config(Path(source.where)), block.config)
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    values = [config[name] for name in POSITIONS if isinstance(config.get(name), int) and config[name] > 0]
    return values[0] if values and config.get("model_type") not in ENDLESS else None


def context_problem(loaded: ReadJob, context: int) -> Problem | None:
    """Returns a problem if a job's explicit sequence length or its virtual tokens exceed the model's context."""
    job, front = loaded.job, virtual_tokens(loaded.job)
    assert job.model is not None
    room, name = context - front, job.model.name
    if room < LEAST:
        message = f"tune.tokens: {front} virtual tokens leave no room in the {context} that {name} was built for"
        return loaded.problem("tune.tokens", message, f"write {max(1, context // 2)} or less")
    seq_len = job.train.seq_len
    if not isinstance(seq_len, int) or seq_len <= room or not _is_written(loaded):
        return None
    message = f"train.seq_len: {seq_len} is above the {room} tokens that {name} was built for"
    message += f", {front} virtual ones left out" if front else ""
    return loaded.problem("train.seq_len", message, f"write {room} or less")


def _is_written(loaded: ReadJob) -> bool:
    """Returns whether the job sets the sequence length; a default is lowered to the model's context."""
    path = ("train", "seq_len")
    return bool(loaded.document.where(path)) and loaded.document.at(path) != "auto"
