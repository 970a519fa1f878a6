"""A vocabulary of one's own: byte-level BPE learnt from the job's data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stoker.data import formats
from stoker.data.build import find_format
from stoker.data.readers import decode
from stoker.data.record import Conversation, Rejected, Text
from stoker.data.sources import Source
from stoker.job.schema import SourceBlock

SPECIAL = ("<|endoftext|>", "<|pad|>")
LEARNT_FROM = 64 << 20  # characters a source: merges found on more text differ little, and learning takes minutes


def learn_vocabulary(sources: Sequence[tuple[Source, SourceBlock]], size: int) -> Tokenizer:
    """A byte-level BPE of ``size`` ids: 256 bytes (nothing is unknown), the special tokens, the merges.

    Words are found as GPT-2 finds them (Radford et al., 2019), so llama.cpp and other readers know them.
    """
    return learn_from_texts((text for source, block in sources for text in texts_of(source, block)), size)


def learn_from_texts(texts: Iterable[str], size: int) -> Tokenizer:
    """The same from texts that are at hand."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def texts_of(source: Source, block: SourceBlock, most: int | None = None) -> Iterator[str]:
    """The texts of a source: its documents, or the turns of its conversations; broken rows give none.

    Args:
        most: characters after which no further row is read; by default `LEARNT_FROM`.
    """
    most = LEARNT_FROM if most is None else most
    read = 0
    found = find_format(source, block.columns) if block.format == "auto" else block.format
    for raw in source.rows():
        value = raw if isinstance(raw, Rejected) else decode(raw)
        example = value if isinstance(value, Rejected) else formats.parse(value, found, block.columns)
        texts: list[str] = []
        if isinstance(example, Text):
            texts = [example.text]
        elif isinstance(example, Conversation):
            texts = [message.content for message in example.messages]
        for text in texts:
            yield text
            read += len(text)
        if read > most:
            return
