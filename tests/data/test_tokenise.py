"""Rows into tokens: which are trained, what happens to long rows, and that none is lost without a reason."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenised import sequences_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stoker.data.files.rows import Raw, Rejected
from stoker.data.text_codec import TextCodec
from stoker.data.tokenise import RowSettings, tokenise

CodecOf = Callable[..., TextCodec]


def raw(row: dict[str, Any] | str, number: int = 1) -> Raw:
    return Raw("my.jsonl", number, row.encode() if isinstance(row, str) else json.dumps(row).encode())


def chat(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def with_settings(format: str = "messages", **changes: Any) -> RowSettings:
    return RowSettings(
        **{"format": format, "columns": (), "train_on": "all", "too_long": "cut", "seq_len": 512, **changes}
    )


def trained_texts(codec: TextCodec, row: dict[str, Any], **changes: Any) -> list[str]:
    """The text of each run of trained tokens."""
    (sequence,) = sequences_of(tokenise([raw(row)], codec, with_settings(**changes)))
    runs: list[list[int]] = []
    before = False
    for token, trained in zip(sequence.ids.tolist(), sequence.trained.tolist(), strict=True):
        if trained:
            runs = runs if before else [*runs, []]
            runs[-1].append(token)
        before = trained
    return [codec.tokenizer.decode(run, skip_special_tokens=False) for run in runs]


HARD = [
    "Paris.",
    " with a space before",
    "  and two",
    "\nand a line",
    "👩\u200d👩\u200d👧\u200d👦 and 🏳️\u200d🌈",
    "\u0301combining first",
    "e\u0301tude, 日本語, ﷽",
    "tabs\t\tand trailing  ",
    "123 456",
    "<|im_start|> written out",
]


@pytest.mark.parametrize("answer", HARD)
@pytest.mark.parametrize("train_on", ["all", "last"])
def test_exactly_the_answers_and_their_stop_tokens_are_trained(chatml: TextCodec, answer: str, train_on: str) -> None:
    row = chat("Where?", "There.", "What 🌍?", answer)
    wanted = ["There.<|im_end|>", f"{answer}<|im_end|>"]
    found = trained_texts(chatml, row, train_on=train_on)
    wanted = wanted if train_on == "all" else wanted[1:]
    assert found == wanted


@given(
    st.lists(st.text(min_size=1, max_size=12).filter(str.strip), min_size=2, max_size=6).filter(
        lambda t: len(t) % 2 == 0
    )
)
def test_the_mask_never_covers_a_prompt(turns: list[str]) -> None:
    """What is not trained, decoded, holds every prompt in whole."""
    codec = CODECS[0]
    turns = [turn.encode("utf-8", "ignore").decode() or "x" for turn in turns]
    batch = tokenise([raw(chat(*turns))], codec, with_settings())
    if not sequences_of(batch):
        assert len(batch.dropped) == 1
        return
    (sequence,) = sequences_of(batch)
    whole = codec.tokenizer.decode(sequence.ids.tolist(), skip_special_tokens=False)
    prompt_until = 0
    for i in range(1, len(turns), 2):
        asked = chat(*turns[:i])["messages"]
        prompt = codec.template.render(asked, prompt=True)
        assert whole.startswith(prompt)
        tokens = 0
        while len(codec.tokenizer.decode(sequence.ids[:tokens].tolist(), skip_special_tokens=False)) < len(prompt):
            tokens += 1
        assert not sequence.trained[prompt_until : max(prompt_until, tokens - 1)].any()
        answered = codec.template.render(chat(*turns[: i + 1])["messages"])
        prompt_until = tokens
        while prompt_until < len(sequence.ids) and len(
            codec.tokenizer.decode(sequence.ids[:prompt_until].tolist(), skip_special_tokens=False)
        ) < len(answered):
            prompt_until += 1


CODECS: list[TextCodec] = []


@pytest.fixture(scope="module", autouse=True)
def codecs(chatml: TextCodec) -> None:
    CODECS[:] = [chatml]


def test_a_token_that_reaches_over_the_boundary_is_prompt_and_said_so(chatml: TextCodec, codec_of: CodecOf) -> None:
    (fits,) = sequences_of(tokenise([raw(chat("Hm?", "Yes."))], chatml, with_settings()))
    assert fits.exact
    lines = codec_of("chatml", own=LARGE)  # knows two line feeds as one token
    (reaches,) = sequences_of(tokenise([raw(chat("Hm?", "\n\nYes."))], lines, with_settings()))
    assert not reaches.exact
    assert (
        lines.tokenizer.decode(reaches.ids[reaches.trained].tolist(), skip_special_tokens=False) == "\nYes.<|im_end|>"
    )
    # "Answer: " and "Yes" share the token " Yes": its space is the prompt's.
    template = (
        "{% for m in messages %}{{ 'Answer: ' if m.role == 'assistant' }}{{ m.content + eos_token }}"
        "{% endfor %}"
        "{{ 'Answer: ' if add_generation_prompt }}"
    )
    spaced = codec_of(template, own=LARGE)
    (row,) = sequences_of(tokenise([raw(chat("Hm?", "Yes yes"))], spaced, with_settings()))
    assert not row.exact
    assert spaced.tokenizer.decode(row.ids[row.trained].tolist(), skip_special_tokens=False) == " yes<|im_end|>"


def large() -> Tokenizer:
    """Knows words and runs of white space, and trims the white space off its offsets as GPT-2's does."""
    from tokenizers import processors

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["Answer: Yes yes\n\n\n   no", "no\n\n\n", "\n\n\n", "\n\n"] * 9, trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer


