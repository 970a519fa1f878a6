"""Trains a new tokenizer on texts: BPE, WordPiece or Unigram, all over bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stoker.data.build_cache import find_format
from stoker.data.dropped_rows import DroppedRows
from stoker.data.files.readers import decode
from stoker.data.files.rows import Conversation, Rejected, Text
from stoker.data.formats import all_formats as formats
from stoker.data.sources import Source
from stoker.data.tokenizers.wordpiece import learn_wordpiece
from stoker.errors import Problem, placed_errors
from stoker.job.blocks.source_block import SourceBlock

SPECIAL = ("<|endoftext|>", "<|pad|>")
Kind = Literal["bpe", "wordpiece", "unigram"]
# Ids of the smallest tokenizer: every byte, in WordPiece at the start and inside of a word, and the special tokens.
FEWEST: dict[Kind, int] = {"bpe": 256 + len(SPECIAL), "wordpiece": 512 + len(SPECIAL), "unigram": 256 + len(SPECIAL)}
LEARNT_FROM = 64 << 20  # characters of each source: more text changes the merges little, and learning takes minutes


def learn_vocabulary(sources: Sequence[tuple[Source, SourceBlock]], size: int) -> Tokenizer:
    """Trains a byte-level BPE of ``size`` ids: 256 bytes (so no text is unknown), the special tokens, the merges.

    Pre-tokenisation is GPT-2's (Radford et al., 2019), so llama.cpp and other readers support it.
    """
    return learn_from_texts(_texts_of_job(sources), size)


def _texts_of_job(sources: Sequence[tuple[Source, SourceBlock]]) -> Iterator[str]:
    """Yields the texts of a job's sources; an error has the key of its source."""
    for index, (source, block) in enumerate(sources):

        def at_source(problem: Problem, key: str = f"data[{index}].path") -> Problem:
            return replace(problem, key=problem.key or key)

        with placed_errors(at_source):
            yield from texts_of(source, block)


def learn_from_texts(texts: Iterable[str], size: int, kind: Kind = "bpe") -> Tokenizer:
    """Returns a tokenizer of up to ``size`` ids over bytes."""
    if kind == "wordpiece":
        return learn_wordpiece(texts, size, SPECIAL)
    tokenizer = Tokenizer(models.BPE() if kind == "bpe" else models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = (trainers.BpeTrainer if kind == "bpe" else trainers.UnigramTrainer)(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def texts_of(
    source: Source, block: SourceBlock, most: int | None = None, dropped: DroppedRows | None = None
) -> Iterator[str]:
    """Yields the texts of a source: its documents, or the turns of its conversations; broken rows give none.

    Args:
        most: characters after which no further row is read; by default `LEARNT_FROM`.
        dropped: gets the broken rows.
    """
    most = LEARNT_FROM if most is None else most
    read = 0
    found = find_format(source, block.columns, "texts") if block.format == "auto" else block.format
    for raw in source.rows():
        value = raw if isinstance(raw, Rejected) else decode(raw)
        example = value.reason if isinstance(value, Rejected) else formats.parse(value, found, block.columns)
        texts: list[str] = []
        if isinstance(example, Text):
            texts = [example.text]
        elif isinstance(example, Conversation):
            texts = [message.content for message in example.messages]
        elif dropped is not None and isinstance(example, str):
            dropped.add(Rejected(raw.source, raw.row, example))
        for text in texts:
            yield text
            read += len(text)
        if read > most:
            return
