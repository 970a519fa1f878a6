"""Opening of a model for generation: a run, an exported folder, a GGUF file, or a hub id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer

from stoker.checkpoint.load_run import TunedRun, open_run
from stoker.data.corpus import special_tokens_of
from stoker.data.templates.chat_template import ChatTemplate
from stoker.data.templates.template_environment import TemplateRefused
from stoker.data.text_codec import TextCodec, encode_prompt
from stoker.errors import Problem, UserError
from stoker.generate.decoder import Decoder, decoder_of
from stoker.generate.generation_engine import GenerationEngine
from stoker.hardware.process_device import choose_device
from stoker.job.blocks.model_block import ModelBlock
from stoker.job.task_spec import task_of
from stoker.models.families import family_of
from stoker.models.hf_config import config_of
from stoker.models.load_model import blank_model, is_classifier
from stoker.models.meta_model import allocate
from stoker.models.model_files import settings_of
from stoker.models.model_source import ModelSource, find_model, model_problem, require_model
from stoker.models.text import context_of
from stoker.models.tokenizers.job_tokenizer import chat_template, codec_of, load_tokenizer_from, served_stop_ids
from stoker.models.weight_source import fill_whole
from stoker.parallel.float64_mode import arithmetic_of

LONGEST_UNKNOWN = 100  # characters; WordPiece makes one token of an unknown word


@dataclass(frozen=True)
class OpenModel:
    """A model in memory with its tokenizer.

    Attributes:
        name: name of the run or the folder.
        codec: tokenizer, chat template and stop tokens.
        chats: whether prompts are conversations; else they are plain text to continue.
        special_tokens: how special tokens in messages are encoded.
        untuned: whether the model without its tuning is also in memory, as the adapter `BASE`.
        run: the run of the model; None for a model without one.
    """

    name: str
    decoder: Decoder
    codec: TextCodec
    chats: bool
    special_tokens: Literal["text", "keep"] = "text"
    untuned: bool = False
    run: TunedRun | None = None

    @property
    def step(self) -> int | None:
        """Step of the run's checkpoint; None without a run."""
        return self.run.step if self.run is not None else None

    @property
    def tokenizer(self) -> Tokenizer:
        return self.codec.tokenizer

    def engine(self, **settings: Any) -> GenerationEngine:
        """Returns an engine with this model; see `GenerationEngine`."""
        return GenerationEngine(self.decoder, tries_threads=True, **settings)

    def prompt_ids(
        self,
        turns: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        template: ChatTemplate | None = None,
        *,
        answered: bool = False,
    ) -> list[int]:
        """Returns the token ids of a conversation that ends before an answer.

        Args:
            answered: whether it ends with the answer instead.
            tools: JSON schemas of the functions that the model may call.
            template: the chat template, if not the model's as it is.

        Raises:
            UserError: the chat template refuses it, its text is too long for any tokens to fit, or it has a token for
                which the model has no embedding.
        """
        try:
            check = self._check_size
            ids = encode_prompt(self.codec, turns, self.special_tokens, tools, template, check, answered=answered)
        except TemplateRefused as error:
            raise UserError(f"the chat template refuses this conversation: {error}") from error
        return self._within_vocabulary(ids)

    @cached_property
    def embeddings(self) -> int:
        """Number of tokens for which the model has an embedding."""
        model: Any = self.decoder.language.model
        return int(model.get_input_embeddings().weight.shape[0])

    @cached_property
    def _longest_token(self) -> int:
        return max(LONGEST_UNKNOWN, *map(len, self.tokenizer.get_vocab()))

    def _check_size(self, text: str) -> None:
        """Rejects a text with more characters than a context of the longest tokens: tokenising it takes long."""
        context = self.decoder.context
        if context is not None and len(text) > context * self._longest_token:
            message = f"the prompt is {len(text):,} characters, and the model was built for {context:,} tokens"
            raise UserError(Problem(message, "shorten the prompt"))

    def text_ids(self, text: str) -> list[int]:
        """Returns the token ids of plain text to continue, after the tokenizer's start token (``<s>``).

        Raises:
            UserError: it is too long for any tokens to fit, or has a token for which the model has no embedding.
        """
        self._check_size(text)
        return self._within_vocabulary(self.codec.encoder.encode_beginning(text))

    def _within_vocabulary(self, ids: list[int]) -> list[int]:
        """Rejects tokens of a tokenizer that is larger than the model's embedding."""
        if max(ids, default=0) < self.embeddings:
            return ids
        outside = next(number for number in ids if number >= self.embeddings)
        message = (
            f"the tokenizer has the token {self.tokenizer.id_to_token(outside)!r} with id {outside:,}, and "
            f"{self.name} has embeddings of {self.embeddings:,} tokens"
        )
        raise UserError(Problem(message, "put the tokenizer that the model was trained with into its folder"))