LARGE = large()


def test_a_prompt_whose_white_space_is_cut_otherwise_when_alone_is_said(codec_of: CodecOf) -> None:
    """A run of line feeds at the end is one token; before an answer, its last one is a token of its own."""
    template = (
        "{% for m in messages %}{{ '\n\n\n' + m.content + eos_token"
        " if m.role == 'assistant' else m.content }}"
        "{% endfor %}{{ '\n\n\n' if add_generation_prompt }}"
    )
    codec = codec_of(template, own=LARGE)
    prompt = codec.tokenizer.encode("no\n\n\n", add_special_tokens=False).ids
    whole = codec.tokenizer.encode("no\n\n\nyes", add_special_tokens=False).ids
    assert whole[: len(prompt)] != prompt
    (row,) = sequences_of(tokenise([raw(chat("no", "yes"))], codec, with_settings()))
    assert not row.exact
    assert codec.tokenizer.decode(row.ids[row.trained].tolist(), skip_special_tokens=False) == "yes<|im_end|>"


def test_tokenizers_of_sentencepiece_are_marked_as_well(codec_of: CodecOf) -> None:
    tokenizer = Tokenizer(
        models.Unigram([("<unk>", 0.0), *((c, -2.0) for c in "▁abcdehilmnorstuwy.?[]INST/")], 0, False)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
    )
    codec = codec_of(template, own=tokenizer)
    (row,) = sequences_of(
        tokenise([raw(chat("where is it?", "it is not here.", "so?", "no."))], codec, with_settings())
    )
    assert row.exact
    trained = [tokenizer.id_to_token(i) for i in row.ids[row.trained].tolist()]
    assert "".join(trained) == "▁it▁is▁not▁here.<|im_end|>▁no.<|im_end|>"


def test_tools_are_rendered_and_not_trained(codec_of: CodecOf) -> None:
    template = "{{ tools | tojson if tools }}" + chatml_source()
    row = {**chat("Rain?", "No."), "tools": [{"type": "function", "function": {"name": "weather"}}]}
    codec = codec_of(template)
    (sequence,) = sequences_of(tokenise([raw(row)], codec, with_settings()))
    assert '"name": "weather"' in codec.tokenizer.decode(sequence.ids.tolist())
    assert trained_texts(codec, row) == ["No.<|im_end|>"]
    pair = {"prompt": "Rain?", "chosen": "No.", "rejected": "Yes.", "tools": row["tools"]}
    both = sequences_of(tokenise([raw(pair)], codec, with_settings("preference")))
    assert len(both) == 2 and all('"name": "weather"' in codec.tokenizer.decode(s.ids.tolist()) for s in both)


def chatml_source() -> str:
    from stoker.data.templates.chat_template import CHATML

    return CHATML


def test_a_tokenizer_without_a_template_has_the_plain_one(codec: TextCodec) -> None:
    row = chat("What is the capital of France?", "Paris.")
    (sequence,) = sequences_of(tokenise([raw(row)], codec, with_settings()))
    text = codec.tokenizer.decode(sequence.ids.tolist(), skip_special_tokens=False)
    question = "### Instruction:\nWhat is the capital of France?\n\n"
    assert text == f"{question}### Response:\nParis.<|endoftext|>\n\n"
    assert trained_texts(codec, row) == ["Paris.<|endoftext|>"]
    assert sequence.stops
    assert sequence.exact


def test_an_answer_without_a_stop_token_says_so(codec_of: CodecOf) -> None:
    codec = codec_of("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}")
    (sequence,) = sequences_of(tokenise([raw(chat("Hm?", "Yes."))], codec, with_settings()))
    assert not sequence.stops


def test_documents_end_with_the_end_token_once_and_are_trained_throughout(chatml: TextCodec) -> None:
    end = chatml.end_id
    batch = tokenise([raw({"text": "The sea."}), raw({"text": "The sea.<|im_end|>"})], chatml, with_settings("text"))
    one, other = sequences_of(batch)
    assert one.ids.tolist() == other.ids.tolist()
    assert one.ids.tolist().count(end) == 1
    assert one.ids[-1] == end
    assert one.trained.all()
    assert one.stops
    assert (
        one.digest
        == other.digest
        != sequences_of(tokenise([raw({"text": "A sea."})], chatml, with_settings("text")))[0].digest
    )


