"""Files of a located model in transformers' format; GGUF files and ChatGLM's checkpoints are converted first."""

from __future__ import annotations

from pathlib import Path

from stoker.errors import user_file_errors
from stoker.job.blocks.model_block import ModelBlock
from stoker.models.chatglm_model import settings_of_chatglm, weights_of_chatglm
from stoker.models.gguf_model import tokenizer_of_gguf, weights_of_gguf
from stoker.models.model_folder import read_config
from stoker.models.model_source import ModelSource
from stoker.models.tokenizers.chatglm_tokenizer import OWN_CODE
from stoker.models.tokenizers.sentencepiece_model import FILE
from stoker.node_cache.hub import require_repository
from stoker.plan.shapes.chatglm import is_config_of_chatglm

SETTINGS = ("*.json", FILE, OWN_CODE)


def is_chatglm(source: ModelSource, revision: str | None = None) -> bool:
    """Returns whether a model that was loaded has ChatGLM's format; asks no hub."""
    if source.kind == "hub":
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(source.where, "config.json", revision=revision)
    else:
        file = Path(source.where) / "config.json"
    return isinstance(file, str | Path) and _is_chatglm(Path(file).parent)


def settings_of(source: ModelSource, revision: str | None = None, *, own_code: bool = False) -> str:
    """Returns the folder or the hub id with the configuration and the tokenizer of a model.

    Args:
        own_code: whether the job runs the code that comes with the model, which then is not converted.

    Raises:
        UserError: they cannot be read.
        RunFailed: the hub does not answer.
    """
    if source.kind == "gguf":
        return str(tokenizer_of_gguf(Path(source.where)))
    folder = None if own_code else _chatglm_folder(source, revision, SETTINGS)
    return str(settings_of_chatglm(folder)) if folder is not None else source.where


def weights_of(source: ModelSource, block: ModelBlock) -> str:
    """Returns the folder or the hub id with the configuration and the weights of a model.

    Raises:
        UserError: they cannot be read.
        RunFailed: the hub does not answer.
    """
    if source.kind == "gguf":
        return str(weights_of_gguf(Path(source.where)))
    folder = None
    if not block.trust_remote_code:
        folder = _chatglm_folder(source, block.revision, (*SETTINGS, "*.safetensors"))
    if folder is None:
        return source.where
    if block.allow_pickle and source.kind == "hub" and not any(folder.glob("*.safetensors")):
        folder = _chatglm_folder(source, block.revision, (*SETTINGS, "*.bin"))
        assert folder is not None
    return str(weights_of_chatglm(folder, allow_pickle=block.allow_pickle))


def _chatglm_folder(source: ModelSource, revision: str | None, files: tuple[str, ...]) -> Path | None:
    """Returns the folder of a model in ChatGLM's format, with the files of these patterns; else None."""
    if source.kind == "folder":
        folder = Path(source.where)
        return folder if _is_chatglm(folder) else None
    if source.kind != "hub":
        return None
    from huggingface_hub import snapshot_download
    from transformers.utils.hub import cached_file

    require_repository(source.where, "model", revision=revision)
    with user_file_errors(f"the model {source.where}"):
        config = cached_file(
            source.where, "config.json", revision=revision, _raise_exceptions_for_missing_entries=False
        )
        if config is None or not _is_chatglm(Path(config).parent):
            return None
        return Path(snapshot_download(source.where, revision=revision, allow_patterns=list(files)))


def _is_chatglm(folder: Path) -> bool:
    has_config = (folder / "config.json").is_file()  # one with only a tokenizer has none
    return has_config and is_config_of_chatglm(read_config(folder))
