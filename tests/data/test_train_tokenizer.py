"""A learnt vocabulary: nothing is unknown to it, it is the same every time, and it knows the data's words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from stoker.data.sources import open_source
from stoker.data.tokenizers import train_tokenizer
from stoker.data.tokenizers.train_tokenizer import SPECIAL, learn_vocabulary
from stoker.job.blocks.source_block import SourceBlock


def learnt(folder: Path, *blocks: SourceBlock, size: int = 500) -> Tokenizer:
    return learn_vocabulary([(open_source(block, folder), block) for block in blocks], size)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("vocabulary")
    rows = [{"instruction": f"How many stokers feed furnace {i}?", "output": "Seven stokers."} for i in range(50)]
    (folder / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    (folder / "sea.txt").write_text("The furnace roars over the sea. " * 50)
    return learnt(folder, SourceBlock(path="my.jsonl"), SourceBlock(path="sea.txt"))


@settings(deadline=None)
@given(st.text(max_size=40))
def test_every_text_comes_back(text: str) -> None:
    ids = LEARNT[0].encode(text).ids
    assert LEARNT[0].decode(ids, skip_special_tokens=False) == text


LEARNT: list[Tokenizer] = []


@pytest.fixture(scope="module", autouse=True)
def shared(tokenizer: Tokenizer) -> None:
    LEARNT[:] = [tokenizer]


def test_a_learnt_tokenizer_has_the_special_tokens_first_and_tokens_of_all_sources(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == [0, 1]
    assert tokenizer.get_vocab_size() <= 500
    assert len(tokenizer.encode(" stokers").ids) == 1
    assert len(tokenizer.encode(" sea").ids) == 1


def test_learning_again_gives_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "my.jsonl").write_text('{"text": "the sea the sea"}\n' * 9)
    one, other = (learnt(tmp_path, SourceBlock(path="my.jsonl")).to_str() for _ in range(2))
    assert one == other != tokenizer.to_str()


def test_only_so_much_of_a_source_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_tokenizer, "LEARNT_FROM", 100)
    rows = [{"text": "early words " * 5}] * 4 + [{"text": "late late late"}] * 50
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = learnt(tmp_path, SourceBlock(path="my.jsonl"))
    assert len(tokenizer.encode(" words").ids) == 1
    assert len(tokenizer.encode(" late").ids) > 1


def test_from_nothing_readable_it_learns_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{broken\n" * 3)
    tokenizer = learnt(tmp_path, SourceBlock(path="bad.jsonl"))
    assert tokenizer.get_vocab_size() == 256 + len(SPECIAL)
    assert len(tokenizer.encode("é").ids) == 2
