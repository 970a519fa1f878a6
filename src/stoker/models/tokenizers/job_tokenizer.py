"""The job's tokenizer: loaded, converted or trained, and as the codec for data preparation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.data.files.cache_lock import lock
from stoker.data.sources import open_source
from stoker.data.templates.chat_template import BUILT_IN, DEFAULT, ChatTemplate
from stoker.data.text_codec import TextCodec
from stoker.data.tokenizers.train_tokenizer import SPECIAL, learn_vocabulary
from stoker.errors import Problem, UserError, user_file_errors
from stoker.hardware.cache_folder import cache_folder
from stoker.job.blocks.model_block import ModelBlock
from stoker.job.blocks.source_block import SourceBlock
from stoker.job.paths import exists
from stoker.job.resolved import ResolvedJob
from stoker.job.tokenizer_extension import Extension, fingerprint, read_extension, read_vocabulary, special_tokens
from stoker.models import offline_models
from stoker.models.hf_config import config_of, generation_config
from stoker.models.model_files import settings_of
from stoker.models.model_folder import TOKENIZER_FILES, check_settings
from stoker.models.model_source import ModelSource, find_model, path_of
from stoker.models.tokenizers.special_tokens import add_special_tokens, stop_tokens, unknown_stops, with_new_tokens
from stoker.models.tokenizers.tokenizer_limits import check_growth, check_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

PROCESSOR_TEMPLATE = "chat_template.json"


def load_tokenizer(job: ResolvedJob, base: Path) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of a language job with the special tokens that the job names.

    Raises:
        UserError: it cannot be found or loaded, it is not backed by a ``tokenizer.json``, or a stop token is unknown.
    """
    assert job.model is not None
    tokenizer = _tokenizer_without(job, base)
    add_special_tokens(tokenizer, job.model)
    return tokenizer


def _tokenizer_without(job: ResolvedJob, base: Path) -> PreTrainedTokenizerFast:
    """Returns the tokenizer that the job names, the model's, or one trained on the job's data."""
    assert job.model is not None
    name = job.model.tokenizer or job.model.name
    source = find_model(name, base)
    if source is None and exists(path_of(name, base) / "tokenizer.json"):
        source = ModelSource("folder", str(path_of(name, base)))
    if source is None:
        raise UserError(f"there is no tokenizer {name!r}: give a hub id, a folder or a catalogue name")
    if source.kind == "scratch":
        source = ModelSource("folder", str(_learnt(job.data, source.where, base)))
    return load_tokenizer_from(source, trust_remote_code=job.model.trust_remote_code, revision=job.model.revision)


def extension_of(job: ResolvedJob, base: Path) -> Extension | None:
    """Returns the tokens that a job's tokenizer adds to its model's; None if it adds none.

    Raises:
        UserError: it extends the tokenizer of another model.
    """
    assert job.model is not None
    extension = _extension_of_folder(job.model, base)
    if job.model.special_tokens is None:
        return extension
    return with_new_tokens(_tokenizer_without(job, base), job.model, extension)


def _extension_of_folder(block: ModelBlock, base: Path) -> Extension | None:
    """Returns the tokens that ``model.tokenizer`` adds; None if the model has a row for each of them."""
    if block.tokenizer is None:
        return None
    extension = read_extension(path_of(block.tokenizer, base))
    source = find_model(block.name, base)
    if extension is None or source is None or source.kind == "scratch":
        return extension
    if source.kind == "folder" and not any((Path(source.where) / file).is_file() for file in TOKENIZER_FILES):
        return extension  # the model has none, and transformers would make an empty one
    try:
        own = load_tokenizer_from(source, trust_remote_code=block.trust_remote_code, revision=block.revision)
    except UserError:
        return extension
    found = fingerprint(own.backend_tokenizer.get_vocab(with_added_tokens=True))
    if found == extension.after:
        return None
    if found != extension.before:
        message = f"model.tokenizer: {block.tokenizer} extends {extension.extends}, not the tokenizer of {block.name}"
        raise UserError(Problem(message, f"write `stoker tokenizer extend --from {block.name} ...`"))
    return extension


def load_tokenizer_from(
    source: ModelSource, *, trust_remote_code: bool = False, revision: str | None = None
) -> PreTrainedTokenizerFast:
    """Returns the tokenizer at a located source."""
    from transformers import AutoTokenizer

    if source.kind == "folder":
        check_settings(Path(source.where))
    where = settings_of(source, revision, own_code=trust_remote_code)
    try:
        with user_file_errors(f"the tokenizer of {source.where}"):
            tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code, revision=revision)
    except UserError:
        if (Path(where) / "config.json").is_file():  # transformers reads it too, and the fault may be there
            config_of(where, ModelBlock(name=source.where, trust_remote_code=trust_remote_code))
        raise
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UserError(f"the tokenizer of {source.where} has no fast (tokenizers) form, which Stoker needs")
    check_growth(tokenizer.backend_tokenizer, source.where)
    check_ids(tokenizer.backend_tokenizer, source.where)
    if tokenizer.chat_template is None and source.kind != "gguf":
        tokenizer.chat_template = _processor_template(where, revision)
    return tokenizer  # type: ignore[return-value]  # it has just been looked at


