"""The order of a run: every row once an epoch, from any place, packed or not, growing or whole."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.data import pack, sequences
from stoker.data.corpus import open_corpus
from stoker.data.files.row_batch import EncodedBatchBuilder
from stoker.data.held_out import hold_out
from stoker.data.mix import proportional, weighted
from stoker.data.sample_preview import sequences_from
from stoker.data.sequences import Document, GrowingSource, Selection, Sequences, by_length
from stoker.data.text_codec import TextCodec
from stoker.data.token_cache import Row, TokenCache
from stoker.data.token_shards import ShardWriter
from stoker.data.tokenise import EncodedBatch
from stoker.files import write_json
from stoker.job import load_job

NUMBER = itertools.count()


def cache_of(folder: Path, lengths: list[int], shards: int = 1, *, complete: bool = True) -> TokenCache:
    """A cache whose row i is the token i, ``lengths[i]`` times."""
    folder = folder / f"cache{next(NUMBER)}"
    folder.mkdir()
    grow(folder, lengths, 0, shards)
    if complete:
        write_json(folder / "complete.json", {})
    return TokenCache(folder)


def grow(folder: Path, lengths: list[int], first: int, shards: int) -> None:
    writer = ShardWriter(folder, 1000, first)
    for part in np.array_split(np.arange(len(lengths)), shards):
        batch, columns = EncodedBatch(rows_in=len(part)), EncodedBatchBuilder()
        for i in part.tolist():
            ids = [i % 1000] * lengths[i]
            columns.add(ids, [(0, len(ids))], ("f", i), stops=True, lost=0, continues=False, exact=True)
        columns.into(batch)
        writer.add(batch)
        writer.flush()


def everything(cache: TokenCache) -> Selection:
    return Selection(cache, np.arange(cache.rows))


def rows_of(some: Sequences, first: int, last: int) -> list[list[tuple[int, int]]]:
    return [[(d.source, d.index) for d in some[i]] for i in range(first, last)]


LENGTHS = [2 + (i * 7) % 31 for i in range(230)]


@pytest.mark.parametrize("capacity", [None, 48])
def test_epochs_hold_every_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capacity: int | None) -> None:
    monkeypatch.setattr(sequences, "WINDOW", 64)
    caches = [cache_of(tmp_path, LENGTHS, 3), cache_of(tmp_path, LENGTHS[:17])]
    some = Sequences(caches, proportional([everything(c) for c in caches], 5), capacity)
    rows = [(s, i) for s, c in enumerate(caches) for i in range(c.rows)]
    ends = [some.total(epoch) for epoch in range(4)]
    orders = set()
    for first, last in itertools.pairwise(ends):
        drawn = [row for sequence in rows_of(some, first, last) for row in sequence]
        assert sorted(drawn) == rows
        orders.add(tuple(drawn))
    assert len(orders) == 3
    drawn_so_far = Counter(row for sequence in rows_of(some, 0, ends[3]) for row in sequence)
    assert drawn_so_far == Counter(dict.fromkeys(rows, 3))
    if capacity:
        assert all(sum(len(d.row.ids) for d in some[i]) <= capacity for i in range(ends[3]))
        assert ends[1] < sum(LENGTHS + LENGTHS[:17]) / capacity * 1.25
    assert some[0][0].row.ids.tolist() == [some[0][0].index] * LENGTHS[some[0][0].index]


@settings(deadline=None, max_examples=25)
@given(start=st.integers(0, 400), batch=st.integers(1, 17), packed=st.booleans(), weighing=st.booleans())
def test_the_middle_is_the_same_for_who_starts_there(start: int, batch: int, packed: bool, weighing: bool) -> None:
    def fresh() -> Sequences:
        selections = [everything(c) for c in CACHES]
        mixture = weighted(selections, [3, 1], 9, 247) if weighing else proportional(selections, 9)
        return Sequences(CACHES, mixture, 48 if packed else None)

    through = fresh()
    wanted = rows_of(through, 0, start + 40)[start:]
    here = fresh()
    found: list[list[tuple[int, int]]] = []
    for first in range(start, start + 40, batch):
        found += rows_of(here, first, min(first + batch, start + 40))
    assert found == wanted


CACHES: list[TokenCache] = []


@pytest.fixture(scope="module", autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("sequences")
    CACHES[:] = [cache_of(folder, LENGTHS, 2), cache_of(folder, LENGTHS[:17])]


def test_windows_are_forgotten_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "WINDOW", 16)
    cache = cache_of(tmp_path, LENGTHS)
    some = Sequences([cache], proportional([everything(cache)], 1), 48)
    last = some.total(3)
    forwards = rows_of(some, 0, last)
    assert [rows_of(some, i, i + 1)[0] for i in reversed(range(last))] == forwards[::-1]


def test_parts_of_epochs_add_up(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, LENGTHS)
    plain = Sequences([cache], proportional([everything(cache)], 1), None)
    assert [plain.total(e) for e in (0.0, 0.5, 1.0, 2.5)] == [0, 115, 230, 575]


@pytest.mark.parametrize("window", [64, 1024])
def test_parts_of_packed_epochs_hold_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr(sequences, "WINDOW", window)
    cache = cache_of(tmp_path, LENGTHS)
    packed = Sequences([cache], proportional([everything(cache)], 1), 48)
    assert packed.total(0.0) == 0
    for epochs in (0.1, 0.5, 1.0, 2.5, 3.0):
        *_, last = every = rows_of(packed, 0, packed.total(epochs))
        wanted = round(len(LENGTHS) * epochs)
        assert 0 <= sum(map(len, every)) - wanted < len(last)


def test_held_out_rows_are_never_drawn(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, LENGTHS)
    mask = hold_out(np.arange(230, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15), 0.1)
    some = Sequences([cache], proportional([Selection(cache, np.flatnonzero(~mask))], 1), 48)
    drawn = {index for sequence in rows_of(some, 0, some.total(2)) for _, index in sequence}
    assert mask.sum() == 23
    assert drawn == set(np.flatnonzero(~mask).tolist())


@pytest.mark.parametrize("capacity", [None, 48])
def test_a_stream_replays_what_it_gave_while_it_grew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capacity: int | None
) -> None:
    monkeypatch.setattr(sequences, "WINDOW", 16)
    monkeypatch.setattr(sequences, "BLOCK", 16)
    growing = cache_of(tmp_path, LENGTHS[:100], complete=False)
    mixture = weighted([GrowingSource(growing)], [1.0], 3, 32)
    some = Sequences([growing], mixture, capacity, endless=True)
    early = rows_of(some, 0, 10)
    assert {index for sequence in early for _, index in sequence} <= set(range(100))
    grow(growing.folder, LENGTHS[100:], 1, 2)
    write_json(growing.folder / "complete.json", {})
    went_on = early + rows_of(some, 10, 500)
    whole = TokenCache(growing.folder)
    replay = Sequences([whole], weighted([GrowingSource(whole)], [1.0], 3, 32), capacity, endless=True)
    assert rows_of(replay, 0, 500) == went_on
    drawn = [index for sequence in went_on for _, index in sequence]
    if capacity is None:  # in order, so the passes are visible: each row once, then each once more
        assert sorted(drawn[:230]) == sorted(drawn[230:460]) == list(range(230))
        assert drawn[:230] != drawn[230:460]
        assert set(drawn[:100]) == set(range(100))


def test_a_corpus_without_rows_has_no_sequences(tmp_path: Path) -> None:
    nothing = cache_of(tmp_path, [])
    for capacity in (None, 48):
        some = Sequences([nothing], proportional([everything(nothing)], 0), capacity)
        assert some.total(3.0) == 0
        with pytest.raises(IndexError):
            some[0]


def test_packing_wastes_little_over_epochs(tmp_path: Path) -> None:
    lengths = [10 + (i * 37) % 90 for i in range(3000)]
    cache = cache_of(tmp_path, lengths)
    some = Sequences([cache], proportional([everything(cache)], 0), 512)
    assert sum(lengths) / (512 * some.total(1)) > 0.97
    assert pack.WINDOW == sequences.WINDOW


@settings(deadline=None)
@given(contents=st.lists(st.integers(0, 40), min_size=2, max_size=200), fraction=st.floats(0.01, 0.6))
def test_equal_rows_are_held_out_together(contents: list[int], fraction: float) -> None:
    digests = np.array(contents, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mask = hold_out(digests, fraction)
    held, kept = set(digests[mask].tolist()), set(digests[~mask].tolist())
    assert not held & kept
    assert kept
    least = min(Counter(contents).values())
    if len(set(contents)) > 1:
        assert 0 < mask.sum() <= max(1, round(fraction * len(contents)), least)


def test_rows_that_come_often_do_not_swallow_the_training_data() -> None:
    digests = np.array([1] * 90 + list(range(2, 12)), dtype=np.uint64)
    mask = hold_out(digests, 0.05)
    assert not mask[:90].any()
    assert 1 <= mask.sum() <= 5


def test_nothing_is_held_out_where_that_is_asked_or_cannot_be() -> None:
    assert not hold_out(np.arange(10, dtype=np.uint64), 0.0).any()
    assert not hold_out(np.zeros(10, dtype=np.uint64), 0.5).any()
    assert not hold_out(np.zeros(1, dtype=np.uint64), 0.5).any()
    assert hold_out(np.arange(10, dtype=np.uint64), 1.0).sum() == 9  # one row is left to train on


def test_the_same_rows_are_held_out_when_others_join() -> None:
    """The choice hangs on content: with more rows, those chosen before mostly stay chosen."""
    rng = np.random.default_rng(0)
    digests = rng.integers(0, 2**63, 1000, dtype=np.uint64)
    before, after = digests[hold_out(digests, 0.1)], digests[:900][hold_out(digests[:900], 0.1)]
    assert np.isin(after, before).mean() > 0.9


def test_a_stream_whose_rows_are_all_dropped_shows_no_sequences(tmp_path: Path, chatml: TextCodec) -> None:
    (tmp_path / "bad.jsonl").write_text("{broken\n" * 3)
    (tmp_path / "job.yaml").write_text(
        "task: sft\nmodel: llama-3m\ndata: {path: bad.jsonl, stream: true, format: prompt}\nsteps: 1\n"
    )
    loaded = load_job(tmp_path / "job.yaml")
    corpus = open_corpus(loaded.job, chatml, seq_len=64, base=tmp_path, loaded=loaded)
    corpus.read_whole()
    assert sequences_from(corpus, chatml, 0, 5) == ([], None)


def test_a_part_of_an_epoch_is_not_cut_by_a_rounding_error(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, LENGTHS[:100])
    assert 0.29 * 100 < 29
    assert Sequences([cache], proportional([everything(cache)], 1), None).total(0.29) == 29


def test_windows_and_shards_have_orders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "WINDOW", 32)
    cache = cache_of(tmp_path, [40] * 64, 2)
    some = Sequences([cache], proportional([everything(cache)], 1), 48)
    assert some.total(1) == 64
    assert some._window(0)[1] != some._window(1)[1]
    rows = GrowingSource(cache).nth_rows(np.arange(64), 5)
    assert sorted(rows[:32].tolist()) == list(range(32)) and (rows[:32] + 32 != rows[32:]).any()


def test_documents_of_a_unit_are_sorted_by_the_longest_of_them() -> None:
    def document(length: int, index: int) -> Document:
        return Document(Row(np.zeros(length, np.uint16), np.ones(length, bool)), 0, index)

    lengths = [3, 9, 5, 6, 8, 2]
    documents = [document(length, index) for index, length in enumerate(lengths)]
    assert [d.index for d in by_length(documents)] == [5, 0, 2, 3, 4, 1]
    assert [d.index for d in by_length(documents, 2)] == [2, 3, 4, 5, 0, 1]


def test_the_fraction_is_of_rows_and_their_choice_is_scrambled() -> None:
    digests = np.repeat(np.arange(1, 51, dtype=np.uint64), 2)
    mask = hold_out(digests, 0.2)
    assert mask.sum() == 20 and set(digests[mask].tolist()) != set(range(1, 11))