def test_every_row_comes_out_as_tokens_or_as_a_reason_in_order(chatml: TextCodec) -> None:
    rows: list[Raw | Rejected] = [
        raw(chat("a", "b"), 1),
        raw("{broken", 2),
        Rejected("my.jsonl", 3, "longer than 64 MiB"),
        raw(chat("only a question"), 4),
        raw(chat("a " * 400, "b"), 5),
        raw({"chosen": "a", "rejected": "b", "prompt": "c"}, 6),
        raw(chat("a", "c"), 7),
    ]
    batch = tokenise(rows, chatml, with_settings(seq_len=64))
    assert batch.rows_in == 7
    assert [row.row for row in sequences_of(batch)] == [1, 7]
    assert [d.row for d in batch.dropped] == [2, 3, 4, 5, 6]
    assert [d.reason.split(":")[0] for d in batch.dropped] == [
        "not valid JSON",
        "longer than 64 MiB",
        "no assistant turn",
        "nothing left to train on",
        "missing column",
    ]


def test_a_batch_survives_the_way_between_processes(chatml: TextCodec) -> None:
    codec = pickle.loads(pickle.dumps(chatml))
    rows = [raw(chat("a", "b")), raw("{")]
    batch = pickle.loads(pickle.dumps(tokenise(rows, codec, with_settings())))
    here = tokenise(rows, chatml, with_settings())
    assert np.array_equal(batch.ids, here.ids)
    assert np.array_equal(batch.index, here.index)
    assert batch.dropped == here.dropped
    assert codec.fingerprint == chatml.fingerprint


def test_the_model_answers_after_the_last_turn(chatml: TextCodec) -> None:
    (row,) = sequences_of(
        tokenise([raw(chat("one", "two", "three"))], chatml, with_settings(train_on="last", prompts=True))
    )
    text = chatml.tokenizer.decode(row.ids[: row.trained.argmax()].tolist(), skip_special_tokens=False)
    assert "three" in text and text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("keep_bad", [False, True])
def test_a_label_that_is_trained_on_is_not_ignored(chatml: TextCodec, keep_bad: bool) -> None:
    row = raw({**chat("one", "two"), "label": True})
    assert ("label" in tokenise([row], chatml, with_settings("judged", keep_bad=keep_bad)).ignored) != keep_bad


def test_a_label_that_is_not_there_is_not_ignored(chatml: TextCodec) -> None:
    assert not tokenise([raw(chat("one", "two"))], chatml, with_settings()).ignored


def test_pairs_that_the_cut_makes_equal_are_counted_as_ignored(chatml: TextCodec) -> None:
    long = "one two three four five"
    row = raw({"prompt": "Hi.", "answers": ["no", f"{long} 6", f"{long} 7"], "scores": [3, 2, 1]})
    whole = tokenise([row], chatml, with_settings("ranked"))
    assert not whole.ignored and len(whole.index) == 6
    cut = tokenise([row], chatml, with_settings("ranked", seq_len=max(whole.index["length"].tolist()) - 4))
    assert list(cut.ignored) == ["pairs of answers with the same tokens"] and len(cut.index) == 4


def test_of_a_pair_the_answers_alone_are_trained_and_the_chosen_one_is_first(chatml: TextCodec) -> None:
    prompt = chat("Hi.", "Yes?", "Is it?")["messages"]
    row = raw({"prompt": prompt, "chosen": "It is.", "rejected": "Never."})
    batch = tokenise([row], chatml, with_settings("preference"))
    trained = [s.ids[s.trained].tolist() for s in sequences_of(batch)]
    texts = [chatml.tokenizer.decode(ids, skip_special_tokens=False) for ids in trained]
    assert texts == ["It is.<|im_end|>", "Never.<|im_end|>"]
    assert batch.turns_untrained == 0 and batch.index["good"].all()


def test_the_first_token_of_a_document_is_not_counted_as_trained(chatml: TextCodec) -> None:
    batch = tokenise([raw({"text": "The sea is blue."})], chatml, with_settings("text"))
    assert batch.index["trained"].tolist() == [len(batch.ids) - 1]
    assert batch.index["good"].all() and batch.index["lost"].tolist() == [0]


def test_only_a_label_makes_an_answer_bad(chatml: TextCodec) -> None:
    plain = tokenise([raw(chat("Is it?", "Yes."))], chatml, with_settings())
    rows = [raw({"prompt": "Is it?", "completion": "Yes.", "label": label}) for label in (True, False)]
    judged = tokenise(rows, chatml, with_settings("judged", keep_bad=True))
    assert plain.index["good"].tolist() == [True] and judged.index["good"].tolist() == [True, False]


def test_rows_that_are_joined_to_one_are_counted_and_dropped_with_it(chatml: TextCodec) -> None:
    rows = [Raw("my.jsonl", 1, b"{", (2, 5)), Raw("my.jsonl", 3, json.dumps(chat("a", "b")).encode(), (4,))]
    batch = tokenise(rows, chatml, with_settings())
    assert batch.rows_in == 5
    assert [row.row for row in batch.dropped] == [1, 2, 5]
