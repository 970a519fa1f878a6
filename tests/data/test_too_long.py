"""Rows longer than a sequence: cut, dropped or split by choice, and no token predicted twice or never."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenised import sequences_of

from stoker.data.files.row_batch import Span
from stoker.data.files.rows import Raw
from stoker.data.templates.trained_spans import SAME_CUT, Cut, mark_trained, split_into_windows
from stoker.data.text_codec import TextCodec
from stoker.data.tokenise import RowSettings, tokenise


def raw(row: dict[str, Any] | str, number: int = 1) -> Raw:
    return Raw("my.jsonl", number, row.encode() if isinstance(row, str) else json.dumps(row).encode())


def chat(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def with_settings(format: str = "messages", **changes: Any) -> RowSettings:
    return RowSettings(
        **{"format": format, "columns": (), "train_on": "all", "too_long": "cut", "seq_len": 512, **changes}
    )


TRAINED = st.lists(st.integers(0, 60), max_size=6, unique=True).map(sorted)


@given(length=st.integers(1, 60), seq_len=st.integers(8, 40), bounds=TRAINED)
def test_split_predicts_every_trained_token_but_the_first_once(length: int, seq_len: int, bounds: list[int]) -> None:
    spans: list[Span] = [(a, min(b, length)) for a, b in zip(bounds[::2], bounds[1::2], strict=False) if a < length]
    trained = {i for a, b in spans for i in range(a, b)}
    windows, reason = split_into_windows(length, spans, seq_len, "split")
    assert bool(windows) != bool(reason)
    predicted = [i for first, last in windows for i in range(first + 1, last) if i in trained]
    assert sorted(predicted) == sorted(trained - {0})
    assert all(0 < last - first <= seq_len for first, last in windows)


@pytest.mark.parametrize("length", [8, 9, 15, 16, 40])
def test_split_documents_lose_nothing(chatml: TextCodec, length: int) -> None:
    text = "The sea is blue and the wind is cold. How are you today? " * 3
    whole = sequences_of(tokenise([raw({"text": text})], chatml, with_settings("text")))[0].ids.tolist()
    batch = tokenise([raw({"text": text})], chatml, with_settings("text", seq_len=length, too_long="split"))
    again = sequences_of(batch)[0].ids.tolist()
    for piece in sequences_of(batch)[1:]:
        assert piece.ids[0] == again[-1]
        assert not piece.trained[0]
        again += piece.ids[1:].tolist()
    assert again == whole
    assert sum(int(piece.trained[1:].sum()) for piece in sequences_of(batch)) == len(whole) - 1
    assert [piece.continues for piece in sequences_of(batch)] == [True] * (len(sequences_of(batch)) - 1) + [False]
    assert [piece.stops for piece in sequences_of(batch)] == [False] * (len(sequences_of(batch)) - 1) + [True]
    assert (batch.rows_split, batch.rows_cut) == (1, 0)


def test_long_rows_are_cut_or_dropped_by_choice(chatml: TextCodec) -> None:
    row = chat("Where?", "There. " * 40)
    cut = tokenise([raw(row)], chatml, with_settings(seq_len=32))
    (whole,) = sequences_of(tokenise([raw(row)], chatml, with_settings(seq_len=4096)))
    assert [(len(s.ids), s.lost, s.stops) for s in sequences_of(cut)] == [(32, len(whole.ids) - 32, False)]
    assert whole.lost == 0
    assert (cut.rows_cut, cut.rows_split, cut.dropped) == (1, 0, [])
    dropped = tokenise([raw(row)], chatml, with_settings(seq_len=32, too_long="drop"))
    assert not sequences_of(dropped)
    assert dropped.dropped[0].reason.startswith("too long: ")
    assert dropped.dropped[0].reason.endswith("seq_len is 32")


def test_pairs_that_the_cut_makes_equal_are_dropped(chatml: TextCodec) -> None:
    answers = [f"{'There. ' * 40}{end}" for end in ("Here.", "Now.")]
    pair = raw({"prompt": "Where?", "chosen": answers[0], "rejected": answers[1]})
    cut = tokenise([pair], chatml, with_settings("preference", seq_len=64))
    assert [row.reason for row in cut.dropped] == [f"{SAME_CUT}: train.seq_len is 64"]
    assert (len(cut.index), cut.rows_cut) == (0, 0)
    assert len(tokenise([pair], chatml, with_settings("preference", seq_len=4096)).index) == 2
    ranking = raw({"prompt": "Where?", "answers": [*answers, "Nowhere."]})
    cut = tokenise([ranking], chatml, with_settings("ranked", seq_len=64))
    assert len(cut.index) == 4 and cut.ignored == {"pairs of answers with the same tokens": 1}


@pytest.mark.parametrize("too_long", ["cut", "drop"])
def test_a_prompt_leaves_room_for_the_answer_that_is_sampled(too_long: Cut) -> None:
    """The answer that the row has needs no room: it is never in the same sequence as a sampled one."""
    assert split_into_windows(330, [(80, 330)], 2048, too_long, sampled=1792) == ([(0, 330)], "")
    windows, reason = split_into_windows(330, [(257, 330)], 2048, too_long, sampled=1792)
    assert windows == [] and reason == "the prompt is too long: 257 tokens, and train.seq_len less max_tokens is 256"
    assert split_into_windows(330, [(257, 330)], 2048, too_long) == ([(0, 330)], "")


def test_a_row_as_long_as_a_sequence_is_whole_and_its_first_token_alone_is_nothing_to_train() -> None:
    assert split_into_windows(5, [(2, 5)], 5, "drop") == ([(0, 5)], "")
    assert split_into_windows(3, [(0, 1)], 5, "drop") == ([], "nothing to train on")


def test_an_answer_is_trained_to_its_last_stop_token_and_any_crossed_beginning_counts() -> None:
    ids, stop = [5, 1, 6, 9, 7, 9, 8, 1, 4], frozenset({9})
    places = [(2, False), (7, False), (8, False), (9, False)]
    assert mark_trained((ids, places), stop) == ([(2, 6), (8, 9)], True)
    assert mark_trained((ids, [(2, True), *places[1:]]), stop)[1] is False


def test_the_longest_row_is_known_wherever_it_is(chatml: TextCodec) -> None:
    rows = [chat("Why?", "So. " * n) for n in (5, 40, 1)]
    found = tokenise([raw(row, n) for n, row in enumerate(rows)], chatml, with_settings())
    assert found.longest == found.index["length"].max() == found.index["length"][1] > found.index["length"][2]
