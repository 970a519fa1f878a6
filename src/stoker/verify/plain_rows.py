"""The twin's rows in the order in which a run takes them, derived from the documentation (docs/packing.md).

Like `plain_loop`, it imports nothing of Stoker.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path

import torch
from torch import Tensor

Row = tuple[Tensor, Tensor]  # token ids and the mask of trained tokens
WINDOW = 1024  # draws that are packed together
M64 = 2**64 - 1


def batches_of(
    sources: Sequence[Sequence[Row]], sizes: Sequence[int], *, seed: int, capacity: int | None
) -> list[list[list[Row]]]:
    """Returns the rows of each sample of each step.

    Args:
        sources: rows of each source.
        sizes: number of samples of each step.
        capacity: tokens of a packed sample; None if a sample is one row.
    """
    rows = [row for source in sources for row in source]
    slots = order([len(source) for source in sources], seed)
    samples = ([slot] for slot in slots) if capacity is None else packed(rows, slots, seed, capacity)
    return [[[rows[i] for i in sample] for sample in islice(samples, size)] for size in sizes]


def read(path: str, tokens: Mapping[str, int], end: int, seq_len: int) -> list[Row]:
    """Reads rows as tokens. Documents are split where they are too long, sharing one token; answers are cut.

    Args:
        tokens: token id by character.
        end: the token that ends every row.
    """
    rows = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        text = row["text"] if "text" in row else row["prompt"] + row["completion"]
        ids = torch.tensor([*(tokens[character] for character in text), end])
        mask = torch.arange(len(ids)) >= len(row.get("prompt", ""))
        starts = range(0, max(1, len(ids) - 1), seq_len - 1) if "text" in row else [0]
        rows += [(ids[i : i + seq_len], mask[i : i + seq_len]) for i in starts]
    return rows


def order(sizes: Sequence[int], seed: int) -> Iterator[int]:
    """Yields every row once per epoch, shuffled twice: the slots of the epoch, and the rows of each source.

    Args:
        sizes: rows of each source; sources are numbered consecutively.
    """
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    for epoch in count():
        shuffled = [shuffle(size, key(key(seed, 2, n), epoch)) for n, size in enumerate(sizes)]
        rows = [start + row for start, source in zip(starts, shuffled, strict=True) for row in source]
        yield from (rows[slot] for slot in shuffle(len(rows), key(seed, 1, epoch)))


def packed(rows: Sequence[Row], slots: Iterator[int], seed: int, capacity: int) -> Iterator[list[int]]:
    """Yields packed samples: a window's rows, the longest first, each placed where it leaves the least room, then
    shuffled.
    """
    sizes = [min(WINDOW, len(rows) - start) for start in range(0, len(rows), WINDOW)]
    for window in count():
        draws = list(islice(slots, sizes[window % len(sizes)]))
        lengths = [len(rows[i][0]) for i in draws]
        samples: list[list[int]] = []
        left: list[int] = []
        for place in sorted(range(len(draws)), key=lambda i, lengths=lengths: (-lengths[i], i)):  # type: ignore[misc]
            fits = [(room, number) for number, room in enumerate(left) if room >= lengths[place]]
            if not fits:
                fits = [(capacity, len(samples))]
                samples.append([])
                left.append(capacity)
            number = min(fits)[1]
            samples[number].append(place)
            left[number] -= lengths[place]
        for number in shuffle(len(samples), key(key(seed, 3, window))):
            yield [draws[place] for place in sorted(samples[number])]


def shuffle(size: int, seed: int) -> list[int]:
    """Permutes a range: a Feistel network of six rounds over the next even power of two, repeated until within the
    range.
    """
    bits = max(1, ((max(size, 2) - 1).bit_length() + 1) // 2)

    def walk(x: int) -> int:
        left, right = x >> bits, x & (2**bits - 1)
        for turn in range(6):
            left, right = right, left ^ (mix(right * 0x9E3779B97F4A7C15 + key(seed, turn)) & (2**bits - 1))
        x = left << bits | right
        return x if x < size else walk(x)

    return [walk(x) for x in range(size)]


def key(*parts: int) -> int:
    """Hashes several numbers to one of 64 bits."""
    state = 0
    for part in parts:
        state = mix((state ^ part) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15)
    return state


def mix(x: int) -> int:
    """Applies SplitMix64's finaliser."""
    x = ((x := x & M64) ^ x >> 30) * 0xBF58476D1CE4E5B9 & M64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & M64
    return x ^ x >> 31
