"""GGUF models: read once by transformers, then cached as an ordinary model folder.

Reading de-quantises every tensor: half a minute for 135 M parameters, and a second from the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tokenizers import decoders, normalizers

from stoker.errors import Problem, UserError, user_file_errors
from stoker.models.converted_folder import converted_folder
from stoker.models.pre_tokenizers import pre_tokenizer_named

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

KIND = "gguf-3"
SPACE = "▁"  # of sentencepiece


@contextmanager
def isolated_folder(path: Path) -> Iterator[Path]:
    """Yields a folder with only the GGUF file, since transformers would also read other files in its folder."""
    with TemporaryDirectory() as folder:
        (Path(folder) / path.name).symlink_to(path.resolve())
        yield Path(folder)


def tokenizer_of_gguf(path: Path) -> Path:
    """Returns the folder with the tokenizer and the configuration of a GGUF file."""

    def convert(folder: Path) -> None:
        from transformers import AutoConfig, AutoTokenizer

        _check_gguf(path)
        with user_file_errors(f"the GGUF file {path}"), isolated_folder(path) as place:
            tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=path.name, trust_remote_code=False)
            config = AutoConfig.from_pretrained(place, gguf_file=path.name, trust_remote_code=False)
        _restore_splitting(path, tokenizer)  # type: ignore[arg-type]
        tokenizer.save_pretrained(folder)
        config.save_pretrained(folder)

    return converted_folder(KIND, [path], "tokenizer", convert)


def _restore_splitting(path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Sets the splitting rules that the file names, or where spaces are added: transformers reads merges and scores,
    but not these.
    """
    from stoker.plan.shapes.gguf_reader import BoundedGGUFReader

    with user_file_errors(f"the GGUF file {path}"):
        fields = BoundedGGUFReader(path).fields
        keys = ("model", "pre", "add_space_prefix")
        model, name, adds_space = (
            field.contents() if (field := fields.get(f"tokenizer.ggml.{key}")) else None for key in keys
        )
    if model == "llama":  # llama.cpp adds a space before each text between special tokens, unless the file says no
        replaced = normalizers.Replace(" ", SPACE)
        prepended = normalizers.Sequence([normalizers.Prepend(SPACE), replaced])
        backend = tokenizer.backend_tokenizer
        backend.normalizer, backend.pre_tokenizer = replaced if adds_space is False else prepended, None
        strip = [] if adds_space is False else [decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return
    found = pre_tokenizer_named(str(name)) if name is not None else None
    if found is not None and hasattr(tokenizer.backend_tokenizer.model, "ignore_merges"):
        tokenizer.backend_tokenizer.pre_tokenizer, tokenizer.backend_tokenizer.model.ignore_merges = found


def weights_of_gguf(path: Path) -> Path:
    """Returns the folder with the configuration and the float32 weights of a GGUF file, as safetensors."""

    def convert(folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        _check_gguf(path)
        with user_file_errors(f"the GGUF file {path}"), isolated_folder(path) as place:
            loading: Any = AutoModelForCausalLM.from_pretrained(
                place, gguf_file=path.name, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
            )
        loaded, report = loading
        if report["missing_keys"]:
            missing = sorted(report["missing_keys"])[0]
            raise UserError(
                Problem(
                    f"transformers does not read {missing} of the model in the GGUF file {path}",
                    "serve it with --engine llama.cpp",
                )
            )
        _plain(loaded).save_pretrained(folder)

    return converted_folder(KIND, [path], "weights", convert)


def _plain(loaded: PreTrainedModel) -> PreTrainedModel:
    """Returns a model with the same weights that is not marked as quantised, so that transformers can save it."""
    import torch

    config = loaded.config.__class__.from_dict(
        {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    )
    with torch.device("meta"):
        plain = loaded.__class__(config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    return plain


def _check_gguf(path: Path) -> None:
    """Checks that the package gguf is installed and that the file's lengths are in it, before transformers reads it."""
    try:
        from stoker.plan.shapes.gguf_reader import BoundedGGUFReader
    except ImportError as error:
        raise UserError(
            f"{path.name} is a GGUF file, and the package gguf is not installed; pip install 'stoker[gguf]'"
        ) from error
    with user_file_errors(f"the GGUF file {path}"):
        BoundedGGUFReader(path)
