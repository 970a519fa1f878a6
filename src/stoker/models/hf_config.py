"""A model's configuration and generation settings, as transformers reads them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import Problem, UserError, user_file_errors
from stoker.job.blocks.model_block import ModelBlock
from stoker.models.model_folder import GENERATION, check_settings, read_config
from stoker.node_cache.hub import require_repository

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig


def config_of(where: str, block: ModelBlock) -> PreTrainedConfig:
    """Returns the configuration at a folder or a hub id.

    Raises:
        UserError: it cannot be read, or loading it would run code that the job does not allow.
    """
    from transformers import AutoConfig

    if Path(where).is_dir():
        read_config(Path(where))
    else:
        require_repository(where, "model", revision=block.revision)
    with user_file_errors(f"the configuration of the model {block.name}"):
        config = AutoConfig.from_pretrained(where, revision=block.revision, trust_remote_code=block.trust_remote_code)
    parts = (config, *(getattr(config, name, None) for name in config.sub_configs))
    for part, name in product(parts, ("_attn_implementation", "_experts_implementation")):
        kernel = getattr(part, name, None)
        if isinstance(kernel, str) and "/" in kernel and not block.trust_remote_code:
            message = f"the configuration of the model {block.name} asks for code from the hub, {kernel}"
            raise UserError(Problem(message, "write model.trust_remote_code: true if you trust it"))
    return config


def generation_config(where: str, revision: str | None = None) -> GenerationConfig | None:
    """Reads the generation settings of a folder or a hub id; returns None if there are none.

    Raises:
        UserError: they cannot be read.
    """
    from transformers import GenerationConfig
    from transformers.utils.hub import cached_file

    missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    with user_file_errors(f"{GENERATION} of {where}"):
        file = cached_file(where, GENERATION, revision=revision, **missing)
        if file is None:
            return None
        check_settings(Path(file).parent)
        return GenerationConfig.from_pretrained(str(Path(file).parent))
