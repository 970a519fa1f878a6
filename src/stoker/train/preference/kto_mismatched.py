"""Prompts paired with the answers of other prompts, by which KTO estimates the KL divergence from the reference."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from stoker.data.sequences import Document
from stoker.data.token_cache import Row


def mismatched_pairs(documents: Sequence[Document], following: Document) -> list[Document]:
    """Pairs each document's prompt with the answer of the next one; ``following`` comes after the last document.

    An answer begins at the first trained token. A pair longer than both its documents is cut.
    """
    return [_joined(one, other) for one, other in pairwise([*documents, following])]


def _joined(one: Document, other: Document) -> Document:
    prompt = one.row.ids[: _answer_of(one)]
    start, length = _answer_of(other), max(len(one.row.ids), len(other.row.ids))
    ids = np.concatenate([prompt, other.row.ids[start:]])[:length]
    trained = np.concatenate([np.zeros(len(prompt), bool), other.row.trained[start:]])[:length]
    return Document(Row(ids, trained), one.source, one.index)


def _answer_of(document: Document) -> int:
    """Returns the index of the first answer token, at least 1: the first token belongs to the prompt, as nothing
    predicts it.
    """
    return max(1, int(np.flatnonzero(document.row.trained)[0])) if document.row.trained.any() else 1
