"""Rows of a job's twin: documents of uneven length, and a tokenizer with one token per character."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from stoker.job.task_spec import RowKind, TaskSpec

FIRST_CHARACTER = 0x4E00  # no normaliser changes these
TOKENS = 127  # fewer than the model's vocabulary, as is common
KNOWN = 101  # tokens that the model knows, if the job adds new ones
PAD, END = "<|pad|>", "<|end|>"
PAD_ID, END_ID = 0, 1
CHARACTERS = {chr(FIRST_CHARACTER + i): i + 2 for i in range(TOKENS - 2)}  # and their ids
# Rewards of a policy's answers: about half of the random answers have one of these letters, and few end early.
REWARDS = {f"regex:[{chr(FIRST_CHARACTER)}-{chr(FIRST_CHARACTER + 15)}]": 1.0, "length:4": 0.5}
LONGEST_PROMPT, LONGEST_ANSWER = 14, 12  # tokens of most rows
BEGINNING = 10  # tokens of a common prefix of some rows


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per character."""
    backend = Tokenizer(models.BPE({PAD: PAD_ID, END: END_ID, **CHARACTERS}, []))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, END)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=PAD)


def rows_of(seed: int, seq_len: int, task: TaskSpec, kind: RowKind) -> Iterator[dict[str, str]]:
    """Yields an endless series of documents: some share a prefix, one in eight has a single trained token, one fills a
    sequence.

    Answers use every letter once before repeating one, so that each is a target.
    """
    generator = np.random.default_rng(seed)
    prompts, answers = (_dealt(generator) for _ in range(2))

    def text(length: int, letters: Iterator[str] = prompts) -> str:
        return "".join(islice(letters, length))

    beginning = text(BEGINNING)
    number = 0
    while True:
        prompt = text(int(generator.integers(1, LONGEST_PROMPT)))
        answer = text(int(generator.integers(1, LONGEST_ANSWER)), answers)
        if number % 4 == 1:
            prompt = beginning
        if number % 8 == 3:  # cut after the first token of the answer, or of the document
            prompt, answer = (text(seq_len - 1), text(2, answers)) if task.rows.chat else (text(1), "")
        if number % 8 == 6:
            prompt, answer = text(LONGEST_PROMPT), text(seq_len, answers)
        if kind == "pairs":
            yield {"prompt": prompt, "chosen": answer, "rejected": next(prompts) + answer[::-1]}
        elif kind == "judged":
            yield {"prompt": prompt, "completion": answer, "label": "01"[number % 3 > 0]}
        else:
            yield {"prompt": prompt, "completion": answer} if task.rows.chat else {"text": prompt + answer}
        number += 1


def _dealt(generator: np.random.Generator) -> Iterator[str]:
    """Yields all letters in random order, repeatedly."""
    letters = list(CHARACTERS)
    while True:
        yield from (letters[i] for i in generator.permutation(len(letters)))


def rows_for(
    number: int, seed: int, seq_len: int, task: TaskSpec, kind: RowKind, *, count: Callable[[list[int]], int] = len
) -> list[dict[str, str]]:
    """Returns as many rows as give ``number`` units by ``count``, which takes the lengths of their sequences."""
    rows: list[dict[str, str]] = []
    lengths: list[int] = []
    made = 0
    for row in rows_of(seed, seq_len, task, kind):
        more = [*lengths, *lengths_of(row, seq_len)]
        would = count(more)
        if would <= number:  # a long document makes two
            rows.append(row)
            lengths, made = more, would
        if made == number:
            return rows
    raise AssertionError("the rows have no end")


def lengths_of(row: dict[str, str], seq_len: int) -> list[int]:
    """Returns the tokens of a row's samples: a long document continues in the next one, sharing a token."""
    if "chosen" in row:
        return [sum(min(len(row["prompt"]) + len(row[side]) + 1, seq_len) for side in ("chosen", "rejected"))]
    left = sum(len(text) for name, text in row.items() if name != "label") + 1
    if "text" not in row:
        return [min(left, seq_len)]
    starts = range(0, max(1, left - 1), seq_len - 1)
    return [min(seq_len, left - start) for start in starts]


def forward_passes(lengths: list[int], tokens: int) -> int:
    """Counts the forward passes of an evaluation: documents in ascending length, up to ``tokens`` together."""
    passes, left = 0, 0
    for length in sorted(lengths):
        passes, left = (passes, left - length) if length <= left else (passes + 1, tokens - length)
    return passes


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """Writes rows as JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
