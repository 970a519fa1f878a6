"""What a run takes of each source, as said beforehand and as it is; and that no token is lost on the way."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stoker.data.corpus import Corpus, open_corpus
from stoker.data.mixture_report import in_words, mixture_parts
from stoker.data.text_codec import TextCodec
from stoker.job import load_job
from stoker.job.schema import Job

LONG, SHORT = 12, 40  # documents of the two sources


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sentence = "The sea is blue and the wind is cold. "
    write("long.jsonl", [f"{i} {sentence * (i + 2)}" for i in range(LONG)])
    write("short.jsonl", [f"{i} How are you today?" for i in range(SHORT)])
    write("few.jsonl", [f"{i} Yes." for i in range(3)])


def write(name: str, texts: list[str]) -> None:
    Path(name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def opened(codec: TextCodec, *overrides: str, weights: tuple[int, int] | None = None) -> tuple[Corpus, Job]:
    sources: list[dict[str, Any]] = [{"path": "long.jsonl"}, {"path": "short.jsonl"}]
    for source, weight in zip(sources, weights or (), strict=False):
        source["weight"] = weight
    job = {"task": "pretrain", "model": "llama-3m", "data": sources, "train": {"seq_len": 64, "batch": 4}}
    Path("job.yaml").write_text(json.dumps(job | {"evaluate": {"fraction": 0.0}}))
    loaded = load_job("job.yaml", list(overrides))
    return open_corpus(loaded.job, codec, seq_len=64, loaded=loaded), loaded.job


def taken(corpus: Corpus, sequences: int) -> tuple[Counter[int], Counter[int]]:
    """(rows, tokens) of each source in the first sequences."""
    rows: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    for i in range(sequences):
        for document in corpus.sequences[i]:
            rows[document.source] += 1
            tokens[document.source] += len(document.row.ids)
    return rows, tokens


@pytest.mark.parametrize("packed", ["true", "false"])
@pytest.mark.parametrize("weights", [None, (1, 3)])
def test_whole_epochs_are_counted_exactly(codec: TextCodec, packed: str, weights: tuple[int, int] | None) -> None:
    corpus, job = opened(codec, "epochs=2", f"train.pack={packed}", weights=weights)
    parts = mixture_parts(corpus, job)
    rows, tokens = taken(corpus, corpus.sequences.total(2))
    assert [part.rows for part in parts] == [rows[0], rows[1]]
    if weights is None:
        assert [part.tokens for part in parts] == [tokens[0], tokens[1]]
        assert [part.epochs for part in parts] == [2.0, 2.0]
    else:
        assert parts[1].rows == pytest.approx(3 * parts[0].rows, abs=2) and parts[0].epochs < 2 < parts[1].epochs
    assert sum(part.share for part in parts) == pytest.approx(1.0)


def test_temperature_flattens(codec: TextCodec) -> None:
    plain, flat = (
        mixture_parts(*opened(codec, "steps=30", "train.pack=false", f"mix.temperature={t}"))[0].rows for t in (1, 4)
    )
    corpus, job = opened(codec, "steps=30", "train.pack=false", "mix.temperature=4")
    assert mixture_parts(corpus, job)[0].rows == pytest.approx(taken(corpus, 120)[0][0], abs=2)
    assert {plain < flat, plain > flat} == {True, False} and sum(p.rows for p in mixture_parts(corpus, job)) == 120


def test_steps_of_packed_rows_are_told_closely(codec: TextCodec) -> None:
    corpus, job = opened(codec, "steps=40", "train.pack=true")
    told, (_, tokens) = mixture_parts(corpus, job), taken(corpus, 160)
    assert sum(part.tokens for part in told) == pytest.approx(sum(tokens.values()), rel=0.1)
    assert "long.jsonl " in in_words(told) and " epochs; short.jsonl" in in_words(told)


def test_every_token_of_every_document_is_a_target_once_an_epoch_but_the_first(codec: TextCodec) -> None:
    corpus, _ = opened(codec, "epochs=1", "train.pack=true", "data[0].too_long=split", "data[1].too_long=split")
    targets: Counter[tuple[int, int]] = Counter()
    pieces: dict[tuple[str, int], list[tuple[int, list[int]]]] = {}
    for i in range(corpus.sequences.total(1)):
        documents = corpus.sequences[i]
        assert sum(len(d.row.ids) for d in documents) <= 64
        for document in documents:
            targets[document.source, document.index] += int(document.row.trained[1:].sum())
            place = corpus.sequences.origin(document)
            pieces.setdefault(place, []).append((document.index, document.row.ids.tolist()))
    assert len(pieces) == LONG + SHORT
    for (file, number), found in pieces.items():
        text = json.loads(Path(file).read_text().splitlines()[number - 1])["text"]
        whole = [*codec.tokenizer.encode(text).ids, codec.end_id]
        ordered = [ids for _, ids in sorted(found)]
        again = ordered[0] + [token for ids in ordered[1:] for token in ids[1:]]
        assert again == whole
        source = int(Path(file).name == "short.jsonl")
        assert sum(targets[source, index] for index, _ in found) == len(whole) - 1


def test_gaps_at_the_end_of_an_epoch_are_counted(codec: TextCodec) -> None:
    """Three short rows fill a part of one sequence, and no sequence has rows of two epochs."""
    corpus, job = opened(codec, "steps=5", "train.pack=true", "data=few.jsonl")
    (part,) = mixture_parts(corpus, job)
    rows, tokens = taken(corpus, 20)
    assert (part.rows, part.tokens) == (rows[0], tokens[0])


def test_rows_held_out_are_not_counted(codec: TextCodec) -> None:
    corpus, job = opened(codec, "epochs=2", "train.pack=false", "evaluate.fraction=0.25")
    assert all(mask.any() for mask in corpus.held_out)
    parts, (rows, tokens) = mixture_parts(corpus, job), taken(corpus, corpus.sequences.total(2))
    assert [(part.rows, part.tokens, part.epochs) for part in parts] == [(rows[s], tokens[s], 2.0) for s in (0, 1)]


def test_packed_sequences_of_streams_are_taken_to_be_full(codec: TextCodec) -> None:
    corpus, job = opened(codec, "steps=10", "train.pack=true", "data[0].stream=true", "data[1].stream=true")
    corpus.read_whole()
    assert sum(part.tokens for part in mixture_parts(corpus, job)) == pytest.approx(10 * 4 * 64, rel=0.1)