def open_model(name: str, base: Path, *, at: str = "last", trusted: Sequence[str] = ()) -> OpenModel:
    """Loads a model by the name of a run, else of a folder, a GGUF file, the catalogue or the hub.

    Args:
        at: the checkpoint of a run: ``last``, ``best`` or a step.
        trusted: keys that may run code, as ``key=value``; see `open_run`.

    Raises:
        UserError: the model does not exist, or cannot be loaded.
    """
    if find_model(name, base, or_run=True) is None:
        return _of_run(name, base, at, trusted)
    return _of_files(name, base, trusted)


def _of_run(name: str, base: Path, at: str, trusted: Sequence[str]) -> OpenModel:
    tuned = open_run(name, base, at=at, trusted=trusted)
    if task_of(tuned.job).model.head == "score":
        message = f"{name} scores answers and writes none: measure it with `stoker eval {name} DATA`"
        raise UserError(Problem(message, f"for scores of single answers, write `stoker serve {name}`"))
    return of_tuned(tuned, base)


def of_tuned(tuned: TunedRun, base: Path) -> OpenModel:
    """Wraps a run in memory, with the chat template of its first source."""
    source = tuned.job.data[0]
    return OpenModel(
        name=tuned.folder.path.name,
        decoder=decoder_of(tuned.model, tuned.device, context=tuned.text.context, frozen=True),
        codec=tuned.text.codec.for_source(source, base),
        chats=task_of(tuned.job).rows.chat or tuned.text.own_template,
        special_tokens=special_tokens_of(source, source.format),
        untuned=tuned.job.tune.method != "full",
        run=tuned,
    )


def block_of_model(name: str, trusted: Sequence[str]) -> ModelBlock:
    """Returns a model as a job names it.

    Args:
        trusted: see `open_model`.
    """
    return ModelBlock(
        name=name,
        trust_remote_code="model.trust_remote_code=true" in trusted,
        allow_pickle="model.allow_pickle=true" in trusted,
    )


def _of_files(name: str, base: Path, trusted: Sequence[str]) -> OpenModel:
    block = block_of_model(name, trusted)
    if problem := model_problem(block, base):
        raise UserError(Problem(*problem))
    source, device = require_model(name, base), choose_device()
    codec, chats = _text_of_files(source, block)
    _check_writes(source, block)
    with arithmetic_of(device):
        blank = blank_model(block, base, seed=0, dtype=device.autocast_dtype or torch.float32, stored_in_bits=True)
        family = family_of(blank.model.config)
        if family is not None and family.attend is not None:
            family.attend(blank.model)
        fill_whole(allocate(blank.model, device.torch), blank.weights)
    return OpenModel(
        name=Path(name).name,
        decoder=decoder_of(blank.model.eval(), device, context=context_of(source, block), frozen=True),
        codec=codec,
        chats=chats,
    )


def _text_of_files(source: ModelSource, block: ModelBlock) -> tuple[TextCodec, bool]:
    """Returns the codec in a model's files, and whether they have a chat template."""
    if source.kind == "scratch":
        message = f"{block.name} begins from random weights and has no tokenizer before it is trained"
        raise UserError(Problem(message, "train it, and name the run"))
    tokenizer = load_tokenizer_from(source, trust_remote_code=block.trust_remote_code)
    _, own = chat_template(tokenizer)
    return codec_of(tokenizer, served_stop_ids(tokenizer, source, block)), own


def _check_writes(source: ModelSource, block: ModelBlock) -> None:
    """Rejects the files of a classifier, whose language head would be its tied embeddings."""
    config = config_of(settings_of(source, block.revision, own_code=block.trust_remote_code), block)
    if is_classifier(config):
        message = f"{block.name} has the weights of a classifier, which scores texts and writes none"
        raise UserError(Problem(message, f"serve it, and ask for scores at /v1/score: stoker serve {block.name}"))


def untuned_model(opened: OpenModel, name: str, base: Path, trusted: Sequence[str] = ()) -> OpenModel:
    """Returns the model that an open run has tuned, with the tokenizer, chat template and stop tokens of its files."""
    codec, chats = _text_of_files(require_model(name, base), block_of_model(name, trusted))
    return OpenModel(Path(name).name, opened.decoder, codec, chats)
