"""The text side of a job's model: tokenizer, stop tokens and context, without loading its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.data.text_codec import TextCodec
from stoker.errors import Problem, UserError
from stoker.job.blocks.model_block import ModelBlock
from stoker.job.keys.tune_keys import virtual_tokens
from stoker.job.load_job import LoadedJob
from stoker.job.resolved import ResolvedJob
from stoker.models import offline_models
from stoker.models.context_length import ENDLESS, POSITIONS, context_problem
from stoker.models.hf_config import config_of
from stoker.models.model_files import settings_of
from stoker.models.model_source import ModelSource, require_model
from stoker.models.tokenizers.job_tokenizer import chat_template, codec_of, load_tokenizer, served_stop_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class TextSide:
    """The parts of a model that data preparation needs.

    Attributes:
        tokenizer: transformers' tokenizer.
        codec: the same for data preparation.
        seq_len: the job's, lowered to the model's context if the job does not set it.
        own_template: whether the chat template is the tokenizer's own, and not the default.
        context: the model's longest sequence, less virtual tokens; None without a limit.
        longest_row: most tokens of a row of the job, with the answer that is sampled to it; None before its data is
            read.
    """

    tokenizer: PreTrainedTokenizerFast
    codec: TextCodec
    seq_len: int
    own_template: bool
    context: int | None = None
    longest_row: int | None = None

    def check_fits(self, longest: int, loaded: LoadedJob, key: str, named: str) -> None:
        """Checks that rows of a job fit into this model, which the job uses beside the one that it trains.

        Args:
            longest: tokens of the longest row.
            key: the key of the job that names this model.
            named: this model, as the job writes it.

        Raises:
            UserError: they do not; the error names the key's place.
        """
        if self.context is not None and longest > self.context:
            message = f"rows have up to {longest} tokens, and {named} was built for {self.context}"
            hint = f"write train.seq_len: {self.context} or less, or name a model with a longer context"
            raise UserError(loaded.problem(key, message, hint))

    def prompt_ids(self, job: ResolvedJob) -> list[int] | None:
        """Returns the token ids of ``tune.text``; None if it is not set.

        Raises:
            UserError: it has no tokens.
        """
        text = job.tune.text
        if text is None:
            return None
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            message = "`tune.text` has no tokens, and virtual tokens begin as those of the text"
            raise UserError(Problem(message, "write a text, or remove it: random words are used then", key="tune.text"))
        return ids


def open_text_side(loaded: LoadedJob, base: Path) -> TextSide:
    """Loads the tokenizer of a resolved language job and settles its sequence length.

    Raises:
        UserError: no such model, tokenizer or stop token, or ``train.seq_len`` is above the model's context.
    """
    job = loaded.job
    assert job.model is not None
    source = require_model(job.model.name, base)
    with loaded.errors_at("model.name"):
        context = context_of(source, job.model)
    with loaded.errors_at_their_keys():
        tokenizer = load_tokenizer(job, base)
    seq_len = job.train.seq_len
    if context is not None:
        if problem := context_problem(loaded, context):
            raise UserError(problem)
        context -= virtual_tokens(job)
        seq_len = min(seq_len, context)
    _, own = chat_template(tokenizer)
    stops = served_stop_ids(tokenizer, source, job.model)
    return TextSide(tokenizer, codec_of(tokenizer, stops), seq_len, own, context)


def context_of(source: ModelSource, block: ModelBlock) -> int | None:
    """Returns the maximum sequence length of a located model; None if its positions have no limit."""
    if source.kind == "scratch":
        return offline_models.SCRATCH[source.where].context
    where = settings_of(source, block.revision, own_code=block.trust_remote_code)
    config = config_of(where, block)
    for name in POSITIONS:
        value = getattr(config.get_text_config(), name, None)
        if isinstance(value, int) and value > 0 and config.model_type not in ENDLESS:
            return value
    return None