def _processor_template(where: str, revision: str | None) -> str | None:
    """Returns the chat template that older image-text models store for their processor; None if there is none."""
    from transformers.utils.hub import cached_file

    missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    with user_file_errors(f"{PROCESSOR_TEMPLATE} of {where}"):
        file = cached_file(where, PROCESSOR_TEMPLATE, revision=revision, **missing)
        stored = json.loads(Path(file).read_text("utf-8")) if file is not None else {}
    template = stored.get("chat_template") if isinstance(stored, dict) else None
    return template if isinstance(template, str) else None


def stop_problems(block: ModelBlock, data: Sequence[SourceBlock], base: Path) -> list[Problem]:
    """Returns the problems of a job's stop tokens that its tokenizer lacks, if the tokenizer is on this machine.

    The tokenizer of a GGUF file is converted first, and a vocabulary that training would learn is learnt; both are
    cached, where training finds them.
    """
    if set(stop_tokens(block)) <= {*special_tokens(block)}:
        return []
    name = block.tokenizer or block.name
    source = find_model(name, base)
    try:
        if source is None:
            folder = path_of(name, base)
        elif source.kind in ("folder", "gguf"):
            folder = Path(settings_of(source, own_code=block.trust_remote_code))
        elif source.kind == "scratch" and not set(stop_tokens(block)) <= {*special_tokens(block), *SPECIAL}:
            folder = _learnt(data, source.where, base)
        else:
            return []
    except UserError as error:
        return list(error.problems)
    vocabulary = read_vocabulary(folder)  # None if it is missing, or refused when it is loaded
    return unknown_stops(block, *vocabulary) if vocabulary is not None else []


def _learnt(data: Sequence[SourceBlock], size: str, base: Path) -> Path:
    """Returns the folder of a byte-level BPE with the catalogue size's vocabulary, trained on the job's data once."""
    vocabulary = offline_models.SCRATCH[size].vocabulary
    sources = [open_source(block, base) for block in data]
    key = hashlib.blake2b(digest_size=16)
    read = [[source.fingerprint(), b.format, b.columns] for source, b in zip(sources, data, strict=True)]
    key.update(json.dumps([vocabulary, read], sort_keys=True).encode())
    folder = cache_folder() / "vocabularies" / key.hexdigest()
    with lock(folder):
        if not (folder / "tokenizer.json").exists():
            learnt = learn_vocabulary(list(zip(sources, data, strict=True)), vocabulary)
            with_special_tokens(learnt).save_pretrained(folder)
    return folder


def with_special_tokens(learnt: Tokenizer) -> PreTrainedTokenizerFast:
    """Returns a learnt vocabulary as transformers' tokenizer, with the names of its special tokens."""
    from transformers import PreTrainedTokenizerFast

    end, padding = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=learnt, eos_token=end, pad_token=padding, clean_up_tokenization_spaces=False
    )


def served_stop_ids(
    tokenizer: PreTrainedTokenizerFast, source: ModelSource | None, block: ModelBlock
) -> frozenset[int]:
    """Returns the stop tokens that the job names, or the end token and those of ``generation_config.json``."""
    if named := stop_tokens(block):
        vocabulary = tokenizer.get_vocab()
        return frozenset(vocabulary[token] for token in named)
    found = None
    if source is not None and source.kind in ("folder", "hub"):
        found = generation_config(settings_of(source, block.revision, own_code=block.trust_remote_code), block.revision)
    ends = found.eos_token_id if found is not None else None
    ends = [tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])]
    return frozenset(end for end in ends if end is not None)


def chat_template(tokenizer: PreTrainedTokenizerFast) -> tuple[str, bool]:
    """(template, whether it is the tokenizer's own); of several named templates, ``default``.

    Raises:
        UserError: the tokenizer's own is no text.
    """
    own = tokenizer.chat_template
    named = own if isinstance(own, dict) else {"default": own or ""}
    if not all(isinstance(template, str) for template in named.values()):
        raise UserError(f"the chat template of {tokenizer.name_or_path} must be text, or texts by their names")
    own = named.get("default")
    return (own, True) if own else (BUILT_IN[DEFAULT], False)


def codec_of(tokenizer: PreTrainedTokenizerFast, stops: frozenset[int]) -> TextCodec:
    """Returns the codec of a tokenizer for data preparation."""
    template, _ = chat_template(tokenizer)
    special = tuple(sorted((k, v) for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)))
    return TextCodec(
        definition=tokenizer.backend_tokenizer.to_str(),
        template=ChatTemplate(template, special),
        stop_ids=stops,
        end_id=tokenizer.eos_token_id,
        vocabulary=len(tokenizer),
    )
