"""New merges: the greedy choice of a plain count, over and over, and what may never become a token."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.data.tokenizers import bpe_merges
from stoker.data.tokenizers.bpe_merges import FEWEST, Merge, Symbol, learn_merges

LETTERS = "abc"


def symbols_of(letters: str, unknown: str = "") -> list[Symbol]:
    return [Symbol(letter, unknown=letter in unknown) for letter in letters]


def by_counting(
    runs: list[list[int]], counts: list[int], symbols: list[Symbol], taken: set[str], size: int
) -> list[Merge]:
    """The same by counting everything again for each merge."""
    texts = [s.text for s in symbols]
    unknown = {n for n, s in enumerate(symbols) if s.unknown}
    runs, taken, found = [list(run) for run in runs], set(taken), []
    while len(found) < size:
        count: Counter[tuple[int, int]] = Counter()
        for run, times in zip(runs, counts, strict=True):
            for n in unknown & set(run):
                count[n, -1] += times * run.count(n)
            last = None
            for i, pair in enumerate(pairwise(run)):
                if pair[0] == pair[1] and last == i - 1 and run[i - 1] == pair[0]:
                    last = None  # overlaps with the one before
                    continue
                last = i
                if not unknown & set(pair):
                    count[pair] += times
        may = [
            (-times, pair)
            for pair, times in count.items()
            if times >= FEWEST
            and "".join(texts[n] for n in pair if n >= 0) not in taken
            and sum(len(texts[n]) for n in pair if n >= 0) <= bpe_merges.LONGEST
        ]
        if not may:
            return found
        _, (left, right) = min(may)
        text = texts[left] + (texts[right] if right >= 0 else "")
        new = len(texts)
        found.append(Merge(left, right if right >= 0 else None, text))
        texts.append(text)
        taken.add(text)
        for run in runs:
            i = 0
            while i < len(run):
                if right < 0 and run[i] == left:
                    run[i] = new
                elif right >= 0 and run[i : i + 2] == [left, right]:
                    run[i : i + 2] = [new]
                i += 1
        unknown.discard(left)
    return found


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.text(LETTERS, min_size=1, max_size=14), st.integers(1, 4)), min_size=1, max_size=8),
    st.sets(st.sampled_from(LETTERS)),
)
def test_each_merge_is_of_the_most_frequent_pair(texts: list[tuple[str, int]], unknown: set[str]) -> None:
    symbols = symbols_of(LETTERS, "".join(unknown))
    runs = [[LETTERS.index(c) for c in text] for text, _ in texts]
    counts = [times for _, times in texts]
    taken = {"ab", *(set(LETTERS) - unknown)}
    assert learn_merges(runs, counts, symbols, taken, 12) == by_counting(runs, counts, symbols, taken, 12)


def test_a_token_neither_begins_within_a_character_nor_ends_in_the_next() -> None:
    """A character of three bytes, ``<-``, ``-`` and ``>``; and a letter."""
    symbols = [Symbol("<", 1, 0, 2), Symbol("-", 0, 1), Symbol(">", 0, 1), Symbol("x")]
    learnt = learn_merges([[0, 1, 2, 0, 1, 2, 3]] * 3, [1] * 3, symbols, set("<->x"), 9)
    assert [merge.text for merge in learnt] == ["<-", "<->", "<->x", "<-><->x"]


def test_tokens_have_a_longest() -> None:
    learnt = learn_merges([[0] * 64], [2], symbols_of("a"), {"a"}, 99)
    assert max(len(merge.text) for merge in learnt) == bpe_merges.LONGEST
